"""The problem: operations, tensors and their storages, with sizes and costs. No torch here."""

from lightning_remat.graph._graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.graph._networkx import to_networkx

__all__ = ["ComputationGraph", "Op", "Phase", "Tensor", "TensorRole", "to_networkx"]

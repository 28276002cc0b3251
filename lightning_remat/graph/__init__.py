"""The problem: operations, tensors and their storages, with sizes and costs. No torch here."""

from lightning_remat.graph._graph import ComputationGraph
from lightning_remat.graph._op import Op, Phase, Tensor, TensorRole

to_networkx = ComputationGraph.to_networkx

__all__ = ["ComputationGraph", "Op", "Phase", "Tensor", "TensorRole", "to_networkx"]

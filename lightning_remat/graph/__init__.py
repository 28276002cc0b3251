"""The problem: operations, tensors and their storages, with sizes and costs. No torch here.

* ``_op``: ops and tensors, and their phases and roles.
* ``_host``: the host's memory, which tensors may be copied to; ``_copyable``: which of them.
* ``_graph``: the computation graph of one training step, the rules that it keeps, and its JSON files.
"""

from lightning_remat.graph._graph import ComputationGraph
from lightning_remat.graph._host import Host
from lightning_remat.graph._op import Op, Phase, Tensor, TensorRole

to_networkx = ComputationGraph.to_networkx

__all__ = ["ComputationGraph", "Host", "Op", "Phase", "Tensor", "TensorRole", "to_networkx"]

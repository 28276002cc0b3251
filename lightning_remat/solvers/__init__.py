"""Algorithms that turn a computation graph and a budget into a schedule. No torch here.

``solve(graph, budget_bytes, method=...)`` runs any of them; ``available()`` lists them.
"""

from lightning_remat.solvers import (  # registers the methods
    _auto,
    _checkpointing,
    _chen,
    _crossing,
    _descent,
    _greedy,
    _greedy_xla,
    _griewank,
    _h_ilp,
    _hiremate,
    _kusumoto,
    _lp_rounding,
    _milp,
    _moccasin,
    _moments,
    _no_remat,
    _pathwidth,
    _rk_checkmate,
    _rotor,
    _treewidth,
    _unpartitioned,
)
from lightning_remat.solvers._auto import INTERRUPTED
from lightning_remat.solvers._batch_size import (
    BatchSize,
    Trial,
    extrapolated_batch_size,
    linear_in_batch,
    max_batch_size,
    one_extra_forward,
)
from lightning_remat.solvers._curve import Curve, plan_curve
from lightning_remat.solvers._largest_batch import (
    LargestBatch,
    OpSequence,
    largest_batch_size,
    moved,
    plain_batch_size,
)
from lightning_remat.solvers._partition import Block, partitioners, register_partitioner
from lightning_remat.solvers._problem import Evaluation, NodeSequence, Problem
from lightning_remat.solvers._registry import Answer, available, options_of, register, solve
from lightning_remat.solvers._smallest import find_smallest
from lightning_remat.solvers._solution import Solution, Status

__all__ = [
    "INTERRUPTED",
    "Answer",
    "BatchSize",
    "Block",
    "Curve",
    "Evaluation",
    "LargestBatch",
    "NodeSequence",
    "OpSequence",
    "Problem",
    "Solution",
    "Status",
    "Trial",
    "available",
    "extrapolated_batch_size",
    "find_smallest",
    "largest_batch_size",
    "linear_in_batch",
    "max_batch_size",
    "moved",
    "one_extra_forward",
    "options_of",
    "partitioners",
    "plain_batch_size",
    "plan_curve",
    "register",
    "register_partitioner",
    "solve",
]

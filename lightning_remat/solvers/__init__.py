"""Algorithms that turn a computation graph and a budget into a schedule. No torch here.

``solve(graph, budget_bytes, method=...)`` runs any of them; ``available()`` lists them.

A folder for each paper, none of which imports another's:

* ``checkmate``: Jain et al. 2020, integer programs and their rounding.
* ``chen_griewank``: Chen et al. 2016, and Griewank and Walther 2000, checkpoints on a chain.
* ``kumar``: Kumar et al. 2019, tree and path decompositions.
* ``kusumoto``: Kusumoto et al. 2019, lower sets.
* ``hiremate``: Gusak et al. 2025, a hierarchy of blocks; with Rotor, H-ILP and Rockmate's Checkmate.
* ``moccasin``: Bartan et al. 2023, retention intervals.
* ``xla``: the greedy of the XLA compiler, as Kumar et al. 2019 describe it.

Four of this project's own:

* ``bounds``: lower bounds on the time of any schedule within a budget.
* ``heuristics``: schedules that are quickly found, and improved by local search.
* ``portfolio``: the cheapest schedule, the smallest peak, the whole trade-off, the largest batch size, by several methods.
* ``offload``: host memory as a third choice beside keeping and computing again.

And ``common``: the problem, the registry of methods, and what several folders use.
"""

from lightning_remat.solvers.bounds import _binding_moments, _minimum_cut  # importing a module registers its methods
from lightning_remat.solvers.checkmate import _generalized_chen, _lp_rounding, _milp, _milp_unpartitioned
from lightning_remat.solvers.chen_griewank import _chen, _griewank
from lightning_remat.solvers.common import _no_remat
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import Evaluation, NodeSequence, Problem
from lightning_remat.solvers.common._registry import Answer, available, options_of, register
from lightning_remat.solvers.common._solution import Solution, Status
from lightning_remat.solvers.heuristics import _descent, _greedy
from lightning_remat.solvers.hiremate import _h_ilp, _hiremate, _rk_checkmate, _rotor
from lightning_remat.solvers.hiremate._partition import Block, partitioners, register_partitioner
from lightning_remat.solvers.kumar import _pathwidth, _treewidth
from lightning_remat.solvers.kusumoto import _dynamic_programming
from lightning_remat.solvers.moccasin import _moccasin
from lightning_remat.solvers.offload._smallest_peak import find_smallest
from lightning_remat.solvers.offload._solve import offloaded, solve
from lightning_remat.solvers.portfolio import _auto
from lightning_remat.solvers.portfolio._auto import INTERRUPTED, OF_NO_USE
from lightning_remat.solvers.portfolio._batch_size import (
    BatchSize,
    Trial,
    extrapolated_batch_size,
    linear_in_batch,
    max_batch_size,
    one_extra_forward,
)
from lightning_remat.solvers.portfolio._curve import Curve, plan_curve
from lightning_remat.solvers.portfolio._largest_batch import (
    LargestBatch,
    OpSequence,
    largest_batch_size,
    moved,
    plain_batch_size,
)
from lightning_remat.solvers.xla import _greedy_xla

__all__ = [
    "INTERRUPTED",
    "OF_NO_USE",
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
    "clock",
    "extrapolated_batch_size",
    "find_smallest",
    "largest_batch_size",
    "linear_in_batch",
    "max_batch_size",
    "moved",
    "offloaded",
    "one_extra_forward",
    "options_of",
    "partitioners",
    "plain_batch_size",
    "plan_curve",
    "register",
    "register_partitioner",
    "solve",
]

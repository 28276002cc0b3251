"""Algorithms that turn a computation graph and a budget into a schedule. No torch here.

``solve(graph, budget_bytes, method=...)`` runs any of them; ``available()`` lists them.
"""

from lightning_remat.solvers import _auto, _chen, _greedy, _milp, _no_remat, _treewidth  # registers the methods
from lightning_remat.solvers._auto import find_smallest
from lightning_remat.solvers._problem import Evaluation, NodeSequence, Problem
from lightning_remat.solvers._registry import Answer, available, options_of, register, solve
from lightning_remat.solvers._solution import Solution, Status

__all__ = [
    "Answer",
    "Evaluation",
    "NodeSequence",
    "Problem",
    "Solution",
    "Status",
    "available",
    "find_smallest",
    "options_of",
    "register",
    "solve",
]

"""Chen et al.'s checkpoints on any graph: Checkmate's generalizations (Jain et al. 2020, section 6.1 and appendix B).

The checkpoints are chosen first, as by "chen_sqrt" or "chen_greedy"; then the fewest computations for them are found:

* "ap_sqrt" and "ap_greedy" (B.1) choose among the articulation points of the undirected forward graph: what comes after one
  depends on nothing before it, so the forward can be resumed from it alone;
* "linearized_sqrt" and "linearized_greedy" (B.2) choose among all forward nodes, as if each depended on the one before only.

A checkpoint is a single node here, all of whose outputs are kept. Where other values cross it, they are computed again from
earlier checkpoints; "chen_sqrt" and "chen_greedy" keep all that crosses instead.

B.1 finds the computations for a given checkpoint matrix S row by row. Here the checkpoints are held in S, and beside
them what the backward has made or had computed again stays until its last use, as in Chen et al.; where that does not
fit the budget, it is computed again for each backward op that reads it. On a chain the schedules are those of
"chen_sqrt" and "chen_greedy".

What differs from the paper: the forward is that of the problem with views contracted, loss included, and what the
caller holds (parameters, batch) is no vertex of it. Its first and last nodes count as candidates, as the ends of a
chain do.

Networks whose blocks share an input, such as an attention mask, have few articulation points. Costs are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import networkx as nx

from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._segments import fastest_fitting, greedy_segmentations, segment_ends
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.common._stages import from_stages, to_stages


def articulation_points(problem: PlainProblem) -> list[int]:
    """Forward nodes whose removal disconnects the undirected forward graph, and its first and last nodes, in order."""
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(problem.boundary))
    graph.add_edges_from((p, node) for node in range(problem.boundary) for p in problem.predecessors[node])
    ends = [0, problem.boundary - 1] if problem.boundary else []
    return sorted({*nx.articulation_points(graph), *ends})


def root_ends(candidates: Sequence[int]) -> list[int]:
    """Every √k-th of k candidates, about (Chen et al. 2016, section 4.3)."""
    return [candidates[i] for i in segment_ends(len(candidates), max(1, math.isqrt(len(candidates))))]


def recomputations(problem: PlainProblem, checkpoints: Iterable[int], hold: bool = True) -> NodeSequence:
    """The fewest computations for given checkpoint nodes; ``hold``: what is computed again stays until its last use."""
    keep = frozenset(v for node in checkpoints for v in problem.writes[node])
    temporary = frozenset(v for v, producer in enumerate(problem.producer) if 0 <= producer < problem.boundary) - keep
    sequence = drop_unused(problem, rollout(problem, keep, frozenset() if hold else temporary))
    return drop_unused(problem, from_stages(problem, to_stages(problem, sequence)))


def _solve(problem: Problem, budget_bytes: int, deadline: float, checkpoints: Iterable[list[int]]) -> Answer:
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    sets = list(checkpoints)
    answer = fastest_fitting(problem, budget_bytes, (recomputations(problem, nodes) for nodes in sets), deadline)
    if answer.status is Status.INFEASIBLE:  # not holding is never faster
        without = (recomputations(problem, nodes, hold=False) for nodes in sets)
        answer = fastest_fitting(problem, budget_bytes, without, deadline)
    return answer


@register("ap_sqrt")
def ap_sqrt(problem: Problem, budget_bytes: int, *, deadline: float) -> Answer:
    """Every √k-th of k articulation points (B.1).

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
    """
    return _solve(problem, budget_bytes, deadline, [root_ends(articulation_points(problem))])


@register("ap_greedy")
def ap_greedy(problem: Problem, budget_bytes: int, *, deadline: float, sizes: int = 64) -> Answer:
    """Articulation points about b bytes apart (B.1); the fastest that fits, over b.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        sizes: how many values of b are tried.
    """
    candidates = articulation_points(problem)
    return _solve(problem, budget_bytes, deadline, greedy_segmentations(problem, candidates, sizes))


@register("linearized_sqrt")
def linearized_sqrt(problem: Problem, budget_bytes: int, *, deadline: float) -> Answer:
    """Every √n-th of n forward nodes (B.2).

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
    """
    return _solve(problem, budget_bytes, deadline, [root_ends(range(problem.boundary))])


@register("linearized_greedy")
def linearized_greedy(problem: Problem, budget_bytes: int, *, deadline: float, sizes: int = 64) -> Answer:
    """Forward nodes about b bytes apart (B.2); the fastest that fits, over b.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        sizes: how many values of b are tried.
    """
    return _solve(problem, budget_bytes, deadline, greedy_segmentations(problem, range(problem.boundary), sizes))

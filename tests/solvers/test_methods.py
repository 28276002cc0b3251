"""What holds for every method of the registry."""

from __future__ import annotations

import pytest
import torch

from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.solvers import Status, available, options_of, solve
from tests.helpers.graphs import unit_chain

PAPERS = {
    "milp", "lp_rounding", "checkmate_unpartitioned", "griewank_logn", "chen_sqrt", "chen_greedy", "ap_sqrt", "ap_greedy",
    "linearized_sqrt", "linearized_greedy", "no_remat", "checkpoint_all", "greedy_xla", "treewidth", "pathwidth", "exact_dp",
    "approx_dp", "rk_checkmate", "rotor", "h_ilp", "hiremate", "moccasin",
}  # fmt: skip
OWN = {"auto", "greedy", "crossing", "descent", "moments"}


def only_backward() -> ComputationGraph:
    """Nothing in the forward: a tangent of 1 byte, and two backward ops."""
    tensors = (Tensor("tangent", 0, role=TensorRole.TANGENT), Tensor("a", 1), Tensor("b", 2))
    ops = tuple(Op(n, n, (i,), (i + 1,), Phase.BACKWARD, seconds=1.0) for i, n in enumerate(("f", "g")))
    return ComputationGraph(ops, tensors, (1, 2, 3), inputs=(0,), backward_outputs=(2,))


def test_all_of_the_papers_are_there() -> None:
    assert set(available()) == PAPERS | OWN
    assert all("deadline" not in options_of(method) for method in available())


@pytest.mark.parametrize("method", sorted(PAPERS | OWN))
@pytest.mark.parametrize("make", [only_backward, lambda: ComputationGraph((), (), ())], ids=["only-backward", "empty"])
def test_small_and_odd_graphs(method: str, make) -> None:
    graph = make()
    enough = solve(graph, 100, method)
    assert enough.schedule is not None and enough.status is Status.OPTIMAL
    too_little = solve(graph, 1, method, 5.0)
    if graph.ops:
        assert too_little.schedule is None
        assert too_little.status in (Status.INFEASIBLE, Status.TIMEOUT)


@pytest.mark.parametrize("method", sorted(PAPERS - {"no_remat", "checkpoint_all", "moccasin"} | OWN))
def test_a_budget_below_every_op_finds_nothing(method: str) -> None:
    solution = solve(unit_chain(6), 2, method, 5.0)
    assert solution.schedule is None
    assert solution.status in (Status.INFEASIBLE, Status.TIMEOUT)


@pytest.mark.parametrize("method", sorted(PAPERS | OWN))
def test_torch_has_the_threads_that_it_had(method: str) -> None:
    """CBC sets OpenMP's number of threads to one for the whole process, where it branches."""
    torch.set_num_threads(2)
    solution = solve(unit_chain(8), 7, method, 2.0)
    assert (solution.schedule is None) == (method in ("no_remat", "checkpoint_all"))
    assert torch.get_num_threads() == 2

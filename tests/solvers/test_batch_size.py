"""The largest batch size under a budget and a cap on the cost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.errors import BudgetError, GraphError
from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.solvers import Problem, solve
from lightning_remat.solvers.chen_griewank import _griewank as _registers  # noqa: F401
from lightning_remat.solvers.portfolio._batch_size import (
    extrapolated_batch_size,
    guessed_batch_size,
    linear_in_batch,
    max_batch_size,
    one_extra_forward,
)
from tests.helpers.graphs import PARAMETERS, chain_at, random_graph, unit_chain


def test_the_cap_is_one_more_forward_with_the_loss() -> None:
    graph = unit_chain(8)
    assert one_extra_forward(graph) == 2 * 9 + 8
    idle = Op("idle", "op", (0,), (17,), Phase.FORWARD, seconds=5.0)
    ops = (*graph.ops[:9], idle, *graph.ops[9:])
    wider = graph.replace(ops=ops, tensors=(*graph.tensors, Tensor("idle_out", 17)), storages=(1,) * 18)
    assert one_extra_forward(wider) == 2 * 9 + 8


@pytest.mark.parametrize(("cap", "units"), [(24, 5), (21, 6), (20, 7), (38, 4)])
def test_unit_chains(cap: int, units: int) -> None:
    """A chain of 8 layers takes 38, 24 and 21 evaluations at 4, 5 and 6 values: the cap decides how many there must be."""
    budget = 100 + PARAMETERS
    found = max_batch_size(chain_at, budget, method="griewank_logn", cap=lambda _: cap)
    assert found.batch_size == 100 // units
    assert found.solution is not None
    assert found.solution.seconds <= cap
    assert found.solution.peak_bytes <= budget
    assert [trial.batch_size for trial in found.tried[:3]] == [1, 2, 4]
    assert {trial.fits for trial in found.tried} == {True, False}
    assert all(trial.fits == (trial.batch_size <= found.batch_size) for trial in found.tried)
    scaled = extrapolated_batch_size(
        chain_at(1), budget, PARAMETERS, method="griewank_logn", cap=lambda _: cap
    )  # eq. 11
    assert scaled.batch_size == found.batch_size
    assert scaled.solution is not None
    assert scaled.solution.peak_bytes == units + PARAMETERS
    thrice = extrapolated_batch_size(chain_at(3), budget, PARAMETERS, batch_size=3, method="milp", cap=lambda _: cap)
    assert thrice.batch_size == found.batch_size


def test_the_default_cap_lies_between_no_and_any_rematerialization() -> None:
    budget = 1000 + PARAMETERS
    none = max_batch_size(chain_at, budget, method="no_remat")
    capped = max_batch_size(chain_at, budget, method="milp")
    free = max_batch_size(chain_at, budget, method="milp", cap=lambda _: float("inf"))
    assert none.batch_size == 1000 // 10  # f1 to f8 with the loss and its gradient
    assert capped.batch_size == 1000 // 5  # 24 evaluations of at most 26
    assert free.batch_size == 1000 // 4
    rough = max_batch_size(chain_at, budget, method="milp", precision=0.1)
    assert capped.batch_size / 1.1 <= rough.batch_size <= capped.batch_size
    assert len(rough.tried) < len(capped.tried)
    assert max_batch_size(chain_at, budget, method="milp", at_most=64).batch_size == 64


def test_a_guess_from_the_trade_off_saves_solves() -> None:
    budget = 1000 + PARAMETERS
    guess = guessed_batch_size(chain_at, budget)
    assert guess == 200  # 24 evaluations of at most 26, at 5 values
    assert guessed_batch_size(chain_at, budget, at_most=64) == 64
    assert guessed_batch_size(chain_at, 6 + PARAMETERS) == 1  # where not even one fits without rematerialization
    guessed = max_batch_size(chain_at, budget, precision=0.1)
    assert guessed.tried[0].batch_size == guess
    assert guessed.batch_size == 200
    from_one = max_batch_size(chain_at, budget, precision=0.1, start=1)
    assert from_one.batch_size in range(182, 201)
    assert len(guessed.tried) < len(from_one.tried)


@pytest.mark.parametrize("start", [1, 7, 30, 199, 200, 201, 999, 5000])
def test_wherever_it_begins_it_ends_at_the_same(start: int) -> None:
    found = max_batch_size(chain_at, 1000 + PARAMETERS, method="griewank_logn", start=start, at_most=1000)
    assert found.batch_size == 200
    assert found.tried[0].batch_size == min(start, 1000)
    sizes = [trial.batch_size for trial in found.tried]
    assert len(sizes) == len(set(sizes)) and {200, 201} <= set(sizes)


def test_none_fits() -> None:
    found = max_batch_size(chain_at, PARAMETERS + 3, method="milp")
    assert (found.batch_size, found.solution, len(found.tried)) == (0, None, 1)
    assert extrapolated_batch_size(chain_at(1), 1000, PARAMETERS, cap=lambda _: 16.0).batch_size == 0
    with pytest.raises(BudgetError, match="at_most"):
        max_batch_size(chain_at, 100, at_most=0)
    with pytest.raises(BudgetError, match="called fixed"):
        extrapolated_batch_size(chain_at(1), 1000, 500)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_graphs_on_a_line_through_two(seed: int, batch_size: int) -> None:
    base = random_graph(seed, overwriting=False)  # which needs results of the size of an input
    fixed = {t.storage for t in base.tensors if t.role is TensorRole.PARAMETER}

    def at(size: int) -> ComputationGraph:
        storages = tuple(b if s in fixed else b * size for s, b in enumerate(base.storages))
        ops = tuple(dataclasses.replace(op, seconds=0.5 + op.seconds * size) for op in base.ops)
        return base.replace(storages=storages, ops=ops)

    drawn = linear_in_batch(at(2), 2, at(5), 5)(batch_size)
    assert drawn.storages == at(batch_size).storages
    assert [op.seconds for op in drawn.ops] == pytest.approx([op.seconds for op in at(batch_size).ops])
    assert linear_in_batch(at(5), 5, at(2), 2)(batch_size).storages == drawn.storages
    problem = Problem(drawn)
    peak = problem.evaluate(problem.captured).peak_bytes
    assert solve(drawn, peak, "no_remat").peak_bytes <= peak


def test_what_is_drawn_once_in_either_is_drawn_once() -> None:
    chain = unit_chain(2)
    again, once = (
        chain.replace(ops=tuple(dataclasses.replace(op, random=True, recomputable=flag) for op in chain.ops))
        for flag in (True, False)
    )
    drawn = [linear_in_batch(small, 1, large, 2)(3) for small, large in ((again, again), (again, once), (once, again))]
    assert [{op.recomputable for op in graph.ops} for graph in drawn] == [{True}, {False}, {False}]


def test_ops_may_be_in_another_order() -> None:
    """A gradient that is larger than what it is made of comes last, and at the larger batch size it is not larger."""
    chain = unit_chain(2)
    *ops, last = chain.ops
    beside = dataclasses.replace(last, name="beside", outputs=(len(chain.tensors),))
    made = dataclasses.replace(chain.tensors[last.outputs[0]], name="beside", storage=len(chain.storages))
    small, large = (
        chain.replace(
            ops=(*ops, *ends),
            tensors=(*chain.tensors, made),
            storages=(*chain.storages, 7),
            backward_outputs=(*chain.backward_outputs, len(chain.tensors)),
        )
        for ends in ((last, beside), (beside, last))
    )
    for first, second in ((small, large), (large, small)):
        drawn = linear_in_batch(first, 1, second, 2)(3)
        assert [op.name for op in drawn.ops] == [op.name for op in second.ops] != [op.name for op in first.ops]
        assert drawn.storages == second.storages


def test_values_between_bytes_are_rounded_up() -> None:
    small, large = unit_chain(2), unit_chain(2).replace(storages=(2,) * 5)
    assert linear_in_batch(small, 1, large, 3)(2).storages == (2,) * 5
    with pytest.raises(GraphError, match="same ops"):
        linear_in_batch(small, 1, unit_chain(3), 2)
    with pytest.raises(GraphError, match="two different ones"):
        linear_in_batch(small, 1, small, 1)

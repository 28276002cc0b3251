"""A graph's ops in another order: as checked as a graph that is made so."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lightning_remat.errors import GraphError
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Problem
from tests.helpers.graphs import random_graph


@pytest.mark.parametrize("seed", range(40))
def test_it_is_refused_where_a_new_graph_is(seed):
    rng, graph = random.Random(seed), random_graph(seed)
    refused = taken = 0
    for _ in range(30):
        order = list(range(len(graph.ops)))
        for _ in range(rng.randrange(3)):
            i = rng.randrange(len(order) - 1)
            order[i], order[i + 1] = order[i + 1], order[i]
        try:
            expected: ComputationGraph | None = dataclasses.replace(graph, ops=tuple(graph.ops[i] for i in order))
        except GraphError:
            expected = None
        if expected is None:
            refused += 1
            with pytest.raises(GraphError):
                graph.in_order(order)
        else:
            taken += 1
            found = graph.in_order(order)
            assert found == expected and found.is_view == expected.is_view and found.producer == expected.producer
    assert taken


@pytest.mark.parametrize("order", [[0], [0, 0, 1]])
def test_each_op_is_named_once(order):
    with pytest.raises(GraphError, match="name each of them once"):
        random_graph(1).in_order(order)


def test_what_is_derived_is_shared_by_copies_that_it_holds_for_alone():
    graph = random_graph(3)
    made: list[ComputationGraph] = []
    graph.derived(made.append)
    for copy in (graph, graph.replace(resident_bytes=7), graph.replace(name="other")):
        copy.derived(made.append)
    assert made == [graph]
    others = (graph.with_costs([1.0 + i for i in range(len(graph.ops))]), graph.in_order(range(len(graph.ops))))
    assert [Problem(one).seconds for one in others] != [Problem(graph).seconds] * 2
    for copy in others:
        copy.derived(made.append)
    assert len(made) == 3

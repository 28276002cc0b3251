"""The computation graph: files, the networkx view, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lightning_remat.errors import GraphError
from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor
from tests.helpers.graphs import unit_chain


def test_networkx_view() -> None:
    view = unit_chain(3).to_networkx()
    assert view.number_of_nodes() == 7
    assert set(view.predecessors(4)) == {3, 2, 1}
    assert view.nodes[3]["phase"] == "loss" and view.edges[3, 4]["bytes"] == 1


LATE = Op("late", "late", (), (0,), Phase.BACKWARD)
ON_INPUT = (Tensor("a", 0), Tensor("b", 0))
"""Two tensors of one storage."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storages": (-1,)}, "negative size"),
        ({"storages": (1.5,)}, "a whole number is needed"),
        ({"resident_bytes": -1}, "resident bytes cannot be negative"),
        ({"forward_resident_bytes": -1}, "resident bytes cannot be negative"),
        ({"ops": (LATE, Op("x", "x", (), ()))}, "forward op x lies after a backward op"),
        ({"tensors": (Tensor("a", 1),)}, "tensor a lies on storage 1, of 1"),
        ({"tensors": (Tensor("a", 0), Tensor("a", 0))}, "two tensors are named a"),
        ({"inputs": (1,)}, "inputs names tensor 1, of 1"),
        ({"backward_outputs": (-1,)}, "backward_outputs names tensor -1, of 1"),
        ({"ops": (Op("x", "x", (0,), (0,)),)}, "before it is produced"),
        ({"ops": (Op("x", "x", (), (0,), seconds=-1.0),)}, "negative cost"),
        ({"ops": (Op("x", "x", (), (0,), seconds=float("nan")),)}, "negative cost"),
        ({"ops": (Op("x", "x", (), (0,), workspace_bytes=-1),)}, "negative cost"),
        ({"ops": (Op("x", "x", (), (0,)), Op("x", "x", (0,), ()))}, "two ops are named x"),
        ({"ops": (Op("x", "x", (), (3,)),)}, "op x names tensor 3, of 1"),
        ({"ops": (Op("x", "x", (), (0, 0)),)}, "op x names a tensor twice"),
        (
            {"ops": (Op("x", "x", (), (0,)), Op("y", "y", (), (), mutates=(0,)))},
            "op y mutates a tensor that it does not read",
        ),
        ({"ops": (Op("x", "x", (), (0,)), Op("y", "y", (), (0,)))}, "tensor a is produced twice"),
        (
            {"ops": (Op("x", "x", (), (1,)),), "tensors": ON_INPUT, "inputs": (0,)},
            "b on a storage that it does not read",
        ),
        ({"ops": (), "forward_outputs": (0,)}, "forward_outputs names a, which nothing produces"),
        ({"ops": ()}, "neither an input nor produced"),
    ],
)
def test_bad_graphs_are_refused(change: dict[str, object], message: str) -> None:
    good = ComputationGraph((Op("x", "x", (), (0,)),), (Tensor("a", 0),), (1,))
    with pytest.raises(GraphError, match=message):
        good.replace(**change)


def test_what_lies_beside_the_ops_is_replaced_alone() -> None:
    graph = unit_chain(3)
    floor, producer = graph.floor_bytes, graph.producer
    beside = {"resident_bytes": 5, "forward_resident_bytes": 7, "name": "chain", "device": "cpu"}
    made = graph.replace(**beside)
    assert made == dataclasses.replace(graph, **beside) != graph and hash(made) != hash(graph)  # type: ignore[arg-type]
    assert (graph.floor_bytes, graph.resident_bytes) == (floor, 0) and made.floor_bytes > floor
    assert made.producer is producer
    assert graph.replace(ops=tuple(dataclasses.replace(op, seconds=9.0) for op in graph.ops)).seconds == 9 * len(
        graph.ops
    )


def test_costs_are_one_an_op() -> None:
    with pytest.raises(GraphError, match="3 ops, but 1 times and 3 workspaces"):
        unit_chain(1).with_costs([1.0])
    with pytest.raises(GraphError, match="3 ops, but 3 times and 2 workspaces"):
        unit_chain(1).with_costs([1.0] * 3, [0, 0])


def test_graph_files_of_other_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(dict(unit_chain(1).to_dict(), version=99)))
    with pytest.raises(GraphError, match="version 99 cannot be read"):
        ComputationGraph.load(path)
    path.write_text("{")
    with pytest.raises(GraphError, match="not a JSON file"):
        ComputationGraph.load(path)

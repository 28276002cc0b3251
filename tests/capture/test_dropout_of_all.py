"""What drops all is a product with zero on any device, as in eager mode: of -1 it leaves -0, and of infinity no number."""

from __future__ import annotations

import operator

import torch

from lightning_remat.capture.rewritings._dropout import split_dropout

aten = torch.ops.aten


def test_on_another_device() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 3, device="meta")
    dropped = graph.call_function(aten.native_dropout.default, (x, 1, True))
    dropped.meta["val"] = torch.empty(4, 3, device="meta"), torch.empty(4, 3, dtype=torch.bool, device="meta")
    items = [graph.call_function(operator.getitem, (dropped, i)) for i in (0, 1)]
    for item, value in zip(items, dropped.meta["val"], strict=True):
        item.meta["val"] = value
    graph.output(tuple(items))
    split_dropout(graph)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.full.default, aten.mul.Tensor]

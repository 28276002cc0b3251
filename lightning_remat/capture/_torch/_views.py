"""A graph's views, each made once, and of what it is a view of: fewer calls for the same memory.

All views of a storage see what is written to it, so that one may stand for another that lies alike.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from lightning_remat.capture._torch._lines import Line

aten = torch.ops.aten
Node = torch.fx.Node

_SHAPED = (aten.view.default, aten._unsafe_view.default)
_TURNED = (aten.t.default, aten.transpose.int)
_VIEWS = (*_SHAPED, *_TURNED, aten.alias.default, aten.expand.default, aten.unsqueeze.default, aten.permute.default)


def fewer_views(graph: torch.fx.Graph) -> list[Line]:
    """The lines of a graph of ops without the views that change nothing, are there already, or are in between.

    The graph's results, and what an op writes to, stay tensors of their own. No storage is held for longer.
    """
    own = {*graph.output_node().all_input_nodes, *itertools.chain.from_iterable(map(written, graph.nodes))}
    lines, made, views = list[Line](), dict[Node, Line](), dict[Any, Line]()

    def copied(node: Node) -> Line:
        line = Line.of(node, made.__getitem__)
        lines.append(line)
        return line

    for node in graph.nodes:
        if node.target not in _VIEWS:
            made[node] = copied(node)
            continue
        source: Line = made[node.args[0]]
        while node.target in _SHAPED and source.target in _SHAPED and _straight(source.args[0]) and _straight(node):
            source = source.args[0]
        key = node.target, source, str(node.args[1:])
        if node in own:
            made[node] = _view_of(source, copied(node))
        elif node.target is aten.alias.default or _is_same(source, node):
            made[node] = source
        elif node.target in _TURNED and source.target is node.target and source.args[1:] == node.args[1:]:
            made[node] = source.args[0]  # there and back
        elif key in views:
            made[node] = views[key]
        else:
            views[key] = made[node] = _view_of(source, copied(node))
            if node.target is aten._unsafe_view.default:
                made[node].target = aten.view.default
    read, kept = set[Line](), list[Line]()
    for line in reversed(lines):
        if line in read or line.target not in _VIEWS:
            kept.append(line)
            read.update(line.all_input_nodes)
    return kept[::-1]


def _view_of(source: Line, view: Line) -> Line:
    view.args = (source, *view.args[1:])
    return view


def written(node: Node) -> Sequence[Node]:
    """What a node writes to; of a function that is not known, all that it reads."""
    if node.op != "call_function" or node.target is operator.getitem:
        return ()
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    if not node.target._schema.is_mutable:
        return ()
    given = dict(zip((one.name for one in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    written = (
        one.name for one in node.target._schema.arguments if one.alias_info is not None and one.alias_info.is_write
    )
    return [value for name in written if isinstance(value := given.get(name), Node)]


def hands_back(node: Any) -> bool:
    """Whether a node's result is what it writes to."""
    returns = node.target._schema.returns if isinstance(getattr(node, "target", None), OpOverload) else ()
    return any(one.alias_info is not None and one.alias_info.is_write for one in returns)


def _layout(node: Node | Line) -> tuple[list[int], list[int], int, torch.dtype] | None:
    """Shape, strides, offset and dtype of a tensor; ``None`` where they are not all known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if any(type(one) is not int for one in numbers):
        return None
    return list(value.shape), list(value.stride()), int(value.storage_offset()), value.dtype


def _is_same(source: Line, view: Node) -> bool:
    """Whether a view is laid out as what it is a view of, also when it runs: strides of dimensions of one are others then."""
    layout = _layout(view)
    return layout is not None and layout == _layout(source) and 1 not in layout[0]


def _straight(node: Node | Line) -> bool:
    """Whether a tensor lies row by row, without gaps: then all its views that only reshape it do."""
    layout = _layout(node)
    if layout is None or 0 in layout[0]:
        return False
    steps = itertools.accumulate(reversed(layout[0][1:]), operator.mul, initial=1)
    return layout[1] == list(steps)[::-1][: len(layout[0])]

"""Writes to a part of a tensor, as functionalization has them: a new tensor that is the old one but for that part.

torch's functional ops for that (``select_scatter`` and others) copy the whole storage that the old tensor lies on: for
one row of a table, the table. What is written is first copied (``aten.copy``) to a tensor on such a storage too. Here a
copy is of the tensor alone, and nothing is copied where the old tensor is needed no longer (see ``_overwriting``): a
loop that fills a tensor row by row fills one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._sizes import size_node, symbols_among
from lightning_remat.capture._torch import hint

aten = torch.ops.aten

_VIEWS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""The view of the part that each op writes to, by the same arguments."""

_BY_STORAGE = {aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default}
"""Ops that address a storage by strides and offset: what lies on it must stay as it was when they were captured."""


@functools.cache
def written(view: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that returns ``x`` with ``source`` written to its part ``view(x, *where)``.

    It returns a copy of ``x``, or ``x`` itself where that is given as ``out``.
    """

    def call(
        x: torch.Tensor, source: torch.Tensor, *where: Any, out: torch.Tensor | None = None, **named: Any
    ) -> torch.Tensor:
        result = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x) if out is None else out
        )
        view(result, *where, **named).copy_(source)
        return result

    call.__name__ = f"written to {view}"
    return call


_WRITTEN = {written(view) for view in _VIEWS.values()}


def writes_part(target: Any) -> bool:
    """Whether the op is one of `written`."""
    return target in _WRITTEN


def copied(
    source: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new tensor of this shape and these strides, with ``source`` copied to it."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(source)


def copies_storage(target: Any) -> bool:
    """Whether the result of torch's op lies on a storage as large as that of its first argument."""
    return target in _VIEWS or target in (aten.copy.default, aten.as_strided_scatter.default)


def write_parts_alone(graph: torch.fx.Graph) -> None:
    """Put `written` in the place of ops that write to a part of a tensor, and `copied` in that of ``aten.copy``.

    What is written is not copied before, if it has the tensor's dtype. A graph with ops that address a storage is left.
    """
    if any(node.target in _BY_STORAGE for node in graph.nodes):
        return
    symbols = symbols_among(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (*_VIEWS, aten.copy.default):
            continue
        if not _apart(node.args[0].meta["val"]) or not _apart(node.meta["val"]):
            continue
        if node.target in _VIEWS:
            node.target = written(_VIEWS[node.target])
            source = node.args[1]
            if source.target is copied and source.args[3] == node.meta["val"].dtype:
                node.update_arg(1, source.args[0])
        else:
            value = node.meta["val"]
            with graph.inserting_before(node):
                sizes = [tuple(size_node(graph, n, symbols) for n in one) for one in (value.shape, value.stride())]
            node.target, node.args, node.kwargs = copied, (node.args[1], *sizes, value.dtype, value.device), {}


def _apart(value: torch.Tensor) -> bool:
    """Whether each element has a place of its own in memory: the tensor was not expanded."""
    return value.layout is torch.strided and not any(
        hint(step) == 0 and hint(size) != 1 for size, step in zip(value.shape, value.stride(), strict=True)
    )

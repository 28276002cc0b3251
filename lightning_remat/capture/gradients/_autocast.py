"""Autocast's cache of weights, in a joint graph.

Eager autocast casts a parameter once in a region and uses that copy everywhere there, so the gradients of its uses are added
in the low precision. AOTAutograd casts the parameter for every use, and adds in float32: other bits, where a parameter is
used more than once. Here the casts become one again.

A region around a captured graph may be around other code too, which shares the copy in eager mode: other graphs of the
step, a second call of a module. Here each of these has a copy of its own, so `shares_casts` asks, when a backward
begins, whether the gradients of several copies come together at a parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._torch import (
    argument_of,
    enter_autocast,
    exit_autocast,
    runs_in_forward,
    sources_of_gradients,
)
from lightning_remat.capture.gradients._sums import several_of
from lightning_remat.errors import CaptureError
from lightning_remat.graph import ComputationGraph, Phase

Node = torch.fx.Node
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Autocast:
    """Autocast while a graph runs.

    Attributes:
        cached: dtypes that parameters are cast to, once in a region.
        regions: how many there are, each with a cache of its own.
        outer: the region is one around the captured graph, and not one inside of it.
        mixed: some of the regions have no cache (``cache_enabled=False``), and others have.
        computed: positions of the arguments that autocast keeps no copy of, but casts for each use
            (`is_cast_for_each_use`).
    """

    cached: frozenset[torch.dtype] = frozenset()
    regions: int = 0
    outer: bool = False
    mixed: bool = False
    computed: frozenset[int | None] = frozenset()

    @classmethod
    def around(cls, module: torch.fx.GraphModule, inputs: Sequence[Any] = ()) -> Autocast:
        """Autocast around a captured forward, as it is on at this moment, or else as the forward itself enters it.

        Args:
            module: what Dynamo has captured.
            inputs: its example arguments.
        """
        computed = frozenset(
            i for i, one in enumerate(inputs) if isinstance(one, torch.Tensor) and is_cast_for_each_use(one)
        )
        on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        caches = {torch.is_autocast_cache_enabled()} if on else set()
        for node in module.graph.nodes:
            if node.target is enter_autocast and node.args[2]:
                caches.add(node.args[3] is not False)
        mixed = len(caches) > 1
        if on:  # regions inside have no cache of their own
            dtypes = {torch.get_autocast_dtype(kind) for kind in on} if True in caches else set()
            return cls(frozenset(dtypes), regions=1, outer=True, mixed=mixed, computed=computed)
        depth, dtypes, regions = 0, set(), 0
        for node in module.graph.nodes:
            if node.target is enter_autocast:
                kind, dtype, enabled, cache = node.args
                regions += depth == 0
                depth += 1
                if enabled and cache is not False:
                    dtypes.add(dtype or torch.get_autocast_dtype(kind))
            elif node.target is exit_autocast:
                depth -= 1
        return cls(frozenset(dtypes), regions, mixed=mixed, computed=computed)


def is_cast_for_each_use(tensor: torch.Tensor) -> bool:
    """Whether autocast keeps no copy of a tensor: it is no leaf of autograd's graph, or it is a view."""
    return not tensor.is_leaf or tensor._is_view()


def share_casts(graph: torch.fx.Graph, forward_outputs: int, autocast: Autocast) -> None:
    """Cast each parameter once, and add the gradients of its uses as eager mode does, in the low precision.

    Args:
        graph: the joint graph, rewritten in place.
        forward_outputs: how many of its outputs are the forward's.
        autocast: what autocast did while the graph was captured.

    Raises:
        CaptureError: where a parameter is used several times and eager's way cannot be told from the graph.
    """
    cached, regions = autocast.cached, autocast.regions
    if regions and any(map(runs_in_forward, graph.find_nodes(op="call_function", target=aten._trilinear.default))):
        raise CaptureError(
            "under autocast the kernel of bilinear layers calls products in low precision, as no captured op does"
        )
    if not cached:
        return
    output = graph.output_node()
    gradients: Sequence[Node | None] = output.args[0][forward_outputs:]  # type: ignore[index, assignment]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for primal, gradient in zip(placeholders, gradients, strict=False):
        casts = [u for u in primal.users if u.target is aten._to_copy.default and u.kwargs.get("dtype") in cached]
        if gradient is None or len(casts) < 2 or primal.meta["val"].dtype != torch.float32:
            continue
        if argument_of(primal.meta.get("desc")) in autocast.computed:
            continue
        leaves = _added(gradient)
        low = [leaf for leaf in leaves if _raised(leaf) in cached]
        if regions > 1 or autocast.mixed or len(low) != len(casts):
            raise CaptureError(
                f"{primal.name} is used {len(casts)} times under autocast, in {regions} regions, and how eager adds up its "
                "gradients is not known; torch.autocast(..., cache_enabled=False) has no such question"
            )
        first = casts[0]
        for cast in casts[1:]:
            cast.replace_all_uses_with(first)
            graph.erase_node(cast)
        _add_in_low_precision(graph, gradient, leaves, low)


def cast_often(graph: torch.fx.Graph, autocast: Autocast) -> frozenset[int]:
    """Positions of the float32 arguments that a joint graph casts several times.

    Eager mode casts them as often, or once for all uses: see `is_cast_for_each_use`.
    """
    found = set()
    for primal in graph.find_nodes(op="placeholder"):
        casts = [
            u for u in primal.users if u.target is aten._to_copy.default and u.kwargs.get("dtype") in autocast.cached
        ]
        if len(casts) > 1 and primal.meta["val"].dtype == torch.float32:
            found.add(argument_of(primal.meta.get("desc")))
    return frozenset(argument for argument in found if argument is not None)


def cast_arguments(graph: torch.fx.Graph, autocast: Autocast) -> frozenset[int]:
    """Positions of the arguments that a joint graph casts in a region around it.

    Eager mode may use a copy there that was cast before the graph, or use the graph's copy after it.
    """
    if not autocast.outer:
        return frozenset()
    found = set()
    for primal in graph.find_nodes(op="placeholder"):
        if any(u.target is aten._to_copy.default and u.kwargs.get("dtype") in autocast.cached for u in primal.users):
            found.add(argument_of(primal.meta.get("desc")))
    return frozenset(argument for argument in found if argument is not None)


@dataclasses.dataclass(frozen=True, eq=False)
class Casts:
    """What one call of captured code has cast in a region around it.

    Attributes:
        region: identifies the region (see `autocast_region`).
        edges: of autograd's graph, as pairs of node and input number: where the gradients of what was cast go.
    """

    region: Any
    edges: frozenset[Any]


def shares_casts(casts: Casts, node: Any) -> bool:
    """Whether, in the backward that runs, another copy of what a call has cast in the same region gets gradients too.

    Args:
        casts: of the call.
        node: the call's node in autograd's graph.
    """
    own = {node, *several_of(node)}
    known = sources_of_gradients() or []
    for edge in casts.edges:
        for source in {one for sources in known for one in sources.get(edge, ())}.difference(own):
            other = getattr(source, "casts", None) or getattr(getattr(source, "handed_out", None), "casts", None)
            if isinstance(other, Casts):
                if other.region is casts.region and edge in other.edges:
                    return True
            elif source is not None and source.name() == _CAST:  # not in captured code: its region is not known
                return True
    return False


_CAST = "ToCopyBackward0"
"""The name of autograd's nodes for casts."""


def casts_in_backward(graph: ComputationGraph) -> bool:
    """Whether eager mode would compute some of the backward in low precision, were it called under autocast."""
    return any(
        op.phase is Phase.BACKWARD
        and op.target in _IN_LOW_PRECISION
        and any(graph.tensors[t].dtype == "float32" for t in op.inputs)
        for op in graph.ops
    )


_IN_LOW_PRECISION = {
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
}
"""Products, whose inputs autocast casts to the low precision. (What it casts to float32 instead is not counted: the
result is rounded to the gradient's dtype in the end.)
"""


def _added(gradient: Node) -> list[Node]:
    """The terms that autograd's engine has added up to a gradient, in its order: ``((a + b) + c) + ...``."""
    later: list[Node] = []
    while gradient.target is aten.add.Tensor and not gradient.kwargs and isinstance(gradient.args[1], Node):
        later.append(gradient.args[1])
        gradient = gradient.args[0]  # type: ignore[assignment]
    return [gradient, *reversed(later)]


def _raised(node: Node) -> torch.dtype | None:
    """The dtype that a node casts to float32; ``None`` where it is no such cast."""
    if node.target is aten._to_copy.default and node.kwargs.get("dtype") is torch.float32:
        source = node.args[0]
        dtype: torch.dtype = source.meta["val"].dtype  # type: ignore[union-attr]
        return dtype
    return None


def _add_in_low_precision(graph: torch.fx.Graph, gradient: Node, leaves: list[Node], low: list[Node]) -> None:
    """Add up a parameter's gradient as the engine does with one cast: the terms of the cast's uses, in low precision.

    Their sum is cast to float32, and takes the place of the term of the first use, which is the last to arrive.

    Args:
        graph: the joint graph, rewritten in place.
        gradient: the sum as it is.
        leaves: its terms, in the engine's order (`_added`).
        low: those of them that are casts to float32.
    """

    def added(a: Node, b: Node, after: Node) -> Node:
        with graph.inserting_after(after):
            node = graph.call_function(aten.add.Tensor, (a, b))
        node.meta = dict(b.meta)
        one, other = a.meta["val"], b.meta["val"]
        with one.fake_mode:
            node.meta["val"] = torch.add(one, other)  # for its strides: neither need be contiguous
        return node

    total: Node = low[0].args[0]  # type: ignore[assignment]
    for leaf in low[1:]:
        source: Node = leaf.args[0]  # type: ignore[assignment]
        total = added(total, source, source)
    last = low[-1]
    last.update_arg(0, total)
    terms = [leaf for leaf in leaves if leaf not in low or leaf is last]
    position = {node: i for i, node in enumerate(graph.nodes)}
    whole = terms[0]
    for term in terms[1:]:
        whole = added(whole, term, max(whole, term, key=position.__getitem__))
        whole.meta["is_gradient_acc"] = True
        position = {node: i for i, node in enumerate(graph.nodes)}
    gradient.replace_all_uses_with(whole)
    while gradient.target is aten.add.Tensor and not gradient.users and gradient is not whole:
        before: Node = gradient.args[0]  # type: ignore[assignment]
        graph.erase_node(gradient)
        gradient = before
    for leaf in low[:-1]:
        if not leaf.users:
            graph.erase_node(leaf)

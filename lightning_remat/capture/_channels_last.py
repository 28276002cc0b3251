"""Convolutions of tensors whose channels lie next to each other, for steps that need not have eager mode's bits.

Kernels for convolutions work on tensors that lie so (``torch.channels_last``), and where a tensor lies otherwise, they copy
it before and after, or are slower ones. What follows a convolution keeps the layout: so one copy of the batch and one of
each weight a step is what it takes. Whether that is faster depends on shapes, dtypes and device, and is measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.nn import functional

from lightning_remat.capture._torch import real_tensors

Node = torch.fx.Node

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout with channels last, by the number of dimensions."""

_CONVOLUTIONS: set[Any] = {
    *(torch.conv2d, torch.conv3d, torch.conv_transpose2d, torch.conv_transpose3d),
    *(functional.conv2d, functional.conv3d, functional.conv_transpose2d, functional.conv_transpose3d),
}
_TIMES = 3
"""How often a convolution is timed, after it was run once; the least counts."""


_HARDLY_MORE = 1.05


class ChannelsLast:
    """A graph that Dynamo has captured, with its convolutions on tensors with channels last, until that is taken back.

    Args:
        module: the graph; it is changed in place.

    Attributes:
        convolutions: how many there are.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._module, self._copies = module, list[Node]()
        found = [node for node in module.graph.nodes if _is_convolution(node)]
        self.convolutions = len(found) if _faster([_shapes(node) for node in found]) else 0
        if not self.convolutions:
            return
        for node in found:
            for number in (0, 1):  # each reads anew what may have been written to since
                source = node.args[number]
                node.update_arg(number, self._copied(source, node, _FORMATS[_example(source).dim()]))
        output = module.graph.output_node()
        for source in output.all_input_nodes:
            if source.op != "placeholder" and _lies_plainly(source):
                output.replace_input_with(source, self._copied(source, output, torch.contiguous_format))
        module.recompile()

    def _copied(self, source: Node, reader: Node, layout: torch.memory_format) -> Node:
        with self._module.graph.inserting_before(reader):
            made = self._module.graph.call_method("contiguous", (source,), {"memory_format": layout})
        like = source if reader.op == "output" else reader
        made.meta = {key: like.meta[key] for key in ("nn_module_stack", "stack_trace") if key in like.meta}
        made.meta["example_value"] = _example(source)
        self._copies.append(made)
        return made

    def take_back(self) -> None:
        """Have the graph be as it was."""
        for node in self._copies:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            self._module.graph.erase_node(node)
        self._copies.clear()
        self._module.recompile()


def _example(node: Any) -> torch.Tensor:
    return node.meta["example_value"]  # type: ignore[no-any-return]


def _is_tensor(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape)


def _is_convolution(node: Node) -> bool:
    """Whether a node is a convolution of images or volumes, of known sizes, that lie with channels first."""
    if node.op != "call_function" or node.target not in _CONVOLUTIONS or len(node.args) < 2:
        return False
    if not all(map(_is_tensor, node.args[:2])):
        return False
    x, weight = (_example(one) for one in node.args[:2])
    return x.dim() == weight.dim() and x.dim() in _FORMATS and x.is_floating_point()


def _lies_plainly(node: Node) -> bool:
    return _is_tensor(node) and _example(node).dim() in _FORMATS and _example(node).is_contiguous()


# -- whether it is faster -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """A convolution, as far as its time depends on it."""

    function: Callable[..., torch.Tensor]
    x: tuple[int, ...]
    weight: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    others: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    gradient: bool

    def seconds(self, layout: torch.memory_format) -> float:
        """The time of its forward and backward, on tensors of this layout."""
        x, weight = (
            torch.zeros(shape, dtype=self.dtype, device=self.device).contiguous(memory_format=layout)
            for shape in (self.x, self.weight)
        )
        x.requires_grad_(self.gradient)
        weight.requires_grad_()

        def run() -> None:
            made = self.function(x, weight, *self.others, **dict(self.named))
            torch.autograd.grad(made, [x, weight] if self.gradient else [weight], torch.ones_like(made))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        run()
        seconds = []
        for _ in range(_TIMES):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)


def _shapes(node: Node) -> _Shapes:
    x, weight = (_example(one) for one in node.args[:2])
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return _Shapes(
        node.target,  # type: ignore[arg-type]
        tuple(x.shape),
        tuple(weight.shape),
        dtype,
        x.device,
        (None, *node.args[3:]),
        tuple((name, value) for name, value in node.kwargs.items() if name != "bias"),
        x.requires_grad,
    )


_KNOWN: dict[tuple[_Shapes, torch.memory_format], float] = {}


def _faster(convolutions: list[_Shapes]) -> bool:
    """Whether all of them together take hardly more time on tensors with channels last, on which what follows gains as well."""
    if not convolutions:
        return False
    totals = {True: 0.0, False: 0.0}
    with real_tensors(), torch.enable_grad(), torch.autocast(convolutions[0].device.type, enabled=False):
        for one in convolutions:
            for last in totals:
                layout = _FORMATS[len(one.x)] if last else torch.contiguous_format
                if (one, layout) not in _KNOWN:
                    _KNOWN[one, layout] = one.seconds(layout)
                totals[last] += _KNOWN[one, layout]
    return totals[True] < _HARDLY_MORE * totals[False]

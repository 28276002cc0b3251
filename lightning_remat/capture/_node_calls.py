"""Ops of a joint graph as calls that a cost model times: their shapes, and what makes inputs that cannot be made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._call import OpCall, Source, TensorSpec
from lightning_remat.capture._nodes import is_tensor, producer
from lightning_remat.capture._sizes import Sizes
from lightning_remat.capture.rewritings._filled import sum_of_chosen
from lightning_remat.capture.rewritings._unread import stand_in

Node = torch.fx.Node


class Specs:
    """The specs of one graph's tensors at given sizes, each made once, and one for all that are alike."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._found: dict[int, tuple[torch.Tensor, TensorSpec]] = {}
        self._alike: dict[TensorSpec, TensorSpec] = {}

    def of(self, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real or fake tensor."""
        found = self._found.get(id(tensor))
        if found is None:
            spec = TensorSpec.of(tensor, self._sizes)
            found = self._found[id(tensor)] = tensor, self._alike.setdefault(spec, spec)
        return found[1]


class NodeCalls:
    """The calls of one graph's ops at given sizes, each made once."""

    def __init__(self, sizes: Sizes, specs: Specs) -> None:
        self._sizes, self._specs = sizes, specs
        self._found: dict[Node, OpCall] = {}
        self._opaque: dict[Node, bool] = {}

    def of(self, node: Node) -> OpCall:
        """The call that a node is."""
        if node in self._found:
            return self._found[node]
        read: list[Node] = []
        value = node.meta["val"]
        values = value if isinstance(value, (tuple, list)) else (value,)
        outputs = tuple([self._specs.of(v) for v in values if isinstance(v, torch.Tensor)])
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        args = tuple([self._plain(one, read) for one in node.args])
        kwargs = {name: self._plain(one, read) for name, one in node.kwargs.items()}
        # The more a mask chooses the more memory that takes: one that is made up chooses all.
        sources = self._sources(read) if target is not sum_of_chosen else ()
        call = self._found[node] = OpCall(target, args, kwargs, outputs, sources)
        return call

    def _plain(self, value: Any, read: list[Node]) -> Any:
        """An argument with specs in the place of tensors' nodes, which are added to ``read``, and numbers in that of others."""
        if isinstance(value, Node):
            found = value.meta.get("val")
            if isinstance(found, torch.Tensor):
                read.append(value)
                return self._specs.of(found)
            return self._sizes(found)
        if isinstance(value, (tuple, list)):
            parts = [self._plain(one, read) for one in value]
            return tuple(parts) if isinstance(value, tuple) else parts
        if isinstance(value, dict):
            return {key: self._plain(one, read) for key, one in value.items()}
        return value

    def _sources(self, read: Sequence[Node]) -> tuple[Source | None, ...]:
        """Where the opaque ones among an op's inputs come from, and what else it reads of the ops that make those."""
        if not any([self._is_opaque(node) for node in read]):
            return ()
        made = [_made_by(node) for node in read]
        opaque = {
            found[0] for node, found in zip(read, made, strict=True) if found is not None and self._is_opaque(node)
        }
        return tuple(
            Source(self.of(found[0]), found[1]) if found is not None and found[0] in opaque else None for found in made
        )

    def _is_opaque(self, node: Node) -> bool:
        """Whether only the op that makes a tensor can give values for it that its readers accept.

        Such are all results of an op but its first (a random state, a mask, the place of a maximum, what a kernel keeps for
        its backward), integers and booleans, and views of these: with made-up values in their place, an op that reads them
        may fail, or read out of bounds. An op's first result in floating point is plain data, and so is what the step is
        given.
        """
        found = self._opaque.get(node)
        if found is None:
            found = self._opaque[node] = self._found_opaque(node)
        return found

    def _found_opaque(self, node: Node) -> bool:
        made = _made_by(node)
        if made is None:
            return False
        maker, place = made
        if _ops.is_view(maker.target):
            return any(self._is_opaque(source) for source in maker.all_input_nodes[:1])
        dtype = node.meta["val"].dtype
        return place > 0 or not (dtype.is_floating_point or dtype.is_complex)


def _made_by(node: Node) -> tuple[Node, int] | None:
    """The op that returns a tensor, and its place among the tensors that it returns; ``None`` where no op does."""
    maker = producer(node)
    if maker.op != "call_function" or maker.target is stand_in or not is_tensor(node):
        return None
    if node is maker:
        return maker, 0
    values, place = maker.meta["val"], node.args[1]
    if node.args[0] is not maker or any(isinstance(value, (tuple, list)) for value in values):
        return None
    return maker, sum(isinstance(value, torch.Tensor) for value in values[:place])

"""Ops that are traced once, and copied where they come again: the same ops on tensors that lie alike.

A network's blocks are alike, and so are their backwards. For each op AOTAutograd's trace goes through functionalization,
through decompositions, through the fake tensors' kernels and through the making of a node, in Python, and what comes of it
depends on the op, on its arguments that are no tensors and on how the tensors lie. So what came of it the first time is
copied the next: the nodes, in their place and with the names, modules and numbers that they have there. Autograd itself
runs as ever: which ops there are, and in which order, is not foreseen. The graph is the one that would have been traced.

* ``FunctionalTensorMode.__torch_dispatch__``: what is called for each op, below autograd.
* ``FunctionalTensor.replace_``: by which ops of a higher order write.
* ``FunctionalTensor.elem``: what a tensor is to the modes below, which is made where it is asked for alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
import torch.fx
import torch.fx.traceback as fx_traceback
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental import proxy_tensor

from lightning_remat.capture._torch.alike._early import EarlyForms
from lightning_remat.capture._torch.alike._keys import (
    Keys,
    Known,
    Memory,
    UnlikeError,
    inner,
    is_constant,
    know,
    known_of,
    made_later,
    note_views,
    written_by,
)

Node = torch.fx.Node

_OF_OPS = {"val", "tensor_meta", "original_aten"}
_OF_PLACES = {"seq_nr", "stack_trace", "is_gradient_acc", "autograd_backward"}
_DEVICE = torch.ops.prim.device.default
_OTHER_MEMORY = {"aten::set_", "aten::resize_", "aten::resize_as_"}
"""Ops by which a tensor lies elsewhere, or its memory is another."""


class OverwrittenError(Exception):
    """An op writes to a tensor of which there is a view that functionalization does not know."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """In a form, stands for one of the nodes that an op reads, or, of its own nodes, the one at ``-1 - index``."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Several:
    """In a form, a tuple or list with places in it."""

    kind: Callable[..., Any]
    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _NodeForm:
    """A node of an op."""

    target: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _ResultForm:
    """A result of an op: the position of its node among the op's, and how it lies."""

    node: int
    like: FakeTensor
    wrapped: torch.Tensor
    lies: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _OpForm:
    """What came of an op.

    Attributes:
        nodes: of the op.
        results: of the op.
        kind: the type of its results, where there are several.
        views: whether they are views of the first argument.
    """

    nodes: tuple[_NodeForm, ...]
    results: tuple[_ResultForm | None, ...]
    kind: type | None
    views: bool


_UNSEEN: Any = object()


class Forms:
    """What came of the ops of a trace, each by the op, its arguments, and how the tensors among them lie.

    Attributes:
        traced: how many ops were traced.
        copied: how many were copied.
        early: likewise for the run before the trace.

    Args:
        own: what makes an op's results where they are not copied.
        parts: see `alike_ops`.
    """

    def __init__(self, own: Callable[..., Any], parts: Container[OpOverload] = ()) -> None:
        self.traced = self.copied = 0
        self._parts = parts
        self._own, self._thread, self._tracer = own, threading.get_ident(), None
        self._keys, self._forms = Keys(), dict[Any, _OpForm | None]()
        self.early = EarlyForms(self._keys, own)

    def call(self, mode: Any, op: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
        """Results of an op.

        Raises:
            OverwrittenError: where it writes to something of which not all views are known.
        """
        proxies = proxy_tensor.get_proxy_mode()
        tracer: Any = proxies.tracer if proxies is not None else None
        if op is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        trace = functools.partial(self._own, mode, op, types, args, kwargs)
        if threading.get_ident() == self._thread:
            self._tracer = tracer or self._tracer
        elif tracer is None or tracer is not self._tracer:  # not a thread of autograd's, but another trace
            return trace()
        if tracer is None:
            return trace() if self._forms else self.early.call(mode, op, types, args, kwargs)
        if op._schema.is_mutable:
            return self._write(trace, op, args, kwargs)
        read: list[Node] = []
        try:
            key = self._keys.of(op, args, kwargs, lambda tensor: self._node(tensor, tracer), read)
        except UnlikeError:
            return self._trace(trace, op, args)
        form = self._forms.get(key, _UNSEEN)
        if form is None or (form is not _UNSEEN and form.views and self._may_be_written(args[0])):
            return self._trace(trace, op, args)
        if form is not _UNSEEN:
            self.copied += 1
            return self._copy(form, op, mode, args, tracer, read)
        last = next(iter(reversed(tracer.graph.nodes)), None)
        results = self._trace(trace, op, args)
        if last is None:
            return results
        try:
            self._forms[key] = self._form(op, args, read, tracer, last, results)
        except UnlikeError:
            self._forms[key] = None
        return results

    def _write(self, trace: Callable[[], Any], op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Trace an op that writes to some of its arguments."""
        written = written_by(op, args, kwargs)
        if op.namespace != "aten" or op._schema.name in _OTHER_MEMORY:
            raise OverwrittenError(str(op))
        self.note_written(written, str(op))
        results = trace()
        self.note_written(written, str(op))  # in part it may be made of ops that read
        for one in written:
            one.memory.lost = one.memory.lost or torch.Tag.inplace_view in op.tags
        return results

    @staticmethod
    def note_written(written: Sequence[Known], by: str) -> None:
        """Note of tensors that they are written to.

        Raises:
            OverwrittenError: where not all views are known.
        """
        if any(one.memory.unknown for one in written):
            raise OverwrittenError(by)
        for one in written:
            one.node = one.lies = None
            one.memory.written, one.memory.lost = True, one.memory.lost or one.memory.viewed

    def _may_be_written(self, tensor: FunctionalTensor) -> bool:
        """Whether functionalization must know of a tensor's views, as far as is known."""
        return self.early.writes_to_views or known_of(tensor).memory.written

    def _trace(self, trace: Callable[[], Any], op: OpOverload, args: Sequence[Any]) -> Any:
        """Trace an op; views among its results are noted as such."""
        self.traced += 1
        results = trace()
        note_views(op, args, results)
        return results

    def _node(self, tensor: FunctionalTensor, tracer: Any) -> Node:
        """The node that a tensor is; how it lies is known then."""
        known = known_of(tensor)
        if known.memory.lost or (known.memory.written and known.view):
            raise UnlikeError
        if known.node is None:
            fake = inner(tensor)
            entry = tracer.tensor_tracker.get(fake)
            if entry is None or entry.constant is not None:
                raise UnlikeError
            known.lies, known.node = self._keys.lies(fake), entry.proxy.node
        assert known.node is not None
        if known.node.graph is not tracer.graph:
            raise UnlikeError
        return known.node

    def _form(
        self, op: OpOverload, args: Sequence[Any], read: list[Node], tracer: Any, last: Node, results: Any
    ) -> _OpForm:
        """What came of an op: the nodes after ``last``.

        Raises:
            UnlikeError: where it is not a node of the op, with others for its results, or what one of the ``parts`` is
                made of, all of it made of the arguments alone.
        """
        made: list[Node] = []
        while last.next.op != "root":
            last = last.next
            made.append(last)
        places = {node: _Place(i) for i, node in enumerate(read)}
        places.update({node: _Place(-1 - i) for i, node in enumerate(made)})
        targets = [node.target for node in made]
        alone = targets[:1] == [op] and all(target is operator.getitem for target in targets[1:])
        if not made or not (alone or op in self._parts):
            raise UnlikeError
        kind = type(results) if isinstance(results, (tuple, list)) else None
        forms: list[_ResultForm | None] = []
        for tensor in results if kind is not None else (results,):
            if tensor is None:
                forms.append(None)
                continue
            if type(tensor) is not FunctionalTensor:
                raise UnlikeError
            node = self._node(tensor, tracer)
            if node not in made or any(one is not None and one.node == made.index(node) for one in forms):
                raise UnlikeError  # or one tensor twice, by which autograd goes
            fake = inner(tensor)
            forms.append(_ResultForm(made.index(node), fake, torch._to_functional_tensor(fake), known_of(tensor).lies))
        views = any(one is not None and known_of(one).view for one in (results if kind is not None else (results,)))
        if views and (type(args[0]) is not FunctionalTensor or len(read) != 1):
            raise UnlikeError
        nodes = tuple(_node_form(node, places) for node in made)
        return _OpForm(nodes, tuple(forms), kind, views)

    def _copy(
        self, form: _OpForm, op: OpOverload, mode: Any, args: Sequence[Any], tracer: Any, read: list[Node]
    ) -> Any:
        """An op's results where it is not traced: new nodes, and tensors that are these."""
        made: list[Node] = []
        meta: Any = fx_traceback.get_current_meta() if fx_traceback.has_preserved_node_meta() else {}
        outermost = meta.get("original_aten") is None
        if outermost:
            meta["original_aten"] = op
        try:
            for one in form.nodes:
                filled = tuple([_filled(part, read, made) for part in one.args])
                # What a tracer's own `create_node` adds is none of what such a node has (see `_node_form`).
                node = torch.fx.Tracer.create_node(tracer, "call_function", one.target, filled, one.kwargs, one.name)
                node.meta.update(one.meta)
                made.append(node)
        finally:
            if outermost:
                meta["original_aten"] = None
        memory = None
        if form.views:
            memory = known_of(args[0]).memory
            memory.viewed = memory.unknown = True
        results = []
        for result in form.results:
            tensor: Any = None
            if result is not None:
                tensor = FunctionalTensor(result.wrapped, mode)
                node = made[result.node]
                make = functools.partial(_made, node, tracer, result.like)
                know(tensor, Known(memory or Memory(), memory is not None, node, result.lies, make))
            results.append(tensor)
        return results[0] if form.kind is None else form.kind(results)


def _node_form(node: Node, places: dict[Node, _Place]) -> _NodeForm:
    target: Any = node.target
    name = target.overloadpacket.__name__ if isinstance(target, OpOverload) else target.__name__
    current = fx_traceback.get_current_meta() if fx_traceback.has_preserved_node_meta() else {}
    if name.startswith("__") or name.lower() != name or not node.meta.keys() <= _OF_OPS | _OF_PLACES | current.keys():
        raise UnlikeError
    if any(isinstance(_placed(value, places), (_Place, _Several)) for value in node.kwargs.values()):
        raise UnlikeError
    meta: dict[str, Any] = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
    return _NodeForm(target, name, tuple(_placed(one, places) for one in node.args), dict(node.kwargs), meta)


def _placed(value: Any, places: dict[Node, _Place]) -> Any:
    """A node's argument, with places where it has nodes."""
    if isinstance(value, Node):
        if value not in places:
            raise UnlikeError
        return places[value]
    if isinstance(value, (tuple, list)):
        parts = tuple(_placed(one, places) for one in value)
        return _Several(type(value), parts) if any(isinstance(one, (_Place, _Several)) for one in parts) else value
    if not is_constant(value):
        raise UnlikeError
    return value


def _filled(value: Any, read: list[Node], made: list[Node]) -> Any:
    """The argument again, with other nodes."""
    kind = type(value)
    if kind is _Place:
        return read[value.index] if value.index >= 0 else made[-1 - value.index]
    if kind is _Several:
        return value.kind([_filled(one, read, made) for one in value.parts])
    return value


def _made(node: Node, tracer: Any, like: FakeTensor) -> Any:
    """What the result of an op that was copied is to the modes below."""
    with torch._C.DisableTorchFunction():  # by which the tracer would be told of each look at the tensor
        with torch._C._AutoDispatchBelowAutograd():
            fake: Any = proxy_tensor.snapshot_fake(like)
        proxy_tensor.track_tensor(fake, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return torch._to_functional_tensor(fake)


@contextlib.contextmanager
def alike_ops(over: Callable[[], bool] = lambda: False, parts: Container[OpOverload] = ()) -> Iterator[Forms]:
    """While open, ops that come again in a trace are copied, unless it is ``over``: what is traced then is another's.

    ``parts`` are ops that are traced as the ops that they are made of. Tracing may end with `OverwrittenError` then.
    """
    own: Any = FunctionalTensorMode.__torch_dispatch__
    forms = Forms(own, parts)

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if over() or not isinstance(func, OpOverload):
            return own(self, func, types, args, kwargs)
        return forms.call(self, func, types, args, kwargs or {})

    functional: Any = FunctionalTensor
    own_replace: Any = FunctionalTensor.replace_

    def replace(self: Any, output: torch.Tensor) -> None:
        known = known_of(self)
        forms.note_written([known], "an op of a higher order")
        forms.early.writes_to_views = forms.early.writes_to_views or known.memory.viewed
        own_replace(self, output)

    assert not hasattr(functional, "elem"), "an attribute of each tensor"
    FunctionalTensorMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    functional.elem, functional.replace_ = made_later(), replace
    try:
        yield forms
    finally:
        FunctionalTensorMode.__torch_dispatch__ = own  # type: ignore[method-assign]
        del functional.elem
        functional.replace_ = own_replace

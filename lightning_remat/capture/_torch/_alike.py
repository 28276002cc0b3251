"""Ops that are traced once, and copied where they come again: the same ops on tensors that lie alike.

A network's blocks are alike, and so are their backwards. For each op AOTAutograd's trace goes through functionalization,
through decompositions, through the fake tensors' kernels and through the making of a node, in Python, and what comes of it
depends on the op, on its arguments that are no tensors and on how the tensors lie. So what came of it the first time is
copied the next: the nodes, in their place and with the names, modules and numbers that they have there. Autograd itself
runs as ever: which ops there are, and in which order, is not foreseen. The graph is the one that would have been traced.

* ``FunctionalTensorMode.__torch_dispatch__``: what is called for each op, below autograd.
* ``FunctionalTensor.elem``: what a tensor is to the modes below, which is made where it is asked for alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
import torch.fx.traceback as fx_traceback
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor
from torch.utils._python_dispatch import _disable_current_modes

Node = torch.fx.Node

_CONSTANTS = {
    *(int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_OF_OPS = {"val", "tensor_meta", "original_aten"}
_OF_PLACES = {"seq_nr", "stack_trace", "is_gradient_acc", "autograd_backward"}


class OverwrittenError(Exception):
    """An op writes to a tensor of which there is a view that functionalization does not know."""


class _UnlikeError(Exception):
    """Something is not understood: the op is traced."""


@dataclasses.dataclass(slots=True)
class _Memory:
    """What tensors that are views of one another share.

    Attributes:
        viewed: whether there is a view.
        unknown: whether one of the views was copied, so that functionalization does not know that it is one.
        written: whether an op has written to it: its views' nodes are made anew when they are read.
        lost: whether that was while there was a view: no tensor's node is known any more.
    """

    viewed: bool = False
    unknown: bool = False
    written: bool = False
    lost: bool = False


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known of a functional tensor.

    Attributes:
        memory: see `_Memory`.
        view: whether it was made as a view of another.
        node: the node that it is; ``None`` where it must be looked up.
        lies: how it lies; equal for tensors that lie alike.
        like: of a copied op's result, a fake tensor that lies alike.
        tracer: then, of its node's graph.
    """

    memory: _Memory
    view: bool = False
    node: Node | None = None
    lies: Any = None
    like: FakeTensor | None = None
    tracer: Any = None


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
        viewed: the argument that they are views of.
    """

    nodes: tuple[_NodeForm, ...]
    results: tuple[_ResultForm | None, ...]
    kind: type | None
    viewed: int | None


_UNSEEN: Any = object()
_KNOWN = "_lightning_remat_known"


def _known(tensor: FunctionalTensor) -> _Known:
    found: _Known | None = vars(tensor).get(_KNOWN)
    if found is None:
        found = _Known(_Memory())
        setattr(tensor, _KNOWN, found)
    return found


class Forms:
    """What came of the ops of a trace, each by the op, its arguments, and how the tensors among them lie.

    Attributes:
        traced: how many ops were traced.
        copied: how many were copied.
    """

    def __init__(self) -> None:
        self.traced = self.copied = 0
        self._forms: dict[Any, _OpForm | None] = {}
        self._alike: dict[Any, Any] = {}

    def call(self, trace: Callable[[], Any], mode: Any, op: OpOverload, args: Sequence[Any], kwargs: Any) -> Any:
        """Results of an op; ``trace`` traces it.

        Raises:
            OverwrittenError: where it writes to something of which not all views are known.
        """
        proxies = get_proxy_mode()
        if proxies is None:  # no graph is made yet
            return trace()
        if op._schema.is_mutable:
            return self._write(trace, op, args, kwargs)
        tracer, read = proxies.tracer, list[Node]()
        try:
            key = self._key(op, args, kwargs, read, tracer)
        except _UnlikeError:
            return self._trace(trace, op, args)
        form = self._forms.get(key, _UNSEEN)
        if form is None or (
            form is not _UNSEEN and form.viewed is not None and _known(args[form.viewed]).memory.written
        ):
            return self._trace(trace, op, args)
        if form is not _UNSEEN:
            self.copied += 1
            return self._copy(form, op, mode, args, tracer, read)
        last = next(reversed(tracer.graph.nodes))
        results = self._trace(trace, op, args)
        try:
            self._forms[key] = self._form(op, args, read, tracer, last, results)
        except _UnlikeError:
            self._forms[key] = None
        return results

    @staticmethod
    def _write(trace: Callable[[], Any], op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Trace an op that writes to some of its arguments."""
        written: list[_Known] = []
        for i, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                tensors = value if isinstance(value, (tuple, list)) else (value,)
                written += [_known(one) for one in tensors if isinstance(one, FunctionalTensor)]
        if torch.Tag.inplace_view in op.tags or any(one.memory.unknown for one in written):
            raise OverwrittenError(str(op))
        results = trace()
        for one in written:
            one.node = one.like = None
            one.memory.written, one.memory.lost = True, one.memory.viewed
        return results

    def _trace(self, trace: Callable[[], Any], op: OpOverload, args: Sequence[Any]) -> Any:
        """Trace an op; views among its results are noted as such."""
        self.traced += 1
        results = trace()
        if any(one.alias_info is not None for one in op._schema.returns):
            given = [one for one in args if isinstance(one, FunctionalTensor)]
            for one in results if isinstance(results, (tuple, list)) else (results,):
                if isinstance(one, FunctionalTensor) and given and all(one is not other for other in given):
                    memory = _known(given[0]).memory
                    memory.viewed = True
                    setattr(one, _KNOWN, _Known(memory, view=True))
        return results

    def _key(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], read: list[Node], tracer: Any) -> Any:
        """All that tells what comes of an op.

        Raises:
            _UnlikeError: where there is more.
        """
        if op.namespace != "aten":
            raise _UnlikeError
        parts = tuple([self._part(one, read, tracer) for one in args])
        named = tuple([(name, self._part(one, read, tracer)) for name, one in kwargs.items()])
        return op, parts, named, torch.is_grad_enabled(), torch.get_default_dtype()

    def _part(self, value: Any, read: list[Node], tracer: Any) -> Any:
        """An argument's part of an op's key; nodes are added to those that the op reads, each once."""
        kind = type(value)
        if kind is FunctionalTensor:
            known = _known(value)
            node = self._node(value, known, tracer)
            if node in read:
                return read.index(node)
            read.append(node)
            return known.lies
        if kind in _CONSTANTS:
            return kind, value
        if kind is float:
            return kind, value.hex()  # -0.0 is not 0.0
        if kind in (tuple, list, torch.Size):
            return kind, *[self._part(one, read, tracer) for one in value]
        raise _UnlikeError

    def _node(self, tensor: FunctionalTensor, known: _Known, tracer: Any) -> Node:
        """The node that a tensor is; how it lies is known then."""
        if known.memory.lost or (known.memory.written and known.view):
            raise _UnlikeError
        if known.node is None:
            inner: Any = torch._from_functional_tensor(tensor.elem)
            entry = tracer.tensor_tracker.get(inner)
            if type(inner) is not FakeTensor or entry is None:
                raise _UnlikeError
            if (
                inner.constant is not None or entry.constant is not None
            ):  # what comes of an op may depend on the numbers
                raise _UnlikeError
            known.lies, known.node = self._lies(inner), entry.proxy.node
        assert known.node is not None
        if known.node.graph is not tracer.graph:
            raise _UnlikeError
        return known.node

    def _lies(self, fake: FakeTensor) -> Any:
        """How a tensor lies; one object for all that lie alike."""
        if fake.layout is not torch.strided or fake.is_quantized or fake.dtype.is_complex:
            raise _UnlikeError
        if (
            fake.is_neg()
            or fake._is_zerotensor()
            or not all(type(size) is int for size in (*fake.shape, *fake.stride()))
        ):
            raise _UnlikeError
        where = fake.storage_offset(), fake.untyped_storage().nbytes()
        lies = tuple(fake.shape), fake.stride(), where, fake.dtype, fake.device
        return self._alike.setdefault(lies, (len(self._alike),))

    def _form(
        self, op: OpOverload, args: Sequence[Any], read: list[Node], tracer: Any, last: Node, results: Any
    ) -> _OpForm:
        """What came of an op: the nodes after ``last``.

        Raises:
            _UnlikeError: where it is not a node of the op, with others for its results, made of the arguments alone.
        """
        made: list[Node] = []
        while last.next.op != "root":
            last = last.next
            made.append(last)
        places = {node: _Place(i) for i, node in enumerate(read)}
        places.update({node: _Place(-1 - i) for i, node in enumerate(made)})
        targets = [node.target for node in made]
        if not made or targets[0] is not op or any(target is not operator.getitem for target in targets[1:]):
            raise _UnlikeError
        kind = type(results) if isinstance(results, (tuple, list)) else None
        forms: list[_ResultForm | None] = []
        for tensor in results if kind is not None else (results,):
            if tensor is None:
                forms.append(None)
                continue
            if type(tensor) is not FunctionalTensor:
                raise _UnlikeError
            known = _known(tensor)
            node = self._node(tensor, known, tracer)
            if node not in made:
                raise _UnlikeError
            inner: Any = torch._from_functional_tensor(tensor.elem)
            forms.append(_ResultForm(made.index(node), inner, torch._to_functional_tensor(inner), known.lies))
        views = [i for i, one in enumerate(op._schema.arguments) if one.alias_info is not None]
        if len(views) > 1 or any(i >= len(args) or type(args[i]) is not FunctionalTensor for i in views):
            raise _UnlikeError
        nodes = tuple(_node_form(node, places) for node in made)
        return _OpForm(nodes, tuple(forms), kind, views[0] if views else None)

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
                node = tracer.create_node("call_function", one.target, filled, one.kwargs, one.name)
                node.meta.update(one.meta)
                made.append(node)
        finally:
            if outermost:
                meta["original_aten"] = None
        memory = None
        if form.viewed is not None:
            memory = _known(args[form.viewed]).memory
            memory.viewed = memory.unknown = True
        results = []
        for result in form.results:
            tensor: Any = None
            if result is not None:
                tensor = FunctionalTensor(result.wrapped, mode)
                del tensor.elem
                view = memory is not None
                known = _Known(memory or _Memory(), view, made[result.node], result.lies, result.like, tracer)
                setattr(tensor, _KNOWN, known)
            results.append(tensor)
        return results[0] if form.kind is None else form.kind(results)


def _node_form(node: Node, places: dict[Node, _Place]) -> _NodeForm:
    target: Any = node.target
    name = target.overloadpacket.__name__ if isinstance(target, OpOverload) else target.__name__
    current = fx_traceback.get_current_meta() if fx_traceback.has_preserved_node_meta() else {}
    if name.startswith("__") or name.lower() != name or not node.meta.keys() <= _OF_OPS | _OF_PLACES | current.keys():
        raise _UnlikeError
    if any(isinstance(_placed(value, places), (_Place, _Several)) for value in node.kwargs.values()):
        raise _UnlikeError
    meta: dict[str, Any] = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
    return _NodeForm(target, name, tuple(_placed(one, places) for one in node.args), dict(node.kwargs), meta)


def _placed(value: Any, places: dict[Node, _Place]) -> Any:
    """A node's argument, with places where it has nodes."""
    if isinstance(value, Node):
        if value not in places:
            raise _UnlikeError
        return places[value]
    if isinstance(value, (tuple, list)):
        parts = tuple(_placed(one, places) for one in value)
        return _Several(type(value), parts) if any(isinstance(one, (_Place, _Several)) for one in parts) else value
    if type(value) not in _CONSTANTS and type(value) is not float:
        raise _UnlikeError
    return value


def _filled(value: Any, read: list[Node], made: list[Node]) -> Any:
    """The argument again, with other nodes."""
    kind = type(value)
    if kind is _Place:
        return read[value.index] if value.index >= 0 else made[-1 - value.index]
    if kind is _Several:
        return value.kind([_filled(one, read, made) for one in value.parts])
    return value


def _inner(tensor: FunctionalTensor, name: str) -> Any:
    """``FunctionalTensor.elem`` of the result of an op that was copied."""
    known: _Known | None = vars(tensor).get(_KNOWN)
    if name != "elem" or known is None or known.like is None or known.node is None:
        raise AttributeError(f"'{type(tensor).__name__}' object has no attribute '{name}'")
    with torch._C._AutoDispatchBelowAutograd(), _disable_current_modes():
        inner = known.like.detach()
    track_tensor(inner, torch.fx.Proxy(known.node, known.tracer), constant=None, tracer=known.tracer)
    tensor.elem = torch._to_functional_tensor(inner)
    return tensor.elem


@contextlib.contextmanager
def alike_ops() -> Iterator[Forms]:
    """While open, ops that come again in a trace are copied.

    Tracing may end with `OverwrittenError` then.
    """
    own: Any = FunctionalTensorMode.__torch_dispatch__
    forms = Forms()

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            return own(self, func, types, args, kwargs)
        return forms.call(lambda: own(self, func, types, args, kwargs), self, func, args, kwargs or {})

    functional: Any = FunctionalTensor
    FunctionalTensorMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    functional.__getattr__ = _inner
    try:
        yield forms
    finally:
        FunctionalTensorMode.__torch_dispatch__ = own  # type: ignore[method-assign]
        del functional.__getattr__

"""What Dynamo reads of a module while it traces a call of it, and whether another module reads alike.

What a call becomes depends on what is read: of the arguments, of the module and all in it, and of the rest of the program. All
of it is found by a source (``L['self'].blocks[3].norm.eps``). So what was read in one call, looked up at the same places of
another module, tells whether a call of that one becomes the same.

* ``Source``: frozen dataclasses that lie on one another, with a template for the expression that each adds.
* ``Guard``: what is checked before each step, of the value that a source names.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.guards import GuardBuilder, _get_closure_vars
from torch._dynamo.source import AttrSource
from torch._guards import Guard, Source

from lightning_remat.capture._torch._guards import source_name

_CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    types.NoneType,
    types.EllipsisType,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_OF_CLASSES = {"TypeDictSource", "TypeMROSource", "TypeSource"}
_CHECKS = {id(value) for value in vars(GuardBuilder).values()}


class UnlikeError(Exception):
    """Something is otherwise, or not understood: nothing is copied."""


def or_unlike(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises `UnlikeError` for all that goes wrong in it: on another torch, something may be otherwise."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (UnlikeError, TorchDynamoException):
            raise
        except Exception as error:
            raise UnlikeError from error

    return call


@dataclasses.dataclass(slots=True)
class Read:
    """A value that was read.

    Attributes:
        source: where it was found.
        value: what was found.
        node: the tensor that the graph is given, if it is one.
    """

    source: Source
    value: Any
    node: torch.fx.Node | None = None


def check_of(guard: Guard) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function of Dynamo's by which a guard is made, and what it is given: constants, and sources.

    Raises:
        UnlikeError: for a guard that is not Dynamo's own, or one that holds what it guards.
    """
    check: Any = guard.create_fn
    args, kwargs = (), {}
    if isinstance(check, functools.partial):
        check, args, kwargs = check.func, check.args, check.keywords
    held = (*args, *kwargs.values())
    if id(check) not in _CHECKS or not all(isinstance(value, (*_CONSTANTS, Source)) for value in held):
        raise UnlikeError
    return check, args, kwargs


@dataclasses.dataclass(slots=True)
class _Place:
    """A source that lies on others.

    Attributes:
        kind: its class.
        below: the positions of the sources that it lies on, by field.
        fields: its other fields.
        name: of the attribute that it is of the one it lies on; "" where it is something else.
        code: otherwise, gives its value from that of the one it lies on (``here``), where that is all it takes.
        of_class: whether it is a class's, and not one module's.
    """

    kind: Callable[..., Source]
    below: dict[str, int]
    fields: dict[str, Any]
    name: str
    code: types.CodeType | None
    of_class: bool


class Places:
    """The places in a module that were looked at.

    Args:
        output: what Dynamo makes.
        source: the module's.
        module: the module.

    Attributes:
        names: what expressions may name.
        known: the places, by their positions; at 0 is the module.
        sources: theirs.
    """

    def __init__(self, output: Any, source: Source, module: torch.nn.Module) -> None:
        self.names: dict[str, Any] = {**_get_closure_vars(), "L": output.local_scope, "G": output.global_scope}
        self.known: list[_Place | None] = [None]
        self.sources = [source]
        self._positions: dict[Source, int | None] = {source: 0}
        self._own = At(self, source, module)

    def position(self, source: Source) -> int | None:
        """The position of a source among the places; ``None`` for one that is not of the module."""
        if source in self._positions:
            return self._positions[source]
        given = (field.name for field in dataclasses.fields(source) if field.init)
        fields = {name: getattr(source, name) for name in given}
        found = {name: self.position(part) for name, part in fields.items() if isinstance(part, Source)}
        below = {name: position for name, position in found.items() if position is not None}
        position = None
        if below:
            position = len(self.known)
            name = source.member if type(source) is AttrSource else ""
            template: Any = getattr(source, "_name_template", None)
            simple = list(found) == ["base"] and isinstance(template, str) and not name
            code = compile(template.format("here"), "<source>", "eval") if simple else None
            rest = {name: part for name, part in fields.items() if name not in below}
            of_class = type(source).__name__ in _OF_CLASSES or any(map(self.is_of_class, below.values()))
            self.known.append(_Place(type(source), below, rest, name, code, of_class))
            self.sources.append(source)
        self._positions[source] = position
        return position

    def are_named(self, guard: Guard) -> bool:
        """Whether the check of a guard is given a place."""
        check: Any = guard.create_fn
        held = (*check.args, *check.keywords.values()) if isinstance(check, functools.partial) else ()
        return any(isinstance(one, Source) and self.position(one) is not None for one in held)

    def value(self, position: int) -> Any:
        """What lies there. See `At.value`."""
        return self._own.value(position)

    def is_of_class(self, position: int) -> bool:
        """Whether a place is in a class, which modules share whose types are guarded on."""
        place = self.known[position]
        return place is not None and place.of_class

    def below(self, position: int) -> Iterable[int]:
        """The positions of what a place lies on."""
        place = self.known[position]
        return () if place is None else place.below.values()

    def moved(self, value: Any, at: At) -> Any:
        """A source as it is for another module; anything else, and what is not of the module, as it is."""
        position = self.position(value) if isinstance(value, Source) else None
        return value if position is None else at.source(position)


_UNSEEN: Any = object()


class At:
    """The same places in another module.

    Args:
        places: the places.
        source: the module's.
        module: the module.
    """

    def __init__(self, places: Places, source: Source, module: torch.nn.Module) -> None:
        self._places = places
        self._sources: dict[int, Source] = {0: source}
        self._values: dict[int, Any] = {0: module}

    def source(self, position: int) -> Source:
        """The source of what lies there."""
        found = self._sources.get(position)
        if found is None:
            place = self._known(position)
            below = {name: self.source(one) for name, one in place.below.items()}
            found = self._sources[position] = place.kind(**below, **place.fields)
        return found

    def value(self, position: int) -> Any:
        """What lies there.

        Raises:
            UnlikeError: where nothing does.
        """
        found = self._values.get(position, _UNSEEN)
        if found is _UNSEEN:
            place = self._known(position)
            try:
                if place.name:
                    found = getattr(self.value(place.below["base"]), place.name)
                elif place.code is not None:
                    found = eval(place.code, self._places.names, {"here": self.value(place.below["base"])})
                else:  # an expression that Dynamo has written, as its guards are
                    found = eval(source_name(self.source(position)), self._places.names)
            except Exception as error:  # it may do anything
                raise UnlikeError from error
            self._values[position] = found
        return found

    def _known(self, position: int) -> _Place:
        place = self._places.known[position]
        assert place is not None, "the module itself"
        return place


class Pairs:
    """What is alike in two modules: of each module and tensor of the one, which of the other is in its place.

    Attributes:
        modules: the other one's modules, by the ``id`` of those in whose place they are.
    """

    def __init__(self) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self._places: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}

    def compare(self, one: Any, other: Any) -> None:
        """Look at two values that were read at the same place.

        Raises:
            UnlikeError: where they would not be traced alike.
        """
        if isinstance(one, torch.Tensor):
            self.pair(one, other)
            if one is not other and (lies(one) != lies(other) or list(vars(one)) != list(vars(other))):
                raise UnlikeError
        elif isinstance(one, torch.nn.Module):
            self.pair(one, other)
            if self.modules.setdefault(id(one), other) is not other or _looks(one) != _looks(other):
                raise UnlikeError
        else:
            if isinstance(one, (list, dict, set)):
                self.pair(one, other)
            if one is not other:
                self._compare_parts(one, other)

    def pair(self, one: Any, other: Any) -> None:
        """Have an object be in the place of another: which are one and the same must be so in both modules."""
        alone = self._places.setdefault(id(one), other) is other and self._taken.setdefault(id(other), one) is one
        if not alone or type(one) is not type(other):
            raise UnlikeError

    def _compare_parts(self, one: Any, other: Any) -> None:
        """What is in lists and dictionaries: numbers must be equal; other things are read by sources of their own."""
        if type(one) is not type(other):
            raise UnlikeError
        if isinstance(one, _CONSTANTS):
            same = repr(one) == repr(other)
        elif isinstance(one, (set, frozenset)):
            same = one == other
        elif isinstance(one, dict):
            same = list(one) == list(other)
            self._compare_items(one.values(), other.values())
        elif isinstance(one, (list, tuple)):
            same = len(one) == len(other)
            self._compare_items(one, other)
        elif isinstance(one, types.MethodType):
            same = one.__func__ is other.__func__
            self.compare(one.__self__, other.__self__)
        else:
            same = False
        if not same:
            raise UnlikeError

    def _compare_items(self, some: Any, others: Any) -> None:
        for one, other in zip(some, others, strict=False):
            parts = isinstance(one, (*_CONSTANTS, list, tuple, dict, set, frozenset)) or type(one) is not type(other)
            if parts and one is not other:
                self._compare_parts(one, other)


def is_keyed_by_objects(value: Any) -> bool:
    """Whether a value is a dictionary or a set by which objects are told from one another."""
    return isinstance(value, (dict, set, frozenset)) and not all(isinstance(key, (*_CONSTANTS, tuple)) for key in value)


def lies(tensor: torch.Tensor, written: bool = True) -> tuple[Any, ...]:
    """All by which tracing tells tensors apart; not ``written``: but for whether they were written to.

    Raises:
        UnlikeError: for tensors with symbolic sizes, or of another layout.
    """
    if tensor.layout is not torch.strided or not all(type(size) is int for size in tensor.shape):
        raise UnlikeError
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._is_view(),
        written and tensor._version == 0,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        tensor._backward_hooks is None,
    )


def is_as_it_was(node: torch.fx.Node, tensor: torch.Tensor) -> bool:
    """Whether a node's tensor lies, while it is traced, as another: one that the graph is given, as it is given."""
    found = node.meta["example_value"]
    return all(type(size) is int for size in found.shape) and (
        (found.dtype, tuple(found.shape), found.stride(), found.requires_grad)
        == (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
    )


def _looks(module: torch.nn.Module) -> tuple[Any, ...]:
    """What Dynamo looks at in a module without a source.

    Raises:
        UnlikeError: for modules with hooks, which are called with the module.
    """
    own = vars(module)
    if any(own.get(name) for name in _HOOKS):
        raise UnlikeError
    members = [own[kind].items() for kind in ("_parameters", "_buffers", "_modules")]
    return list(own), module.training, [[(name, value is None) for name, value in some] for some in members]

"""Dynamo's guards on modules, asked only when something that they read is not what it was when they last held.

A step's guards walk through all modules, from attribute to attribute: up to an eighth of what the step of a small network
takes. Most of them read attributes of modules, and items of the dicts, lists and tuples there. While all of these are the
same objects, and what may change about an object has not (tensors' metadata, lengths, keys, types), they hold as they did.
That is looked at in a few passes over all modules, several times as fast; only else Dynamo's own guards are asked.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, eq, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch._C import _dynamo
from torch._dynamo.guards import CheckFunctionManager
from torch._guards import Guard, Source

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch._guards import source_name

_compiled: Any = _dynamo.guards
_NEEDED = "TensorGuards", "dict_version", "install_no_tensor_aliasing_guard"

_LAST = re.compile(r"(.+)(?:\.([A-Za-z_]\w*)|\['([^'\\]+)'\]|\[(\d+)\])")
"""A source's name: that of what it is read from, and an attribute, a key or an index."""

_LOCAL = re.compile(r"L\['(\w+)'\]")
_DICTS, _LISTS = (dict, OrderedDict), (list, tuple, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

_TWICE = "buffers of modules are different tensors"

_RESTLESS = 8
"""How many times more often something has changed than not before Dynamo's guards alone are asked from then on."""


class ModuleGuards:
    """What the guards on modules of a step have read, for as long as the step is there."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """While Dynamo traces: of a captured frame's guards, those on a module that it is given become one."""
        if not all(hasattr(_compiled, name) for name in _NEEDED):
            yield
            return
        plain = CheckFunctionManager.build_guards

        @functools.wraps(plain)
        def build_guards(
            manager: CheckFunctionManager,
            guards: list[Guard],
            known: Any,
            code: Any,
            output: Any,
            *others: Any,
            **named: Any,
        ) -> Any:
            groups: dict[str, _Group] = {}
            left = [guard for guard in guards if not _taken(guard, groups, output.local_scope)]
            builder, found = plain(manager, left, known, code, output, *others, **named)
            for group in groups.values():
                inner, group.guards = plain(manager, group.given, known, code, output, *others, **named)
                builder.id_matched_objs.update(inner.id_matched_objs)
                if len(names := inner.no_tensor_aliasing_names) > 1:
                    _compiled.install_no_tensor_aliasing_guard(
                        inner.no_tensor_aliasing_guard_managers, names, [_TWICE], None
                    )
                root = group.given[0].originating_source
                while isinstance(base := getattr(root, "base", None), Source):
                    root = base
                builder.get_guard_manager_from_source(root).add_lambda_guard(
                    _check(group), group.words, group.given[0].user_stack
                )
                group.built(self._forget)
                self._groups.append(group)
            self._forget()
            return builder, found

        with replaced([(CheckFunctionManager, "build_guards", build_guards)]):
            yield

    def _forget(self) -> None:
        """Let go of what was read: a module that is gone would stay in memory."""
        for group in self._groups:
            group.seen = None


def _taken(guard: Guard, groups: dict[str, _Group], scope: Mapping[str, Any]) -> bool:
    """Whether a guard is one of the group of a module that its source is read from; it is added to it then."""
    name = source_name(guard.originating_source)
    local = _LOCAL.match(name)
    if local is None or not isinstance(scope.get(local[1]), torch.nn.Module):
        return False
    group = groups.get(local[0])
    if group is None:
        group = _Group(local[1], scope[local[1]])
    if not group.takes(guard, name):
        return False
    groups[local[0]] = group
    return True


def _check(group: _Group) -> Callable[[torch.nn.Module], bool]:
    # Dynamo keeps its guards for good, and what is read only as long as the step is there.
    found, guards, words, name = weakref.ref(group), group.guards, group.words, group.name

    def check(module: torch.nn.Module) -> bool:
        own = found()
        if own is not None and own.unchanged(module):
            return True
        scope = {name: module}
        if not guards.check(scope):
            words[:] = guards.check_verbose(scope).verbose_code_parts or words
            if words[0].startswith("Duplicate tensor"):  # Dynamo would look for it among its other guards
                words[:] = [_TWICE]
            return False
        if own is not None:
            own.note(module)
        return True

    return check


class _Step(NamedTuple):
    """How a value is read: from which other one (its number), as an attribute's or an item's value."""

    base: int
    key: str | int
    attribute: bool


class _Group:
    """The guards on a module that a frame is given, and on what is read from it.

    Args:
        name: of the frame's local variable.
        module: its value.

    Attributes:
        given: the guards.
        guards: Dynamo's form of them.
        words: those that failed last, in Dynamo's words.
        seen: what they have read when they last held.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.given: list[Guard] = []
        self.guards: Any = None
        self.words = [f"what is read from {name}"]
        self.seen: _Seen | None = None
        self._changed: Callable[[], None]
        self._numbers = {f"L['{name}']": 0}
        self._steps = [_Step(-1, name, attribute=False)]
        self._values: list[Any] = [module]
        self._asked: dict[str, dict[Any, None]] = {
            question: {} for question in ("empty", "length", "keys", "type", "tensor")
        }
        self._absent: dict[tuple[int, str], None] = {}
        self._restless = 0

    def takes(self, guard: Guard, name: str) -> bool:
        """Add a guard, if all that it reads can be looked at here."""
        known = len(self._steps)
        try:
            taken = self._asks(guard, self._number(name))
        except _UnknownError:
            taken = False
        if taken:
            self.given.append(guard)
        else:  # what it alone reads may change
            del self._steps[known:], self._values[known:]
            while len(self._numbers) > known:
                self._numbers.popitem()
        return taken

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            last = _LAST.fullmatch(name)
            if last is None:
                raise _UnknownError
            before, attribute, key, index = last.groups()
            step = _Step(self._number(before), attribute or key or int(index), attribute is not None)
            self._values.append(_read(self._values[step.base], step))
            self._numbers[name] = len(self._steps)
            self._steps.append(step)
        return self._numbers[name]

    def _asks(self, guard: Guard, number: int) -> bool:
        """Note what a guard asks of a value beside which object it is; returns whether that is known."""
        value, asked = self._values[number], self._asked
        create: Any = guard.create_fn
        kind, named = getattr(create, "func", create).__name__, getattr(create, "keywords", {})
        container = type(value) in (*_DICTS, *_LISTS)
        constant = kind in ("CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH") and _is_constant(value)
        if constant or (kind == "TYPE_MATCH" and container):
            pass
        elif kind == "TYPE_MATCH" and isinstance(value, torch.nn.Module):
            asked["type"][number] = None
        elif kind == "SEQUENCE_LENGTH" and container:
            if not isinstance(value, tuple):
                asked["length"][number] = None
        elif kind == "EMPTY_NN_MODULE_HOOKS_DICT" and type(value) in _DICTS:
            asked["empty"][number] = None
        elif kind == "DICT_KEYS_MATCH" and type(value) in _DICTS and all(type(key) is str for key in value):
            asked["keys"][number] = None
        elif kind == "NOT_PRESENT_IN_GENERIC_DICT" and isinstance(value, torch.nn.Module) and set(named) == {"attr"}:
            self._absent[number, named["attr"]] = None
        elif kind == "DICT_NOT_CONTAINS" or (kind == "DICT_CONTAINS" and named.get("invert")):
            if not (type(value) in _DICTS and type(named["key"]) is str):
                return False
            self._absent[number, named["key"]] = None
        elif kind == "TENSOR_MATCH" and type(value) in _TENSORS and value.layout == torch.strided:
            asked["tensor"][number] = None
        else:
            return False
        return True

    def built(self, changed: Callable[[], None]) -> None:
        """All guards are there; ``changed`` is to be called when what they have read has changed."""
        self._changed = changed
        self._values.clear()
        self.given.clear()

    def unchanged(self, module: torch.nn.Module) -> bool:
        """Whether all that was read when the guards last held is as it was."""
        if self.seen is None:
            return False
        if module is self.seen.module and self.seen.same():
            self._restless = max(self._restless - 1, 0)
            return True
        self._restless += 1
        self._changed()
        return False

    def note(self, module: torch.nn.Module) -> None:
        """Dynamo's guards hold for a module: note what they have read, unless that changes again and again."""
        if self._restless >= _RESTLESS:
            return
        values = [module]
        try:
            for step in self._steps[1:]:
                values.append(_read(values[step.base], step))
        except _UnknownError:
            return
        self.seen = _Seen(values, self._steps, self._asked, self._absent)


class _UnknownError(Exception):
    """Something is read in a way that is not looked at here."""


def _read(base: Any, step: _Step) -> Any:
    try:
        if step.attribute:
            owner: Any = type(base)
            if isinstance(base, torch.nn.Module) and step.key == "__dict__":
                return vars(base)
            if isinstance(base, torch.nn.Module) and not _computes(owner, step.key):
                return vars(base)[str(step.key)]
        elif type(base) in _DICTS or (type(base) in _LISTS and isinstance(step.key, int)):
            return base[step.key]
    except (KeyError, IndexError):
        pass
    raise _UnknownError


@functools.lru_cache(maxsize=4096)
def _computes(owner: Any, name: Any) -> bool:
    """Whether an attribute's value is not that in its object's ``__dict__``, as that of a property."""
    return hasattr(inspect.getattr_static(owner, name, None), "__set__")


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANTS or (type(value) is tuple and all(map(_is_constant, value)))


@functools.cache
def _versions_tell() -> bool:
    """Whether a module's attribute that is set changes the version of its ``__dict__`` (not from Python 3.13 on)."""
    module = torch.nn.Module()
    before = _compiled.dict_version(vars(module))
    module.training = False
    return bool(before != _compiled.dict_version(vars(module)))


class _Contents:
    """What was read from a dict, list or tuple.

    Args:
        container: the dict, list or tuple.

    Attributes:
        items: that were read, by their keys or indices.
        absent: keys that it does not have.
    """

    def __init__(self, container: Any) -> None:
        self.container = container
        self.items: dict[str | int, Any] = {}
        self.absent: dict[str, None] = {}


class _Look:
    """Whether all that was read from containers is still there, in a few passes over all of them."""

    def __init__(self, contents: Iterable[_Contents]) -> None:
        alike: dict[tuple[str | int, ...], list[_Contents]] = {}
        self._absent: dict[str, list[Any]] = {}
        for one in contents:
            if one.items:
                alike.setdefault(tuple(one.items), []).append(one)
            for name in one.absent:
                self._absent.setdefault(name, []).append(one.container)
        self._items = [
            (itemgetter(*keys), [one.container for one in found], len(keys) > 1) for keys, found in alike.items()
        ]
        self._values = [value for found in alike.values() for one in found for value in one.items.values()]

    def same(self) -> bool:
        try:
            read = chain.from_iterable(
                chain.from_iterable(map(get, found)) if several else map(get, found)
                for get, found, several in self._items
            )
            return all(map(is_, read, self._values)) and not any(
                any(map(contains, found, repeat(name))) for name, found in self._absent.items()
            )
        except (KeyError, IndexError):  # it is gone
            return False


class _Seen:
    """What guards have read from a module, and whether it is still so."""

    def __init__(
        self,
        values: Sequence[Any],
        steps: Sequence[_Step],
        asked: Mapping[str, Iterable[int]],
        absent: Iterable[tuple[int, str]],
    ) -> None:
        self.module: torch.nn.Module = values[0]
        owners: dict[int, torch.nn.Module] = {}
        read: dict[int, _Contents] = {}
        for step, value in zip(steps[1:], values[1:], strict=True):
            base = values[step.base]
            if step.attribute:
                owners[id(base)] = base
                base = vars(base)
            if base is value:  # a module's `__dict__`
                continue
            if not isinstance(base, tuple):  # the items of a tuple stay
                read.setdefault(id(base), _Contents(base)).items[step.key] = value
        for number, name in absent:
            base = values[number]
            if isinstance(base, torch.nn.Module):
                owners[id(base)] = base
                base = vars(base)
            read.setdefault(id(base), _Contents(base)).absent[name] = None
        self._owners = list(owners.values())
        self._dicts = [vars(owner) for owner in self._owners]

        unversioned = set() if _versions_tell() else set(map(id, self._dicts))
        unversioned |= {number for number, one in read.items() if not isinstance(one.container, dict)}
        self._look = _Look(read[number] for number in unversioned if number in read)
        self._contents = [one for number, one in read.items() if number not in unversioned]
        self._versioned = [one.container for one in self._contents]
        self._versions = list(map(_compiled.dict_version, self._versioned))

        self._empty = [values[number] for number in asked["empty"]]
        self._typed = [values[number] for number in asked["type"]]
        self._types = list(map(type, self._typed))
        self._sized = [values[number] for number in asked["length"]]
        self._lengths = list(map(len, self._sized))
        self._keyed = [values[number] for number in asked["keys"]]
        self._keys = list(map(tuple, self._keyed))
        self._tensors = list({id(values[number]): values[number] for number in asked["tensor"]}.values())
        self._metadata = _compiled.TensorGuards(
            *self._tensors,
            dynamic_dims_sizes=[[*tensor.size()] for tensor in self._tensors],
            dynamic_dims_strides=[[*tensor.stride()] for tensor in self._tensors],
        )

    def same(self) -> bool:
        """Whether everything is as it was."""
        return (
            all(map(is_, map(attrgetter("__dict__"), self._owners), self._dicts))
            and self._same_versions()
            and self._look.same()
            and not any(self._empty)
            and all(map(is_, map(type, self._typed), self._types))
            and all(map(eq, map(len, self._sized), self._lengths))
            and all(map(eq, map(tuple, self._keyed), self._keys))
            and self._metadata.check(*self._tensors)
        )

    def _same_versions(self) -> bool:
        """Whether the dicts that have versions are as they were, or at least what was read from them."""
        versions = list(map(_compiled.dict_version, self._versioned))
        if versions == self._versions:
            return True
        pairs = zip(self._contents, versions, self._versions, strict=True)
        if not _Look(one for one, now, before in pairs if now != before).same():
            return False
        self._versions = versions
        return True

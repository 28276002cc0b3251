"""Values that a step asks of its batch, and tensors whose sizes depend on such values, computed before the step.

How many rows a mask chooses (see ``_rows``), how many sequences of a packed batch go on at each time (``packed``), or what
Python asks of a tensor (see ``_answers``) is not known when a graph is captured, and the graph breaks there. But where it is
computed from tensors that are given to the step, and from plain numbers, it can be computed before the step begins, as eager
mode computes it where it is used. Such a tensor is an input of the step then, with a size that Dynamo guards on or makes a
symbol of; so is a number; and the answer to a question is one that Dynamo guards on. What depends on random numbers or on the
network, or is in code after a graph break, is left to Dynamo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch import (
    Source,
    VariableTracker,
    attribute_of,
    build_attribute,
    build_number,
    found_at,
    given_now,
    guard_on,
    real_tensors,
    source_name,
)
from lightning_remat.capture.tracing._values import value_of

Found = Callable[[Any], torch.Tensor]
"""Computes a tensor from a value that is given to a step."""

_ERRORS = AttributeError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, Warning

MOST_INTEGERS = 4
"""Integers that are asked for before a step: each value may be a capture more."""

MOST_SIZES = 2
"""How many of these may be sizes: plans are made for sizes."""

MOST_ANSWERS = 8
"""Sets of answers, yes or no, that a step is captured for: after these, what is asked is left to Dynamo."""


_SIZE = "size of "

_EARLY = ".early"
"""What is computed before the step, among a call's arguments: no argument has such a name."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    """What is computed before each call: where its values are found in what the call reads (see `found_at`), and how.

    ``words`` are the same in each capture, and those of nothing else.
    """

    places: Mapping[Source, str]
    words: str
    compute: Callable[[Mapping[Source, Any]], Any]

    def of(self, at: Callable[[str], Any]) -> Any:
        with torch.no_grad():
            return self.compute({source: at(place) for source, place in self.places.items()})

    def then(self, function: Callable[[Any], Any], words: str = "") -> _Entry:
        """What a function makes of it; ``words`` are put in front of its own."""
        return dataclasses.replace(self, words=words + self.words, compute=lambda given: function(self.compute(given)))


class Early:
    """What is computed before each call of a function from what is given to it, and from what it finds on its modules.

    Args:
        function: what is captured.
        on_found: called with each tensor of it when it is found while a call is captured.

    Attributes:
        codes: code of the function.
        values: those of the present call, an attribute each: what the captured code reads.
    """

    def __init__(self, function: Callable[..., Any], on_found: Callable[[torch.Tensor], None]) -> None:
        self._on_found = on_found
        function = function.forward if isinstance(function, torch.nn.Module) else function
        self.codes = _codes(function)
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None
        self._own = _Own(function)
        self._entries: dict[str, _Entry] = {}
        self._names: dict[str, str] = {}
        self._places: dict[str, str] = {}  # of what was computed early itself, by its source's name
        self._local: dict[str, Any] = {}
        self._asked: dict[type, set[str]] = {bool: set(), int: set(), float: set()}
        self._sizes: set[str] = set()
        self._rows: set[str] = set()
        self._left: set[str] = set()
        self._answers: set[tuple[str, ...]] = set()
        self.values = types.SimpleNamespace()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of the present call."""
        return [value for value in vars(self.values).values() if isinstance(value, torch.Tensor)]

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a call: compute all that was found so far, but for what it is not given the tensors of."""
        vars(self.values).clear()
        if self._signature is None:
            return
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:  # the call will say so
            return
        bound.apply_defaults()
        self._local = {**self._own.local, **bound.arguments, _EARLY: self.values}
        if not self._entries:
            return
        with replaced(((warnings, "showwarning", _say_nothing),)):  # the step may not come to what is warned of
            for key, entry in self._entries.items():
                with contextlib.suppress(*_ERRORS):
                    setattr(self.values, self._names[key], entry.of(self._at))

    def leave_what_varies(self) -> bool:
        """Before a call: leave to Dynamo what has had too many sets of answers, from now on; returns whether anything has."""
        asked = sorted(self._asked[bool])
        found = (getattr(self.values, self._names[key], None) for key in asked)
        self._answers.add(
            tuple(key for key, value in zip(asked, found, strict=True) if value is not None and value.dim() > 1)
        )
        return len(self._answers) > MOST_ANSWERS and self._leave(set(asked))

    def end(self) -> None:
        """After a call: keep nothing of it."""
        vars(self.values).clear()
        self._local = {}

    def traced(self, tx: Any) -> bool:
        """While Dynamo traces: whether it is in the function's own frame, before any graph break, or in what that calls."""
        return tx.output.root_tx.f_code in self.codes

    def of_tensor(self, tx: Any, tensor: Any, compute: Found, words: str, *, rows: bool = False) -> Any:
        """While Dynamo traces: a variable for what is computed from a tensor before each call.

        Args:
            tx: what translates.
            tensor: a variable of the tensor.
            compute: gives the result of the tensor.
            words: tell this computation from others of the same tensor.
            rows: whether its size is a number of rows, another one in each batch.

        Returns:
            The variable, or ``None`` where the tensor is not known before the step.
        """
        entry = self._entry(tensor, compute, words)
        if entry is None or entry.words in self._left:
            return None
        if rows:
            self._rows.add(entry.words)
        return self._variable(tx, entry)

    def of_argument(self, tx: Any, variable: Any, compute: Found, words: str) -> Any:
        """Likewise for a variable of something else that is given to the call, which Dynamo has not looked into yet."""
        source = variable.source
        place = self._place(source)
        if self._now(place) is not variable.peek_value():
            return None
        self._guard(source, place)
        return self._variable(tx, _Entry({source: place}, f"{words} of {place}", lambda given: compute(given[source])))

    def holds(self, tx: Any, tensor: Any, question: Callable[[torch.Tensor], bool]) -> bool | None:
        """While Dynamo traces: whether something holds for a tensor, if that is known before the step: it is guarded on."""
        entry = self._entry(tensor, question, question.__name__)
        return None if entry is None else self._decided(tx, entry)

    def answer(self, tx: Any, tensor: Any) -> bool | None:
        """Likewise whether a tensor is true; it may be left to Dynamo later (see `leave_what_varies`)."""
        question = self._question(tensor, bool)
        return None if question is None else self._decided(tx, question)

    def _decided(self, tx: Any, question: _Entry) -> bool | None:
        found = self._variable(tx, question.then(_as_dims))
        return (
            None if found is None else found.call_method(tx, "dim", [], {}).as_python_constant() == _as_dims(True).dim()
        )

    def number(self, tx: Any, tensor: Any, kind: type) -> Any:
        """While Dynamo traces: a variable for ``kind(tensor)``, an ``int`` or ``float``, if that is known before the step.

        It is an input of the graph. An integer that the size of a tensor follows from is itself a size (see `are_sizes`).
        """
        question = self._question(tensor, kind)
        if question is None:
            return None
        if question.words not in self._sizes:
            return self._variable(tx, question, build_number)
        found = self._variable(tx, question.then(_as_size, _SIZE))
        return None if found is None else _size_of(tx, found)

    def are_sizes(self, names: Sequence[str]) -> bool:
        """Make sizes of these integers, by their sources' names; returns whether any of them was none so far."""
        given = {name.rpartition(".")[2] for name in names}
        found = {key for key in self._asked[int] - self._sizes if self._names[key] in given}
        self._sizes |= found
        for key in found:
            del self._entries[key]
        if len(self._sizes) > MOST_SIZES:
            self._leave(set(self._sizes))
        return bool(found)

    def leave_floats(self, names: Sequence[str] | None) -> bool:
        """Leave these floats to Dynamo from now on, by their sources' names; returns whether any of them was known so far.

        The names of their symbols change with each trace, by which Dynamo would make constants of them. ``None``: all floats.
        """
        given = None if names is None else {name.rpartition(".")[2] for name in names}
        return self._leave({key for key in self._asked[float] if given is None or self._names.get(key) in given})

    def leave_sizes(self) -> bool:
        """Leave rows, and integers that are sizes, to Dynamo from now on; returns whether there were any."""
        return self._leave(self._rows | self._sizes)

    def leave(self) -> bool:
        """Leave to Dynamo all that has been asked so far, from now on; returns whether anything has."""
        return self._leave(set().union(*self._asked.values()))

    def _leave(self, keys: set[str]) -> bool:
        self._left |= keys
        for key in keys:
            self._entries.pop(key, None)
            self._entries.pop(_SIZE + key, None)
            vars(self.values).pop(self._names.get(key, ""), None)
        for known in (*self._asked.values(), self._rows, self._sizes):
            known -= keys
        return bool(keys)

    def _question(self, tensor: Any, kind: type) -> _Entry | None:
        """``kind(tensor)``; ``None`` where it is not known before the step, or not to be asked then."""
        node = tensor.as_proxy().node
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or any(not isinstance(n, int) or n != 1 for n in example.shape):
            return None
        question = self._entry(tensor, lambda value: kind(value.item()), kind.__name__)
        if question is None or not question.places:  # of constants: see `_constants`
            return None
        asked = self._asked[kind]
        many = kind is int and question.words not in asked and len(asked) == MOST_INTEGERS
        if many or question.words in self._left:
            return None
        asked.add(question.words)
        return question

    def _at(self, place: str) -> Any:
        return found_at(place, self._local, self._own.of_module)

    def _now(self, place: str) -> Any:
        try:
            return self._at(place)
        except (AttributeError, LookupError, NameError, TypeError):
            return None

    def _entry(self, tensor: Any, compute: Callable[[Any], Any], words: str) -> _Entry | None:
        """What is computed from a tensor's value, if that is known before the step."""
        node = tensor.as_proxy().node
        value = value_of(node)
        if value is None:
            return None
        places = {source: self._place(source) for source in sorted(value.sources, key=source_name)}
        for source, place in places.items():
            given = given_now(node.graph, source)
            if given is None or not _is_same(self._now(place), given):
                return None
            self._guard(source, place)
        return _Entry(places, f"{words} of {value.words(self._place)}", lambda given: compute(value.of(given)))

    def _guard(self, source: Source, place: str) -> None:
        """Guard on a frame being given what the call is: a function may call itself with other things after a graph break."""
        early = weakref.ref(self)

        def is_given(value: Any) -> bool:
            own = early()
            return own is not None and _is_same(own._now(place), value)

        guard_on(source, is_given, True, "what the step is given")

    def _variable(self, tx: Any, entry: _Entry, build: Callable[..., Any] = build_attribute) -> Any:
        key = entry.words
        name = self._names.setdefault(key, f"early_{len(self._names)}")
        if key not in self._entries or not hasattr(self.values, name):
            with real_tensors():
                try:
                    value = entry.of(self._at)
                except _ERRORS:  # eager mode will say so
                    return None
            self._entries.pop(key, None)
            self._entries[key] = entry  # the last one: it may be computed of others
            setattr(self.values, name, value)
            if isinstance(value, torch.Tensor):
                self._on_found(value)
        self._places[source_name(attribute_of(tx, self.values, name))] = f"L[{_EARLY!r}].{name}"
        return build(tx, self.values, name)

    def _place(self, source: Source) -> str:
        """Where a source's value is found, in words that are the same in each capture."""
        place = source_name(source)
        return self._places.get(place, place)


def _say_nothing(*_warning: Any, **_of: Any) -> None:
    pass


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal numbers of Python's."""
    return one is other or (type(one) in (int, float) and type(one) is type(other) and one == other)


def _as_dims(answer: bool) -> torch.Tensor:
    """A tensor of no elements, by the dimensions of which Dynamo guards on an answer."""
    return torch.empty((0,) * (1 + answer), dtype=torch.bool, device="cpu")


def _as_size(number: int) -> torch.Tensor:
    """A tensor of no elements that an integer is the first size of; a negative one by another number of dimensions."""
    return torch.empty((abs(number), 0, *(0,) * (number < 0)), dtype=torch.bool, device="cpu")


def _size_of(tx: Any, variable: Any) -> Any:
    """While Dynamo traces: the integer of `_as_size`."""
    size = variable.call_method(tx, "size", [VariableTracker.build(tx, 0)], {})
    if variable.call_method(tx, "dim", [], {}).as_python_constant() == _as_size(1).dim():
        return size
    return VariableTracker.build(tx, operator.neg).call_function(tx, [size], {})


class _Own:
    """What a function reads beside its arguments: the object that it is a method of, its closure, and its module's globals."""

    def __init__(self, function: Any) -> None:
        self._function = function.func if isinstance(function, functools.partial) else function
        plain = getattr(self._function, "__func__", self._function)
        self._code = getattr(plain, "__code__", None)
        self._cells = getattr(plain, "__closure__", None) or ()
        self.of_module: Mapping[str, Any] = getattr(plain, "__globals__", {})

    @property
    def local(self) -> dict[str, Any]:
        """By the names that they have in the function."""
        if self._code is None:
            return {}
        found = {}
        for name, cell in zip(self._code.co_freevars, self._cells, strict=True):
            with contextlib.suppress(ValueError):  # nothing is in it yet
                found[name] = cell.cell_contents
        if hasattr(self._function, "__self__") and self._code.co_argcount:
            found[self._code.co_varnames[0]] = self._function.__self__
        return found


def _codes(function: Any) -> set[types.CodeType]:
    """The code of a function or a method, by which its own frame is known from those after a graph break."""
    if isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return {code} if isinstance(code, types.CodeType) else set()

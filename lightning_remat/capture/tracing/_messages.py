"""Warnings, logging calls and prints in a step: they neither break its graph nor get lost.

Each becomes an op without results in the graph, in its place among those that have effects (see ``capture._effects``), and says
once a step what eager mode says: the same words, of the values at that moment, attributed to the same line of code. A
call that says nothing when the step is captured, because of its logger's level, is left out. Where the words need more
than constants, sizes and tensors (an object of the user's, a tensor whose text names its ``grad_fn``), the call is left
to Python, and the graph breaks.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lightning_remat.capture._torch import (
    BaseListVariable,
    BuiltinVariable,
    IgnoredFunctionVariable,
    LoggingLoggerVariable,
    StringFormatVariable,
    VariableTracker,
    is_size,
    logging_calls,
    unimplemented,
)

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}
_OWN = {*_LEVELS, "exception", "log"}
_PLAIN = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, type)

_Values = tuple[Sequence[torch.Tensor], Sequence[int]]
_Words = Callable[[_Values], Any]

_calls: dict[str, Callable[[_Values], None]] = {}
"""The calls that the op `say` makes, by a key of what is said and where: the same in all processes and captures."""


@torch.library.custom_op("lightning_remat::say", mutates_args=())
def say(key: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
    """Make the call that ``key`` stands for, with these values; it is where eager mode makes it."""
    _calls[key](([tensor.detach() for tensor in tensors], numbers))


@say.register_fake
def _(key: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
    del key, tensors, numbers


@contextlib.contextmanager
def messages_stay() -> Iterator[None]:
    """While Dynamo traces: what the step says becomes a part of the graph."""
    ignored, logged = IgnoredFunctionVariable.call_function, LoggingLoggerVariable.call_method
    builtin = BuiltinVariable.call_function

    def of_functions(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """``warnings.warn``, and methods that libraries add to loggers."""
        if self.value is warnings.warn:
            return _warned(tx, args, kwargs)
        return _said(tx, self.value, args, kwargs)

    def of_loggers(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method: Any = getattr(self.value, name, None)
        is_hung = name not in _OWN and getattr(method, "__func__", method) in logging_calls()
        if name in _LEVELS or name == "exception":
            if not self.value.isEnabledFor(_LEVELS.get(name, logging.ERROR)):
                return VariableTracker.build(tx, None)
            if set(kwargs) <= {"stacklevel"} and name in _LEVELS:
                return _logged(tx, self.value, _LEVELS[name], args, kwargs)
        elif is_hung:
            return _said(tx, method, args, kwargs)
        if is_hung or name in _OWN:
            _left(name)
        return logged(self, tx, name, args, kwargs)

    def of_python(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is builtins.print and "file" not in kwargs:
            return _said(tx, builtins.print, args, kwargs)
        return builtin(self, tx, args, kwargs)

    IgnoredFunctionVariable.call_function = of_functions
    LoggingLoggerVariable.call_method = of_loggers  # type: ignore[method-assign]
    BuiltinVariable.call_function = of_python  # type: ignore[method-assign]
    try:
        yield
    finally:
        IgnoredFunctionVariable.call_function = ignored
        LoggingLoggerVariable.call_method = logged  # type: ignore[method-assign]
        BuiltinVariable.call_function = builtin  # type: ignore[method-assign]


@dataclasses.dataclass
class _Said:
    """The arguments of one call that says something, and the tensors and numbers of the graph that they need."""

    tensors: list[Any] = dataclasses.field(default_factory=list)
    numbers: list[Any] = dataclasses.field(default_factory=list)
    spelled: list[str] = dataclasses.field(default_factory=list)

    def words(self, given: Any, formatted: bool = False) -> _Words:
        """A function that gives one argument of the call when the step runs.

        Raises:
            LookupError: for what needs more than constants, sizes and tensors.
        """
        value = given.realize()
        if isinstance(value, StringFormatVariable):
            self.spelled.append(value.format_string)
            parts = [self.words(part, formatted=True) for part in value.sym_args]
            named = {name: self.words(part, formatted=True) for name, part in value.sym_kwargs.items()}
            form = value.format_string
            return lambda values: form.format(
                *(part(values) for part in parts), **{name: part(values) for name, part in named.items()}
            )
        if value.is_tensor():
            example = value.as_proxy().node.meta.get("example_value")
            if example is None or (example.requires_grad and (example.dim() or not formatted)):
                raise LookupError
            self.spelled.append(f"tensor {len(self.tensors)}")
            self.tensors.append(value)
            place = len(self.tensors) - 1
            return lambda values: values[0][place]
        if is_size(value):
            self.spelled.append(f"number {len(self.numbers)}")
            self.numbers.append(value)
            place = len(self.numbers) - 1
            return lambda values: values[1][place]
        if value.is_python_constant():
            constant = value.as_python_constant()
            if not _is_plain(constant):
                raise LookupError
            self.spelled.append(repr(constant))
            return lambda _values: constant
        if isinstance(value, BaseListVariable) and value.python_type() in (list, tuple, torch.Size):
            kind = value.python_type()
            items = [self.words(item) for item in value.items]
            self.spelled.append(f"{kind.__name__} of {len(items)}")
            return lambda values: kind([item(values) for item in items])
        raise LookupError

    def put(self, tx: Any, where: str, call: Callable[[_Values], None]) -> Any:
        """Put the call into the graph, as an op."""
        key = hashlib.sha256("\0".join([where, *self.spelled]).encode()).hexdigest()[:16]
        _calls[key] = call
        op = VariableTracker.build(tx, torch.ops.lightning_remat.say.default)
        lists = [VariableTracker.build(tx, []), VariableTracker.build(tx, [])]
        for made, items in zip(lists, (self.tensors, self.numbers), strict=True):
            made.items.extend(items)
        op.call_function(tx, [VariableTracker.build(tx, key), *lists], {})
        return VariableTracker.build(tx, None)


def _is_plain(constant: Any) -> bool:
    if type(constant) in (list, tuple):
        return all(map(_is_plain, constant))
    if type(constant) is dict:
        return all(map(_is_plain, (*constant.keys(), *constant.values())))
    return isinstance(constant, _PLAIN)


def _said(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call that needs its arguments alone, and not the line of code that it is attributed to."""
    name = getattr(function, "__qualname__", str(function))
    said = _Said()
    try:
        words = [said.words(one) for one in args]
        named = {key: said.words(one) for key, one in kwargs.items()}
    except LookupError:
        _left(name)
    owner = getattr(getattr(function, "__self__", None), "name", "")
    return said.put(
        tx,
        f"{name} of {owner} {sorted(named)}",
        lambda values: function(*(one(values) for one in words), **{key: one(values) for key, one in named.items()}),
    )


def _logged(tx: Any, logger: logging.Logger, level: int, args: Any, kwargs: Any) -> Any:
    said = _Said()
    try:
        words = [said.words(one) for one in args]
        above = kwargs["stacklevel"].as_python_constant() if "stacklevel" in kwargs else 1
    except LookupError:
        words = []
    if not words:
        _left(logger.name)
    frame = _frame(tx, above)
    file, line, function = frame.f_code.co_filename, frame.lineno, frame.f_code.co_name

    def call(values: _Values) -> None:
        if logger.isEnabledFor(level):
            message, *rest = (one(values) for one in words)
            logger.handle(logger.makeRecord(logger.name, level, file, line, message, tuple(rest), None, function))

    return said.put(tx, f"{logger.name} {level} {file}:{line}", call)


def _warned(tx: Any, args: Any, kwargs: Any) -> Any:
    said = _Said()
    try:
        named = dict(zip(("message", "category", "stacklevel", "source"), args, strict=False)) | kwargs
        if not {"message"} <= named.keys() <= {"message", "category", "stacklevel", "skip_file_prefixes"}:
            raise LookupError
        words = said.words(named["message"])
        category = _category(named["category"].realize()) if "category" in named else UserWarning
        above = named["stacklevel"].as_python_constant() if "stacklevel" in named else 1
    except LookupError:
        _left("warnings.warn")
    frame = _frame(tx, above)
    file, line, scope = frame.f_code.co_filename, frame.lineno, frame.f_globals
    module = scope.get("__name__") or "<string>"

    def call(values: _Values) -> None:
        registry = scope.setdefault("__warningregistry__", {})
        warnings.warn_explicit(words(values), category, file, line, module, registry, scope)

    return said.put(tx, f"{category.__name__} {file}:{line}", call)


def _category(given: Any) -> type[Warning]:
    found = given.as_python_constant() if given.is_python_constant() else getattr(given, "value", None)
    if found is None:
        return UserWarning
    if not (isinstance(found, type) and issubclass(found, Warning)):
        raise LookupError
    return found


def _frame(tx: Any, above: int) -> Any:
    """Dynamo's frame of the code that a message is attributed to: by ``stacklevel``, and at most the step itself."""
    while above > 1 and tx.parent is not None:
        tx, above = tx.parent, above - 1
    return tx


def _left(name: str) -> None:
    unimplemented(
        gb_type="message",
        context=name,
        explanation=f"What {name} says needs more than constants, sizes and tensors without gradients: Python calls it.",
        hints=[],
    )

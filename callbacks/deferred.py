"""Calls of ``self.log`` and metrics, and appends to lists: recorded while a captured step runs, and made after it.

None of these can be captured: Lightning's ``log`` would be a graph break, a metric counts its updates in Python numbers
and a list has a length, so that every step would be recompiled. Calls of ``log`` and of torchmetrics metrics are
recorded in their order, with their tensors detached; so is what is appended to a list of the module.

A metric call returns a `DeferredValue`, which computes itself when the step does more with it than log or return it.
Only metrics with ``is_differentiable = False`` are deferred: others run at once, between two captured graphs.

Where the step reads the Trainer's metrics (``self.trainer.callback_metrics``) after something was recorded, all of it is made
first, between two captured graphs.

What is logged is copied, as Lightning does. What a metric is given is kept until the step returns, not copied: a step that
overwrites it in place after the metric call should hand the metric a clone.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric, MetricCollection

from lightning_remat.callbacks.lightning_internals import CONNECTOR, wrapped_optimizers
from lightning_remat.callbacks.own_state import Place, holder_of, list_at
from lightning_remat.errors import CaptureError

_METHODS = ("forward", "update", "compute", "reset")


@dataclasses.dataclass(eq=False)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    early: bool  # may be made before the step returns, when the step uses its result
    on_list: bool = False
    done: bool = False
    result: Any = None

    def make(self) -> None:
        if not self.done:
            self.done = True
            args, kwargs = apply_to_collection((self.args, self.kwargs), DeferredValue, value_of)
            self.args, self.kwargs = (), {}
            self.result = self.function(*args, **kwargs)


class Deferred:
    """Records calls of ``module.log``, of the module's metrics and of its growing lists, and makes them later."""

    def __init__(self, module: pl.LightningModule) -> None:
        self.calls: list[_Call] = []
        self._module, self._logs = module, True
        self._lists: dict[Place, GrowingList] = {}
        # While a step runs: the attributes of an object, the name of one of them, and what stands in for it.
        self._replacements: list[tuple[dict[str, Any], str, Any]] = [
            (module.__dict__, name, self._logging(getattr(module, name))) for name in ("log", "log_dict")
        ]
        of_trainer = vars(module.trainer)
        self._replacements.append((of_trainer, CONNECTOR, MetricsInOrder(of_trainer[CONNECTOR], self)))
        if not module.automatic_optimization:
            self._replacements += [
                (attributes, name, _uncaptured(method)) for attributes, name, method in _manual(module)
            ]
        self._replaced: list[tuple[dict[Any, Any], Any, Any, Any]] = []  # likewise, with the old value third
        for part in module.modules():
            if isinstance(part, (Metric, MetricCollection)):
                stand_in = self._deferring if is_deferred(part) else self._at_once
                for name in _METHODS:
                    self._replacements.append((part.__dict__, name, stand_in(getattr(part, name))))

    def stand_in_for(self, place: Place) -> None:
        """From the next step on, record what a step appends to the list (or deque) that lies at a place then."""
        self._lists.setdefault(place, GrowingList(self))

    @contextmanager
    def active(self, log: bool = True) -> Iterator[None]:
        """While open, calls are recorded; an exception drops them.

        Where ``log`` is false, those of ``log`` and ``log_dict`` are not made when the step reads the Trainer's metrics.
        """
        self.calls.clear()
        self._logs = log
        self._replace()
        try:
            yield
        except BaseException:
            self._forget()
            raise
        finally:
            self._restore()

    def settle(self, output: Any, log: bool = True) -> Any:
        """Make the recorded calls; returns ``output`` with deferred values replaced by what they stand for.

        So are those that the step has made attributes of the module. Where the argument ``log`` is false, calls of ``log`` and
        ``log_dict`` are dropped.
        """
        try:
            for call in self.calls:
                if log or call.early:
                    call.make()
            attributes = vars(self._module)
            for name in [name for name, value in attributes.items() if type(value) is DeferredValue]:
                attributes[name] = value_of(attributes[name])
            return apply_to_collection(output, DeferredValue, value_of)
        finally:
            self._forget()

    def drop(self) -> None:
        """Drop the recorded calls of a run that is not to log anything, but make the appends to lists."""
        try:
            for call in self.calls:
                if call.on_list:
                    call.make()
        finally:
            self._forget()

    def _forget(self) -> None:
        self.calls.clear()
        for stand_in in self._lists.values():
            stand_in.let_go()

    def make_early_calls(self, last: _Call | None = None) -> None:
        """In the middle of a step: make the recorded calls of metrics and lists, up to ``last`` or all."""
        with self.suspended():
            for call in self.calls:
                if call.early:
                    call.make()
                if call is last:
                    break
        for call in self.calls:  # what is logged is what there is now, whatever the step makes of it
            if not call.early:
                call.args, call.kwargs = apply_to_collection((call.args, call.kwargs), DeferredValue, _copied)

    def make_calls(self) -> None:
        """In the middle of a step: make all recorded calls."""
        with self.suspended():
            for call in self.calls:
                if call.early or self._logs:
                    call.make()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While open, nothing is recorded: metrics call their own methods."""
        active = bool(self._replaced)
        self._restore()
        try:
            yield
        finally:
            if active:
                self._replace()

    def _replace(self) -> None:
        for attributes, name, new in self._replacements:
            self._put(attributes, name, new)
        for place, stand_in in self._lists.items():
            if (values := list_at(place)) is not None:
                stand_in.stands_for(values)
                self._put(holder_of(place), place[1][-1], stand_in)

    def _put(self, attributes: dict[Any, Any], name: Any, new: Any) -> None:
        self._replaced.append((attributes, name, attributes.get(name), new))
        attributes[name] = new

    def _restore(self) -> None:
        for attributes, name, old, new in self._replaced:
            if attributes.get(name) is not new:  # the step has put something else there
                continue
            if old is None:
                attributes.pop(name, None)
            else:
                attributes[name] = old
        self._replaced = []

    def _logging(self, method: Callable[..., None]) -> Callable[..., None]:
        calls = self.calls

        def log(*args: Any, **kwargs: Any) -> None:
            if not kwargs.get("enable_graph", False):
                args, kwargs = _detached(args, copy=True), _detached(kwargs, copy=True)
            calls.append(_Call(method, args, kwargs, early=False))

        return log

    def _deferring(self, method: Callable[..., Any]) -> Callable[..., Any]:
        calls = self.calls

        def deferring(*args: Any, **kwargs: Any) -> DeferredValue:
            call = _Call(method, _detached(args), _detached(kwargs), early=True)
            calls.append(call)
            return DeferredValue(self, call)

        return deferring

    def _at_once(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def at_once(*args: Any, **kwargs: Any) -> Any:
            self.make_early_calls()  # it may read another metric's state
            with self.suspended():
                return method(*args, **kwargs)

        return _uncaptured(at_once)


class MetricsInOrder:
    """Stands in for what the Trainer reads its metrics from: calls that were recorded before are made before."""

    def __init__(self, connector: Any, deferred: Deferred) -> None:
        self._connector, self._deferred = connector, deferred

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)


def _metrics(name: str) -> property:
    def read(self: MetricsInOrder) -> Any:
        if self._deferred.calls:
            return _after_calls(self, name)
        return getattr(self._connector, name)

    return property(read)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_calls(stand_in: MetricsInOrder, name: str) -> Any:
    stand_in._deferred.make_calls()
    return getattr(stand_in._connector, name)


for _name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
    setattr(MetricsInOrder, _name, _metrics(_name))


class DeferredValue:
    """What a deferred metric call returns: its value, computed when it is used."""

    def __init__(self, deferred: Deferred, call: _Call) -> None:
        self._deferred, self._call = deferred, call

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = apply_to_collection((args, kwargs or {}), DeferredValue, value_of)
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(value_of(self), name)

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (value_of(self),)  # a copy of a module that keeps one holds the value itself


class GrowingList:
    """Stands in for a list or deque while a step runs: appends are recorded, all else works on the list itself."""

    def __init__(self, deferred: Deferred) -> None:
        self._deferred = deferred
        self._boxes: list[list[list[Any] | collections.deque[Any]]] = []

    def stands_for(self, values: list[Any] | collections.deque[Any]) -> None:
        """Set the list that appends go to. Closures reach it, so that Dynamo does not guard on its length."""
        box = [values]  # Dynamo keeps the closures that it has met
        self._boxes.append(box)

        def append(value: Any) -> None:
            box[0].append(value)

        def extend(more: Any) -> None:
            box[0].extend(more)

        def get() -> list[Any] | collections.deque[Any]:
            return box[0]

        self._append, self._extend, self._get = append, extend, get

    def let_go(self) -> None:
        """Keep nothing of the lists that it stood for: the step is over."""
        for box in self._boxes:
            box.clear()
        self._boxes.clear()

    def append(self, value: Any) -> None:
        """Record that ``value`` is to be appended."""
        self._deferred.calls.append(_Call(self._append, (value,), {}, early=True, on_list=True))

    def extend(self, values: Any) -> None:
        """Record that ``values`` are to be appended."""
        self._deferred.calls.append(_Call(self._extend, (list(values),), {}, early=True, on_list=True))

    def __iadd__(self, values: Any) -> GrowingList:
        self.extend(values)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(list_of(self), name)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def list_of(stand_in: GrowingList) -> list[Any] | collections.deque[Any]:
    """Append what was recorded so far, and return the list itself."""
    stand_in._deferred.make_early_calls()
    return stand_in._get()


def _list_operator(name: str) -> Callable[..., Any]:
    def operator(self: GrowingList, *args: Any) -> Any:
        return getattr(list_of(self), name)(*args)

    operator.__name__ = name
    return operator


for _name in ("len", "getitem", "setitem", "delitem", "iter", "reversed", "contains", "add", "mul", "eq", "repr"):
    setattr(GrowingList, f"__{_name}__", _list_operator(f"__{_name}__"))


def is_deferred(metric: Metric | MetricCollection) -> bool:
    """Whether a metric's calls are deferred: it, and each metric in it, has ``is_differentiable = False``."""
    return all(one.is_differentiable is False for one in metric.modules() if isinstance(one, Metric))


def _as_it_is(value: Any) -> Any:
    return value


@torch.compiler.disable  # type: ignore[untyped-decorator]
def value_of(value: DeferredValue) -> Any:
    """Make all recorded calls of metrics and lists up to this one, each once, and return what this one returned."""
    if "_call" not in vars(value):  # Dynamo formats f-strings before it fills in the objects that the step has made
        raise CaptureError("a metric's value cannot be formatted inside a captured step: format float(value) instead")
    if not value._call.done:
        value._deferred.make_early_calls(value._call)
    return value._call.result


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: DeferredValue, *args: Any) -> Any:
        args = tuple(value_of(other) if isinstance(other, DeferredValue) else other for other in args)
        return getattr(value_of(self), name)(*args)

    operator.__name__ = name
    return operator


def _copied(value: DeferredValue) -> Any:
    """What a value stands for, copied, where that is known; otherwise itself."""
    return _detached(value._call.result, copy=True) if value._call.done else value


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert
    lt le gt ge eq ne bool float int index round len getitem setitem delitem contains iter format repr
    and rand or ror xor rxor
"""
for _name in _OPERATORS.split():
    setattr(DeferredValue, f"__{_name}__", _operator(f"__{_name}__"))


def _detached(values: Any, *, copy: bool = False) -> Any:
    if isinstance(values, torch.Tensor):
        return values.detach().clone() if copy else values.detach()
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*[_detached(v, copy=copy) for v in values])
    if isinstance(values, (tuple, list)):
        return type(values)([_detached(v, copy=copy) for v in values])
    if type(values) is dict:
        return {key: _detached(v, copy=copy) for key, v in values.items()}
    return values


def _uncaptured(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def _manual(module: pl.LightningModule) -> Iterator[tuple[dict[str, Any], str, Callable[..., Any]]]:
    """The methods by which manual optimization changes gradients and optimizers: calls of them are graph breaks."""
    for name in ("manual_backward", "optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer"):
        yield module.__dict__, name, getattr(module, name)
    for optimizer in wrapped_optimizers(module.trainer):
        for name in ("step", "zero_grad"):
            yield optimizer.__dict__, name, getattr(optimizer, name)

"""Python state that a training step changes on its own module: counters (``self.seen += 1``), lists (``self.losses.append``).

Dynamo guards on such values, so that the step would be recompiled every time. What a step changes is found by comparing
before and after it; then a counter is declared to Dynamo as dynamic, and a list or deque is replaced by a stand-in
(`GrowingList`). A list of tensors with gradients (features that hooks collect) is more likely to be emptied by each step: it
is replaced when it has grown twice. One that the step's code hands on as it is (``torch.stack(self.losses)``) is not replaced
(`hands_on`): what gets it may ask for a list.

Attributes of the module are compared in each step. What lies in its dicts, objects and parts (``self.history["loss"]``) is
compared in the first step and after each one that was captured.
"""

from __future__ import annotations

import ast
import collections
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import Metric

from lightning_remat.callbacks.lightning_internals import STEP_COUNTERS


def _names(step: Callable[..., object]) -> list[str]:
    """By which names Dynamo knows the module, the batch and its index in the frame of a training step.

    A decorator's function is the frame, with its own names: the step's are not asked for.
    """
    function = getattr(step, "__func__", step)
    names = ["self", "batch", "batch_idx"]
    found = [f"L['{name}']" for name in names]
    bound = function is not step
    for i, one in enumerate(inspect.signature(function, follow_wrapped=False).parameters.values(), 0 if bound else 1):
        if one.kind is one.VAR_POSITIONAL:
            found[i:] = [f"L['{one.name}'][{k}]" for k in range(len(names) - i)]
        if i == len(names) or one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            break
        found[i] = f"L['{one.name}']"
    return found


def _has_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


GROWING = (list, collections.deque)
"""The types of what is replaced by a stand-in."""

DEPTH = 3
"""How far lists are looked for in dicts and objects of a module."""

MOST = 1000
"""Dicts of more entries are not looked into."""

_LIBRARIES = ("lightning", "lightning_remat", "torch", "torchmetrics", "builtins")
"""Packages whose classes know nothing of a user's lists."""

_ITERABLE = """
    len list tuple set deque sum max min any all sorted reversed enumerate zip map filter iter repr str print
    tensor as_tensor extend update fsum
"""
ANY_ITERABLE = frozenset(_ITERABLE.split())
"""Names of functions that take a stand-in for a list as they take the list."""

NUMERIC = {"np", "numpy", "statistics"}
"""Modules of such functions, by the names that they usually have."""


def hands_on(step: Callable[..., object], name: object) -> bool:
    """Whether a training step, or a method that it names, passes on a list itself, or returns it.

    Calls of the list's own methods, subscripts, loops, `ANY_ITERABLE` and `NUMERIC` do not. Code that is not at hand is taken
    for code that does not.

    Args:
        step: the bound method.
        name: the list's attribute, or its key in a dict.
    """
    classes = [one for one in type(getattr(step, "__self__", None)).__mro__ if _package(one) not in _LIBRARIES]
    seen, functions = set[object](), [step]
    while functions:
        function = inspect.unwrap(functions.pop())
        if function in seen:
            continue
        seen.add(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            continue
        for parent in ast.walk(tree):
            for child in ast.iter_child_nodes(parent):
                if _named(child) == name and _passes_on(parent, child):
                    return True
                if not isinstance(child, ast.Attribute):
                    continue
                methods = (vars(one).get(child.attr) for one in classes)
                functions += [method for method in methods if inspect.isfunction(method)]
    return False


def _package(one: type) -> str:
    return one.__module__.split(".")[0]


def _named(expression: ast.AST) -> object:
    """The attribute or key that an expression looks up."""
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        return expression.slice.value
    return expression.attr if isinstance(expression, ast.Attribute) else None


def _passes_on(parent: ast.AST, child: ast.AST) -> bool:
    """Whether an expression passes on what is found in it."""
    if isinstance(parent, ast.Call):
        called = parent.func
        names = {one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in ast.walk(called)}
        last = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        return child is not called and last not in ANY_ITERABLE and not names & NUMERIC
    if isinstance(parent, ast.Assign):
        return child is parent.value and not all(isinstance(target, ast.Name) for target in parent.targets)
    return isinstance(parent, (ast.keyword, ast.Return, ast.Tuple, ast.List, ast.Set, ast.Dict))


Place = tuple[torch.nn.Module, tuple[Any, ...]]
"""Where a list lies: a module, and names and keys that lead there. What lies there may be another object in each step."""

_OF_MODULES = frozenset(vars(torch.nn.Module()))


def holder_of(place: Place) -> dict[Any, Any]:
    """The dict, or the attributes of an object, in which the list of a place lies now by its last key; empty without one."""
    part, path = place
    holder = vars(part)
    for key in path[:-1]:
        holder = _inside(holder.get(key)) or {}
    return holder


def _paths(
    holder: dict[Any, Any], depth: int, seen: set[int], but: frozenset[str] = frozenset()
) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to lists and deques in a dict, and up to a depth in dicts and objects in it; each only once."""
    seen.add(id(holder))
    for key, value in holder.items():
        if key in but:
            continue
        if type(value) in GROWING:
            yield (key,)
        elif depth > 0 and (inside := _inside(value)) is not None and id(inside) not in seen:
            yield from ((key, *path) for path in _paths(inside, depth - 1, seen))


def _inside(value: object) -> dict[Any, Any] | None:
    """A dict, or the attributes of an object of the user's; ``None`` where no lists are looked for."""
    if isinstance(value, dict):
        return value if len(value) <= MOST else None
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or _package(type(value)) in _LIBRARIES:
        return None
    return getattr(value, "__dict__", None)


class OwnState:
    """The counters and lists of a module that its training step was seen to change.

    Args:
        module: the module of the ``training_step``.

    Attributes:
        sources: patterns of Dynamo source names, separated by commas, for what changes from step to step and may be
            read in one: the batch's index, ``global_step``, ``current_epoch``, counters. A graph is valid for all of
            their values, or, where the step branches on one, for those that take the same branch.
        lists: where the module's lists that grow lie.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.lists: list[Place] = []
        self._module, self._step = module, module.training_step
        self._counters: set[str] = set()
        self._filled: set[Place] = set()  # of lists that have grown in a step
        self._known: set[Place] = set()  # those in `lists`, and those that are handed on
        own, _, batch_idx = _names(module.training_step)
        self._self = re.escape(own)
        self._always = [re.escape(batch_idx), self._self + STEP_COUNTERS]

    @property
    def sources(self) -> str:
        """Patterns of Dynamo source names for what changes, separated by commas."""
        return ",".join([*self._always, *(rf"{self._self}\.{name}" for name in sorted(self._counters))])

    @contextmanager
    def watched(self, closely: bool) -> Iterator[None]:
        """To be open while a step runs: notes the counters and lists that it changes; all of its lists if ``closely``."""
        attributes = vars(self._module)
        counters = {name: value for name, value in attributes.items() if type(value) is int}
        ends = [(place, *_end(values)) for place in self._places(closely) if (values := list_at(place)) is not None]
        yield
        for name, value in counters.items():
            now = attributes.get(name)
            if type(now) is int and now != value:
                self._counters.add(name)
        for place, length, last in ends:
            self._compare(place, length, last)

    def _places(self, closely: bool) -> list[Place]:
        seen: set[int] = set()
        found: list[Place] = []
        for part in self._module.modules() if closely else [self._module]:
            if not isinstance(part, Metric):
                found += [(part, path) for path in _paths(vars(part), DEPTH if closely else 0, seen, _OF_MODULES)]
        return [place for place in found if place not in self._known]

    def _compare(self, place: Place, length: int, last: int) -> None:
        now = list_at(place)
        if not now or (len(now) <= length and (type(now) is list or id(now[-1]) == last)):
            return
        if place in self._filled or not any(map(_has_gradient, list(now)[min(length, len(now) - 1) :])):
            self._known.add(place)
            if not hands_on(self._step, place[1][-1]):
                self.lists.append(place)
        self._filled.add(place)


def list_at(place: Place) -> list[Any] | collections.deque[Any] | None:
    """The list or deque that lies at a place now; ``None`` where there is none."""
    values = holder_of(place).get(place[1][-1])
    return values if type(values) in GROWING else None


def _end(values: list[Any] | collections.deque[Any]) -> tuple[int, int]:
    """Length, and the last value's id, which keeps no tensor; a full deque that is added to is as long as before."""
    return len(values), id(values[-1]) if values else 0

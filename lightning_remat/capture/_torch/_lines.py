"""A graph's code, as ``fx`` writes it and in a third of the time: a function of one list, which gives up each value after its
last use. What is called, and constants that have no short name, are globals of the code.

Where a graph calls `hand_out`, the function is a generator, which gives a list of what is handed out there, and goes on when
that list has been cleared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from lightning_remat.capture._torch._bindings import quickest

Node = torch.fx.Node

_WRITTEN = {int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format}
_NAMES = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}


def hand_out(_values: tuple[Any, ...]) -> None:
    """Stands for the place where a graph's code hands out values, and waits."""
    raise NotImplementedError("a graph with this call is run as code")


@dataclasses.dataclass(slots=True, eq=False)
class Line:
    """A node as it is written, with lines in the place of nodes.

    Attributes:
        node: the node.
        target, args, kwargs: what is called, and with what.
    """

    node: Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, node: Node, line_of: Callable[[Node], Line]) -> Line:
        """A node's line; ``line_of`` gives those that it reads."""
        args: Any = map_arg(node.args, line_of)  # type: ignore[arg-type]
        kwargs: Any = map_arg(node.kwargs, line_of) if node.kwargs else {}  # type: ignore[arg-type]
        return cls(node, node.target, args, kwargs)

    @property
    def meta(self) -> dict[str, Any]:
        """The node's."""
        return self.node.meta

    @property
    def all_input_nodes(self) -> list[Line]:
        """The lines that it reads, each once."""
        found: dict[Line, None] = {}
        _note(self.args, found)
        if self.kwargs:
            _note(self.kwargs, found)
        return list(found)


def _note(value: Any, found: dict[Line, None]) -> None:
    kind = type(value)
    if kind is Line:
        found[value] = None
    elif kind in _WRITTEN:
        pass
    elif isinstance(value, (tuple, list)):
        for one in value:
            _note(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _note(one, found)
    elif isinstance(value, slice):
        _note((value.start, value.stop, value.step), found)


def code_of(lines: Sequence[Line]) -> tuple[str, dict[str, Any]]:
    """The code of ``forward(self, args_list)``, and its globals; ``self`` has the constants."""
    return _Code(lines).text()


def _attribute(owner: str, name: str) -> str:
    return f"{owner}.{name}" if name.isidentifier() else f"getattr({owner}, {name!r})"


class _Code:
    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._taken = {line.node.name for line in lines}
        self.names: dict[str, Any] = dict(_NAMES)
        self._known: dict[int, str] = {}
        self._given_up: dict[Line, list[str]] = {}
        read: set[Line] = set()
        for line in reversed(lines):
            for one in line.all_input_nodes:
                if one not in read:
                    read.add(one)
                    self._given_up.setdefault(line, []).append(one.node.name)
            if line not in read:
                self._given_up.setdefault(line, []).append(line.node.name)

    def text(self) -> tuple[str, dict[str, Any]]:
        given = [f"    {line.node.name} = next(args_iter)" for line in self._lines if line.node.op == "placeholder"]
        head = ["def forward(self, args_list):", "    args_iter = iter(args_list)", *given, "    args_list.clear()"]
        body = [self._line(line) for line in self._lines if line.node.op != "placeholder"]
        return "\n".join((*head, *body, "")), self.names

    def _line(self, line: Line) -> str:
        node = line.node
        if node.op == "output":
            return f"    return {self._value(line.args[0])}"
        given_up = self._given_up.get(line, [])
        if line.target is hand_out:
            handed = f"    {node.name} = [{', '.join([self._value(one) for one in line.args[0]])}]"
            over = " = ".join((*(name for name in given_up if name != node.name), "None"))
            return f"{handed};  {over}\n    yield {node.name}" if over != "None" else f"{handed}\n    yield {node.name}"
        over = " = ".join((*given_up, "None"))
        return f"    {node.name} = {self._call(line)}" + (f";  {over}" if over != "None" else "")

    def _call(self, line: Line) -> str:
        if line.node.op == "get_attr":
            return functools.reduce(_attribute, line.target.split("."), "self")
        assert line.node.op == "call_function", f"{line.node.op} in a lowered graph"
        if line.target is operator.getitem:
            source, item = line.args
            return f"{self._value(source)}[{self._value(item)}]"
        call = self._named("call", quickest(line) if isinstance(line.target, OpOverload) else line.target)
        args = [self._value(one) for one in line.args]
        args += [f"{name} = {self._value(one)}" for name, one in line.kwargs.items()]
        return f"{call}({', '.join(args)})"

    def _named(self, kind: str, value: Any) -> str:
        """The name of a global of the code: one for each value."""
        name = self._known.get(id(value))
        if name is None:
            name = f"{kind}_{len(self.names)}"
            while name in self._taken:
                name = f"_{name}"
            self._known[id(value)] = name
            self.names[name] = value
        return name

    def _value(self, value: Any) -> str:
        kind = type(value)
        if kind is Line:
            return value.node.name  # type: ignore[no-any-return]
        if kind in _WRITTEN:
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join([self._value(one) for one in value])}]"
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            parts = [self._value(one) for one in value]
            return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
        if isinstance(value, dict):
            return "{" + ", ".join([f"{key!r}: {self._value(one)}" for key, one in value.items()]) + "}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        return self._named("constant", value)

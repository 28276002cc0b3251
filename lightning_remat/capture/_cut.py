"""A graph of Dynamo's that calls units (`capture._torch._units`), cut at these calls."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _torch as internals
from lightning_remat.errors import CaptureError

Node = torch.fx.Node


@dataclasses.dataclass
class _Part:
    """The nodes between two calls of units, or such a call.

    Attributes:
        run: what is called: a piece of the graph, or the unit.
        args, kwargs: its arguments, with nodes in the place of what they compute.
        made: the nodes whose values it returns in a tuple; for a unit, the node whose value it returns.
        dead: nodes whose values nothing needs after it.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Node, ...] | Node
    dead: list[Node] = dataclasses.field(default_factory=list)


class UnitChangedError(CaptureError):
    """A unit has returned something else than when the code around it was captured; nothing that has run can be undone."""

    def __init__(self, unit: Any) -> None:
        super().__init__(
            f"{type(unit).__name__} returned tensors of another structure, size, layout, dtype or requires_grad than when the "
            "code around it was captured, for the same arguments: it depends on something else (an attribute, say). This call "
            "cannot go on; later ones run that code as before"
        )
        self.unit = unit


class Cut:
    """Runs a graph of Dynamo's in parts: its units, and what is between them.

    Call `run` with Dynamo capturing, but not this class's own code (`CODES`): what is between two units is a frame that
    Dynamo captures, and so is the forward of each unit, within its hooks. Make one only when the graph is to run: code that is
    made while Dynamo traces is not captured.

    Args:
        module: the graph, which has calls of units.
        pieces: gets the nodes of what is between units, by their code.
    """

    def __init__(self, module: torch.fx.GraphModule, pieces: dict[types.CodeType, Sequence[Node]]) -> None:
        self._inputs = module.graph.find_nodes(op="placeholder")
        (output,) = module.graph.find_nodes(op="output")
        self._result = output.args[0]
        self._parts = _parts(module, pieces)
        needed = set(output.all_input_nodes)
        for part in reversed(self._parts):
            used = dict.fromkeys([*_nodes_in(part.args), *_nodes_in(part.kwargs), *_made_by(part)])
            part.dead = [node for node in used if node not in needed]
            needed.update(used)

    def run(self, *inputs: Any) -> Any:
        """What the graph computes from its inputs."""
        values: dict[Node, Any] = {}
        for node, value in zip(self._inputs, inputs, strict=True):
            values[node] = value
        del inputs
        for part in self._parts:
            result = part.run(*_with_values(part.args, values), **_with_values(part.kwargs, values))
            if isinstance(part.made, Node):
                if not internals.as_returned(part.made, result):
                    raise UnitChangedError(part.run)
                values[part.made] = result
            else:
                for node, value in zip(part.made, result, strict=True):
                    values[node] = value
                    del value
            del result
            for node in part.dead:
                del values[node]
        return _with_values(self._result, values)


def _with_values(thing: Any, values: dict[Node, Any]) -> Any:
    """The same with the nodes' values in the place of nodes."""
    if isinstance(thing, Node):
        return values[thing]
    if isinstance(thing, dict):
        found = {}
        for key in thing:
            found[key] = _with_values(thing[key], values)
        return found
    if isinstance(thing, slice):
        return slice(*_with_values((thing.start, thing.stop, thing.step), values))
    if isinstance(thing, tuple | list):
        parts = []
        for part in thing:
            parts.append(_with_values(part, values))
        if hasattr(thing, "_fields"):
            return type(thing)(*parts)
        return tuple(parts) if isinstance(thing, tuple) else parts
    return thing


CODES = frozenset({Cut.run.__code__, _with_values.__code__})
"""Of the frames that Dynamo is to pass over; it captures what they call."""


def name_as(piece: Sequence[Node], module: torch.fx.GraphModule) -> None:
    """Say of the nodes of a piece, which Dynamo has traced again, from which modules they are."""
    named, nodes = _calls(piece), _calls(module.graph.nodes)
    if [node.target for node in named] != [node.target for node in nodes]:
        return
    for one, node in zip(named, nodes, strict=True):
        node.meta.update({key: one.meta[key] for key in ("nn_module_stack", "stack_trace") if key in one.meta})


def _calls(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.op in ("call_function", "call_method", "call_module")]


def calls_units(module: torch.fx.GraphModule) -> bool:
    """Whether a graph calls units."""
    return any(internals.unit_of(node) is not None for node in module.graph.nodes)


def _parts(module: torch.fx.GraphModule, pieces: dict[types.CodeType, Sequence[Node]]) -> list[_Part]:
    """The parts of a graph, in their order."""
    parts: list[_Part] = []
    between: list[Node] = []
    for node in module.graph.nodes:
        unit = internals.unit_of(node)
        if unit is not None or node.op == "output":
            if between:
                parts.append(_piece(module, between))
                pieces[parts[-1].run.__code__] = between
                between = []
            if unit is not None:
                _, args, kwargs = node.args
                parts.append(_Part(unit, tuple(args), dict(kwargs), node))
        elif node.op != "placeholder":
            between.append(node)
    return parts


def _piece(module: torch.fx.GraphModule, nodes: Sequence[Node]) -> _Part:
    """Some nodes of a graph, one after the other, as a function."""
    inside = set(nodes)
    graph = torch.fx.Graph()
    given: list[Node] = []
    copies: dict[Node, Node] = {}
    outside = dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside)
    for one in outside:
        if one.op != "get_attr":
            given.append(one)
            copies[one] = graph.placeholder(one.name)
    for one in outside:
        if one.op == "get_attr":
            copies[one] = graph.node_copy(one)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    made = tuple(node for node in nodes if node.op != "get_attr" and any(user not in inside for user in node.users))
    graph.output(tuple(copies[node] for node in made))
    piece = torch.fx.GraphModule(module, graph)
    return _Part(piece.forward, tuple(given), {}, made)


def _nodes_in(thing: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(thing, found.append)
    return found


def _made_by(part: _Part) -> tuple[Node, ...]:
    return (part.made,) if isinstance(part.made, Node) else part.made

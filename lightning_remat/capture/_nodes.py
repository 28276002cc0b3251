"""Nodes of a joint graph: its inputs and outputs, the arguments that they belong to, a node's op, module and name."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _torch as internals
from lightning_remat.errors import CaptureError

Node = torch.fx.Node


def is_tensor(node: Any) -> bool:
    """Whether a node stands for one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def primals_and_tangents(graph: torch.fx.Graph) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The placeholders of the forward, and those that are handed to the backward."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = tuple(n for n in placeholders if "tangents" in str(n.target))
    return tuple(n for n in placeholders if n not in tangents), tangents


def primal_arguments(primals: Sequence[Node]) -> tuple[int | None, ...]:
    """For each primal, the position of the argument that it is: its own, where AOTAutograd's descriptors are absent."""
    if not any("desc" in node.meta for node in primals):
        return tuple(range(len(primals)))
    return tuple(internals.argument_of(node.meta.get("desc")) for node in primals)


def gradient_arguments(graph: torch.fx.Graph, num_fwd_outputs: int) -> tuple[int | None, ...]:
    """For each output of the backward, the position of the argument whose gradient it is, likewise."""
    output = graph.output_node()
    count = len(output.args[0]) - num_fwd_outputs  # type: ignore[arg-type]
    descriptions = output.meta.get("desc")
    return tuple(map(internals.argument_of, descriptions[num_fwd_outputs:])) if descriptions else tuple(range(count))


def new_values(graph: torch.fx.Graph, forward_outputs: Sequence[Any]) -> list[tuple[Node, Node]]:
    """Forward outputs that are new values of primals, and those primals: AOTAutograd copies them when the forward ends.

    Raises:
        CaptureError: where such a primal is none of the graph's.
    """
    primals = {node.meta.get("desc"): node for node in graph.nodes if node.op == "placeholder"}
    found = []
    for value, description in zip(forward_outputs, graph.output_node().meta.get("desc") or (), strict=False):
        written = internals.overwritten(description)
        if written is None or not isinstance(value, Node):
            continue
        if written not in primals:
            raise CaptureError(
                f"{value.name} is the new value of {written.expr()}, which is no input of the captured graph"
            )
        found.append((value, primals[written]))
    return found


def producer(node: Node) -> Node:
    """The op whose result a node is: itself, or the one of whose tuple it takes an item (``getitem``)."""
    while node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def copy_of(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph in nodes of its own, with the same names and ``meta``."""
    graph, nodes = torch.fx.Graph(), dict[Node, Node]()
    output = graph.output(graph.graph_copy(module.graph, nodes))
    output.meta = dict(module.graph.output_node().meta)
    return internals.unwritten(module, graph)


_ROOT = re.compile(r"^L\['[^']*'\]\.?|^L__self___?")
_INDEX = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def module_path(node: Node) -> str:
    """The user's module path of a node: ``"transformer.h.3.mlp"``; "" at the root or where it is unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _kind = next(reversed(stack.values()))
    return _plain_path(str(path))


@functools.lru_cache(maxsize=4096)
def _plain_path(path: str) -> str:
    """A module's path without the name of what holds all, and without brackets."""
    path = _INDEX.sub(r".\1", _ROOT.sub("", path))
    return path.replace("._modules.", ".").removeprefix("_modules.").strip(".")


def target_name(target: Any) -> str:
    """What an op is called: ``"aten.mm.default"``, or a function's name."""
    if isinstance(target, internals.OpOverload):
        return _operator_name(target)
    return getattr(target, "__name__", str(target))


@functools.cache
def _operator_name(target: internals.OpOverload) -> str:
    return str(target)

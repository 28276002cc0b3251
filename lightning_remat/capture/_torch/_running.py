"""How a lowered module runs: as a function of one list, which it clears, or node by node where someone observes it.

``_BoxedCodeGen`` writes such a function's code, and ``_LazyGraphModule`` none before someone asks for it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen

from lightning_remat.capture._tangents import Layout
from lightning_remat.capture._torch._bindings import quickest
from lightning_remat.capture._torch._views import fewer_views

_OPERATOR = re.compile(r"\btorch\.ops\.(\w+\.\w+\.\w+)(?=\()")


def unwritten(root: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph, with what that refers to in ``root``; its code is written when it is first run."""
    return _LazyGraphModule(root, graph)


def boxed(module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module as a function of one list, which it clears, so that nothing outside keeps its arguments alive."""
    graph, codegen = fewer_views(module.graph), cast(Any, _BoxedCodeGen)  # without types before torch 2.12
    graph.set_codegen(codegen())
    code = graph.python_code("self")
    names = dict(code.globals)
    calls = (node for node in graph.nodes if isinstance(node.target, OpOverload))  # one in the code for each

    def directly(match: re.Match[str]) -> str:
        node, name = next(calls), f"call_{len(names)}"
        assert match[1] == str(node.target), f"{match[1]} is called where {node.target} was expected"
        names[name] = quickest(node)
        return name

    exec(_OPERATOR.sub(directly, code.src), names)
    forward = names["forward"]

    def run(args: list[Any]) -> Any:
        return forward(module, args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@dataclasses.dataclass(frozen=True)
class Modules:
    """A captured graph as AOTAutograd runs it.

    Attributes:
        forward: returns ``returned`` outputs, then the saved tensors, then ``sizes`` saved sizes.
        backward: takes the saved sizes, the saved tensors and the tangents.
        returned, sizes: their numbers.
        summands: how many of the backward's last outputs are summands of gradients before them (see ``capture._sums``).
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    returned: int
    sizes: int
    summands: int = 0


ObserveNode = Callable[[torch.fx.Node, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
"""Given a node of a lowered module, its arguments and what runs it: runs it, and returns its result."""

Arrival = frozenset[tuple[int, Layout]]
"""Layouts of tangents that a version's backward was not made for, each with the position of the tangent's output."""


class Runner:
    """Runs one module of a version, its forward or its backward.

    Attributes:
        module: the module.
        alone: runs it, with nobody observing.
        without: for a backward: the same without some tangents (see `Exchange.unread`).
        laid_out: likewise, for tangents of other layouts (see `Exchange.arrive`).
        opened: likewise, with its sums taken apart (see `Exchange.opens`).
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.without: dict[frozenset[str], Runner] = {}
        self.laid_out: dict[Arrival, Runner] = {}
        self.opened: Runner | None = None
        self.module, self.alone = module, boxed(module)

    def __call__(self, args: list[Any], observe: ObserveNode | None) -> Any:
        if observe is None:
            return self.alone(args)
        given = tuple(args)
        args.clear()
        return _Observed(self.module, observe).run(*given)


class _Observed(torch.fx.Interpreter):
    """Runs a module node by node."""

    def __init__(self, module: torch.fx.GraphModule, observe: ObserveNode) -> None:
        super().__init__(module)
        self._observe = observe

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        run = functools.partial(self.call_function, n.target, args, kwargs)
        return self._observe(n, args, kwargs, run)

"""How a lowered module runs: as a function of one list, which it clears, or node by node where someone observes it.

``_LazyGraphModule`` writes no code before someone asks for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from lightning_remat.capture._tangents import Layout
from lightning_remat.capture._torch._lines import code_of
from lightning_remat.capture._torch._views import fewer_views


def unwritten(root: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph, with what that refers to in ``root``; its code is written when it is first run."""
    return _LazyGraphModule(root, graph)


def boxed(module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module as a function of one list, which it clears, so that nothing outside keeps its arguments alive."""
    code, names = code_of(fewer_views(module.graph))
    exec(code, names)
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
        summands: how many of the backward's last outputs are summands of gradients before them (see
            ``capture.gradients._sums``).
        copies: whether tensors are copied to the host and back.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    returned: int
    sizes: int
    summands: int = 0
    copies: bool = False


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
        in_stages: the same as a generator (see ``capture.gradients._stages``).
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.without: dict[frozenset[str], Runner] = {}
        self.laid_out: dict[Arrival, Runner] = {}
        self.opened: Runner | None = None
        self.in_stages: Callable[[list[Any]], Any] | None = None
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

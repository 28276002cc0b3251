"""One captured graph, and the versions of modules that run it, one a plan."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_remat.capture import CapturedGraph
from lightning_remat.capture import _torch as internals
from lightning_remat.graph import ComputationGraph
from lightning_remat.lowering import lower
from lightning_remat.planner._device_memory import DeviceMemory
from lightning_remat.planner._surroundings import Surroundings, Weights
from lightning_remat.runtime._accumulate import Accumulator
from lightning_remat.runtime._arrivals import Arrivals
from lightning_remat.runtime._moving import MovingBuffers
from lightning_remat.runtime._recent import Recent
from lightning_remat.runtime._sized_plans import SizedPlans
from lightning_remat.schedule import Schedule

READ_CALLS = 2
"""Calls in which it is noted which parameters a graph is given."""


@dataclasses.dataclass(eq=False)
class Graph:
    """One captured graph, and what runs it.

    Attributes:
        captured: with costs, and nothing around it.
        problem: with what lies around it.
        weights: its parameters that get gradients.
        around: what the device held beside it when it was captured.
        memory: of a CUDA device, as it was then.
        exchange: the modules that run it, one version a plan.
        versions: by the number of a plan, its version.
        plan: number of the one that runs, where no plan was made for the call as a whole.
        buffers: those that change between a forward and its backward.
        arrivals: the gradients that its backward is handed.
        code: of the frame that it was found in.
        plainly: runs it as Dynamo found it; ``None`` where that is not what eager mode runs.
        accumulator: takes its gradients as they are made, where it may.
        arguments: where its symbolic sizes stand among its arguments.
        sized: its plans, where it has symbolic sizes.
        stays: its plan is not made anew: nothing was found, or what was found was refused.
        whole: there is no other graph in a call, as far as can be told while it is captured.
        crowded: more is held beside it than when it was planned.
        left: it runs plainly from now on.
        calls: that it has run in, the numbers of the first and of the last one, and how many these are.
        read: ids of the parameters that it was given: one graph may run for several layers that are alike.
    """

    captured: CapturedGraph
    problem: ComputationGraph
    weights: Weights
    around: Surroundings
    memory: DeviceMemory | None
    exchange: internals.Exchange
    versions: dict[int, int]
    plan: int
    buffers: MovingBuffers
    arrivals: Arrivals
    code: types.CodeType | None = None
    plainly: Callable[..., Any] | None = None
    accumulator: Accumulator | None = None
    arguments: tuple[int, ...] = ()
    sized: SizedPlans | None = None
    stays: bool = False
    whole: bool = True
    crowded: bool = False
    left: bool = False
    calls: tuple[int, int, int] = (0, 0, 0)
    read: set[int] = dataclasses.field(default_factory=set)
    # By the outputs that a backward does not come through, the gradients that are none then, and the tangents.
    _dropped: Recent[frozenset[int], frozenset[int]] = dataclasses.field(default_factory=Recent)
    _unread: Recent[frozenset[int], frozenset[str]] = dataclasses.field(default_factory=Recent)

    def add(self, number: int, captured: CapturedGraph, schedule: Schedule) -> None:
        """One more plan, ready to run."""
        version = self.exchange.add(lower(captured, schedule), lambda: lower(captured, schedule))
        self.versions[number] = version
        self.arrivals.add(version, captured, schedule)
        self.buffers.add(number, captured, schedule)

    def called(self, number: int, args: Sequence[Any]) -> None:
        """It runs in a call (several times, perhaps)."""
        first, last, count = self.calls
        if number != last:
            self.calls = first or number, number, count + 1
        if count < READ_CALLS:
            self.read.update(id(value) for value in args if isinstance(value, torch.nn.Parameter))

    def always_called(self, number: int) -> bool:
        """Whether it has run in all calls since one before this, and in this too."""
        first, last, count = self.calls
        return first < number == last == first + count - 1

    def leave_out(self, unused: frozenset[int]) -> frozenset[int]:
        """The backward that begins does not come through these outputs; returns the gradients that are none then.

        What only leads to outputs that the loss does not come from gets no gradient, as in eager mode: zeros would make an
        optimizer decay its weights.
        """
        dropped = self._dropped.get(unused)
        if dropped is None:
            dropped = self._dropped[unused] = self.captured.gradients_without(unused) if unused else frozenset()
        unread = self._unread.get(unused)
        if unread is None:
            unread = self._unread[unused] = self.captured.tangents_of(unused) if unused else frozenset()
        self.exchange.dropped, self.exchange.unread = dropped, unread
        return dropped


Path = tuple[Graph, ...]
"""Graphs of a call, as far as it has come."""

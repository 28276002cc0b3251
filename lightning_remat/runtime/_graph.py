"""One captured graph, and the versions of its lowered modules, one per plan."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_remat._recent import Recent
from lightning_remat.capture import CapturedGraph
from lightning_remat.capture import _torch as internals
from lightning_remat.capture.gradients._differentiated import Differentiated
from lightning_remat.graph import ComputationGraph
from lightning_remat.lowering import lower
from lightning_remat.planner._device_memory import DeviceMemory
from lightning_remat.planner._surroundings import Surroundings, Weights
from lightning_remat.runtime._accumulate import Accumulator
from lightning_remat.runtime._arrivals import Arrivals
from lightning_remat.runtime._moving import ChangedActivations, MovingBuffers
from lightning_remat.runtime._sized_plans import SizedPlans
from lightning_remat.schedule import Schedule, simulate
from lightning_remat.solvers import Problem

READ_CALLS = 2
"""First calls of a graph, in which it is noted which parameters it is given."""


@dataclasses.dataclass(eq=False)
class Graph:
    """One captured graph, with what plans and runs it.

    Attributes:
        captured: the graph with costs, without the memory beside it.
        problem: the graph to be scheduled: with the memory that is held beside it.
        weights: bytes of its parameters that get gradients, by their ids.
        around: the memory that the device held beside it when it was captured.
        memory: the CUDA device's memory, as it was then; ``None`` on the CPU.
        exchange: runs the lowered modules, of which there is one version per plan.
        versions: the version of each plan, by the plan's number.
        plan: number of the plan that runs where no plan was made for the call as a whole.
        buffers: its inputs that may change between forward and backward.
        changes: what it is given or hands out that changes before its backward; ``None`` where that is not looked for.
        arrivals: the layouts of the gradients that its backward is given.
        code: code of the frame that it was found in.
        plainly: runs it as Dynamo found it; ``None`` where that is not what eager mode runs.
        differentiated: makes its gradients differentiable; ``None`` where that is not possible.
        accumulator: adds its gradients to ``.grad`` as they are computed; ``None`` where it may not.
        arguments: positions of its symbolic sizes among its arguments.
        sized: its plans for all sizes, where it has symbolic sizes.
        stays: no further plan is made for it: none was found, or what was found was refused.
        symbolic: whether any size of what it is given is a symbol.
        whole: whether it is the only graph of a call, as far as is known when it is captured.
        crowded: whether more is held beside it than when it was planned.
        left: whether it runs in eager mode from now on.
        calls: the calls that it has run in: the numbers of the first and of the last one, and how many there were.
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
    changes: ChangedActivations | None = None
    code: types.CodeType | None = None
    plainly: Callable[..., Any] | None = None
    differentiated: Differentiated | None = None
    accumulator: Accumulator | None = None
    arguments: tuple[int, ...] = ()
    sized: SizedPlans | None = None
    stays: bool = False
    symbolic: bool = False
    whole: bool = True
    crowded: bool = False
    left: bool = False
    calls: tuple[int, int, int] = (0, 0, 0)
    read: set[int] = dataclasses.field(default_factory=set)
    # By the outputs without a gradient in a backward: the gradients that are None then, and the outputs' tangents.
    _dropped: Recent[frozenset[int], frozenset[int]] = dataclasses.field(default_factory=Recent)
    _unread: Recent[frozenset[int], frozenset[str]] = dataclasses.field(default_factory=Recent)

    def add(self, number: int, captured: CapturedGraph, schedule: Schedule) -> None:
        """Lower one more plan, so that it can run."""
        version = self.exchange.add(lower(captured, schedule), lambda: lower(captured, schedule))
        self.versions[number] = version
        self.arrivals.add(version, captured, schedule)
        self.buffers.add(number, captured, schedule)

    def called(self, number: int, args: Sequence[Any]) -> None:
        """Note that it runs in the call of this number (several times, perhaps)."""
        first, last, count = self.calls
        if number != last:
            self.calls = first or number, number, count + 1
        if count < READ_CALLS:
            self.read.update(id(value) for value in args if isinstance(value, torch.nn.Parameter))

    def saved_bytes(self) -> int:
        """Bytes that its forward leaves behind where nothing is evaluated again."""
        problem = Problem(self.captured.graph)
        return simulate(self.captured.graph, problem.expand(problem.captured)).saved_bytes

    @property
    def is_new(self) -> bool:
        """Whether the present call is its first one."""
        return self.calls[2] == 1

    def always_called(self, number: int) -> bool:
        """Whether it has run in this call, and in every call since some earlier one."""
        first, last, count = self.calls
        return first < number == last == first + count - 1

    def leave_out(self, unused: frozenset[int]) -> frozenset[int]:
        """In the backward that begins these outputs get no gradient; returns the gradients that are ``None`` then.

        A parameter on which only such outputs depend gets no gradient, as in eager mode: with a gradient of zeros an
        optimizer would decay its weights.
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
"""The graphs that a call has run, in their order."""

"""A schedule replayed on its graph: what is held at each step, whose it is, and what it is there for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lightning_remat.graph import ComputationGraph, Phase, TensorRole
from lightning_remat.schedule import Compute, Copy, Life, Schedule, Timeline, lives, simulate

GRADIENTS, WORKSPACE, BESIDE, OLD = "gradients", "workspace", "held beside", "old gradients"
"""What is held that is no module's: gradients of parameters, the running op's workspace, what is resident outside of the
graph (an optimizer's state), and the gradients of the step before."""

INPUTS = {TensorRole.PARAMETER: "parameters", TensorRole.BUFFER: "buffers", TensorRole.BATCH: "the batch"}

KEPT, AGAIN, PASSING, HANDED_OUT = "kept for the backward", "computed again", "for the moment", "handed to the caller"

OUTSIDE = "outside of submodules"


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor that is held at some moment: its name, shape, size, module, and what it is there for."""

    name: str
    shape: str
    nbytes: int
    module: str
    why: str


@dataclasses.dataclass(frozen=True)
class Moment:
    """What is held at one step.

    Attributes:
        nbytes: all of it; the sums of ``parts`` and of ``modules`` are that too.
        op, target, module, phase: of the op that runs there, the last ``"forward"`` or ``"backward"``.
        parts: bytes by what they are there for, the largest first.
        modules: bytes by module, or by what is no module's, the largest first.
        largest: the largest tensors, the largest first.
    """

    nbytes: int
    op: str
    target: str
    module: str
    phase: str
    parts: tuple[tuple[str, int], ...]
    modules: tuple[tuple[str, int], ...]
    largest: tuple[Held, ...]


class Replay:
    """A schedule on its graph.

    Args:
        graph, schedule: what is replayed.

    Attributes:
        timeline: its memory timeline.
        lives: what takes memory, the largest first.
    """

    def __init__(self, graph: ComputationGraph, schedule: Schedule) -> None:
        self.graph, self.schedule = graph, schedule
        self.timeline: Timeline = simulate(graph, schedule)
        self.lives: list[Life] = sorted(lives(graph, schedule), key=lambda one: -one.nbytes)
        self._begins = np.array([one.begin for one in self.lives], dtype=np.int64)
        self._ends = np.array([one.end for one in self.lives], dtype=np.int64)
        self._first: dict[int, int] = {}  # op -> the step at which it is evaluated first
        for index, step in enumerate(schedule.steps):
            if isinstance(step, Compute):
                self._first.setdefault(step.op, index)
        self._gradients = {graph.tensors[t].storage for t in graph.backward_outputs} - graph.input_storages
        self._handed_out = {graph.tensors[t].storage for t in graph.forward_outputs}

    def alive(self, step: int, most: int | None = None) -> list[Life]:
        """What is held at a step beside what always is, the largest first."""
        there = np.flatnonzero((self._begins <= step) & (self._ends >= step))
        return [self.lives[i] for i in there[:most]]

    def sums(self, label: Callable[[Life], int], count: int) -> npt.NDArray[np.int64]:
        """Bytes at each step of the lives of each of so many labels: an array of (labels, steps)."""
        steps = len(self.schedule.steps)
        changes = np.zeros((count, steps + 2), dtype=np.int64)
        for one in self.lives:
            at = label(one)
            changes[at, one.begin] += one.nbytes
            changes[at, one.end + 1] -= one.nbytes
        return np.cumsum(changes, axis=1)[:, :steps]

    def workspaces(self) -> npt.NDArray[np.int64]:
        """Bytes of the workspace at each step."""
        ops = self.graph.ops
        return np.array(
            [ops[step.op].workspace_bytes if isinstance(step, Compute) else 0 for step in self.schedule.steps],
            dtype=np.int64,
        )

    def always(self) -> dict[str, int]:
        """Bytes that are held all through the step, by what they are."""
        graph, found = self.graph, dict.fromkeys(INPUTS.values(), 0)
        for storage in graph.input_storages:
            roles = [graph.tensors[t].role for t in graph.tensors_on[storage]]
            found[INPUTS[next((role for role in roles if role in INPUTS), TensorRole.BATCH)]] += graph.storages[storage]
        return {**found, BESIDE: graph.resident_bytes}

    def module(self, one: Life) -> str:
        """The module of the op that made it."""
        return (self.graph.ops[one.op].module if one.op >= 0 else "") or OUTSIDE

    def is_gradient(self, one: Life) -> bool:
        """Whether it is what the step is run for."""
        return one.tensor >= 0 and self.graph.tensors[one.tensor].storage in self._gradients

    def is_kept(self, one: Life) -> bool:
        """Whether the forward leaves it to the backward."""
        return one.begin < self.schedule.boundary <= one.end

    def why(self, one: Life) -> str:
        """What it is there for."""
        if self.is_gradient(one):
            return GRADIENTS
        if one.op < 0:
            return "handed in by the caller"
        if one.begin > self._first[one.op] and self.schedule.boundary <= one.begin and self._in_forward(one.op):
            return AGAIN if isinstance(self.schedule.steps[one.begin], Compute) else "fetched from the host"
        if one.tensor >= 0 and self.graph.tensors[one.tensor].storage in self._handed_out:
            return HANDED_OUT
        return KEPT if self.is_kept(one) else PASSING

    def _in_forward(self, op: int) -> bool:
        return self.graph.ops[op].phase is not Phase.BACKWARD

    def held(self, one: Life) -> Held:
        """It, for people."""
        tensor = self.graph.tensors[one.tensor] if one.tensor >= 0 else None
        name = tensor.name if tensor is not None else f"a result of {self.graph.ops[one.op].name} that is not kept"
        shape = " x ".join(map(str, tensor.shape)) + f" {tensor.dtype}" if tensor is not None and tensor.shape else ""
        return Held(name, shape, one.nbytes, self.module(one), self.why(one))

    def op(self, step: int) -> int:
        """The op that runs at a step, or that made what is copied there; -1 where there is none."""
        at = self.schedule.steps[step] if 0 <= step < len(self.schedule.steps) else None
        if isinstance(at, Copy):
            return self.graph.producer[at.tensor]
        return at.op if isinstance(at, Compute) else -1

    def peak(self, name_of: Callable[[str], str], most: int = 10) -> Moment:
        """The moment of the peak; ``name_of`` groups modules."""
        step, graph = self.timeline.peak_step, self.graph
        op = graph.ops[self.op(step)] if self.op(step) >= 0 else None
        constant = self.always()
        if step < self.schedule.boundary:
            constant[OLD] = graph.forward_resident_bytes
        running = 0 <= step < len(self.schedule.steps) and isinstance(self.schedule.steps[step], Compute)
        constant[WORKSPACE] = op.workspace_bytes if op is not None and running else 0
        parts, modules = dict(constant), dict(constant)
        alive = self.alive(step) if step >= 0 else []
        for one in alive:
            why = self.why(one)
            parts[why] = parts.get(why, 0) + one.nbytes
            module = GRADIENTS if self.is_gradient(one) else name_of(self.module(one))
            modules[module] = modules.get(module, 0) + one.nbytes
        return Moment(
            nbytes=self.timeline.peak_bytes,
            op=self.timeline.peak_op,
            target=op.target if op is not None else "",
            module=self.timeline.peak_module,
            phase="forward" if step < self.schedule.boundary else "backward",
            parts=_largest_first(parts),
            modules=_largest_first(modules),
            largest=tuple(self.held(one) for one in alive[:most]),
        )


def _largest_first(found: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((name, n) for name, n in found.items() if n), key=lambda one: -one[1]))

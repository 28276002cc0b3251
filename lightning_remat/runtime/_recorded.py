"""One recorded run of a captured graph, what is known of runs before they are recorded, and why a graph cannot be."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from lightning_remat._recent import Recent
from lightning_remat.capture import CapturedGraph
from lightning_remat.capture._effects import says, tells
from lightning_remat.graph import TensorRole

_TO_COPY = torch.ops.aten._to_copy.default

Run = Callable[[list[Any]], Any]
"""Runs a lowered module; clears the list that it is given."""


class Tape(Protocol):
    """One recorded run."""

    @property
    def stale(self) -> bool:
        """Whether it must not be replayed any more."""

    def replay(self, args: Sequence[Any]) -> None:
        """Do once more what it did; states of random number generators are read from these arguments."""


class Tapes(Protocol):
    """Records runs (see `lightning_remat.capture._torch.CudaTapes`)."""

    def noted(self) -> contextlib.AbstractContextManager[Any]:
        """While open, what is done with random states is noted."""

    def record(self, run: Run, args: list[Any], noted: Any) -> tuple[Any, Tape]:
        """Run a function once, and keep how."""

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the memory of one that a recorded run returned, which it does not keep."""


@dataclasses.dataclass
class Known:
    """What is known of the runs of one kind, as long as they run unrecorded.

    Attributes:
        runs: how many there were.
        noted: what one of them did with random states; ``None`` before.
        outputs: the devices of what it returned.
    """

    runs: int = 0
    noted: Any = None
    outputs: list[torch.device | None] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Recorded:
    """A recorded forward, and its backward.

    Attributes:
        tape: replays the forward.
        given: its arguments.
        copied: by position of an argument that is copied, the memory that it is copied to.
        fixed: ids of the other arguments.
        returned: what it returns to the step's caller, and
        saved: to its backward; tensors among both are read where they lie, and not owned.
        elsewhere: by position, the devices of those that lie on another one where the forward is not recorded: states of fused
            attention's dropout, which a backward that is not recorded reads in the host's memory.
        call: number of the call in which it was recorded: what that saved is owned by autograd's graph, so that the recorded
            backward frees it where it has read it.
        backward: replays the backward; ``None`` as long as there is none.
        key: of the backward: with any other the recorded one is not used.
        tangents: the memory that its last arguments are copied to.
        gradients: what it returns, as above.
        homes: by position among these, the parameters (by position) whose gradients have memory of their own (`Homes`).
    """

    tape: Tape
    given: list[Any]
    copied: dict[int, torch.Tensor]
    fixed: frozenset[int]
    returned: list[Any]
    saved: list[Any]
    elsewhere: dict[int, torch.device]
    call: int = 0
    backward: Tape | None = None
    key: Hashable = None
    tangents: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[Any] = dataclasses.field(default_factory=list)
    homes: dict[int, int] = dataclasses.field(default_factory=dict)


def devices_of(values: Sequence[Any]) -> list[torch.device | None]:
    return [one.device if isinstance(one, torch.Tensor) else None for one in values]


def moved_elsewhere(before: Sequence[torch.device | None], values: Sequence[Any]) -> dict[int, torch.device]:
    """By position, the devices on which tensors were before, where they are on others now."""
    pairs = enumerate(zip(before, devices_of(values), strict=True))
    return {i: device for i, (device, now) in pairs if device is not None and device != now}


def as_unrecorded(recorded: Recorded, args: list[Any]) -> list[Any]:
    """Arguments of a backward of a recorded forward, as one that is not recorded reads them; the list is the same."""
    sizes = sum(not isinstance(one, torch.Tensor) for one in args)  # they come first
    for i, device in recorded.elsewhere.items():
        args[sizes + i] = args[sizes + i].to(device)
    return args


def unrecordable(captured: CapturedGraph) -> str | None:
    """Why a graph would do otherwise when it is replayed, where nothing but its kernels would run; ``None`` if it would not."""
    device = captured.device.type
    for op, node in zip(captured.graph.ops, captured.nodes, strict=True):
        if node is None:
            continue
        if says(node) or tells(node):
            return f"{op.name} does something beside its result, which it would do no more in a recorded step"
        value = node.meta.get("val")
        first = value[0] if isinstance(value, (tuple, list)) and value else value
        if op.random and isinstance(first, torch.Tensor) and first.device.type != device:
            return f"{op.name} draws random numbers on the device {first.device}, and would draw the same ones in each step"
        if isinstance(first, torch.Tensor) and node.target is _TO_COPY and not node.kwargs.get("non_blocking"):
            copied: Any = node.args[0]
            to, from_ = first.device, copied.meta["val"].device
            if device in (to.type, from_.type) and to.type != from_.type:
                instead = (
                    "make it there (device=...), or keep it in a buffer" if to.type == device else "copy it afterwards"
                )
                return f"{op.name} copies a tensor from the device {from_} to {to}, for which the step waits: {instead}"
    return None


def held_arguments(captured: CapturedGraph) -> frozenset[int]:
    """Positions of a graph's arguments that are no part of a batch."""
    tensors = captured.graph.tensors
    return frozenset(
        i
        for i, node in enumerate(captured.primals)
        if node in captured.node_tensor and tensors[captured.node_tensor[node]].role is not TensorRole.BATCH
    )


def known_of(kinds: Recent[Hashable, Known], key: Hashable) -> Known:
    """What is known of a kind of run, this one counted."""
    known = kinds.get(key)
    if known is None:
        known = kinds[key] = Known()
    known.runs += 1
    return known

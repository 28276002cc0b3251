"""Captured graphs whose forward and backward are recorded, and replayed in one launch each (CUDA graphs).

What a recorded run reads lies where it lay then: parameters and buffers are expected there, batches and the loss's gradient are
copied there. A step's outputs are copied out of the recordings' memory. What a forward saves for its backward stays in it, so
between the two no other graph is replayed: where calls overlap, all but the first run unrecorded. Gradients that the backward
adds up itself (`Accumulator`) are written to memory of their own, which parameters' ``.grad`` then has too.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from lightning_remat._recent import Recent
from lightning_remat._settings import setting
from lightning_remat.capture import CapturedGraph
from lightning_remat.capture import _torch as internals
from lightning_remat.errors import RematWarning
from lightning_remat.graph import TensorRole
from lightning_remat.runtime._accumulate import Accumulator, Homes
from lightning_remat.runtime._copies import copied_out, layout, memory_like
from lightning_remat.runtime._moving import MovingBuffers
from lightning_remat.runtime._recorded import (
    Known,
    Recorded,
    Run,
    Tape,
    Tapes,
    as_unrecorded,
    devices_of,
    held_arguments,
    known_of,
    moved_elsewhere,
    unrecordable,
)

WARM_UP = 2
"""Calls of each kind that run unrecorded before the one in which it is noted what is done with random states."""

MOST_ATTEMPTS = 4
"""How often a forward is recorded to no avail, since its backward could not be, before it is left."""

_SETTINGS = (
    "backends.cudnn.allow_tf32",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.enabled",
)
"""What decides which kernels run, of what no new capture follows from."""

MOST_MOVES = 3
"""How often an argument without gradients lies somewhere else, before it is copied to the same place for each run."""

MOST = 16
"""Recorded forwards of a captured graph, one for each plan and set of strides."""


TAPES: dict[str, Callable[[torch.device], Tapes]] = {"cuda": internals.CudaTapes}
"""What records, by the type of the device."""


class Recordings:
    """What is recorded of one step's graphs.

    Args:
        wanted: whether anything is to be recorded.
        name: of the step, for warnings.

    Attributes:
        homes: where recorded backwards add up gradients.
        serial: number of the call whose forward was replayed last.
        last: what was replayed then.
    """

    def __init__(self, wanted: bool, name: str) -> None:
        self._wanted, self._name = wanted, name
        self._tapes: dict[torch.device, Tapes] = {}
        self._recorders: list[Recorder] = []
        self.homes = Homes()
        self.serial = 0
        self.last: Recorded | None = None
        self._waiting: weakref.ref[torch.Tensor] | None = None
        self._told: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether there is a graph that is recorded, or will be."""
        return bool(self._recorders)

    def recorder(
        self, captured: CapturedGraph, accumulator: Accumulator | None, buffers: MovingBuffers
    ) -> Recorder | None:
        """What runs a captured graph recorded; ``None`` where nothing records."""
        device = captured.device
        if not self._wanted or device.type not in TAPES:
            return None
        reason = unrecordable(captured)
        if reason is not None:
            self.told(reason)
            return None
        if device not in self._tapes:
            self._tapes[device] = TAPES[device.type](device)
        made = Recorder(self, self._tapes[device], captured, accumulator, buffers)
        self._recorders.append(made)
        return made

    def room_bytes(self, captured: CapturedGraph) -> int:
        """Bytes that copies of a graph's batch take."""
        if not self._wanted or captured.device.type not in TAPES:
            return 0
        graph = captured.graph
        batch = {graph.tensors[t].storage for t in graph.inputs if graph.tensors[t].role is TensorRole.BATCH}
        return sum(graph.storages[storage] for storage in batch)

    def forget(self) -> None:
        """Let go of everything that is recorded, and of its memory, unless a backward may come that reads it."""
        if not self.waits:
            self.last = None
            self.homes.clear()
            for recorder in self._recorders:
                recorder.forget()

    def told(self, reason: str) -> None:
        """Warn that something runs unrecorded, once for each reason."""
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(
                f"{self._name or 'the step'} (or a part of it) cannot be recorded, and runs without CUDA graphs: {reason}",
                RematWarning,
                stacklevel=2,
            )

    @property
    def waits(self) -> bool:
        """Whether a backward may come that reads what a replayed forward has saved."""
        return self._waiting is not None and self._waiting() is not None

    def begun(self, recorded: Recorded) -> int:
        """A forward was replayed; returns the number of the call."""
        self.serial += 1
        self.last = recorded
        return self.serial

    def wait_for(self, saved: torch.Tensor) -> None:
        """As long as there is this tensor, which autograd keeps for the backward, no other graph is replayed."""
        self._waiting = weakref.ref(saved)


class Recorder:
    """Runs forwards and backwards of one captured graph, recorded where they can be.

    Args:
        shared: of the step.
        tapes: records.
        captured: the graph.
        accumulator: see `Accumulator`; ``None`` where gradients are returned to autograd.
        buffers: those that are copied for each run.

    Attributes:
        serial: number of the call whose forward was replayed last; 0 where the last one was not.
    """

    def __init__(
        self,
        shared: Recordings,
        tapes: Tapes,
        captured: CapturedGraph,
        accumulator: Accumulator | None,
        buffers: MovingBuffers,
    ) -> None:
        self._shared, self._tapes, self._device = shared, tapes, captured.device
        self._accumulator, self._buffers = accumulator, buffers
        self._arguments, self._held = captured.arguments, held_arguments(captured)
        self._written = frozenset(captured.primals.index(one) for one in captured.updated.values())
        self._forwards: Recent[Hashable, Known] = Recent(MOST)
        self._backwards: Recent[Hashable, Known] = Recent(MOST)
        self._recorded: dict[Hashable, Recorded] = {}
        self._places: dict[int, int] = {}  # of arguments that are expected where they were, by position
        self._moves: Counter[int] = Counter()  # of these
        self._ready: set[int] = set()  # versions of which a backward could be recorded too
        self._attempts = 0
        self.serial = 0

    def wait_for(self, saved: torch.Tensor) -> None:
        """As long as there is this tensor, which autograd keeps for the backward, no other forward is replayed."""
        self._shared.wait_for(saved)

    def told(self, reason: str) -> None:
        """Warn that something runs unrecorded, once for each reason."""
        self._shared.told(reason)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, version: int, run: Run, args: list[Any], returned: int) -> Sequence[Any]:
        """A forward's outputs.

        Args:
            version: which one.
            run: runs it.
            args: its arguments, in a list that is cleared.
            returned: how many of its outputs are not saved for the backward.
        """
        self.serial = 0
        key = self._forward_key(version, args)
        if key is None:
            return run(args)  # type: ignore[no-any-return]
        recorded = self._recorded.get(key)
        if recorded is not None and recorded.tape.stale:
            del self._recorded[key]
        elif recorded is not None:
            for i, memory in recorded.copied.items():
                memory.copy_(args[i])
            written = self._to_write(args, recorded.copied)
            args.clear()
            recorded.tape.replay(())
            _write(written)
            self.serial = self._shared.begun(recorded)
            return [*copied_out(recorded.returned, recorded.fixed), *recorded.saved]
        known = known_of(self._forwards, key)
        if known.runs <= WARM_UP or len(self._recorded) == MOST:
            return run(args)  # type: ignore[no-any-return]
        if known.noted is None:
            with self._tapes.noted() as known.noted:
                outputs: Sequence[Any] = run(args)
            known.outputs = devices_of(outputs)
            return outputs
        if version not in self._ready:
            return run(args)  # type: ignore[no-any-return]
        return self._record_forward(key, run, args, known, returned)

    def _record_forward(self, key: Hashable, run: Run, args: list[Any], known: Known, returned: int) -> Sequence[Any]:
        copied = {
            i: memory_like(one).copy_(one)
            for i, one in enumerate(args)
            if isinstance(one, torch.Tensor) and not self._is_fixed(i)
        }
        given = [copied.get(i, one) for i, one in enumerate(args)]
        written = self._to_write(args, copied)
        args.clear()
        try:
            found, tape = self._tapes.record(run, list(given), known.noted)
        except Exception as error:  # noqa: BLE001 - whatever torch raises: nothing was computed, and it runs as before
            self._leave(error)
            outputs: Sequence[Any] = run(given)
            _write(written)
            return outputs
        _write(written)
        kept = self._unowned(found, given)
        fixed = frozenset(id(one) for i, one in enumerate(given) if i not in copied)
        elsewhere = moved_elsewhere(known.outputs[returned:], found[returned:])
        recorded = Recorded(tape, given, copied, fixed, kept[:returned], kept[returned:], elsewhere)
        self._recorded[key] = recorded
        self.serial = recorded.call = self._shared.begun(recorded)
        return [*copied_out(found[:returned], fixed), *found[returned:]]

    def _is_fixed(self, position: int) -> bool:
        """Whether an argument of the forward is expected where it was: parameters, and buffers but those that are copied."""
        moves = self._arguments[position] in self._buffers.moving or self._moves[position] == MOST_MOVES
        return position in self._held and not moves

    def _place(self, position: int, tensor: torch.Tensor) -> int:
        """Where an argument lies that is expected where it was; notes whether it is there."""
        place = tensor.data_ptr()
        if self._places.get(position, place) != place and not tensor.requires_grad:
            self._moves[position] += 1
            if self._moves[position] == MOST_MOVES:
                self.forget()  # what is recorded reads other places
        self._places[position] = place
        return place

    def _to_write(
        self, args: Sequence[Any], copied: dict[int, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Arguments that the forward writes to, of those that are copied, each with its copy."""
        return [(args[i], copied[i]) for i in self._written if i in copied]

    def _forward_key(self, version: int, args: Sequence[Any]) -> Hashable:
        """What a recorded forward has in common with a call; ``None`` for a call in which none is replayed."""
        if self._shared.waits or self._attempts == MOST_ATTEMPTS:
            return None
        found: list[Hashable] = [version, *map(setting, _SETTINGS)]
        for i, one in enumerate(args):
            if not isinstance(one, torch.Tensor):
                found.append(one)
            elif not self._is_here(one):
                self._shared.told(f"it is given a tensor that is on the device {one.device}, and not on {self._device}")
                return None
            else:
                found.append(self._place(i, one) if self._is_fixed(i) else layout(one))
        return None if None in found else tuple(found)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, serial: int, version: int, run: Run, args: list[Any], saved: int, usual: bool) -> Sequence[Any]:
        """The gradients that a backward returns.

        Args:
            serial: number of the call whose forward it belongs to; 0 where that was not replayed.
            version: which one.
            run: runs it.
            args: its arguments, in a list that is cleared.
            saved: how many of them come from the forward; after these there are gradients.
            usual: whether it is the version's own backward, and all of its gradients are returned.

        Raises:
            RuntimeError: where another forward was replayed since: a defect of this library.
        """
        if serial and serial != self._shared.serial:
            raise RuntimeError("what a forward has saved was overwritten: this is a defect of lightning_remat")
        recorded = self._shared.last if serial else None
        # A recorded backward writes over what the forward has saved as soon as it has read it.
        usual = usual and not internals.graph_is_kept()
        key = self._backward_key(version, args[saved:]) if usual else None
        if recorded is not None and recorded.backward is not None:
            if key == recorded.key and not recorded.backward.stale and self._homes_are_free(recorded):
                return self._replay_backward(recorded, recorded.backward, args, saved)
            return run(as_unrecorded(recorded, args))  # type: ignore[no-any-return]
        noted = known.noted if key is not None and (known := self._backwards.get(key)) is not None else None
        if recorded is not None and recorded.call == serial and noted is not None:
            return self._record_backward(recorded, key, run, args, saved, noted)
        if recorded is not None:
            args = as_unrecorded(recorded, args)
            self._drop(recorded)
        return self._unrecorded_backward(version, key, run, args)

    def _unrecorded_backward(self, version: int, key: Hashable, run: Run, args: list[Any]) -> Sequence[Any]:
        if key is None or self._attempts == MOST_ATTEMPTS:
            return run(args)  # type: ignore[no-any-return]
        if self._accumulator is not None:
            self._accumulator.make_homes()
        known = known_of(self._backwards, key)
        if known.runs <= WARM_UP or known.noted is not None:
            return run(args)  # type: ignore[no-any-return]
        self._ready.add(version)
        with self._tapes.noted() as known.noted:
            return run(args)  # type: ignore[no-any-return]

    def _record_backward(
        self, recorded: Recorded, key: Hashable, run: Run, args: list[Any], saved: int, noted: Any
    ) -> Sequence[Any]:
        accumulator = self._accumulator
        tangents = [memory_like(one).copy_(one) for one in args[saved:]]
        given = [*args[:saved], *tangents]
        sizes = [one for one in given if not isinstance(one, torch.Tensor)]
        args.clear()
        homes: dict[int, int] = {}
        try:
            with self._into_homes() as first:
                found, tape = self._tapes.record(run, given, noted)
                if accumulator is not None:
                    homes = accumulator.homes_among(found)
        except Exception as error:  # noqa: BLE001 - see `_record_forward`; what was saved is where it was
            self._drop(recorded)
            self._leave(error)
            again = [one for one in recorded.saved if isinstance(one, torch.Tensor)]
            return run(as_unrecorded(recorded, [*sizes, *again, *tangents]))  # type: ignore[no-any-return]
        recorded.gradients = self._unowned(found, [found[i] for i in homes])
        recorded.backward, recorded.key, recorded.tangents, recorded.homes = tape, key, tangents, homes
        return self._gradients(recorded, first)

    def _replay_backward(self, recorded: Recorded, tape: Tape, args: list[Any], saved: int) -> Sequence[Any]:
        for memory, one in zip(recorded.tangents, args[saved:], strict=True):
            memory.copy_(one)
        states = args[:saved]
        args.clear()
        with self._into_homes() as first:
            tape.replay(states)
        return self._gradients(recorded, first)

    def _into_homes(self) -> contextlib.AbstractContextManager[frozenset[int]]:
        return self._accumulator.into_homes() if self._accumulator is not None else contextlib.nullcontext(frozenset())

    def _backward_key(self, version: int, tangents: Sequence[Any]) -> Hashable:
        if not all(isinstance(one, torch.Tensor) and self._is_here(one) for one in tangents):
            return None
        ways = self._accumulator.ways() if self._accumulator is not None else ()
        layouts = tuple(map(layout, tangents))
        return None if None in layouts else (version, ways, layouts)

    def _homes_are_free(self, recorded: Recorded) -> bool:
        """Whether nobody but parameters holds gradients of earlier steps."""
        return self._accumulator is None or self._accumulator.homes_are_free(recorded.homes.values())

    def _gradients(self, recorded: Recorded, first: frozenset[int]) -> list[Any]:
        """What autograd is given: copies, and where a parameter had no gradient, the memory that it has of its own."""
        found: list[Any] = []
        for i, one in enumerate(recorded.gradients):
            position = recorded.homes.get(i)
            if position is None:
                found += copied_out([one])
            else:
                found.append(one.detach() if position in first else None)
        return found

    def forget(self) -> None:
        """Let go of what is recorded."""
        self._recorded.clear()

    # -- both ---------------------------------------------------------------------------------------------------------

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type

    def _unowned(self, values: Sequence[Any], owned: Sequence[Any]) -> list[Any]:
        """Tensors with the memory of these, which they do not keep, but for those that are owned elsewhere."""
        others = set(map(id, owned))
        return [
            self._tapes.unowned(one)
            if isinstance(one, torch.Tensor) and self._is_here(one) and id(one) not in others
            else one
            for one in values
        ]

    def _drop(self, recorded: Recorded) -> None:
        """Forget a forward whose backward was not recorded."""
        self._recorded = {key: one for key, one in self._recorded.items() if one is not recorded}
        self._attempts += 1
        if self._attempts == MOST_ATTEMPTS:
            self._shared.told("its gradients are added up in other places, or of other layouts, in each step")

    def _leave(self, error: Exception) -> None:
        """Record nothing of this graph any more."""
        self._attempts = MOST_ATTEMPTS
        words = (str(error).strip().splitlines() or [""])[0]
        self._shared.told(f"{type(error).__name__}: {words}")


def _write(written: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write to arguments what the forward has written to their copies."""
    with torch.no_grad():
        for argument, copy in written:
            argument.copy_(copy)

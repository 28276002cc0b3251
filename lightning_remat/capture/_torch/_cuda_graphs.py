"""Runs of a function on a CUDA device, recorded as CUDA graphs: replayed, they do what the function did, in one launch.

``_storage_Use_Count`` tells whether someone else holds a tensor's memory; ``_cuda_clearCublasWorkspaces`` gives up what cuBLAS
took for itself while it was recorded.

While a run is recorded, no state of the random number generator can be read or set. Random ops that draw anew draw from the
default generator: a graph begins where that stands when it is replayed, and moves it on. One that draws again has a generator
of its own, whose state is set before each replay. Which state a run would have read is known from one that was noted before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

_now = threading.local()

_spoilt: Counter[int] = Counter()
"""How often a device's random number generator was exchanged, by the device's index (see `Tape.stale`)."""


@dataclasses.dataclass
class Noted:
    """What a run did with the states of the random number generator.

    Attributes:
        start: the generator's state when it began, as (seed, offset).
        offsets: those of the states that it read, relative to that.
        drawn_again: how often it drew numbers again.
    """

    start: torch.Tensor
    offsets: list[int] = dataclasses.field(default_factory=list)
    drawn_again: int = 0

    def state(self, device: torch.device) -> torch.Tensor:
        """The state of a device's generator."""
        state = torch.cuda.get_rng_state(device)
        self.offsets.append(int(_words(state)[1] - _words(self.start)[1]))
        return state

    def again(self, state: torch.Tensor, draw: Callable[[], Any], restored: Callable[[], Any]) -> Any:
        """Draw with the generator in a state."""
        del state, draw
        self.drawn_again += 1
        return restored()


class _Taping:
    """Stands for the random number generator while a run is recorded."""

    def __init__(self, noted: Noted, generator: torch.Generator, given: Mapping[int, int]) -> None:
        self._default, self._given = generator, given
        moves = [[0, offset] for offset in noted.offsets]
        self._moves = torch.tensor(moves, dtype=torch.int64, device="cpu").view(-1, 2)
        self._states = torch.zeros_like(self._moves)
        self._made = list(self._states.view(torch.uint8))
        self._read = 0
        self.own = [generator.clone_state() for _ in range(noted.drawn_again)]
        self._sources: list[int] = []

    def state(self, _device: torch.device) -> torch.Tensor:
        """What will hold the state after each replay."""
        self._read += 1
        found: torch.Tensor = self._made[self._read - 1]
        return found

    def again(self, state: torch.Tensor, draw: Callable[[], Any], _restored: Callable[[], Any]) -> Any:
        """Draw from a generator of its own."""
        own = self.own[len(self._sources)]
        made = next((i for i, one in enumerate(self._made) if one is state), None)
        self._sources.append(self._given[id(state)] if made is None else -1 - made)
        default = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(own)
        try:
            return draw()
        finally:
            self._default.graphsafe_set_state(default)

    def begin(self, args: Sequence[Any]) -> None:
        """Before a replay: what is read is as it would be in a run with these arguments."""
        if len(self._moves):
            torch.add(_words(self._default.get_state()), self._moves, out=self._states)
        for own, source in zip(self.own, self._sources, strict=True):
            own.set_state(args[source] if source >= 0 else self._made[-1 - source])


def _words(state: torch.Tensor) -> torch.Tensor:
    """Seed and offset of a generator's state."""
    return state.view(torch.int64)


def random_source() -> Noted | _Taping | None:
    """What stands for the random number generator in this thread; ``None`` for the generator itself."""
    return getattr(_now, "source", None)


@contextlib.contextmanager
def _source(source: Noted | _Taping) -> Iterator[None]:
    _now.source = source
    try:
        yield
    finally:
        _now.source = None


class Tape:
    """One recorded run.

    Args:
        graph: replays it.
        taping: sets what random ops read.
        device: index of the device.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, taping: _Taping, device: int) -> None:
        self._graph, self._taping, self._device = graph, taping, device
        self._spoilt = _spoilt[device]

    @property
    def stale(self) -> bool:
        """Whether it draws from a generator that is not the device's any more: it must not be replayed."""
        return self._spoilt != _spoilt[self._device]

    def replay(self, args: Sequence[Any]) -> None:
        """Do once more what the run did, with the states of generators that are among these arguments."""
        self._taping.begin(args)
        self._graph.replay()


class _Memory:
    """Bytes on the device that lie where they are said to lie; who says so keeps them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaTapes:
    """Records runs on one CUDA device; all of them share one pool of memory.

    A run's memory is taken from the pool, and what it frees is given back to it: another recorded run takes it again. So
    nothing that a run leaves in the pool outlives the next replay of another one, unless a tensor that owns it is held.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # torch's own is of the device on which anything was recorded first
        self._stream: torch.cuda.Stream | None = None
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()

    @contextlib.contextmanager
    def noted(self) -> Iterator[Noted]:
        """While open, what is done with the generator's states is noted."""
        noted = Noted(torch.cuda.get_rng_state(self._device))
        with _source(noted):
            yield noted

    def record(self, run: Callable[[list[Any]], Any], args: list[Any], noted: Noted) -> tuple[Any, Tape]:
        """Run a function, which clears the list that it is given, once, and keep how.

        Args:
            run: a function of a list.
            args: the list: tensors whose memory stays what it is, states of the generator, and numbers.
            noted: an earlier run, with such arguments.

        Returns:
            What it returns, and the recorded run. Tensors among that own memory of the pool.

        Raises:
            Exception: whatever torch raises where something cannot be recorded. Nothing has been computed then.
        """
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
        states = {id(one): i for i, one in enumerate(args) if isinstance(one, torch.Tensor) and not one.is_cuda}
        kept = [one if isinstance(one, torch.Tensor) and not one.is_cuda else None for one in args]
        graph = torch.cuda.CUDAGraph()
        taping = _Taping(noted, generator, states)
        for own in taping.own:
            graph.register_generator_state(own)
        if not self._tapes:  # the pool is gone with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        safe = generator.clone_state()
        clear_workspaces()  # or there would be one more of each
        reason: Exception | None = None
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),  # goes back to it, whatever is raised
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
                _source(taping),
            ):
                try:
                    found = run(args)
                except Exception as error:
                    reason = error
                    raise
        except BaseException as error:
            # The other one may still count as being recorded: it can draw no more.
            generator.graphsafe_set_state(safe)
            _spoilt[index] += 1
            if reason is not None and isinstance(error, Exception):
                raise reason from None  # when the recording ends, CUDA only says that it has failed
            raise
        finally:
            reason = None  # it refers to this frame, which refers to what was computed
        # Seed and offset were set to zero on the stream that was recorded, and are set on this one before each replay.
        torch.cuda.synchronize(self._device)
        clear_workspaces()
        tape = Tape(graph, taping, index)
        self._tapes.add(tape)
        tape.replay(kept)
        return found, tape

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the memory of another one on the device, which it does not keep."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor)
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = torch.as_tensor(_Memory(tensor.data_ptr(), span * tensor.element_size()), device=tensor.device)
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())


def clear_workspaces() -> None:
    """Have cuBLAS give up its workspaces: it takes new ones with its next product on a stream."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def holders(tensor: torch.Tensor) -> int:
    """How many tensors there are with the memory of this one, itself included."""
    return 1 + _references(tensor) - _references_to_one()


@functools.cache
def _references_to_one() -> int:
    return _references(torch.empty(1, device="cpu"))


def _references(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

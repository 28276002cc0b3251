"""Snapshots of everything that a training step may change, so that it can be run again from the same state."""

from __future__ import annotations

import collections
import copy
import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from lightning_remat.exactness._bits import plain, same_bits

MOST_ENTERED = 10_000
"""Items up to which a container is searched. A longer one gets its items back, but what these hold is not restored."""

_FOREIGN = {"builtins", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torch"}
"""Packages whose objects are not searched, except modules: trainers, loggers, data loaders, autograd's graph."""

_CLOSED = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType),
    *(torch.utils.data.Dataset, torch.utils.data.Sampler, torch.utils.data.DataLoader),
)

Undo = Callable[[], object]


class State:
    """A snapshot of parameters, buffers, gradients, random generators and Python attributes, as they are now.

    It holds everything that can be reached from the attributes of modules: containers, objects of the user's own
    classes, arrays and random generators. It is put back in place: the objects stay the same. Copies of tensors are
    kept on the CPU.

    Args:
        *roots: modules, and what a step is given (a batch that the step takes items out of gets them back).
    """

    def __init__(self, *roots: Any) -> None:
        self._undo: list[Undo] = []
        self._leaves: list[tuple[torch.Tensor, torch.Tensor | None, bool]] = []
        self._seen: dict[int, Any] = {}  # ids, with their objects, which must live as long
        devices: set[torch.device] = set()
        for thing in _everything(roots, self._seen):
            if isinstance(thing, torch.Tensor):
                devices.add(thing.device)
                if thing.is_leaf:
                    self._leaves.append((thing, thing.grad, thing.requires_grad))
            undo = undoing(thing)
            if undo is not None:
                self._undo.append(undo)
        self._undo += [_random_of_process(), *map(_random_of_device, devices)]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
        for tensor, gradient, requires_grad in self._leaves:
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient

    def begin(self) -> None:
        """Put everything back, and remove all gradients."""
        self.restore()
        for tensor, _, _ in self._leaves:
            tensor.grad = None


def _everything(roots: Iterable[Any], seen: dict[int, Any]) -> Iterator[Any]:
    """All objects that can be reached from ``roots``, each once, and before those that it holds."""
    waiting = collections.deque(roots)
    while waiting:
        thing = waiting.popleft()
        if id(thing) in seen or thing is None or isinstance(thing, (bool, int, float, str, bytes, *_CLOSED)):
            continue
        seen[id(thing)] = thing
        yield thing
        waiting.extend(_parts(thing))


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, (dict, list, tuple, set, frozenset, collections.deque)):
        if len(thing) > MOST_ENTERED:
            return ()
        own = [vars(thing)] if hasattr(thing, "__dict__") and not is_foreign(thing) else []
        return [*own, *(thing.values() if isinstance(thing, dict) else thing)]
    if isinstance(thing, torch.Tensor) or not hasattr(thing, "__dict__"):
        return ()
    return (vars(thing),) if isinstance(thing, torch.nn.Module) or not is_foreign(thing) else ()


def is_foreign(thing: Any) -> bool:
    """Whether an object holds none of the user's state: it is not searched, unless it is a module."""
    return isinstance(thing, _CLOSED) or type(thing).__module__.partition(".")[0] in _FOREIGN


@functools.singledispatch
def undoing(_thing: Any) -> Undo | None:
    """A function that puts an object back as it is now; ``None`` for objects that have nothing to put back."""
    return None


@undoing.register
def _(thing: torch.Tensor) -> Undo | None:
    if torch.nn.parameter.is_lazy(thing) or thing.device.type == "meta" or thing.layout is not torch.strided:
        return None
    kept = plain(thing).to("cpu", copy=True)

    def undo() -> None:
        if not same_bits(thing.cpu(), kept):
            thing.copy_(kept)

    return undo


@undoing.register
def _(thing: dict) -> Undo:  # type: ignore[type-arg]
    kept = list(thing.items())
    kind = (
        collections.OrderedDict if isinstance(thing, collections.OrderedDict) else dict
    )  # past the methods of a subclass, which may forbid changes

    def undo() -> None:
        now = list(thing.items())
        if len(now) != len(kept) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, kept, strict=True)):
            kind.clear(thing)
            for key, value in kept:
                kind.__setitem__(thing, key, value)

    return undo


@undoing.register(list)
@undoing.register(collections.deque)
def _(thing: Any) -> Undo:
    kept = list(thing)

    def undo() -> None:
        thing.clear()
        thing.extend(kept)

    return undo


@undoing.register
def _(thing: set) -> Undo:  # type: ignore[type-arg]
    kept = set(thing)

    def undo() -> None:
        thing.clear()
        thing.update(kept)

    return undo


@undoing.register
def _(thing: np.ndarray) -> Undo:
    kept = thing.copy()

    def undo() -> None:
        if thing.flags.writeable:
            thing[...] = kept

    return undo


@undoing.register
def _(thing: torch.Generator) -> Undo:
    return functools.partial(thing.set_state, thing.get_state())


@undoing.register
def _(thing: np.random.Generator) -> Undo:
    kept = copy.deepcopy(thing.bit_generator.state)
    return lambda: setattr(thing.bit_generator, "state", kept)


@undoing.register(random.Random)
def _(thing: random.Random) -> Undo:
    return functools.partial(thing.setstate, thing.getstate())


@undoing.register
def _(thing: np.random.RandomState) -> Undo:
    return functools.partial(thing.set_state, thing.get_state())


def _random_of_process() -> Undo:
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def undo() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002 - what users draw from
        torch.set_rng_state(of_torch)

    return undo


def _random_of_device(device: torch.device) -> Undo:
    if device.type != "cuda":
        return lambda: None
    return functools.partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)

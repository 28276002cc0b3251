"""Snapshots of what a training step may change, from which the step can be undone."""

from __future__ import annotations

import collections
import dataclasses
import random
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_remat._blocks import block_bytes
from lightning_remat.callbacks.deferred import is_deferred
from lightning_remat.callbacks.lightning_internals import MODULE_OWN
from lightning_remat.exactness import is_foreign, undoing

MOST_ENTERED = 10_000
"""Items up to which a container is searched. Longer ones are not restored, except lists in the module's attributes."""

_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None)})
_INTERNAL = frozenset(vars(nn.Module())) | MODULE_OWN
_CLOSED = sys.stdlib_module_names | {__name__.partition(".")[0]}
_LIGHTNINGS = frozenset({"_current_fx_name"})
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_NOTHING = object()


class Held(NamedTuple):
    """A tensor that a module, what can be reached from it, or a batch holds.

    Attributes:
        place: where it is held, the same from step to step: a tensor that replaces it is found under the same place.
        tensor: the tensor itself.
        given: whether it belongs to the batch.
    """

    place: Hashable
    tensor: torch.Tensor
    given: bool = False


@dataclasses.dataclass
class Known:
    """What a snapshot has to search, kept from earlier snapshots so that not every step searches everything.

    Attributes:
        entered: ids of the containers and objects (beside modules and the batch) that are searched; ``None`` for all.
        parts: for each module, by its id: the module, how many attributes it had, and the names of those that are
            searched.
    """

    entered: set[int] | None = None
    parts: dict[int, tuple[nn.Module, int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)


class ModuleState:
    """A snapshot of a module: its tensors, random generators, numbers, texts and containers, as they are now.

    These are parameters, buffers, and what can be reached from attributes of the module and its submodules: tensors,
    containers, objects of the user's own classes. Metrics that are deferred are left out: they are updated when a step
    has returned.

    Args:
        module: the module.
        device: its random generator is saved, beside those of the CPU, Python and NumPy.
        batch: what the step is given, and may change too.
        copy: returns the copy of a tensor, or ``None`` for one that is not to be copied. By default all are copied to
            host memory.
        known: what to search; by default everything.

    Attributes:
        tensors: all tensors that were found, each once.
        copied: indices of those in ``tensors`` that were copied.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        device: torch.device,
        batch: Any = (),
        *,
        copy: Callable[[Held], torch.Tensor | None] | None = None,
        known: Known | None = None,
    ) -> None:
        self._device = device
        walk = _Walk(known or Known())
        walk.through(module, batch)
        self.tensors = walk.tensors
        self._containers = [(owner, one, _shallow(one)) for owner, one in walk.containers]
        self._parents = walk.parents
        self._generators = [undo for one in walk.generators if (undo := undoing(one)) is not None]
        copy = copy or on_host
        with torch.no_grad():
            kept = [(i, held.tensor, copy(held)) for i, held in enumerate(self.tensors)]
        # With each copy, the memory that the tensor had: `tensor.data = ...` gives it another.
        self._copies = {i: (tensor, tensor.detach(), one) for i, tensor, one in kept if one is not None}
        self.copied = self._copies.keys()
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - what users draw from
        self._device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Put everything back as it was, as far as it was copied."""
        for owner, container, kept in self._containers:
            _put_back(container, kept, attributes=owner is not container)
        with torch.no_grad():
            for tensor, before, copy in self._copies.values():
                if _moved(tensor, before):
                    tensor.data = before
                written_once(tensor).copy_(copy)
        for undo in self._generators:
            undo()
        of_python, of_numpy, of_torch = self._random
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random, self._device)

    def values(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """The numbers and texts among the attributes and dicts of the snapshot, as they are now, each with its dict."""
        attributes = (one for _, one, _ in self._containers if isinstance(one, dict))
        return [
            (one, {k: v for k, v in one.items() if type(v) in _SIMPLE and k not in _LIGHTNINGS}) for one in attributes
        ]

    def copy_of(self, index: int) -> torch.Tensor:
        """The copy of one of ``tensors``, in the form that `written_once` gives."""
        return self._copies[index][2]

    def is_moved(self, index: int) -> bool:
        """Whether a copied tensor has other memory now."""
        tensor, before, _ = self._copies[index]
        return _moved(tensor, before)

    def lively(self) -> set[int]:
        """Ids of the containers and objects that lead to tensors, or that have changed since the snapshot."""
        own = {held.place[0] for held in self.tensors if not held.given and isinstance(held.place, tuple)}
        found = own | {id(owner) for owner, one, kept in self._containers if _differs(one, kept)}
        waiting = list(found)
        while waiting:
            parent = self._parents.get(waiting.pop())
            if parent is not None and parent not in found:
                found.add(parent)
                waiting.append(parent)
        return found


def on_host(held: Held) -> torch.Tensor:
    """A copy in host memory."""
    return written_once(held.tensor.detach()).to("cpu", copy=True)


def written_once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; where several of its elements share memory (an expanded one), a view that has each element once."""
    if tensor.is_contiguous():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if span >= tensor.numel() else tensor.as_strided((span,), (1,))


def nbytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that copies of those of these tensors that are on a device take there, each in memory of its own."""
    kind = device.type
    return sum(block_bytes(written_once(one).nbytes, kind) for one in tensors if one.device.type == kind)


def _moved(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return tensor.data_ptr() != before.data_ptr() or tensor.shape != before.shape


class _Walk:
    """A search for everything that can be reached from a module and a batch."""

    def __init__(self, known: Known) -> None:
        self.tensors: list[Held] = []
        self.containers: list[tuple[Any, Any]] = []  # each after the object that it belongs to
        self.generators: list[Any] = []
        self.parents: dict[int, int] = {}
        self._known = known
        self._seen: set[int] = set()
        self._given = 0

    def through(self, module: pl.LightningModule, batch: Any) -> None:
        lists = [one for one in vars(module).values() if type(one) is list]  # however long they are
        self.containers += [(one, one) for one in lists if not self._enters(one, given=False)]
        for root, given in ((batch, True), (module, False)):
            waiting = [root]
            while waiting:
                thing = waiting.pop()
                if id(thing) in self._seen:
                    continue
                self._seen.add(id(thing))
                if isinstance(thing, nn.Module):
                    self._module(thing, given, waiting)
                else:
                    for name, value in self._items(thing):
                        self._visit(thing, name, value, given, waiting)

    def _module(self, thing: nn.Module, given: bool, waiting: list[Any]) -> None:
        own = vars(thing)
        module, size, names = self._known.parts.get(id(thing), (None, 0, ()))
        if module is not thing or size != len(own):
            if isinstance(thing, (Metric, MetricCollection)) and is_deferred(thing):
                return
            names = tuple(k for k, v in own.items() if k not in _INTERNAL and (v is None or type(v) not in _SIMPLE))
            self._known.parts[id(thing)] = thing, len(own), names
        self.containers.append((thing, own))
        for holder in (own["_parameters"], own["_buffers"]):
            if holder:
                self.containers.append((thing, holder))
                for name, value in holder.items():
                    if value is not None:
                        self._tensor(thing, name, value, given, waiting)
        for name in names:
            if own.get(name) is not None:
                self._visit(thing, name, own[name], given, waiting)
        for part in own["_modules"].values():
            if part is not None:
                self.parents.setdefault(id(part), id(thing))
                waiting.append(part)

    def _items(self, thing: Any) -> Iterable[tuple[Any, Any]]:
        if isinstance(thing, dict):
            self.containers.append((thing, thing))
            return thing.items()
        if isinstance(thing, (list, tuple, set, frozenset, collections.deque)):
            if not isinstance(thing, (tuple, frozenset)):
                self.containers.append((thing, thing))
            return enumerate(thing)
        attributes: dict[str, Any] = vars(thing)
        self.containers.append((thing, attributes))
        return attributes.items()

    def _visit(self, holder: Any, name: Any, value: Any, given: bool, waiting: list[Any]) -> None:
        if type(value) in _SIMPLE:
            return
        if isinstance(value, torch.Tensor):
            self._tensor(holder, name, value, given, waiting)
        elif isinstance(value, nn.Module):
            self.parents.setdefault(id(value), id(holder))
            waiting.append(value)
        elif isinstance(value, _GENERATORS):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.generators.append(value)
        elif self._enters(value, given):
            self.parents.setdefault(id(value), id(holder))
            waiting.append(value)

    def _tensor(self, holder: Any, name: Any, value: torch.Tensor, given: bool, waiting: list[Any]) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if type(value) in _PLAIN:
            followed = not value.is_meta and value.layout is torch.strided
        elif hasattr(value, "__tensor_flatten__"):  # a wrapper subclass: the memory is that of its inner tensors
            for part in value.__tensor_flatten__()[0]:
                self._visit(value, part, getattr(value, part), given, waiting)
            return
        else:
            followed = not nn.parameter.is_lazy(value) and not value.is_meta and value.layout is torch.strided
        if followed:
            self._given += given
            self.tensors.append(Held(self._given if given else (id(holder), name), value, given))

    def _enters(self, thing: Any, given: bool) -> bool:
        if not given and self._known.entered is not None:
            return id(thing) in self._known.entered
        if isinstance(thing, (dict, list, tuple, set, frozenset, collections.deque)):
            return len(thing) <= MOST_ENTERED
        own = type(thing).__module__.partition(".")[0] not in _CLOSED
        return own and hasattr(thing, "__dict__") and not is_foreign(thing)


def _shallow(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _differs(container: Any, kept: Any) -> bool:
    if len(container) != len(kept):
        return True
    if isinstance(container, dict):
        return any(container.get(name, _NOTHING) is not value for name, value in kept.items())
    return any(one is not other for one, other in zip(container, kept, strict=True))


def _put_back(container: Any, kept: Any, attributes: bool) -> None:
    """Put items back; of attributes only plain values and tensors, since others may stand in for methods just now."""
    if not _differs(container, kept):
        return
    if attributes:
        for name in [name for name, value in container.items() if name not in kept and _is_value(value)]:
            del container[name]
        for name, value in kept.items():
            if name not in _LIGHTNINGS and _is_value(value) and _is_value(container.get(name)):
                container[name] = value
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, kept)
    elif isinstance(container, set):
        container.clear()
        container.update(kept)
    else:
        container.clear()
        container.extend(kept)


def _is_value(value: Any) -> bool:
    return type(value) in _SIMPLE or isinstance(value, (torch.Tensor, tuple))

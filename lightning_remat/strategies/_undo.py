"""Undoing a training step: by copies of everything at first, then of what steps were seen to change."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_remat.callbacks.module_state import Held, Known, ModuleState, nbytes_on, on_host, written_once
from lightning_remat.errors import listed
from lightning_remat.exactness import digest, is_out_of_memory, same_bits


@dataclasses.dataclass
class _Copied:
    """A tensor that is copied before each step.

    Attributes:
        nbytes: bytes that its copy takes on the device.
        memory: the tensor that holds the copy; ``None`` before the first one.
        on_host: whether the copy is kept in host memory.
    """

    nbytes: int
    memory: torch.Tensor | None = None
    on_host: bool = False


class Undo:
    """Takes a snapshot before each training step of what the step may change, and learns what that is.

    In the first step everything that it may change is copied to host memory. When forward and backward have run, before
    the optimizer's step, everything is compared bit by bit with these copies (a change through ``.data`` leaves no
    other trace), and from then on only what has changed is copied, on its own device. The same is done once more when
    the optimizer has changed the parameters: an EMA teacher that begins as a copy of the student does not change before
    that. What later steps change for the first time is noticed by its address and version counter, and copied from then
    on.

    Args:
        module: the module of the step.
        device: the device that the step runs on.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self._copied: dict[Hashable, _Copied] = {}  # by place
        self._known = Known(entered=set())
        self._everything = self._unknown = True
        self._untrained: Trained | None = None
        self._unknown_bytes = nbytes_on(device, module.buffers())

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take on the device between steps.

        Before the first step has ended this is an estimate: the bytes of all buffers, or on the CPU, whose memory is
        the host's, of everything that is copied then.
        """
        if self._unknown:
            return self._unknown_bytes
        return sum(one.nbytes for one in self._copied.values() if not one.on_host)

    def begin(self, batch: Any) -> StepState:
        """Take a snapshot of what a step on this batch may change."""
        if self._unknown:
            self._untrained = self._untrained or Trained(self._module)
        elif self._untrained is not None and self._untrained.has_changed():
            self._everything, self._untrained = True, None
        known = None if self._everything else self._known
        state = StepState(self._everything, self._module, self._device, batch, copy=self._copy, known=known)
        if self._unknown and is_host(self._device):
            copies = [*(held.tensor for held in state.tensors), torch.get_rng_state()]
            self._unknown_bytes = nbytes_on(self._device, copies)
        return state

    def learn(self, state: StepState) -> None:
        """A step has ended: what it has changed, compared with how it began, is copied from now on."""
        for held in state.changed():
            nbytes = nbytes_on(self._device, [held.tensor])
            self._copied.setdefault(held.place, _Copied(nbytes, on_host=nbytes == 0))
        if state.everything:
            assert self._known.entered is not None
            self._known.entered |= state.lively()
            self._everything = self._unknown = False

    def keep_on_host(self) -> None:
        """Keep the copies that have no memory yet in host memory: the device has no room for them."""
        for one in self._copied.values():
            one.on_host = one.on_host or one.memory is None

    def _copy(self, held: Held) -> torch.Tensor | None:
        if self._everything:
            return on_host(held)
        known = self._copied.get(held.place)
        if known is None:
            return None
        now = written_once(held.tensor.detach())
        memory = known.memory
        if memory is None or (memory.shape, memory.dtype) != (now.shape, now.dtype):
            known.memory = None
            memory = known.memory = _memory(now, known)
            known.nbytes = nbytes_on(self._device, [memory])
        return memory.copy_(now, non_blocking=True)


def is_host(device: torch.device) -> bool:
    """Whether the device's memory is the host's."""
    return device.type == "cpu"


def _memory(like: torch.Tensor, known: _Copied) -> torch.Tensor:
    if not known.on_host:
        try:
            return torch.empty_like(like)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            known.on_host = True
    return torch.empty_like(like, device="cpu", pin_memory=like.device.type == "cuda")


class Trained:
    """Tells whether the values of the trainable parameters have changed since it was made, or last asked."""

    def __init__(self, module: pl.LightningModule) -> None:
        trained = (one for one in module.parameters() if one.requires_grad and not nn.parameter.is_lazy(one))
        self._parameters = [one for one in trained if not hasattr(one, "__tensor_flatten__")]
        self._marks, self._digests = self._now()

    def has_changed(self) -> bool:
        """Whether they have changed; their contents are compared only if they were written to."""
        if [_mark(one) for one in self._parameters] == self._marks:
            return False
        before, (self._marks, now) = self._digests, self._now()
        return any(not torch.equal(one, other) for one, other in zip(before, now, strict=True))

    def _now(self) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
        with torch.no_grad():
            return [_mark(one) for one in self._parameters], [digest(one) for one in self._parameters]


class StepState(ModuleState):
    """The snapshot that undoes one step, and what the step has changed since.

    Attributes:
        everything: whether everything that the step may change is copied.
    """

    def __init__(self, everything: bool, module: pl.LightningModule, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        self._module, self.everything = module, everything
        self._marks = self.marks()
        self._digests: dict[int, torch.Tensor] | None = None

    def changed(self) -> list[Held]:
        """The tensors that have changed; if not everything is copied, as far as addresses and version counters tell."""
        found = self._seen_to_change()
        if self.everything:
            found |= {i for i in self.copied if self.is_moved(i) or not self._has_kept_its_bits(i)}
        return [self.tensors[i] for i in sorted(found)]

    def lost(self) -> list[Held]:
        """The tensors that have changed and are not copied, as far as addresses and version counters tell."""
        return [self.tensors[i] for i in sorted(self._seen_to_change() - self.copied)]

    def restore(self) -> None:
        """Put everything back. What is not copied is hashed, for `doubtful` to find changes without another trace."""
        super().restore()
        if self._digests is None:
            rest = (i for i in range(len(self.tensors)) if i not in self.copied)
            self._digests = {i: digest(self.tensors[i].tensor) for i in rest}

    def doubtful(self) -> list[Held]:
        """Tensors without a copy that the repeated step has changed without a trace: the first run may have, too."""
        seen, digests = self._seen_to_change(), self._digests or {}
        rest = ((i, before) for i, before in digests.items() if i not in seen)
        return [self.tensors[i] for i, before in rest if not torch.equal(digest(self.tensors[i].tensor), before)]

    def marks(self) -> list[tuple[int, int]]:
        """Address and version counter of every tensor, as they are now."""
        return [_mark(held.tensor) for held in self.tensors]

    def taken_down(self, marks: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Keep the present values of numbers, texts, and the copied tensors that have not changed since ``marks``.

        Returns:
            A function that gives these values back, where they are others by then.
        """
        here = {i: on_host(self.tensors[i]) for i in self.copied if _mark(self.tensors[i].tensor) == marks[i]}
        values = self.values()

        def give() -> None:
            with torch.no_grad():
                for i, copy in here.items():
                    now = written_once(self.tensors[i].tensor.detach())
                    if not same_bits(now.cpu(), copy):
                        now.copy_(copy)
            for container, earlier in values:
                container.update(earlier)

        return give

    def names(self, tensors: Sequence[Held]) -> str:
        """The names of some of these tensors, for a message."""
        parts = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
        known = {id(tensor): name for name, tensor in parts}
        words = [
            known.get(id(one.tensor), "a tensor of the batch" if one.given else _described(one)) for one in tensors
        ]
        return listed(words)

    def _has_kept_its_bits(self, index: int) -> bool:
        return same_bits(written_once(self.tensors[index].tensor.detach()).cpu(), self.copy_of(index))

    def _seen_to_change(self) -> set[int]:
        return {i for i, mark in enumerate(self._marks) if _mark(self.tensors[i].tensor) != mark}


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """A tensor's address, and its version counter: how often it was written to, as far as autograd knows."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _described(held: Held) -> str:
    name = held.place[1] if isinstance(held.place, tuple) else held.place
    return f"a tensor of shape {tuple(held.tensor.shape)} that the module holds under {name!r}"

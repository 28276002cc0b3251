"""Copying what is changed between a forward and its backward, where the backward would read it again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_remat._blocks import block_bytes
from lightning_remat.capture import CapturedGraph
from lightning_remat.capture import _torch as internals
from lightning_remat.lowering import read_again, read_by_gradients
from lightning_remat.report import format_bytes
from lightning_remat.schedule import Schedule

log = logging.getLogger(__name__)

READ_LATER = (
    "a buffer is changed between forward and backward, and the backward reads it as it is then (a batch norm in evaluation "
    "mode whose statistics another call moves): gradients of this step may be others than in eager mode, and later calls run "
    "as before"
)

WATCHED_RUNS = 2
"""First runs of a plan in which buffers are watched for changes between forward and backward."""


class MovingBuffers:
    """The buffers among the arguments of one captured graph that must be copied, since its backward reads them again.

    A buffer that eager mode reads in the forward alone may be changed before the backward (the queue of MoCo). In the
    first runs of a plan every buffer that its backward would read for a recomputation is copied, and compared when the
    backward begins; after that those that were seen to change are copied. Parameters (frozen ones too) and the batch
    are not copied: they may be large, and nothing but an optimizer or the next step changes them.

    Args:
        captured: the graph.
        inputs: the arguments of the captured function, as it was captured.
        batch: ids of the call's own inputs.

    Attributes:
        planned_bytes: bytes of copies that the graph's plan has room for; set by the code that makes the plan.
        most_bytes: bytes that are copied at most while buffers are watched.
    """

    def __init__(self, captured: CapturedGraph, inputs: Sequence[Any], batch: Collection[int]) -> None:
        self.planned_bytes = 0
        self._arguments = captured.arguments
        self._names = {i: str(node.target) for i, node in zip(captured.arguments, captured.primals, strict=True)}
        self._held = {
            i
            for i, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and not value.requires_grad and not isinstance(value, torch.nn.Parameter)
        }
        self._in_gradients = {self._arguments[primal] for primal in read_by_gradients(captured)}
        self._read_again: dict[int, list[int]] = {}
        self._bytes: dict[int, int] = {}
        most = (self._arguments[primal] for primal in read_again(captured))
        watched = [inputs[i] for i in most if i in self._held and id(inputs[i]) not in batch]
        self.most_bytes = sum(block_bytes(one.nbytes, one.device.type) for one in watched)

    def add(self, plan: int, captured: CapturedGraph, schedule: Schedule) -> None:
        """Add a plan, by its number."""
        # Inputs that are no arguments (`None`) are bases that the step itself writes to, or parts of tensor subclasses.
        again = (self._arguments[primal] for primal in read_again(captured, schedule))
        self._read_again[plan] = [i for i in again if i in self._held]

    @property
    def unplanned_bytes(self) -> int:
        """Bytes that are copied and that the plan has no room for."""
        return max(0, sum(self._bytes.values()) - self.planned_bytes)

    @property
    def moving(self) -> Collection[int]:
        """Positions of the arguments that are copied in every run."""
        return self._bytes.keys()

    def watched(self) -> int:
        """A plan's first runs are over: returns the bytes of copies that were planned for these runs alone."""
        copied = sum(self._bytes.values())
        spare, self.planned_bytes = max(0, self.planned_bytes - copied), min(self.planned_bytes, copied)
        return spare

    def copies(self, args: Sequence[Any], plan: int, runs: int, batch: Collection[int]) -> dict[int, torch.Tensor]:
        """The copies for a run of a plan, by the positions of the arguments.

        Args:
            args: the arguments of the run.
            plan: number of the plan.
            runs: how often it has run, this run included.
            batch: ids of the call's own inputs.
        """
        which: Iterable[int] = self._bytes
        if runs <= WATCHED_RUNS:
            which = [i for i in self._read_again[plan] if id(args[i]) not in batch]
        return {i: internals.copied(args[i]) for i in which}

    def watch(
        self, args: Sequence[Any], copies: Mapping[int, torch.Tensor], name: str, give_up: Callable[[str], None]
    ) -> Callable[[], None]:
        """A function to call when the backward begins: it looks which arguments have changed since they were copied.

        It keeps no other arguments alive.

        Args:
            args: the arguments.
            copies: those that were copied, by position.
            name: of the step.
            give_up: told why later calls run as before, where eager's own backward reads what has changed, as it is then.
        """
        pairs = {i: (args[i], copy) for i, copy in copies.items()}

        def compare() -> None:
            for i, (original, copy) in pairs.items():
                if i not in self._bytes and not torch.equal(original, copy):
                    self._bytes[i] = block_bytes(copy.nbytes, copy.device.type)
                    if i in self._in_gradients:
                        give_up(READ_LATER)
                        continue
                    log.info(
                        "%s: %s is changed between forward and backward: each step copies it (%s)",
                        name,
                        self._names[i],
                        format_bytes(copy.nbytes),
                    )

        return compare


class ChangedActivations:
    """What a part of a step is given or hands out, and later code writes to in place although its backward reads it again.

    Eager mode has not saved that then. In the call in which the part is captured, its backward reads copies, and it is
    noted what is changed; from then on there are copies of that alone.

    Args:
        exchange: runs the part.
    """

    def __init__(self, exchange: internals.Exchange) -> None:
        self._exchange = exchange
        self._inputs: set[int] = set()
        # Whether one of them has been changed; the outputs that lie there, or the position of the argument.
        self._watched: list[tuple[Callable[[], bool], frozenset[int], int | None]] = []

    def begin(self, args: Sequence[Any], batch: Collection[int], new: bool) -> None:
        """Before the forward: have copies made.

        Args:
            args: its arguments.
            batch: ids of the call's own inputs, which are not copied.
            new: whether the part was captured in this call.
        """
        if not new:
            self._watched.clear()
        which = _activations(args, batch) if new else self._inputs
        self._exchange.apart = new
        addresses = (internals.address_of(args[i]) for i in which)
        self._exchange.moving = {address for address in addresses if address is not None}

    def watch(self, args: Sequence[Any], batch: Collection[int], outputs: Sequence[Any]) -> None:
        """After the forward of a part that was captured in this call."""
        for i in _activations(args, batch):
            self._watched.append((internals.changed_since(args[i]), frozenset(), i))
        for one in outputs:
            address = internals.address_of(one)
            if address is not None and address in self._exchange.places:
                self._watched.append((internals.changed_since(one), self._exchange.places[address], None))

    def look(self) -> None:
        """See what has been changed since."""
        for changed, outputs, argument in self._watched:
            if changed():
                self._exchange.changed |= outputs
                self._inputs.update(() if argument is None else (argument,))


def _activations(args: Sequence[Any], batch: Collection[int]) -> list[int]:
    """Positions of the arguments that earlier parts of a step have computed, and that get gradients."""
    return [
        i
        for i, one in enumerate(args)
        if type(one) is torch.Tensor and one.grad_fn is not None and id(one) not in batch
    ]

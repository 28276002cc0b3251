"""Measuring one whole step: the memory that is held while each of its graphs runs, and between them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_remat.capture import _torch as internals
from lightning_remat.measure import PeakMemory, track_peak
from lightning_remat.planner._beside import Held
from lightning_remat.schedule import OUTSIDE

ELSEWHERE = (-1, OUTSIDE)
"""Label of what runs before the forward of a step's first graph, and after its backward."""

AFTERWARDS = (-1, "")
"""Label of what runs when the step is over."""

MOST_UPDATES = 8
"""Optimizer steps (of other networks, say) after which a backward that has not ended is no longer waited for."""


class MeasuredStep:
    """One step that is measured: from construction to `end`, or to the first optimizer step after its backward.

    Another measurement ends it too. On the CPU it must not end within the backward: autograd would start the profiler
    again.

    Args:
        device: the device that the step runs on; one that `possible` allows.
        reduces: whether gradients are reduced after the backward of the first graph, which takes memory too: what runs then
            counts as a part of that.
    """

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether a step of this thread can be measured there.

        On the CPU only steps of the main thread can: a thread that ends while its profiler runs crashes the process,
        and the end of a step without a backward is not known.
        """
        return device.type == "cuda" or threading.current_thread() is threading.main_thread()

    def __init__(self, device: torch.device, reduces: bool = False) -> None:
        self._reduces, self._complete = reduces, False
        self._thread = threading.get_ident()
        self._updates = 0
        self._open = contextlib.ExitStack()
        self._peak: PeakMemory = self._open.enter_context(track_peak(device, give_way=self.give_way))
        self._labels: list[tuple[int, str]] = [ELSEWHERE]
        self._over = self._cut_short = False
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    def begins(self, position: int, phase: str) -> None:
        """The forward or backward of the graph at this position of the step begins."""
        if not self._over:
            self._peak.mark()
            self._labels.append((position, phase))

    def ends(self, position: int, phase: str) -> None:
        """That forward or backward has ended; the step is over with the backward that the first graph's is a part of."""
        if self._over:
            return
        self._peak.mark()
        is_last = phase == "backward" and position == 0
        self._complete = self._complete or is_last
        if is_last and self._reduces:
            self._labels.append((position, phase))
            return
        self._labels.append((position if phase == "forward" else position - 1, OUTSIDE))
        if is_last:
            internals.after_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        """What runs from here on is no part of the step."""
        if not self._over:
            self._peak.mark()
            self._labels.append(AFTERWARDS)
            self._over = True

    @property
    def is_complete(self) -> bool:
        """Whether the backward of its first graph has ended."""
        return self._complete

    def end(self) -> None:
        """End the measurement: the step is over, or will not be completed."""
        self._stop()
        self._hook.remove()

    def _stop(self) -> None:
        self._open.close()
        self._over = True

    def give_way(self) -> None:
        """End the measurement for another one: the step counts as unmeasured, unless it was over.

        In a backward (where a hook is captured, say) it does not end yet.
        """
        self._cut_short = self._cut_short or not self._complete
        if internals.backward_number() < 0:
            self._stop()

    def _before_update(self, *_: object) -> None:
        if self._thread != threading.get_ident() or internals.backward_number() >= 0:
            return  # in another thread, or by a hook of a parameter
        self._updates += 1
        if self._complete:  # otherwise it is another network that is updated
            self._stop()  # the hook itself cannot be removed while hooks are called
        elif self._updates == MOST_UPDATES:  # perhaps no backward comes
            self.give_way()

    def held(self, graphs: int, at_start_bytes: int, kept_free_bytes: int = 0) -> list[Held] | None:
        """The most that was held, for each graph; ``None`` where the step could not be measured, or not to its end.

        Args:
            graphs: how many graphs the step has.
            at_start_bytes: what was held when the step began, for devices that do not count it themselves (the CPU).
            kept_free_bytes: bytes that are to be kept free for something else; they count as held.
        """
        if self._cut_short or not self._peak.stretches:
            return None
        if self._peak.allocated_bytes is not None and self._peak.peak_bytes is not None:
            at_start_bytes = self._peak.allocated_bytes - self._peak.peak_bytes
        found: dict[tuple[int, str], int] = {}
        for label, stretch in zip(self._labels, self._peak.stretches, strict=True):
            found[label] = max(found.get(label, 0), at_start_bytes + kept_free_bytes + stretch.peak_bytes)
        each = [Held(*(found.get((i, phase)) for phase in ("forward", "backward", OUTSIDE))) for i in range(graphs)]
        return [dataclasses.replace(each[0], elsewhere_bytes=found[ELSEWHERE]), *each[1:]]

"""One step that is measured as a whole: what is held while each of its graphs runs, and between them."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_remat.measure import PeakMemory, track_peak
from lightning_remat.planner._beside import OUTSIDE, Held

MOST_UPDATES = 8
"""Of other networks, while the backward of a measured step is waited for: it is measured no longer."""


class MeasuredStep:
    """One step that is measured: begins when this is made, and ends with `end`, or when an optimizer begins to update.

    On the CPU it must not end within the backward: autograd would switch the profiler on again. What measures next ends it too.

    Args:
        device: where it runs; one that `possible` allows.
    """

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether a step of this thread can be measured there.

        On the CPU only those of the main thread: a thread that ends while its profiler runs takes the process down with it,
        and a step that has no backward is nowhere known to be over.
        """
        return device.type == "cuda" or threading.current_thread() is threading.main_thread()

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.get_ident()
        self._updates = 0
        self._open = contextlib.ExitStack()
        self._peak: PeakMemory = self._open.enter_context(track_peak(device, give_way=self.give_way))
        self._labels: list[tuple[int, str]] = [(-1, "")]
        self._over = self._cut_short = False
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    def begins(self, position: int, phase: str) -> None:
        """The forward or backward of the graph at this position of the step begins."""
        if not self._over:
            self._peak.mark()
            self._labels.append((position, phase))

    def ends(self, position: int, phase: str) -> None:
        """It is done; with the backward of the first graph, nothing comes that counts."""
        if self._over:
            return
        self._peak.mark()
        self._labels.append((position if phase == "forward" else position - 1, OUTSIDE))
        self._over = phase == "backward" and position == 0

    def end(self) -> None:
        """The step is over, or will not come to its end."""
        self._stop()
        self._hook.remove()

    def _stop(self) -> None:
        self._open.close()
        self._over = True

    def give_way(self) -> None:
        """Something else is to be measured: the step counts as unmeasured, unless it was over."""
        self._cut_short = self._cut_short or not self._over
        self._stop()

    def _before_update(self, *_: object) -> None:
        if self._thread != threading.get_ident():
            return
        self._updates += 1
        if self._over:  # if not, what updates meanwhile is another network
            self._stop()  # the hook itself cannot be taken out while hooks are called
        elif self._updates == MOST_UPDATES:  # or no backward comes
            self.give_way()

    def held(self, graphs: int, at_start_bytes: int, kept_free_bytes: int = 0) -> list[Held] | None:
        """What was found, for each of so many graphs; ``None`` where it could not be measured, or not to its end.

        Args:
            graphs: how many there are.
            at_start_bytes: what is held when the step begins. The device's own number is taken where it has one.
            kept_free_bytes: counted as held.
        """
        if self._cut_short or not self._peak.stretches:
            return None
        if self._peak.allocated_bytes is not None and self._peak.peak_bytes is not None:
            at_start_bytes = self._peak.allocated_bytes - self._peak.peak_bytes
        found: dict[tuple[int, str], int] = {}
        for label, stretch in zip(self._labels, self._peak.stretches, strict=True):
            found[label] = max(found.get(label, 0), at_start_bytes + kept_free_bytes + stretch.peak_bytes)
        return [Held(*(found.get((i, phase)) for phase in ("forward", "backward", OUTSIDE))) for i in range(graphs)]

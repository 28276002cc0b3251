"""The three clocks of a step: its ops', and those of the copies in either direction, which run beside them."""

from __future__ import annotations

from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule._schedule import Compute, Copy, Step


class Clocks:
    """Seconds passed for the ops, and until all copies that have begun will have ended.

    Attributes:
        seconds: when what ops have run so far is done, what they waited for included.
    """

    def __init__(self, graph: ComputationGraph) -> None:
        self.seconds = 0.0
        self._graph = graph
        self._idle = [0.0, 0.0]  # to the host, to the device: when the last copy in that direction has ended
        self._ends: dict[tuple[int, bool], float] = {}

    def pass_step(self, step: Step) -> None:
        """Move on by one step.

        Raises:
            ScheduleError: for the end of a copy that has not begun, or any copy where the graph has no host memory.
        """
        if isinstance(step, Compute):
            self.seconds += self._graph.ops[step.op].seconds
        elif isinstance(step, Copy):
            tensor = self._graph.tensors[step.tensor]
            if step.ended:
                if (step.tensor, step.to_device) not in self._ends:
                    raise ScheduleError(f"a copy of {tensor.name} ends that has not begun")
                self.seconds = max(self.seconds, self._ends[step.tensor, step.to_device])
            else:
                host = self._graph.host
                if host is None:
                    raise ScheduleError(f"{tensor.name} is copied, and the graph has no host memory")
                start = max(self.seconds, self._idle[step.to_device])
                if step.to_device:
                    start = max(start, self._ends.get((step.tensor, False), 0.0))
                end = start + host.seconds(self._graph.storages[tensor.storage], to_device=step.to_device)
                self._idle[step.to_device] = self._ends[step.tensor, step.to_device] = end

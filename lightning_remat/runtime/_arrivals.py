"""Gradients that arrive laid out otherwise than a graph was captured for (see ``capture._tangents``).

How the gradient of an output lies is not known before the first backward brings it. There the step is traced once more for
gradients that lie so, the schedule at hand is carried over to it, and the backward that begins is already that of this trace;
the next call is planned with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch.fx

from lightning_remat.capture import CapturedGraph
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._tangents import Given, Layout, Layouts, alike
from lightning_remat.errors import CaptureError
from lightning_remat.lowering import relaid_backward
from lightning_remat.schedule import Schedule

MOST_LAYOUTS = 8
"""In which one graph's gradients may come, beside that which it was captured for; each is a trace of its own."""

PLANNED_LAYOUTS = 2
"""The first of these are planned for; others take the schedule at hand."""


@dataclasses.dataclass(frozen=True)
class _Version:
    """What runs a graph, and for each of its tangents the position of the output, and how it lies."""

    captured: CapturedGraph
    schedule: Schedule
    tangents: tuple[tuple[int | None, Layout], ...]


class Arrivals:
    """The gradients that one captured graph is handed.

    Args:
        exchange: what runs the graph.
        trace: gives the graph, without costs, for gradients that lie so.
    """

    def __init__(self, exchange: internals.Exchange, trace: Callable[[Layouts], CapturedGraph]) -> None:
        self._exchange, self._trace = exchange, trace
        self._versions: dict[int, _Version] = {}
        self._traces: dict[internals.Arrival, CapturedGraph] = {}
        self._to_plan: CapturedGraph | None = None
        self._places: list[int | None] = []  # of the outputs that the tangents are for

    def add(self, version: int, captured: CapturedGraph, schedule: Schedule) -> None:
        """One more version of what runs the graph."""
        tangents = ((internals.output_of_tangent(node), _layout(node)) for node in captured.tangents)
        self._versions[version] = made = _Version(captured, schedule, tuple(tangents))
        self._places = [place for place, _ in made.tangents]

    def tangents(self, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients of outputs, given by their positions, by those of the tangents, counted from the end."""
        return {self._places.index(position) - len(self._places): gradient for position, gradient in given.items()}

    def taken(self) -> CapturedGraph | None:
        """The graph as it was traced for the last gradients that came otherwise than expected, once, to be planned."""
        found, self._to_plan = self._to_plan, None
        return found

    def begin(self, version: int, given: Mapping[int, Given]) -> None:
        """A version's backward begins; ``given``: how the gradients lie that it is handed, by the position of the output.

        Raises:
            CaptureError: where the backward that is about to run is none for such gradients.
            ScheduleError: likewise.
        """
        made_for = self._versions[version]
        came = [given.get(place) if place is not None else None for place, _ in made_for.tangents]
        others: dict[int, Layout] = {}
        for (place, layout), one in zip(made_for.tangents, came, strict=True):
            if place is not None and one is not None and not alike(one[0], one[1], layout.at(one[0])):
                others[place] = Layout.of(*one)
        if not self._exchange.expect(came):
            if others:
                raise CaptureError("its outputs are of tensor subclasses")
            return
        if not others:
            return
        arrival = frozenset(others.items())
        backward = None
        try:
            if not self._exchange.knows(version, arrival):
                backward = relaid_backward(made_for.captured, made_for.schedule, self._traced(arrival))
        except BaseException:
            self._exchange.expect([None] * len(came))
            raise
        self._exchange.arrive(version, arrival, backward)

    def _traced(self, arrival: internals.Arrival) -> CapturedGraph:
        if arrival not in self._traces:
            if len(self._traces) == MOST_LAYOUTS:
                raise CaptureError(f"they have come in more than {MOST_LAYOUTS} ways")
            found = self._traces[arrival] = self._trace(dict(arrival))
            if len(self._traces) <= PLANNED_LAYOUTS:
                self._to_plan = found
        return self._traces[arrival]


def _layout(tangent: torch.fx.Node) -> Layout:
    """How a graph takes it that a tangent lies."""
    value = tangent.meta["val"]
    return Layout.of(*([internals.hint(n) for n in sizes] for sizes in (value.shape, value.stride())))

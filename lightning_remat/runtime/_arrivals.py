"""Gradients of outputs that arrive in another memory layout than a graph was captured for (see ``capture._tangents``).

The layout of an output's gradient is not known before the first backward. If it is another than was assumed, the step
is traced once more for it, the present schedule is carried over to the new trace, and the backward that is about to run
is already that of the new trace; the next call is planned with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import torch.fx

from lightning_remat.capture import CapturedGraph
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._tangents import Given, Layout, Layouts, alike
from lightning_remat.errors import CaptureError
from lightning_remat.lowering import relaid_backward
from lightning_remat.schedule import Schedule

MOST_LAYOUTS = 8
"""Combinations of layouts that one graph is traced for, at most, beside the one that it was captured for."""

PLANNED_LAYOUTS = 2
"""So many of these have plans of their own made; further ones take the present schedule."""


@dataclasses.dataclass(frozen=True)
class _Version:
    """One version of a graph; for each of its tangents, the position of the output, and the expected layout."""

    captured: CapturedGraph
    schedule: Schedule
    tangents: tuple[tuple[int | None, Layout], ...]


class Arrivals:
    """The layouts in which one captured graph's backward is given the gradients of its outputs (its tangents).

    Args:
        exchange: runs the graph's versions.
        trace: traces the graph, without costs, for gradients of these layouts.
    """

    def __init__(self, exchange: internals.Exchange, trace: Callable[[Layouts], CapturedGraph]) -> None:
        self._exchange, self._trace = exchange, trace
        self._versions: dict[int, _Version] = {}
        self._traces: dict[internals.Arrival, CapturedGraph] = {}
        self._to_plan: CapturedGraph | None = None
        self._places: list[int | None] = []  # for each tangent, the position of its output

    def add(self, version: int, captured: CapturedGraph, schedule: Schedule) -> None:
        """Add a version of the graph."""
        tangents = ((internals.output_of_tangent(node), _layout(node)) for node in captured.tangents)
        self._versions[version] = made = _Version(captured, schedule, tuple(tangents))
        self._places = [place for place, _ in made.tangents]

    def tangents(self, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients, given by the positions of their outputs, by the positions of the tangents (from the end)."""
        return {self._places.index(position) - len(self._places): gradient for position, gradient in given.items()}

    def taken(self) -> CapturedGraph | None:
        """The graph as traced for layouts that were new since the last call, to be planned; ``None`` for none."""
        found, self._to_plan = self._to_plan, None
        return found

    def begin(self, version: int, given: Mapping[int, Given], ported: Collection[int] = ()) -> None:
        """A version's backward begins: make it one for the layouts of its gradients.

        Args:
            version: number of the version.
            given: shape and strides of the gradients that it is given, by the position of the output.
            ported: positions of those that autograd does not hand over: it has zeros in their places, laid out as traced.

        Raises:
            CaptureError, ScheduleError: where no backward could be made for these layouts.
        """
        made_for = self._versions[version]
        came = [given.get(place) if place is not None else None for place, _ in made_for.tangents]
        others: dict[int, Layout] = {}
        for (place, layout), one in zip(made_for.tangents, came, strict=True):
            if place is not None and one is not None and not alike(one[0], one[1], layout.at(one[0])):
                others[place] = Layout.of(*one)
        handed_over = ((place, one) for (place, _), one in zip(made_for.tangents, came, strict=True))
        if not self._exchange.expect([None if place in ported else one for place, one in handed_over]):
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
    """The layout that a graph was traced with for a tangent."""
    value = tangent.meta["val"]
    return Layout.of(*([internals.hint(n) for n in sizes] for sizes in (value.shape, value.stride())))

"""Steps in which more runs than one captured graph: they are measured as a whole, and planned again with the result."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_remat._recent import Recent
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.capture import _torch as internals
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.measure import held_bytes
from lightning_remat.planner._beside import NOTHING_BESIDE, Beside, Held, measured_beside, peak_beside
from lightning_remat.planner._plan_cache import fingerprint
from lightning_remat.report import format_bytes
from lightning_remat.runtime._call import Call, Shapes, growth, leaves_a_loss_to_do
from lightning_remat.runtime._graph import Graph, Path
from lightning_remat.runtime._measured_step import MeasuredStep
from lightning_remat.runtime._paths import Paths
from lightning_remat.runtime._plans import Plans
from lightning_remat.runtime._sized_plans import SizedPlan

log = logging.getLogger(__name__)

MEASURED = 3
"""Steps of the same shapes that are measured, at most: each is planned again, until that changes little."""

SETTLED = 0.01
"""Share of the peak: a step within the budget is not planned again where what was measured changes its peak by less."""


MOST_LARGER = 32
"""Steps that are measured since they may hold more than those that were measured at other sizes, at most."""

COMPARED = 16
"""Sets of shapes at which steps were measured, or are to be, that others are compared with."""


@dataclasses.dataclass(eq=False)
class _Measured:
    """A call that is measured: its shapes, the bytes held when it begins, as far as known, and what it has run.

    ``larger`` says that its shapes did not come before, and that it may hold more than was measured at others; ``sized`` is the
    plan that it ran, where its only graph has symbolic sizes.
    """

    step: MeasuredStep
    shapes: Shapes
    at_start_bytes: int
    larger: bool
    ran: list[tuple[Graph, int]] = dataclasses.field(default_factory=list)
    sized: SizedPlan | None = None


@dataclasses.dataclass(frozen=True)
class _Found:
    """What was measured in a step: the memory beside each of its graphs, and the most that was held, in bytes."""

    beside: tuple[Beside, ...]
    most_bytes: int


def _most(held: Sequence[Held]) -> int:
    return max(nbytes or 0 for one in held for nbytes in dataclasses.astuple(one))


class Measuring:
    """Decides which calls are measured, and has them planned again with what was measured.

    Args:
        function: the step that is called.
        plans: the plans of all graphs.
        paths: the plans of whole calls.
        call: the present call.
        name: name of the step, for the log.
        several_backwards: whether a call may be followed by several backwards: its end is not known then, and nothing
            is measured.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        plans: Plans,
        paths: Paths,
        call: Call,
        name: str,
        several_backwards: bool,
    ) -> None:
        self._function = function
        self._plans, self._paths, self._call, self._name = plans, paths, call, name
        self._several_backwards = several_backwards
        self._wanted: Recent[Shapes, int] = Recent()  # how many more calls of these shapes are measured
        self._parts: Recent[Shapes, None] = Recent(COMPARED)  # of steps in which more runs than one graph
        self._seen: Recent[Shapes, None] = Recent(COMPARED)  # of those that were measured
        self._larger = 0  # steps that were begun to be measured since they may hold more
        self._now: _Measured | None = None
        self._left_anew = False
        self._measured = 0  # steps that were planned with

    @property
    def step(self) -> MeasuredStep | None:
        """The measurement of the present call; ``None`` if it is not measured."""
        return self._now.step if self._now is not None else None

    @property
    def wanted(self) -> bool:
        """Whether the next call is to be measured, if it is given the shapes of the last one."""
        return bool(self._wanted.get(self._call.shapes))

    def left_anew(self) -> None:
        """A part of the step runs in eager mode from now on: what it holds is to be measured beside the graphs."""
        self._left_anew = True

    def begin(self, leaves: Sequence[torch.Tensor]) -> None:
        """A call begins with these tensors; measure it if that is wanted, and possible on its device in this thread."""
        shapes = self._call.shapes
        wanted = self._wanted.get(shapes)
        if larger := wanted is None:
            wanted = self._wanted[shapes] = int(self._may_hold_more(shapes))
        if not wanted or self._left_anew or not self._plans.graphs:
            return
        device = self._plans.graphs[-1].captured.device
        if MeasuredStep.possible(device):
            at_start = self._held_at_start() + held_bytes(leaves, device=device)
            self._now = _Measured(MeasuredStep(device, self._sharded), shapes, at_start, larger)

    def returned(self, shapes: Shapes, result: Any) -> None:
        """After a call: have the next ones of these shapes measured if more runs in a step than one captured graph."""
        if self._now is not None and not (self._call.captured or self._call.measures):
            self._now.ran = list(self._call.ran)
            self._now.sized = self._plans.last_sized
            if self._now.step.is_complete:  # it has called its backward itself
                self.end()
            return
        if self._now is not None:  # memory of capturing and planning was measured too
            self.end()
            self._wanted[shapes] = max(1, self._wanted.get(shapes) or 0)
            self._larger -= self._now.larger
            self._now = None
        if self._call.captured or self._left_anew:
            self._left_anew = self._left_anew and bool(self._call.captured)
            if self._possible() and (self._is_a_part() or leaves_a_loss_to_do(result)):
                self._wanted[shapes] = MEASURED
                self._parts[shapes] = None

    def _may_hold_more(self, shapes: Shapes) -> bool:
        """Whether a step of shapes that did not come before may hold more beside known graphs than was measured so far."""
        if self._larger == MOST_LARGER or self._plans.planning.agreement is not None:
            return False  # the other processes need not be given larger ones at the same time
        if all(growth(shapes, known) is None for known in self._parts):
            return False
        larger = all(by is None or by > 1 for by in (growth(shapes, known) for known in self._seen))
        self._larger += larger
        return larger

    def give_way(self) -> None:
        """Something is to be captured or measured that needs the profiler: end the measurement of a step."""
        if self._now is not None:
            self._now.step.give_way()

    def end(self) -> None:
        """The backward of the last call is done: what runs until the next call is not measured with it."""
        if self._now is not None:
            self._now.step.end()

    def plan(self, goes_on: Callable[[InfeasibleBudgetError, bool], bool]) -> None:
        """Before a call: if the last one was measured and held more or less than planned, plan its graphs again.

        Args:
            goes_on: asked where they do not fit a size with what was measured, and told whether that was at larger sizes
                than before: whether training goes on by the smallest plans.

        Raises:
            InfeasibleBudgetError: when they do not, and it does not.
        """
        self.end()
        measured, self._now = self._now, None
        if measured is None or not measured.ran:
            return
        shapes, path = measured.shapes, tuple(graph for graph, _ in measured.ran)
        kept_free = path[0].around.kept_free_bytes
        held = measured.step.held(len(path), measured.at_start_bytes, kept_free)
        sized, of_sizes = measured.sized, path[0].sized
        if sized is not None and of_sizes is not None:
            plans, known = [of_sizes.plan(sized)], [of_sizes.beside(sized.sizes)]
        else:
            plans = [self._plans.all[number] for _, number in measured.ran]
            known = [self._paths.planned_beside.get(number, NOTHING_BESIDE) for _, number in measured.ran]
        mine = _Found(tuple(map(measured_beside, plans, known, held)), _most(held)) if held is not None else None
        agreed = self._agreed(path, mine)
        if agreed is None:  # another profiler runs, or another measurement ended this one
            return
        found, most = agreed.beside, agreed.most_bytes
        self._seen[shapes] = None
        self._wanted[shapes] = (self._wanted.get(shapes) or 1) - 1
        before = max(plan.predicted_peak_bytes for plan in plans)
        after = max(map(peak_beside, plans, known, found))
        settled = most <= plans[0].budget_bytes and abs(after - before) <= SETTLED * before
        if settled or self._paths.another_begins_alike(shapes, path):
            self._wanted[shapes] = 0
            return
        log.info("%s holds %+d bytes beside its plans: planned again", self._name or "the step", after - before)
        plan_anew: Callable[[], object]
        if sized is not None and of_sizes is not None:
            put_back = of_sizes.put_beside(sized.sizes, found[0])
            plan_anew = functools.partial(of_sizes.at, sized.sizes)
        else:
            self._paths.beside[shapes, path] = found
            put_back = self._paths.forget_path(shapes, path)
            plan_anew = functools.partial(self._paths.plan_anew, shapes, path)
        try:
            plan_anew()
        except InfeasibleBudgetError as error:
            if parse_budget(self._plans.planning.config.budget).kind is BudgetKind.SIZE:
                if not goes_on(error, measured.larger):
                    raise
                plan_anew()
                return
            # The measured step did run. With "auto" the device has room for it, though less than the margin is left free; a
            # share is one of less, now that less is known to be held.
            put_back()
            self._wanted[shapes] = 0
            self._paths.beside.keep(lambda key, _: key != (shapes, path))
            log.warning(
                "%s keeps its plans, though it held %s: %s", self._name or "the step", format_bytes(most), error
            )
        self._paths.settle(shapes, path)

    def _is_a_part(self) -> bool:
        """Whether more than one captured graph runs in the present call: others, or what is not planned."""
        first = self._call.path[0]
        if len(self._call.ran) > 1 or not first.whole:
            return True
        return first.code is not None and (
            internals.goes_on(first.code) or not internals.is_code_of(first.code, self._function)
        )

    def _possible(self) -> bool:
        if not self._call.ran or self._several_backwards:
            return False
        if self._plans.planning.agreement is not None and not self._sharded:
            return False
        if any(graph.accumulator is not None for graph in self._call.path):  # the graph is known to be the whole step
            return False
        alone = len(self._call.path) == 1 and self._plans.planning.agreement is None
        if not alone and any(graph.sized is not None for graph in self._call.path):
            return False
        return all(graph.captured.device.type in ("cpu", "cuda") for graph in self._call.path)

    @property
    def _sharded(self) -> bool:
        """Whether parameters are shards: all processes run the same steps at the same time then, and measure the same."""
        return any(graph.around.sharded for graph in (*self._plans.graphs, *self._call.path))

    def _agreed(self, path: Path, mine: _Found | None) -> _Found | None:
        """The most that any of the processes has measured that train together, so that all plan with the same."""
        agreement = self._plans.planning.agreement
        if agreement is None:
            return mine
        self._measured += 1
        question = f"beside {self._measured} {fingerprint(path[0].captured.graph, len(path))}"
        said = agreement.of_all(question, dataclasses.astuple(mine) if mine is not None else None)
        each = [_Found(tuple(Beside(*one) for one in beside), most) for beside, most in filter(None, said)]
        if not each:
            return None
        parts = zip(*(one.beside for one in each), strict=True)
        beside = tuple(
            Beside(*map(max, *map(dataclasses.astuple, part))) if len(each) > 1 else part[0] for part in parts
        )
        return _Found(beside, max(one.most_bytes for one in each))

    def _held_at_start(self) -> int:
        """Bytes on the device when a step begins, as far as known, without the tensors that it is given."""
        around = self._plans.planning.surroundings()
        if around.module_bytes:
            return around.held_bytes + around.state_bytes + around.named_bytes
        graphs = self._plans.graphs
        weights = {key: nbytes for graph in graphs for key, nbytes in graph.weights.items()}
        static = max(graph.captured.static_bytes for graph in graphs)
        resident = around.resident_bytes - around.kept_free_bytes
        return static + resident + (sum(weights.values()) if around.old_gradients else 0)

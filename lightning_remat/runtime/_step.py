"""A function that runs as scheduled: captured on its first call, planned, lowered, and run from then on.

Dynamo captures the function and guards on its inputs; every graph that it finds is handed over as a joint
forward-backward graph, costed, planned and lowered here. A new shape gives a new graph and so a new plan; an old one costs
nothing to come back to. What cannot be captured runs as before, and the reason is said once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import operator
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.fx
from torch.autograd.graph import get_gradient_edge

import lightning_remat
from lightning_remat._blocks import block_bytes
from lightning_remat.allocator import Footprint
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.capture import PARTS, Autocast, CapturedGraph, from_joint, name_assertions, same_device, stays
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._autocast import Casts, cast_arguments, shares_casts
from lightning_remat.capture._buffers import buffers_are_known
from lightning_remat.capture._checkpoints import checkpoints, refuse_other_second_evaluations
from lightning_remat.capture._compiled import compiled_stays, is_compiled, name_of
from lightning_remat.capture._constants import constants_are_known
from lightning_remat.capture._early import Early
from lightning_remat.capture._hook_order import hooks_in_order
from lightning_remat.capture._inference import refuse_inference_mode
from lightning_remat.capture._joint import module_path, target_name
from lightning_remat.capture._masks import masks_as_in_eager_mode
from lightning_remat.capture._messages import messages_stay
from lightning_remat.capture._numpy import numpy_as_constants
from lightning_remat.capture._ports import Ports, hands_on_views_alone, with_ports
from lightning_remat.capture._sums import (
    HandedOut,
    Sums,
    adds_elsewhere,
    differentiable_views,
    mark_sums,
    opened,
    refuse_written_views,
    split_sums,
)
from lightning_remat.capture._tangents import Given, Layouts
from lightning_remat.cost import CostCache, OpCost, cost_model
from lightning_remat.errors import (
    CaptureError,
    GraphError,
    InfeasibleBudgetError,
    RematError,
    RematWarning,
    ScheduleError,
)
from lightning_remat.graph import ComputationGraph
from lightning_remat.lowering import lower, without_tangents
from lightning_remat.measure import held_bytes
from lightning_remat.planner._beside import NOTHING_BESIDE, Beside, MeasuredStep, measured_beside, peak_beside
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._device_memory import DeviceAllocator, DeviceMemory, allocated_bytes
from lightning_remat.planner._late import with_late_gradients
from lightning_remat.planner._make import FOR_ONCE, UNPLANNED, AtHand, Progress, make_plan, unplanned
from lightning_remat.planner._plan import Plan, with_beside
from lightning_remat.planner._plan_cache import PlanCache, fingerprint
from lightning_remat.planner._surroundings import Surroundings, Weights, replay_bytes
from lightning_remat.planner._together import Part, kept_bytes, plan_together, with_outside
from lightning_remat.report import format_bytes
from lightning_remat.runtime._accumulate import Accumulator
from lightning_remat.runtime._agreement import Agreement
from lightning_remat.runtime._arrivals import Arrivals
from lightning_remat.runtime._moving import WATCHED_RUNS, MovingBuffers
from lightning_remat.runtime._recent import Recent
from lightning_remat.runtime._search import Search
from lightning_remat.runtime._sized_plans import SizedPlan, SizedPlans, rounded_up
from lightning_remat.schedule import Schedule
from lightning_remat.solvers import Status

log = logging.getLogger(__name__)


Shapes = tuple[tuple[tuple[int, ...], torch.dtype, torch.device, bool], ...]
"""Shape, dtype, device and ``requires_grad`` of every tensor that a call is given."""

ObserveOp = Callable[[str, str, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
"""Given an op's name, the path of its module, its arguments and what runs it: runs it, and returns its result."""

TIGHTER = 0.8
"""Of what lies between the floor and the peak of a plan that ran out of memory, what the next may take."""

_Answer = TypeVar("_Answer")

EAGER_EXTRA = 1.25
"""Eager may hold more than the captured step without rematerialization (float dropout masks, say): at most this much."""

STATIC_CAPTURES = 3
"""Sets of shapes that are captured each on its own; the next is captured with symbols for the sizes that vary."""

SECONDS_A_SIZE = 3.0
"""Time limit of a plan for one of many sizes, where that is enough to find one."""

MANY_CAPTURES = 16
"""Captures of different shapes after which a person should know what they cost."""

MOST_CAPTURES = 4
"""Captures for the same shapes before the step is taken to depend on something that always changes."""

READ_CALLS = 2
"""Calls in which it is noted which parameters a graph is given."""

MOST_LEFT = 4
"""Times that functions which are captured over and over are left alone, and the rest of the step stays planned."""


def _shapes(leaves: Sequence[torch.Tensor]) -> Shapes:
    return tuple((tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad) for leaf in leaves)


def _varying(shapes: Shapes, known: Sequence[Shapes]) -> list[tuple[int, ...]]:
    """For each tensor, the dimensions in which it differs from those of calls that are otherwise alike."""
    found = []
    for i, (shape, *_) in enumerate(shapes):
        found.append(tuple(d for d in range(len(shape)) if any(other[i][0][d] != shape[d] for other in known)))
    return found


def _alike_but_for_sizes(one: Shapes, other: Shapes) -> bool:
    return [(len(shape), *rest) for shape, *rest in one] == [(len(shape), *rest) for shape, *rest in other]


class _NoSymbols(BaseException):
    """A capture with symbolic sizes came to nothing, before anything of the call has run."""


class _Stop(BaseException):
    """Carries one of our errors through Dynamo, which would otherwise swallow it and run the frame as before."""

    def __init__(self, error: RematError) -> None:
        super().__init__(str(error))
        self.error = error


MEASURED = 3
"""Steps of the same shapes that are measured, at most: planned again each time, until no more is found beside the plans."""

SETTLED = 0.01
"""Of a step's peak: what is found beside the plans is not planned for where it changes the peak by less, within the budget."""

MOST_PATHS = 8
"""Sequences of graphs, for the same shapes, that are planned together: where Python decides by data there may be very many."""


@dataclasses.dataclass(eq=False)
class _Measured:
    """A call that is measured: its shapes, what is held when it begins, as far as that is known, and what it has run."""

    step: MeasuredStep
    shapes: Shapes
    at_start_bytes: int
    call: list[tuple[_Graph, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Graph:
    """One captured graph, and what runs it.

    Attributes:
        captured: with costs, and nothing around it.
        problem: with what lies around it.
        weights: its parameters that get gradients.
        around: what the device held beside it when it was captured.
        memory: of a CUDA device, as it was then.
        exchange: the modules that run it, one version a plan.
        versions: by plan (an index into `ScheduledStep.plans`), its version.
        plan: the one that runs, where no plan was made for the call as a whole.
        arguments: where its symbolic sizes stand among its arguments.
        sized: its plans, where it has symbolic sizes.
        stays: its plan is not made anew: nothing was found, or what was found was refused.
        whole: there is no other graph in a call, as far as can be told while it is captured.
        buffers: those that change between a forward and its backward.
        arrivals: the gradients that its backward is handed.
        code: of the frame that it was found in.
        plainly: runs it as Dynamo found it; ``None`` where that is not what eager mode runs.
        accumulator: takes its gradients as they are made, where it may.
        dropped: by the outputs that a backward does not come through, the gradients that are none then.
        unread: by the same outputs, the tangents that are none.
        crowded: more is held beside it than when it was planned.
        left: it runs plainly from now on.
        calls: that it has run in, the numbers of the first and of the last one, and how many these are.
        read: ids of the parameters that it was given: one graph may run for several layers that are alike.
    """

    captured: CapturedGraph
    problem: ComputationGraph
    weights: Weights
    around: Surroundings
    memory: DeviceMemory | None
    exchange: internals.Exchange
    versions: dict[int, int]
    plan: int
    buffers: MovingBuffers
    arrivals: Arrivals
    code: types.CodeType | None = None
    plainly: Callable[..., Any] | None = None
    accumulator: Accumulator | None = None
    arguments: tuple[int, ...] = ()
    sized: SizedPlans | None = None
    stays: bool = False
    whole: bool = True
    dropped: Recent[frozenset[int], frozenset[int]] = dataclasses.field(default_factory=Recent)
    unread: Recent[frozenset[int], frozenset[str]] = dataclasses.field(default_factory=Recent)
    crowded: bool = False
    left: bool = False
    calls: tuple[int, int, int] = (0, 0, 0)
    read: set[int] = dataclasses.field(default_factory=set)

    def called(self, number: int, args: Sequence[Any]) -> None:
        """It runs in a call (several times, perhaps)."""
        first, last, count = self.calls
        if number != last:
            self.calls = first or number, number, count + 1
        if count < READ_CALLS:
            self.read.update(id(value) for value in args if isinstance(value, torch.nn.Parameter))

    def always_called(self, number: int) -> bool:
        """Whether it has run in all calls since one before this, and in this too."""
        first, last, count = self.calls
        return first < number == last == first + count - 1


_Path = tuple[_Graph, ...]
"""Graphs of a call, as far as it has come."""


class ScheduledStep:
    """``function``, run as scheduled wherever gradients are enabled.

    Args:
        function: takes and returns anything; tensors among its inputs and outputs may be nested.
        config: how to plan.
        surroundings: asked when a captured graph is planned: what the device holds beside it.
        name: of what is captured, for people.
        on_plan: called with every new plan.
        progress: told in words what is being done.
        dynamic_sources: gives the inputs that may change without a new capture, in Dynamo's words (``"L['batch_idx']"``).
        leave_alone: run the function itself for shapes at which the plain step fits with room to spare.
        several_backwards: a call may be followed by several backwards, or hold them (manual optimization).
        agreement: with the other processes that train the same model; measures and plans each graph in one of them.
        accumulates: asked when a graph is captured: whether its backward may add gradients to those at hand itself. Nothing
            but ``Tensor.backward`` of what a call returns may follow it then.
        reserved: the budget is one of what a CUDA device's allocator reserves, not of what it has allocated; by default if it
            is ``"auto"``.
        at_hand: schedules that are known before anything is captured.
        shared: what a call reads may be read outside of it too, or by another call, before the backward: gradients of what
            it reads several times are added up by autograd then, in the order in which they come.

    Attributes:
        plans: one a captured graph and shape, in the order of capture.
        failures: why something could not be captured, each reason once.
        runs: how often each plan's forward has run.
        planning_seconds: spent on capture, measuring, planning, and looking for a plan at hand, the first runs of what was
            captured included.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        config: RematConfig,
        *,
        surroundings: Callable[[], Surroundings] | None = None,
        name: str = "",
        on_plan: Callable[[Plan], None] | None = None,
        progress: Progress | None = None,
        dynamic_sources: Callable[[], str] = str,
        leave_alone: bool = False,
        several_backwards: bool = False,
        agreement: Agreement | None = None,
        accumulates: Callable[[], bool] = bool,
        reserved: bool | None = None,
        at_hand: AtHand | None = None,
        shared: bool = False,
    ) -> None:
        self.function = function
        self.config = config
        self.name = name
        self.plans: list[Plan] = []
        self.failures: list[str] = []
        self.runs: list[int] = []
        self.planning_seconds = 0.0
        self._surroundings = surroundings or Surroundings
        self._on_plan = on_plan
        self._progress = progress or (lambda _text: None)
        self._dynamic_sources = dynamic_sources
        self.leave_alone = leave_alone
        self.several_backwards = several_backwards
        self.agreement = agreement
        self._accumulates = accumulates
        self._shared = shared
        self._reserved = parse_budget(config.budget).kind is BudgetKind.AUTO if reserved is None else reserved
        self._allocator = DeviceAllocator(config.allocator)
        self._unnamed: dict[torch.device, int] = {}  # bytes that are allocated beside what is known, by device
        self._at_hand = at_hand
        self._gave_up = False
        self._began = 0.0  # the present call, in seconds since the epoch
        self._shapes: Shapes = ()
        self._batch: frozenset[int] = frozenset()  # ids of the present call's tensors
        self._early = Early(function, self._found_early)
        self._graphs: list[_Graph] = []
        self._limit: int | None = None  # a budget that was come down to
        budget = parse_budget(config.budget)
        self._asked = int(budget.value or 0) if budget.kind is BudgetKind.SIZE else None
        self._last: Plan | tuple[SizedPlans, SizedPlan] | None = None
        # What there is one for each set of shapes: of those that came last.
        self._fits_anyway: Recent[Shapes, int] = Recent()  # with the largest plan of their call
        self._captures: Recent[Shapes, int] = Recent()
        self._numbers: Recent[Shapes, int] = Recent()  # of the calls
        self._captured_sets = 0
        self._cost_cache = CostCache()
        self._plan_cache = PlanCache()
        self._call: list[tuple[_Graph, int]] = []  # graphs that the present call has run so far, and their plans
        self._captured_now: list[int] = []  # plans of what the present call has captured, old ones too
        # Plans that were made for a call as a whole: by its shapes and graphs so far, that of the last of these graphs.
        self._together: dict[tuple[Shapes, _Path], int] = {}
        self._settled: Recent[tuple[Shapes, _Path], None] = Recent()  # whole calls that have been looked at
        # What was measured beside the graphs of such a call; of plans, what there is beside their graphs of that.
        self._beside: Recent[tuple[Shapes, _Path], tuple[Beside, ...]] = Recent()
        self._planned_beside: dict[int, Beside] = {}
        self._to_measure: Recent[Shapes, int] = Recent()  # how many more calls of these shapes
        self._measured_call: _Measured | None = None
        self._joint_plans: Recent[Shapes, int] = Recent()
        self._search: tuple[Search, _Graph] | None = None
        self._to_search: list[_Graph] = []
        self._nodes: set[Any] = set()  # of autograd's graph, made by the present call's graphs
        self._left_codes: set[types.CodeType] = set()  # of frames that are not captured any more
        self._static = internals.compile_frame(function, self._backend, self._tracing, self._left_codes)
        self._symbolic: Callable[..., Any] | None = internals.compile_frame(
            function, self._symbolic_backend, self._tracing, self._left_codes, symbolic=True
        )
        self._static_shapes: Recent[Shapes, None] = Recent()
        self._floats = internals.VaryingFloats()
        self._left: dict[int, Any] = {}  # what the user has compiled, and tracing has met
        self._told_compiled = False
        self._code: types.CodeType | None = None  # of the frame that is captured
        self._times_left, self._left_anew = 0, False
        self._known_graphs = 0  # when the present call began
        if is_compiled(function):
            self._give_up(
                "it was compiled with torch.compile as a whole, and your compiler runs it; give the plain function or module "
                "to have it planned"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._gave_up:
            self.end_measured()
            return self.function(*args, **kwargs)
        self._early.begin(args, kwargs)
        try:
            return self._run(args, kwargs)
        finally:
            self._early.end()

    def _found_early(self, tensor: torch.Tensor) -> None:
        """While a call is captured: a tensor that is computed before the step, and given to it from now on."""
        self._batch |= {id(tensor)}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = internals.tensor_leaves((args, kwargs))
        leaves = [*given, *self._early.tensors]
        self._let_go_of_copies()
        self._plan_arrivals()
        shapes = self._shapes = _shapes(leaves)
        self._batch = frozenset(map(id, leaves))
        self._nodes.clear()
        self._plan_what_was_measured()
        if shapes in self._fits_anyway:
            return self.function(*args, **kwargs)
        started, planning_seconds = time.monotonic(), self.planning_seconds
        self._take_better_plans()
        self._captured_now.clear()
        self._numbers[shapes] = (self._numbers.get(shapes) or 0) + 1
        self._known_graphs = len(self._graphs)
        self._began = time.time()
        compiled, varying = self._compiled(shapes, leaves)
        known_failures = internals.capture_failures() if not self.plans or compiled is self._symbolic else None
        measures = self._to_measure.get(shapes) and not self._left_anew
        if measures and MeasuredStep.possible(device := self._graphs[-1].captured.device):
            at_start = self._held_at_start() + held_bytes(leaves, device=device)
            self._measured_call = _Measured(MeasuredStep(device), shapes, at_start)
        try:
            with internals.varying(varying):
                result = compiled(*args, **kwargs)
        except _NoSymbols:
            return self._run(args, kwargs)
        except _Stop as stop:
            raise stop.error from stop.error.__cause__
        if len(self._early.tensors) + len(given) > len(leaves):  # as the next call of these shapes will have it
            shapes = self._shapes = _shapes([*given, *self._early.tensors])
            self._static_shapes[shapes] = None
        self._tell_compiled()
        if not self.plans and not self.failures:
            reasons = list(internals.capture_failures() - known_failures) if known_failures is not None else []
            found = f" ({reasons[0].splitlines()[0]})" if reasons else "; TORCH_LOGS=graph_breaks says more"
            if reasons or internals.tensor_leaves(result):  # otherwise it has nothing to learn from this batch
                self._failed(f"no operation with gradients could be captured in it{found}", None)
        if compiled is self._symbolic and not self._call and known_failures is not None:
            for reason in internals.capture_failures() - known_failures:
                self._failed(f"with symbolic sizes, {reason}", None)
        if self._captured_now:
            self._captured(shapes, self._captured_now)
        path = tuple(graph for graph, _ in self._call)
        if not self._adds_gradients(result):
            self._leave_gradients_to_autograd()
        elif compiled is self._symbolic:
            self._after_symbolic(shapes)
        elif any(graph.left for graph in path):
            pass  # the next call takes another path
        elif self._in_parts() and (shapes, path) not in self._settled and shapes not in self._fits_anyway:
            self._plan_together(shapes, path)
        if self._captured_now:
            self.planning_seconds = planning_seconds + time.monotonic() - started
        self._measure_next(shapes, result)
        return result

    def _tell_compiled(self) -> None:
        """Say once what the user has compiled and the step calls: it is not planned."""
        if not self._left or self._told_compiled:
            return
        self._told_compiled = True
        names = list(dict.fromkeys(map(name_of, self._left.values())))
        verb, stay = ("was", "stays") if len(names) == 1 else ("were", "stay")
        rest = "the rest is planned in parts" if self._call else "and nothing around it can be planned"
        self._failed(
            f"{' and '.join(names)} {verb} compiled with torch.compile and {stay} so: your compiler runs it, what it holds for "
            f"the backward is outside of the plan and the budget, {rest}. To have the whole step planned, compile nothing "
            "inside of it",
            None,
        )

    @property
    def last_plan(self) -> Plan | None:
        """The plan that ran last, of several in one call the one with the largest peak; ``None`` before the first."""
        if isinstance(self._last, tuple):
            plans, sized = self._last
            return plans.plan(sized)
        return self._last

    def _in_parts(self) -> bool:
        """Whether the present call has run several graphs, or one that has no plan within the budget as it came."""
        alone = any(FOR_ONCE in self.plans[number].notes for _, number in self._call)
        return len(self._call) > 1 or alone or (self._shapes, tuple(graph for graph, _ in self._call)) in self._beside

    def _adds_gradients(self, result: Any) -> bool:
        """Let a call's only graph add gradients itself, if it may; whether this is as foreseen when it was captured."""
        accumulators = [graph.accumulator for graph, _ in self._call if graph.accumulator is not None]
        if not accumulators:
            return True
        alone = len(self._call) == 1 and internals.lead_only_to(self._nodes, internals.tensor_leaves(result))
        self._nodes.clear()
        for accumulator in accumulators:
            accumulator.alone = alone
        return alone

    def _leave_gradients_to_autograd(self) -> None:
        """What is called from now on is captured anew, with all gradients returned."""
        self._accumulates = bool
        # Dynamo keeps what it captured for the same backend, and methods of one object are the same.
        backend = functools.partial(self._backend)
        self._static = internals.compile_frame(self.function, backend, self._tracing, self._left_codes)
        if self._symbolic is not None:
            backend = functools.partial(self._backend, symbolic=True)
            self._symbolic = internals.compile_frame(
                self.function, backend, self._tracing, self._left_codes, symbolic=True
            )

    def _captured(self, shapes: Shapes, numbers: Sequence[int]) -> None:
        """After a call that captured something: does the plain step fit anyway, or does every call capture again?"""
        plans = [self.plans[i] for i in numbers]
        if self.leave_alone and all(map(_fits_as_it_is, plans)):
            self._fits_anyway[shapes] = max(numbers, key=lambda i: self.plans[i].baseline_peak_bytes)
            log.info("%s fits as it is: nothing is swapped in for these shapes", self.name or "the step")
        elif len(self._call) == 1 and self.config.background and self._call[0][0].sized is None:
            self._to_search.append(self._call[0][0])
        self._captures[shapes] = captures = (self._captures.get(shapes) or 0) + 1
        self._captured_sets += 1
        if self._captured_sets == MANY_CAPTURES:
            log.warning(
                "%s was captured for %d different sets of shapes, which takes time: pad batches to fewer sizes if you can",
                self.name or "the step",
                MANY_CAPTURES,
            )
        if captures > MOST_CAPTURES:
            condition = internals.recapture_reason(self._began)
            words = f"this did not hold at last: {condition}" if condition else "such as a Python number"
            again = (
                f"was captured {captures} times for the same shapes, because it depends on a value that changes from call "
                f"to call ({words})"
            )
            if self._leave_what_changes(shapes, again):
                self._captures[shapes] = 0
            else:
                self._give_up(f"it {again}; pass such a value as a tensor, or read it outside")

    def _leave_what_changes(self, shapes: Shapes, again: str) -> bool:
        """Leave the functions alone that were captured anew in this call, if the step calls them and is none of them itself.

        What they are to the step is then measured beside its graphs.

        Args:
            shapes: of the call.
            again: that they were captured again and again, in words.

        Returns:
            Whether the rest stays planned.
        """
        new = self._graphs[self._known_graphs :]
        codes = {graph.code for graph in new if graph.code is not None}
        if not codes or self._times_left == MOST_LEFT or any(internals.is_code_of(c, self.function) for c in codes):
            return False
        number = self._numbers.get(shapes) or 0
        left = {graph for graph in self._graphs if graph.code in codes and not graph.always_called(number)}
        if any(graph.plainly is None for graph in left) or all(graph in left for graph, _ in self._call):
            return False
        self._times_left += 1
        self._left_codes |= codes
        for graph in left:
            graph.left = True
        self._graphs = [graph for graph in self._graphs if not graph.left]
        self._together.clear()
        self._settled.clear()
        self._joint_plans.clear()
        self._beside.keep(lambda key, _: left.isdisjoint(key[1]))
        self._left_anew = True
        names = sorted(f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})" for code in codes)
        self._failed(f"{' and '.join(names)} {again}; what else the step does stays planned", None)
        return True

    def left_out(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
        """Names of the parameters that have gradients although nothing that was captured reads them, nor a compiled module.

        What a call did with them was left alone by Dynamo (a packed sequence, say): it runs as before, and takes memory that
        no plan counts.
        """
        known = {key for graph in self._graphs for key in (*graph.weights, *graph.read)}
        known |= {id(p) for one in self._left.values() if isinstance(one, torch.nn.Module) for p in one.parameters()}
        return [name for name, p in parameters if p.grad is not None and id(p) not in known]

    # -- sizes that vary ----------------------------------------------------------------------------------------------

    def _compiled(
        self, shapes: Shapes, leaves: Sequence[torch.Tensor]
    ) -> tuple[Callable[..., Any], list[tuple[torch.Tensor, tuple[int, ...]]]]:
        """What runs a call, captured for its shapes alone, or once many were seen with symbols; tensors and dims for these."""
        if shapes in self._static_shapes or self._symbolic is None:
            self._static_shapes[shapes] = None
            return self._static, []
        alike = [known for known in self._static_shapes if _alike_but_for_sizes(known, shapes)]
        if len(alike) < STATIC_CAPTURES:
            self._static_shapes[shapes] = None
            return self._static, []
        return self._symbolic, list(zip(leaves, _varying(shapes, alike), strict=True))

    def _after_symbolic(self, shapes: Shapes) -> None:
        """After a call that ran with symbolic sizes: was that worth it, and do these shapes fit as they are?"""
        graphs = [graph for graph, _ in self._call]
        if len(graphs) != 1 or graphs[0].sized is None:
            self._without_symbols(
                "it is captured as several graphs" if len(graphs) > 1 else "its sizes are not symbolic"
            )
        elif self.leave_alone and isinstance(self._last, tuple) and _fits_as_it_is(self._last[1]):
            self._fits_anyway[shapes] = self._call[0][1]

    def _without_symbols(self, reason: str) -> None:
        """From now on each set of shapes is captured on its own."""
        self._symbolic = None
        log.info(
            "%s is captured for each set of shapes on its own: with symbolic sizes, %s", self.name or "the step", reason
        )

    def _symbolic_backend(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._backend(module, inputs, symbolic=True)

    def close(self) -> None:
        """End what still searches beside the training, and leave the allocator as it was; the plans at hand stay."""
        self.end_measured()
        self._allocator.put_back()
        if self._search is not None:
            self._search[0].close()
        self._search = None
        self._to_search.clear()

    def begin_anew(self) -> None:
        """What has run so far was no training: runs are counted, and buffers watched, as if there had been none."""
        self.runs[:] = [0] * len(self.runs)

    @contextlib.contextmanager
    def observed(self, observe: ObserveOp) -> Iterator[None]:
        """While open, every op of what was captured is run through ``observe``, in the order in which it is scheduled."""

        def observe_node(node: torch.fx.Node, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
            if node.target is operator.getitem:
                return run()
            return observe(target_name(node.target), module_path(node), args, kwargs, run)

        for graph in self._graphs:
            graph.exchange.observe = observe_node
        try:
            yield
        finally:
            for graph in self._graphs:
                graph.exchange.observe = None

    def tighten(self, budget_bytes: int | None = None) -> int | None:
        """Come down to a smaller budget, because the last call ran out of memory; what it ran is planned again.

        Args:
            budget_bytes: the budget; by default the last plan's peak, less a part of what rematerialization can save.

        Returns:
            The budget that everything is planned within from now on, in bytes; ``None`` where nothing was captured.

        Raises:
            InfeasibleBudgetError: when what ran cannot do with less.
        """
        plain = self._fits_anyway.get(self._shapes)
        numbers = [number for _, number in self._call] or ([plain] if plain is not None else [])
        if self._gave_up or not numbers:
            return None
        ran = [self.last_plan] if self._call and self.last_plan is not None else [self.plans[n] for n in numbers]
        largest = max(ran, key=lambda plan: plan.predicted_peak_bytes)
        if budget_bytes is None:
            floor = largest.graph.floor_bytes
            budget_bytes = floor + int(TIGHTER * max(0, largest.predicted_peak_bytes - floor))
        elif largest.predicted_peak_bytes <= budget_bytes:
            self._come_down(budget_bytes)
            return budget_bytes
        graphs = [graph for graph in self._graphs if any(number in graph.versions for number in numbers)]
        path = tuple(graph for graph, _ in self._call)

        def plan_again() -> None:
            if len(path) > 1:
                self._plan_path(self._shapes, path)
            else:
                for graph in graphs:
                    self._plan_again(graph)

        before = self.config
        self._come_down(budget_bytes)
        try:
            plan_again()
        except InfeasibleBudgetError as error:
            if error.smallest_bytes >= largest.predicted_peak_bytes:
                self.config = before
                raise
            budget_bytes = error.smallest_bytes
            self._come_down(budget_bytes)
            plan_again()
        return budget_bytes

    def make_room(self, nbytes: int) -> bool:
        """Count so many more bytes that are held on the device all through every step, and plan again where there is no room.

        A budget that is a share, or ``"min"``, is the larger for them.

        Returns:
            Whether there is room; if not, they are not counted. (Where a call is several graphs, or has symbolic sizes, that is
            not known before the next call, which raises `InfeasibleBudgetError` if there is none.)
        """
        problems = [(graph, graph.problem, graph.buffers.planned_bytes) for graph in self._graphs]
        self._count(nbytes)
        try:
            if len(self._call) == 1:
                self._plan_again(self._call[0][0])
        except InfeasibleBudgetError:
            self._count(-nbytes)
            for graph, problem, planned_bytes in problems:
                graph.problem, graph.buffers.planned_bytes, graph.crowded = problem, planned_bytes, False
            return False
        return True

    def _count(self, nbytes: int) -> None:
        """So much more is held beside all graphs."""
        larger = nbytes if self._limit is None and not self._fixed else 0
        for graph in self._graphs:
            graph.around = dataclasses.replace(graph.around, resident_bytes=graph.around.resident_bytes + nbytes)
            graph.problem = graph.problem.replace(resident_bytes=graph.problem.resident_bytes + nbytes)
            graph.crowded = True
        owners = {number: graph for graph in self._graphs for number in graph.versions}
        for number, graph in owners.items():
            plan = with_beside(self.plans[number], nbytes, larger)
            _, footprint = self._as_allocated(graph.memory, plan.graph, plan.schedule, plan.budget_bytes)
            plan = dataclasses.replace(plan, footprint=footprint)
            if self._last is self.plans[number]:
                self._last = plan
            self.plans[number] = plan
        for graph in self._graphs:
            if graph.sized is not None:
                graph.sized.take({number: self.plans[number] for number in graph.versions})
        self._together.clear()
        self._settled.clear()
        self._joint_plans.clear()

    @property
    def _fixed(self) -> bool:
        """Whether the budget is so many bytes, not a share of something that depends on the step."""
        return parse_budget(self.config.budget).kind in (BudgetKind.AUTO, BudgetKind.SIZE)

    def _come_down(self, budget_bytes: int) -> None:
        self._limit = budget_bytes
        for graph in self._graphs:
            if graph.sized is not None:
                graph.sized.come_down(budget_bytes)
        self.config = dataclasses.replace(self.config, budget=budget_bytes)
        self._together.clear()
        self._settled.clear()
        self._joint_plans.clear()
        self._fits_anyway.keep(
            lambda shapes, number: (
                shapes != self._shapes and self.plans[number].baseline_peak_bytes * EAGER_EXTRA <= budget_bytes
            )
        )

    def _plan_again(self, graph: _Graph, *, part: bool = False) -> None:
        """A plan for a graph within the budget that was come down to, or with room for what is copied, if its own has not.

        A part of a call for which there is none keeps the one that it has.
        """
        plan = self.plans[graph.plan]
        copies = 0 if self.agreement is not None else graph.buffers.unplanned_bytes
        limit = plan.budget_bytes if self._limit is None and (copies or graph.crowded) else self._limit
        if graph.sized is not None or graph.stays or limit is None or plan.predicted_peak_bytes + copies <= limit:
            return  # plans for symbolic sizes are chosen for each call
        graph.problem = graph.problem.replace(resident_bytes=graph.problem.resident_bytes + copies)
        graph.buffers.planned_bytes += copies
        try:
            made = make_plan(
                graph.problem,
                self.config,
                replay_bytes=replay_bytes(graph.captured),
                progress=self._progress,
                cache=self._plan_cache,
                memory=graph.memory,
                reserved=self._reserved,
            )
        except InfeasibleBudgetError:
            if not part:
                raise
            graph.stays = True  # the whole may fit
            return
        except ScheduleError as error:
            graph.stays = True
            self._refused(graph.problem, str(error), "the plan at hand stays")
            return
        graph.plan = self._add_plan(made, graph, graph.captured)
        log.info(
            "%s, %s: %s",
            self.name or "captured graph",
            "with copies" if copies or graph.crowded else "within less",
            made.summary(),
        )

    # -- better plans -------------------------------------------------------------------------------------------------

    def _plan_together(self, shapes: Shapes, path: _Path) -> None:
        """Now that all graphs of a call are known, plan them as one; the next such call runs that.

        Calls that begin with the same graphs run the same plans of these: which way a call goes is not known before.

        Raises:
            InfeasibleBudgetError: when the graphs do not fit together; the next such call raises it again.
        """
        if self._needs_one_plan(shapes, path):
            paths = self._joint_plans.get(shapes) or 0
            if paths < MOST_PATHS:
                self._plan_within_what_is_left(shapes, path)
            elif paths == MOST_PATHS:
                log.warning(
                    "%s is captured as more than %d different sequences of graphs: the others are not planned as a whole, "
                    "and may run over the budget",
                    self.name or "the step",
                    MOST_PATHS,
                )
            self._joint_plans[shapes] = paths + 1
        self._settled[shapes, path] = None

    def _measure_next(self, shapes: Shapes, result: Any) -> None:
        """After a call: whether the next ones of these shapes are measured, since more than its graphs runs in a step."""
        if self._measured_call is not None:
            if self._captured_now:  # capturing and planning take memory too
                self.end_measured()
                self._measured_call = None
            else:
                self._measured_call.call = list(self._call)
        elif self._captured_now or self._left_anew:
            self._left_anew = self._left_anew and bool(self._captured_now)
            if self._may_measure() and (len(self._call) > 1 or _leaves_a_loss_to_do(result)):
                self._to_measure[shapes] = MEASURED

    def _may_measure(self) -> bool:
        if not self._call or self.agreement is not None or self.several_backwards:
            return False
        if any(graph.accumulator is not None for graph, _ in self._call):  # its call is known to be the whole step
            return False
        return all(graph.sized is None and graph.captured.device.type in ("cpu", "cuda") for graph, _ in self._call)

    def _held_at_start(self) -> int:
        """What is on the device when a step begins, but for what it is given, as far as that is known."""
        around = self._surroundings()
        if around.module_bytes:
            return around.held_bytes + around.state_bytes
        weights = {key: nbytes for graph in self._graphs for key, nbytes in graph.weights.items()}
        static = max(graph.captured.static_bytes for graph in self._graphs)
        resident = around.resident_bytes - around.kept_free_bytes
        return static + resident + (sum(weights.values()) if around.old_gradients else 0)

    def end_measured(self) -> None:
        """The backward of the last call is done: if it is measured, what comes until the next one is not part of it."""
        if self._measured_call is not None:
            self._measured_call.step.end()

    def _plan_what_was_measured(self) -> None:
        """Before a call: if the last one was measured, and held more or less than planned, plan what it ran again.

        Raises:
            InfeasibleBudgetError: when the budget that was given has no room for what was found.
        """
        self.end_measured()
        measured, self._measured_call = self._measured_call, None
        if measured is None or not measured.call:
            return
        shapes, path = measured.shapes, tuple(graph for graph, _ in measured.call)
        kept_free = path[0].around.kept_free_bytes
        held = measured.step.held(len(path), measured.at_start_bytes, kept_free)
        if held is None:  # another profiler runs, or another measurement ended this one
            return
        self._to_measure[shapes] = (self._to_measure.get(shapes) or 1) - 1
        plans = [self.plans[number] for _, number in measured.call]
        known = [self._planned_beside.get(number, NOTHING_BESIDE) for _, number in measured.call]
        found = tuple(map(measured_beside, plans, known, held))
        before = max(plan.predicted_peak_bytes for plan in plans)
        after = max(map(peak_beside, plans, known, found))
        most = max(nbytes or 0 for one in held for nbytes in dataclasses.astuple(one))
        settled = most <= plans[0].budget_bytes and abs(after - before) <= SETTLED * before
        if settled or any(key != (shapes, path) and _begins_alike(key, shapes, path) for key in self._settled):
            self._to_measure[shapes] = 0
            return
        log.info("%s holds %+d bytes beside its plans: planned again", self.name or "the step", after - before)
        together = dict(self._together)
        self._beside[shapes, path] = found
        for i in range(len(path)):
            self._together.pop((shapes, path[: i + 1]), None)
        self._settled.keep(lambda key, _: key != (shapes, path))
        try:
            self._plan_within_what_is_left(shapes, path)
        except InfeasibleBudgetError as error:
            if parse_budget(self.config.budget).kind is not BudgetKind.AUTO:
                raise
            # What was measured has run: the device has room for it, though not as much as was to be left free.
            self._together, self._to_measure[shapes] = together, 0
            self._beside.keep(lambda key, _: key != (shapes, path))
            log.warning("%s keeps its plans, though it held %s: %s", self.name or "the step", format_bytes(most), error)
        self._settled[shapes, path] = None

    def _let_go_of_copies(self) -> None:
        """Before a call: a plan whose first runs are over needs no room any more for what was copied to be watched."""
        for graph, number in self._call:
            if self.runs[number] != WATCHED_RUNS or not (spare := graph.buffers.watched()):
                continue
            plan, before = self.plans[number], graph.problem.resident_bytes
            graph.problem = graph.problem.replace(resident_bytes=before - spare)
            if plan.graph.resident_bytes == before:  # not where the plan evaluates nothing again, and copies nothing
                plan = with_beside(plan, -spare)
                _, footprint = self._as_allocated(graph.memory, plan.graph, plan.schedule, plan.budget_bytes)
                self.plans[number] = dataclasses.replace(plan, footprint=footprint)

    def _plan_arrivals(self) -> None:
        """Before a call: plan what the last one ran again, if its gradients came otherwise than it was captured for."""
        path = tuple(graph for graph, _ in self._call)
        self._call.clear()
        if any(graph.left for graph in path):  # no call takes this path any more
            return
        planned = [graph for graph in path if graph.sized is None and not graph.stays]
        others = {graph: other for graph in planned if (other := graph.arrivals.taken()) is not None}
        if not others:
            return
        self.end_measured()  # measuring costs needs what measures a step
        self._together = {key: number for key, number in self._together.items() if others.keys().isdisjoint(key[1])}
        self._settled.keep(lambda key, _: others.keys().isdisjoint(key[1]))
        for graph, other in others.items():
            graph.captured = with_late_gradients(self._measured(other)[0])
        try:
            if len(path) > 1 or (self._shapes, path) in self._beside:
                self._plan_within_what_is_left(self._shapes, path)
                self._settled[self._shapes, path] = None
            else:
                (graph,) = path
                graph.buffers.planned_bytes = room = graph.buffers.most_bytes
                made = self._made(graph.captured, graph.weights, graph.around, graph.memory, room_bytes=room)
                graph.problem, plan = made
                graph.plan = self._add_plan(plan, graph, graph.captured)
        except InfeasibleBudgetError as error:  # it has run
            log.warning("%s keeps its plans, though its gradients lie otherwise: %s", self.name or "the step", error)

    def _plan_within_what_is_left(self, shapes: Shapes, path: _Path) -> None:
        """Plan a path; where one of its graphs ran out of memory and came down to too little for all, within the smallest."""
        try:
            self._plan_path(shapes, path)
        except InfeasibleBudgetError as error:
            if self._limit is None or (self._asked is not None and error.smallest_bytes > self._asked):
                raise
            self._come_down(error.smallest_bytes)
            self._plan_path(shapes, path)

    def _needs_one_plan(self, shapes: Shapes, path: _Path) -> bool:
        """Whether what the graphs of a call run, each planned as it came, may be other than what a plan for all of them is."""
        if all((shapes, path[: i + 1]) in self._together for i in range(len(path))):
            return False
        if (shapes, path) in self._beside:
            return True
        budget = parse_budget(self.config.budget)
        of_each = budget.kind is BudgetKind.MIN or (budget.kind is BudgetKind.SHARE and budget.value != 1)
        shared = sum(len(graph.weights) for graph in path) > len({key for graph in path for key in graph.weights})
        ran = [self.plans[number] for _, number in self._call]
        return of_each or shared or any(plan.rematerializes or FOR_ONCE in plan.notes for plan in ran)

    def _plan_path(self, shapes: Shapes, path: _Path) -> None:
        """One plan for the graphs of a call, those that already have one for calls that begin alike kept if that can be."""
        known = [self._together.get((shapes, path[: i + 1])) for i in range(len(path))]
        fixed = [number for number in known[: known.index(None)] if number is not None]
        if len(path) > 1:
            log.info("%s is captured as %d graphs, and planned again together", self.name or "the step", len(path))
        captured = {graph: with_outside(graph.captured) for graph in path}
        beside = self._beside.get((shapes, path)) or (NOTHING_BESIDE,) * len(path)
        parts = [
            Part(captured[graph], graph.weights, graph.around, one) for graph, one in zip(path, beside, strict=True)
        ]
        try:
            plans = self._joint(parts, fixed, path[0].memory)
        except InfeasibleBudgetError:
            if not fixed:
                raise
            plans, fixed = self._joint(parts, [], path[0].memory), []
            # Other ways to go on from here were planned after what has been given up.
            self._together = {
                key: number for key, number in self._together.items() if not _begins_alike(key, shapes, path)
            }
            self._settled.keep(lambda key, _: not _begins_alike(key, shapes, path))
        except ScheduleError as error:
            self._refused(parts[0].graph, str(error), "its graphs keep the plans that were made for each")
            return
        for i in range(len(fixed), len(path)):
            number = self._together[shapes, path[: i + 1]] = self._add_plan(plans[i], path[i], parts[i].captured)
            self._planned_beside[number] = beside[i]

    def _joint(self, parts: Sequence[Part], fixed: Sequence[int], memory: DeviceMemory | None) -> list[Plan]:
        schedules = [self.plans[number].schedule for number in fixed]

        def make() -> list[Plan]:
            return plan_together(
                parts,
                self.config,
                fixed=schedules,
                held_bytes=parts[0].around.held_bytes + parts[0].captured.batch_bytes,
                progress=self._progress,
                cache=self._plan_cache,
                memory=memory,
                reserved=self._reserved,
            )

        facts = [schedule.to_dict() for schedule in schedules]
        return self._agreed(
            lambda: " ".join(["plans", *(fingerprint(part.graph, facts) for part in parts)]),
            make,
            lambda plans: [plan.to_dict() for plan in plans],
            lambda found: [Plan.from_dict(data, ComputationGraph.from_dict(data["graph"])) for data in found],
        )

    def _take_better_plans(self) -> None:
        """Between two steps: from the next forward on, run what was found beside the training. One search at a time."""
        if self._search is None:
            self._begin_search()
            return
        search, graph = self._search
        solution = search.better()
        plan = self.plans[graph.plan]
        fits, footprint = False, None
        if solution is not None and solution.schedule is not None and solution.seconds < plan.predicted_seconds:
            fits, footprint = self._as_allocated(graph.memory, plan.graph, solution.schedule, plan.budget_bytes)
        if fits and solution is not None and solution.schedule is not None:
            plan = dataclasses.replace(
                plan,
                schedule=solution.schedule,
                predicted_peak_bytes=solution.peak_bytes,
                predicted_seconds=solution.seconds,
                solver=solution.method,
                status=solution.status,
                lower_bound_seconds=max(solution.lower_bound_seconds, plan.lower_bound_seconds),
                bound_scope=solution.bound_scope,
                solve_seconds=solution.solve_seconds,
                notes=(*solution.notes, "found while training ran on an earlier plan"),
                footprint=footprint,
            )
            graph.plan = self._add_plan(plan, graph, graph.captured)
            log.info("%s: a cheaper plan from now on: %s", self.name or "captured graph", plan.summary())
        if search.running:
            return
        self._search = None
        if search.completed:  # the next run begins with the best, and does not search again
            file = self._plan_cache.path(plan.graph, plan.budget_bytes, self.config)
            self._plan_cache.store(file, plan.solution(), plan.budget_bytes)

    def _as_allocated(
        self, memory: DeviceMemory | None, graph: ComputationGraph, schedule: Schedule, budget_bytes: int
    ) -> tuple[bool, Footprint | None]:
        """Whether a schedule fits as the device's allocator sees it, and what that makes of it."""
        if memory is None:
            return True, None
        footprint = memory.footprint(graph, schedule, budget_bytes if self._reserved else None)
        return footprint.fits and (self._reserved or footprint.allocated_bytes <= budget_bytes), footprint

    def _begin_search(self) -> None:
        """Look for something cheaper than a plan in a process of its own, unless that was done in an earlier run."""
        while self._to_search and self._search is None:
            graph = self._to_search.pop(0)
            plan = self.plans[graph.plan]
            known = self._plan_cache.path(plan.graph, plan.budget_bytes, self.config).exists()
            smallest = parse_budget(self.config.budget).kind is BudgetKind.MIN
            if plan.rematerializes and plan.status is not Status.OPTIMAL and not known and not smallest:
                self._search = Search(plan, self.config), graph

    def _add_plan(self, plan: Plan, graph: _Graph, captured: CapturedGraph) -> int:
        """One more plan of a graph, ready to run; returns its index."""
        self.plans.append(plan)
        self.runs.append(0)
        number = len(self.plans) - 1
        schedule = plan.schedule
        version = graph.exchange.add(lower(captured, schedule), lambda: lower(captured, schedule))
        graph.versions[number] = version
        graph.arrivals.add(version, captured, schedule)
        graph.buffers.add(number, captured, plan.schedule)
        self._allocator.arrange(plan.footprint, captured.device)
        if self._on_plan is not None:
            self._on_plan(plan)
        return number

    # -- capture ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _tracing(self, code: types.CodeType) -> Iterator[None]:
        """Open while Dynamo captures a frame of the function, and what it hands over is planned."""
        around, self._code = self._code, code
        with (
            internals.tracing(self._dynamic_sources(), self._floats),
            masks_as_in_eager_mode(),
            buffers_are_known(),
            hooks_in_order(),
            numpy_as_constants(),
            constants_are_known(),
            messages_stay(),
            self._early.found(),
            compiled_stays(lambda called: self._left.update({id(called): called})),
        ):
            try:
                yield
            finally:
                self._code = around

    def _backend(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any], symbolic: bool = False
    ) -> Callable[..., Any]:
        if self._measured_call is not None:  # measuring the costs of what is captured needs what measures a step
            self._measured_call.step.give_way()
        internals.guard_on_gradients(inputs)
        in_checkpoints = checkpoints(module)
        name_assertions(module)
        if self._gave_up:  # in the midst of a call
            if in_checkpoints:
                raise CaptureError("the rest of a call that runs as before")
            return module.forward
        if hands_on_views_alone(module) and not in_checkpoints:
            return module.forward
        if internals.sizes_from_floats(module):  # a plan is one for sizes that are known
            internals.floats_as_constants(module)
        parameters = [isinstance(value, torch.nn.Parameter) for value in inputs]
        weights: dict[int, int] = {}
        planned: list[
            tuple[CapturedGraph, ComputationGraph, Surroundings, DeviceMemory | None, int, MovingBuffers]
        ] = []
        autocast = Autocast.around(module)
        draws_anew = any(node.kwargs.get("preserve_rng_state", True) is False for node in in_checkpoints)
        whole = internals.is_whole_function(module, inputs)
        last = internals.ends_function(module, self._code, self.function)
        sums: Sums = {}
        casts: frozenset[int] = frozenset()
        alone = self._accumulates() and whole
        accumulator = Accumulator(inputs) if alone else None
        given_views = differentiable_views(inputs)  # nothing that is kept may hold the inputs
        ported, views = with_ports(module)
        frame = internals.Frame(ported, PARTS, symbolic, stays)

        def read(
            joint: torch.fx.GraphModule,
            _joint_inputs: Any,
            *,
            num_fwd_outputs: int,
            static_lifetime_input_indices: Sequence[int] | None = None,
            **_: Any,
        ) -> tuple[CapturedGraph, Sums]:
            refuse_other_second_evaluations(joint.graph, draws_anew)
            refuse_written_views(joint.graph, num_fwd_outputs, given_views)
            sums: Sums = {}
            if accumulator is None and not last:
                sums = split_sums(joint.graph, num_fwd_outputs)
            elif self._shared:
                sums = mark_sums(joint.graph, num_fwd_outputs)
            captured = from_joint(
                joint,
                num_fwd_outputs,
                static_inputs=static_lifetime_input_indices or (),
                parameters=parameters,
                name=self.name,
                autocast=autocast,
                hand_over=accumulator.hand_over if accumulator is not None else None,
            )
            return captured, sums

        def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **described: Any) -> internals.Modules:
            nonlocal sums, casts
            if self._shared or not whole:
                casts = cast_arguments(joint.graph, autocast)
            captured, sums = read(joint, joint_inputs, **described)
            for value in (
                *inputs,
                *module.parameters(),
            ):  # Dynamo's module holds those of an optimizer that a step asks
                if isinstance(value, torch.nn.Parameter) and value.requires_grad:
                    here = same_device(value.device, captured.device)
                    weights[id(value)] = block_bytes(value.nbytes, value.device.type) if here else 0
            if captured.symbols:
                sizes = (captured.sizes.values[symbol] for symbol in captured.symbols)
                limits = captured.size_limits()
                captured = captured.at([rounded_up(n, most) for n, most in zip(sizes, limits, strict=True)])
            buffers = MovingBuffers(captured, inputs, self._batch)
            if whole and not captured.symbols:
                buffers.planned_bytes = buffers.most_bytes
            try:
                with internals.real_tensors(), internals.collected():
                    captured, problem, plan, around, memory = self._plan(
                        captured, weights, whole, buffers.planned_bytes
                    )
                    self._allocator.arrange(plan.footprint, captured.device)
            except (ScheduleError, GraphError):  # a defect: nothing of it may reach the user's step
                raise
            except RematError as error:
                raise _Stop(error) from error
            index = next((i for i, known in enumerate(self.plans) if known is plan), len(self.plans))
            if index == len(self.plans):
                self.plans.append(plan)
                self.runs.append(0)
            planned.append((captured, problem, around, memory, index, buffers))
            summands = 0 if last else sum(len(positions) - 1 for positions in sums.values())
            return dataclasses.replace(lower(captured, plan.schedule), summands=summands)

        def trace_again(layouts: Layouts) -> CapturedGraph:
            captured: CapturedGraph
            captured, others = frame.joint(layouts, read)
            if others != sums:
                raise CaptureError("the gradients that are added up in it are others then")
            return captured

        self._progress("capturing")
        try:
            refuse_inference_mode(module.graph)
            compiled, exchange = frame.compiled(inputs, partition)
        except Exception as error:  # whatever torch raises: the graph runs as before, and the reason is said
            internals.floats_as_constants(module)
            if symbolic and not self._call:
                self._without_symbols(f"{type(error).__name__}: {error}")
                raise _NoSymbols from error
            reason = f"{type(error).__name__}: {error}"
            if (
                in_checkpoints
            ):  # run from here, they would be none, and draw other numbers: only Python's own are eager's
                self._give_up(reason)
                raise
            self._failed(reason, error)
            return module.forward
        if not planned:  # nothing in it needs a gradient
            return compiled
        exchange.without = without_tangents
        if last and sums:
            exchange.opened = functools.partial(opened, sums=sums)
            exchange.summed = {first: others for first, *others in sums.values()}
        captured, problem, around, memory, index, buffers = planned[0]
        buffers.add(index, captured, self.plans[index].schedule)
        arrivals = Arrivals(exchange, trace_again)
        arrivals.add(0, captured, self.plans[index].schedule)
        graph = _Graph(
            captured,
            problem,
            weights,
            around,
            memory,
            exchange,
            versions={index: 0},
            plan=index,
            buffers=buffers,
            arrivals=arrivals,
            code=self._code,
            plainly=None if in_checkpoints else module.forward,
            accumulator=accumulator,
            whole=whole,
        )
        self._captured_now.append(index)
        if self._on_plan is not None:
            with internals.real_tensors():
                self._on_plan(self.plans[index])

        if captured.symbols:
            symbols = [internals.expression(value) for value in inputs]
            graph.arguments = tuple(symbols.index(symbol) for symbol in captured.symbols)
            graph.sized = self._sized_plans(graph, captured, weights, index)
        self._graphs.append(graph)

        def run(*args: Any) -> Any:
            if graph.left and graph.plainly is not None:
                return graph.plainly(*args)
            graph.called(self._numbers.get(self._shapes) or 0, args)
            number, plan = self._plan_of(graph, args)
            graph.exchange.current = graph.versions[number]
            self.runs[number] += 1
            last = self._last[1] if isinstance(self._last, tuple) else self._last
            if not self._call or last is None or plan.predicted_peak_bytes >= last.predicted_peak_bytes:
                if not isinstance(plan, SizedPlan):
                    self._last = plan
                elif graph.sized is not None:
                    self._last = graph.sized, plan
            position = len(self._call)
            self._call.append((graph, number))
            measured = self._measured_call.step if self._measured_call is not None else None
            copies = graph.buffers.copies(args, number, self.runs[number], self._batch)
            compare = graph.buffers.watch(args, copies, self.name or "captured graph")
            handed_out = HandedOut(sums)
            if casts:
                cast = [get_gradient_edge(args[i]) for i in casts if args[i].requires_grad and args[i].is_leaf]
                region = internals.autocast_region(captured.device.type)
                handed_out.casts = Casts(region, frozenset((edge.node, edge.output_nr) for edge in cast))
            given = handed_out.inputs([copies.get(i, value) for i, value in enumerate(args)])
            if measured is not None:
                measured.begins(position, "forward")
            outputs = compiled(*given)
            ports = Ports(outputs, views)
            if casts:
                for one in outputs:
                    if (node := internals.captured_node(one)[0]) is not None:
                        node.casts = handed_out.casts
            if measured is not None:
                measured.ends(position, "forward")
            added = {i: args[i] for i in accumulator.positions} if accumulator is not None else {}
            if accumulator is not None:
                accumulator.alone = False  # until it is known what the call returns
                self._nodes.update(internals.captured_node(one)[0] for one in outputs)
            first = self.runs[number] == 1
            begins = functools.partial(
                self._backward_begins, graph, number, compare, added, handed_out, measured, position, first=first
            )
            internals.on_backward((*args, *given), outputs, begins, ports.gradients)
            return outputs[: len(outputs) - len(views)]

        return run

    def _plan_of(self, graph: _Graph, args: Sequence[Any]) -> tuple[int, Plan | SizedPlan]:
        """What of a graph runs now: a plan for its sizes, or one for calls that begin as this one, or its own."""
        if graph.sized is not None:
            started = time.monotonic()
            sized = graph.sized.at(tuple(int(args[i]) for i in graph.arguments))
            self.planning_seconds += time.monotonic() - started
            return sized.number, sized
        path = (*(one for one, _ in self._call), graph)
        number = self._together.get((self._shapes, path))
        if number is None:
            self._plan_again(graph, part=bool(self._call) or not graph.whole)
            number = graph.plan
        return number, self.plans[number]

    def _share(self, floor_bytes: int, baseline_bytes: int) -> int:
        """The budget of a step, where it is a share; 0 where it is not known before something is solved."""
        budget = parse_budget(self.config.budget)
        if budget.kind is not BudgetKind.SHARE:
            return 0
        return budget.resolve(floor_bytes, baseline_bytes, int, int)

    def _sized_plans(self, graph: _Graph, captured: CapturedGraph, weights: Weights, number: int) -> SizedPlans:
        replayed = replay_bytes(captured)

        def surround(captured: CapturedGraph, replays: bool) -> ComputationGraph:
            around = graph.around.put_around(captured, weights)
            return around if replays else around.replace(resident_bytes=around.resident_bytes - replayed)

        def make(captured: CapturedGraph) -> tuple[int, Plan]:
            with internals.real_tensors():
                try:
                    plan = self._made(captured, weights, graph.around, graph.memory, most_seconds=SECONDS_A_SIZE)[1]
                except InfeasibleBudgetError:
                    plan = self._made(captured, weights, graph.around, graph.memory)[1]
            return self._add_plan(plan, graph, graph.captured), plan

        def measure(captured: CapturedGraph) -> CapturedGraph:
            with internals.real_tensors():
                return self._measured(captured)[0]

        return SizedPlans(
            captured,
            number,
            self.plans[number],
            shared=self._fixed,
            share=self._share,
            measure=measure,
            surround=surround,
            make=make,
            allocated=functools.partial(self._as_allocated, graph.memory),
        )

    def _backward_begins(
        self,
        graph: _Graph,
        number: int,
        compare: Callable[[], None],
        added: Mapping[int, torch.nn.Parameter],
        handed_out: HandedOut,
        measured: MeasuredStep | None,
        position: int,
        unused: frozenset[int],
        given: Mapping[int, Given],
        ported: Mapping[int, torch.Tensor],
        node: Any,
        *,
        first: bool,
    ) -> None:
        """Of a graph, before anything of it has run.

        What only leads to outputs that the loss does not come from gets no gradient, as in eager mode: zeros would make an
        optimizer decay its weights. A second backward may be about to come from these outputs: in the first run of a plan
        what it needs is kept, to see.
        """
        if torch.is_grad_enabled():
            self._give_up(
                "its gradients are differentiated again (create_graph=True), which captured code cannot do: this backward "
                "fails, and later calls run as before; compute such a penalty inside of what is captured, where it is "
                "planned too"
            )
        dropped = graph.dropped.get(unused)
        if dropped is None:
            dropped = graph.dropped[unused] = graph.captured.gradients_without(unused) if unused else frozenset()
        unread = graph.unread.get(unused)
        if unread is None:
            unread = graph.unread[unused] = graph.captured.tangents_of(unused) if unused else frozenset()
        graph.exchange.dropped, graph.exchange.unread = dropped, unread
        graph.exchange.taken = handed_out.taken
        if handed_out.casts is not None and shares_casts(handed_out.casts, node):
            self._give_up(
                "weights are used under one torch.autocast by several graphs, or outside of them too: eager mode casts each "
                "once, and adds up its gradients in the low precision. Those of this step may have other last bits, and "
                "later calls run as before; torch.autocast(..., cache_enabled=False), or one autocast for each call, has no "
                "such question"
            )
        if graph.exchange.summed:
            added_to = adds_elsewhere(node)
            graph.exchange.opens = bool(added_to)
            if handed_out.stay(added_to):
                self._give_up(
                    "it cannot be told in which order eager mode adds up the gradients of something that it reads several "
                    "times and that is read outside of it too: those of this step may have other last bits"
                )
        graph.exchange.ported = graph.arrivals.tangents(ported)
        self._take_as_given(graph, number, given)
        if measured is not None:
            measured.begins(position, "backward")
            graph.exchange.done = functools.partial(measured.ends, position, "backward")
        if graph.accumulator is not None:
            gradients = graph.captured.gradient_arguments
            graph.accumulator.begin(added, {gradients[i] for i in dropped})
        if internals.needs_kept(node):
            self._give_up(
                "two backwards come through one captured graph, each from a part of its outputs (such as one generated batch "
                "that is judged twice): compute what both need twice, or add the losses, to have the step scheduled"
            )
        elif unused and first and self.several_backwards:
            internals.keep_saved(node)
        compare()

    def _take_as_given(self, graph: _Graph, number: int, given: Mapping[int, Given]) -> None:
        """The backward that begins is one for gradients that lie so in memory."""
        try:
            graph.arrivals.begin(graph.versions[number], given)
        except Exception as error:  # noqa: BLE001 - whatever torch raises while it traces
            self._give_up(
                "a gradient lies otherwise in memory than the output that it is of, and no backward could be made for that "
                f"({type(error).__name__}: {error}): the gradients of this step may have other last bits than in eager mode"
            )

    def _give_up(self, reason: str) -> None:
        """Later calls run as before."""
        self._gave_up = True
        self._failed(reason, None)

    def _plan(
        self, captured: CapturedGraph, weights: Weights, whole: bool, room_bytes: int
    ) -> tuple[CapturedGraph, ComputationGraph, Plan, Surroundings, DeviceMemory | None]:
        """The graph with costs, the same with what lies around it, its plan, what lies around it, and the device's memory."""
        captured, cost_seconds = self._measured(captured)
        captured = with_late_gradients(captured)
        around, memory = self._on_device(captured, self._surroundings())
        graph, plan = self._made(
            captured, weights, around, memory, cost_seconds=cost_seconds, whole=whole, room_bytes=room_bytes
        )
        return captured, graph, plan, around, memory

    def _on_device(self, captured: CapturedGraph, around: Surroundings) -> tuple[Surroundings, DeviceMemory | None]:
        """On a CUDA device: what else is allocated there counts too (workspaces of libraries, the user's own tensors)."""
        device = captured.device
        if device not in self._unnamed:
            known = max(around.held_bytes, captured.static_bytes) + captured.batch_bytes
            unnamed = allocated_bytes(device) - known if device.type == "cuda" and not self._call else 0
            self._unnamed[device] = max(0, unnamed)
        around = dataclasses.replace(around, resident_bytes=around.resident_bytes + self._unnamed[device])
        begins = not (any(self.runs) or self._fits_anyway or self._call)
        return around, self._allocator.memory(device, state_bytes=around.state_bytes, begins=begins)

    def _measured(self, captured: CapturedGraph) -> tuple[CapturedGraph, float]:
        """The graph with costs, and the seconds that it took to find them."""
        started = time.monotonic()
        device = captured.device
        self._progress("measuring every operation")
        model = cost_model(
            self.config.cost_model,
            cache=self._cost_cache,
            progress=functools.partial(self._measuring, started),
        )
        costs = self._agreed(
            lambda: f"costs {fingerprint(captured.graph)}",
            lambda: model(captured.calls, device),
            lambda found: [one.to_list() for one in found],
            lambda data: [OpCost.from_list(one) for one in data],
        )
        captured = captured.with_costs(
            [c.seconds for c in costs], [c.workspace_bytes for c in costs], [c.real_bytes for c in costs]
        )
        return dataclasses.replace(
            captured, graph=captured.graph.replace(device=str(device))
        ), time.monotonic() - started

    def _measuring(self, started: float, done: int, total: int) -> None:
        left = (time.monotonic() - started) / done * (total - done)
        about = f", about {left:.0f} s left" if left >= 1 else ""
        self._progress(f"measuring operation {done} of {total}{about}")

    def _made(
        self,
        captured: CapturedGraph,
        weights: Weights,
        around: Surroundings,
        memory: DeviceMemory | None,
        *,
        cost_seconds: float = 0.0,
        most_seconds: float = math.inf,
        whole: bool = True,
        room_bytes: int = 0,
    ) -> tuple[ComputationGraph, Plan]:
        """A graph with what lies around it, and its plan.

        ``room_bytes`` are for copies in its first runs (`MovingBuffers`), where something is evaluated again.
        """
        config = dataclasses.replace(self.config, time_limit=min(self.config.time_limit, most_seconds))
        earlier = [(self.plans[number].graph, graph.weights) for graph, number in self._call]
        kept = sum(kept_bytes(self.plans[number]) for _, number in self._call)
        graph = around.put_around(captured, weights, earlier, kept_bytes=kept)
        graph = graph.replace(resident_bytes=graph.resident_bytes + room_bytes)
        replayed = replay_bytes(captured) + room_bytes
        alike = (graph, graph.replace(resident_bytes=graph.resident_bytes - replayed))
        same = [known for known in self.plans if known.graph in alike]
        if same:  # captured again for another reason than its shapes
            return graph, min(same, key=lambda known: known.predicted_seconds)
        record: dict[str, Any] = {
            "replay_bytes": replayed,
            "held_bytes": around.held_bytes + captured.batch_bytes,
            "cost_seconds": cost_seconds,
            "progress": self._progress,
            "cache": self._plan_cache,
            "memory": memory,
            "reserved": self._reserved,
            "at_hand": self._at_hand,
        }

        def make() -> Plan:
            try:
                return make_plan(graph, config, part=bool(earlier) or not whole, **record)
            except ScheduleError as error:
                return unplanned(graph, config, str(error), held_bytes=record["held_bytes"])

        plan = self._agreed(
            lambda: f"plan {fingerprint(graph)}",
            make,
            Plan.to_dict,
            lambda data: Plan.from_dict(data, ComputationGraph.from_dict(data["graph"])),
        )
        log.info("%s: %s", self.name or "captured graph", plan.summary())
        if plan.solver == UNPLANNED:
            self._refused(plan.graph, plan.notes[0], "it runs without rematerialization")
        return graph, plan

    def _agreed(
        self,
        question: Callable[[], str],
        answer: Callable[[], _Answer],
        encode: Callable[[_Answer], Any],
        decode: Callable[[Any], _Answer],
    ) -> _Answer:
        """``answer()``, found in one of the processes that train together and handed to the others as plain data."""
        if self.agreement is None:
            return answer()
        return decode(self.agreement.once(question(), lambda: encode(answer())))

    def _refused(self, graph: ComputationGraph, reason: str, instead: str) -> None:
        """The verifier refuses what is found for a graph: a defect of ours, which is said once, with what shows it."""
        reason = f"every schedule that was found for it breaks a rule ({reason})"
        if reason in self.failures:
            return
        self.failures.append(reason)
        warnings.warn(
            f"{self.name or 'the step'} (or a part of it): {reason}. This is a defect of lightning_remat "
            f"{lightning_remat.__version__}: {instead}. Please report it with this message, torch's version "
            f"({torch.__version__}), the budget ({self.config.budget!r}) and {self._plan_cache.keep_refused(graph)}",
            RematWarning,
            stacklevel=2,
        )

    def _failed(self, reason: str, error: Exception | None) -> None:
        reason = reason.strip().splitlines()[0] if reason.strip() else type(error).__name__
        if reason in self.failures:
            return
        self.failures.append(reason)
        log.debug("capture of %s failed", self.name, exc_info=error)
        warnings.warn(
            f"{self.name or 'the step'} (or a part of it) could not be captured and runs as before, without "
            f"rematerialization: {reason}",
            RematWarning,
            stacklevel=2,
        )


def _fits_as_it_is(plan: Plan | SizedPlan) -> bool:
    return plan.baseline_peak_bytes * EAGER_EXTRA <= plan.budget_bytes


def _leaves_a_loss_to_do(result: Any) -> bool:
    """Whether a loss has yet to be computed from what a call returns, before its backward begins."""
    differentiable = [one for one in internals.tensor_leaves(result) if one.requires_grad]
    return bool(differentiable) and all(one.numel() > 1 for one in differentiable)


def _begins_alike(key: tuple[Shapes, _Path], shapes: Shapes, path: _Path) -> bool:
    return key[0] == shapes and key[1][0] is path[0]

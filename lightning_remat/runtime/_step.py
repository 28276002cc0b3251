"""`ScheduledStep`: a function that is captured on its first call, planned, lowered, and run by its plan.

Dynamo captures the function and guards on its inputs; for every graph that it finds, AOTAutograd makes a joint
forward-backward graph, whose ops are measured, and which is planned and lowered. A new shape gives a new graph and so a
new plan; to come back to an old one costs nothing. What cannot be captured runs as before, and a warning gives the
reason once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat._recent import Recent
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._nodes import module_path, target_name
from lightning_remat.capture.gradients._taken import Taken
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._late import with_late_gradients
from lightning_remat.planner._make import AtHand, Progress
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._surroundings import Surroundings
from lightning_remat.runtime._agreement import Agreement
from lightning_remat.runtime._backend import Backend, NoPacking, NoSymbols, Stop
from lightning_remat.runtime._call import Call, Shapes, shapes_of
from lightning_remat.runtime._captures import Captures
from lightning_remat.runtime._graph import Graph
from lightning_remat.runtime._improving import Improving
from lightning_remat.runtime._measuring import Measuring
from lightning_remat.runtime._modules import has_lazy_parameters
from lightning_remat.runtime._paths import Paths
from lightning_remat.runtime._planning import Planning
from lightning_remat.runtime._plans import Plans, fits_as_it_is
from lightning_remat.runtime._reasons import Reasons
from lightning_remat.runtime._recordings import Recordings
from lightning_remat.runtime._running import Step

log = logging.getLogger(__name__)

ObserveOp = Callable[[str, str, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
"""Takes an op's name, its module's path, its arguments, and a function that runs it; returns that one's result."""

TIGHTER = 0.8
"""Share of the bytes between the floor and the peak of a plan that ran out of memory that the next plan may take."""

BEGUN = 3
"""Calls of the same shapes by plans after which training has begun: until then, a size that cannot be held is an error."""

FEW = 0.1
"""Share of the trained numbers up to which parameters are not named that are used outside of what is captured."""


def _with_homes(around: Callable[[], Surroundings]) -> Surroundings:
    """What is beside a recorded graph: gradients lie in memory of their own, or are copied out of the graph's."""
    return dataclasses.replace(around(), old_gradients=True, accumulating=True)


class ScheduledStep:
    """Runs ``function`` by plans wherever gradients are enabled.

    Args:
        function: takes and returns anything; tensors among its inputs and outputs may be nested.
        config: how to plan.
        surroundings: asked when a captured graph is planned: what the device holds beside it.
        name: name of the step, for messages and plans.
        on_plan: called with every new plan.
        progress: called with a text about the work in progress.
        dynamic_sources: gives patterns of Dynamo source names, separated by commas, of values that may change without a
            new capture (``"L['batch_idx']"``).
        leave_alone: whether to run the function itself for shapes at which it fits without rematerialization, with room
            to spare.
        several_backwards: whether a call may be followed by several backwards, or hold them (manual optimization).
        agreement: has each graph measured and planned in one of the processes that train the same model; ``None`` for
            one.
        reduces: asked in each call whether its gradients are reduced over processes while its backward runs: nothing but
            ``Tensor.backward`` of what the call returns may follow it then.
        accumulates: asked when a graph is captured: whether its backward may add gradients to ``.grad`` itself. Nothing
            but ``Tensor.backward`` of what a call returns may follow the call then.
        reserved: whether the budget is one of bytes that a CUDA device's allocator reserves, not of allocated ones; by
            default if it is ``"auto"``.
        at_hand: schedules that are known before anything is captured.
        shared: whether what a call reads may be read outside of it too, or by another call, before the backward:
            autograd then adds up the gradients of what is read several times, in the order in which they arrive.

    Attributes:
        function, name, leave_alone: as given.
        plans: all plans in the order in which they were made; usually one for each captured graph and set of input
            shapes.
        failures: why something could not be captured, each reason once.
        runs: how often the forward of each plan has run.
        taken: the gradients that the last backward has added to others, or handed to autograd, while it ran.

    Raises:
        BudgetError: on a call, for a size over what the device has.
        InfeasibleBudgetError: on a call, when no schedule fits the budget.
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
        reduces: Callable[[], bool] = bool,
        accumulates: Callable[[], bool] = bool,
        reserved: bool | None = None,
        at_hand: AtHand | None = None,
        shared: bool = False,
    ) -> None:
        self.function = function
        self.name = name
        self.leave_alone = leave_alone
        budget = parse_budget(config.budget)
        around = surroundings or Surroundings
        self._reasons = Reasons(name)
        self._call = Call()
        planning = Planning(
            config,
            self._reasons,
            surroundings=functools.partial(_with_homes, around) if config.cuda_graphs else around,
            progress=progress or (lambda _text: None),
            agreement=agreement,
            reserved=budget.kind is BudgetKind.AUTO if reserved is None else reserved,
            at_hand=at_hand,
        )
        self._plans = Plans(planning, self._reasons, self._call, on_plan)
        asked = int(budget.value or 0) if budget.kind is BudgetKind.SIZE else None
        self._paths = Paths(self._plans, self._call, self._reasons, asked)
        self._measuring = Measuring(function, self._plans, self._paths, self._call, name, several_backwards)
        self._improving = Improving(self._plans, name)
        self._recordings = Recordings(config.cuda_graphs, name)
        self.taken = Taken()
        step = Step(
            self._plans,
            self._paths,
            self._measuring,
            self._call,
            self._reasons,
            several_backwards,
            shared,
            self._recordings,
            self.taken,
            reduces,
        )
        weakly = weakref.ref(self)  # Dynamo keeps the backend

        def goes_on(error: Exception) -> bool:
            own = weakly()
            return own is not None and own._goes_on(error)

        self._backend = Backend(function, step, accumulates, shared, goes_on)
        self._captures = Captures(function, self._backend, self._call, self._reasons, dynamic_sources)
        self._planned_calls: Recent[Shapes, int] = Recent()  # how often a call of some shapes has run by plans
        self._lazy = True  # its modules may have parameters that get their shapes in the first call
        self._checkpointed = False  # a checkpoint around the calls evaluates them again in the backward
        self.plans, self.runs, self.failures = self._plans.all, self._plans.runs, self._reasons.failures

    @property
    def config(self) -> RematConfig:
        """How it plans: as it was given, or with the budget that it was lowered to."""
        return self._plans.planning.config

    @property
    def agreement(self) -> Agreement | None:
        """How the processes that train the same model agree on plans; ``None`` for one process."""
        return self._plans.planning.agreement

    @property
    def planning_seconds(self) -> float:
        """Seconds spent in calls that captured something (their run included), and on choosing plans for sizes."""
        return self._plans.seconds

    @property
    def gave_up(self) -> bool:
        """Whether all later calls run as before; the last one may have left its plan already."""
        return self._reasons.gave_up

    @property
    def last_plan(self) -> Plan | None:
        """The plan that ran last (of several in one call, that with the largest peak); ``None`` before the first."""
        return self._plans.last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._reasons.gave_up or self._captures.turned_off():
            self.end_measured()
            return self.function(*args, **kwargs)
        if self._lazy and has_lazy_parameters(self.function):  # their first numbers are drawn in this call
            return self.function(*args, **kwargs)
        self._lazy = False
        self._captures.begin(args, kwargs)
        try:
            while True:
                try:
                    return self._run(args, kwargs)
                except (NoSymbols, NoPacking) as without:
                    self._capture_otherwise(without)
                except Stop as stop:
                    if self._call.ran or not stop.begins or not self._goes_on(stop.error):
                        raise stop.error from stop.error.__cause__
        finally:
            self._captures.early.end()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = internals.tensor_leaves((args, kwargs))
        leaves = [*given, *self._captures.early.tensors]
        again = internals.in_backward()  # a checkpoint around the call runs it a second time, by the same plans
        self._checkpointed = self._checkpointed or again
        if not again:
            self._plans.let_go_of_copies()
            self._plan_arrivals()
        self._call.begin(leaves)
        if not again:
            self._plan_with_what_was_measured()
        if self._plans.is_plain(self._call.shapes):
            return self.function(*args, **kwargs)
        started, planning_seconds, graphs = time.monotonic(), self._plans.seconds, len(self._plans.graphs)
        if not self._checkpointed:  # plans do not change between a call and its second evaluation
            self._improving.take()
        compiled, symbolic, varying = self._captures.chosen(leaves)
        known_failures = internals.capture_failures() if not self.plans or symbolic else None
        if not self._checkpointed:
            self._measuring.begin(leaves)
        try:
            with internals.varying(varying):
                result = compiled(*args, **kwargs)
        except Stop:
            raise
        except BaseException:
            self._captures.raised()
            raise
        finally:
            self._call.runs = False
            self._captures.called()
        early = self._captures.early.tensors
        if len(given) + len(early) > len(leaves):  # more early tensors were found: count them as the next call will
            self._call.shapes = shapes_of([*given, *early])
            self._captures.known_static(self._call.shapes)
        self._captures.tell_compiled()
        self._tell_failures(result, symbolic, known_failures)
        self._tell_what_runs_no_more(result)
        if self._call.captured:
            self._look_at_what_was_captured(graphs)
        if left := self._captures.leave_what_varies(self._plans.graphs):
            self._leave(left)
        if not again:
            self._plan_as_one(result, symbolic)
        if self._call.captured:
            self._plans.seconds = planning_seconds + time.monotonic() - started
        self._measuring.returned(self._call.shapes, result)
        if self._call.ran:
            self._planned_calls[self._call.shapes] = (self._planned_calls.get(self._call.shapes) or 0) + 1
            self._call.planned += 1
        return result

    def _capture_otherwise(self, without: BaseException) -> None:
        if isinstance(without, NoSymbols):
            self._captures.without_symbols(str(without))
        else:
            self._captures.without_packing(str(without))

    def _goes_on(self, error: Exception, calls: int | None = None) -> bool:
        """Whether training that has gone on by plans goes on by the smallest ones, now that the budget cannot be held.

        Args:
            error: says that it cannot.
            calls: how many calls have run by plans; by default those of the present call's shapes.
        """
        if calls is None:
            calls = self._planned_calls.get(self._call.shapes) or 0
        if not isinstance(error, InfeasibleBudgetError) or calls < BEGUN or not self._plans.planning.budget_is_fixed:
            return False  # for a share, see `Plans.or_smallest`
        self._reasons.no_longer_fits(error)
        self._plans.take_the_smallest()
        return True

    # -- before and after a call --------------------------------------------------------------------------------------

    def _plan_with_what_was_measured(self) -> None:
        """Before a call: see `Measuring.plan`; a step that ran by plans goes on where its parts, or larger sizes, take more."""

        def goes_on(error: InfeasibleBudgetError, larger: bool) -> bool:
            if larger:
                return self._goes_on(error, self._call.planned)
            return self._captures.passes and self._goes_on(error)

        self._measuring.plan(goes_on)

    def _plan_arrivals(self) -> None:
        """Before a call: plan the graphs of the last one again, if gradients came in other layouts than expected."""
        shapes, path = self._call.shapes, self._call.path
        self._call.ran.clear()
        if any(graph.left for graph in path):  # no call takes this path any more
            return
        if self._paths.may_come_once(shapes, path):
            return
        planned = [graph for graph in path if graph.sized is None and not graph.stays]
        others = {graph: other for graph in planned if (other := graph.arrivals.taken()) is not None}
        if not others:
            return
        self.end_measured()  # both the measured step and the measurement of costs need the profiler
        self._paths.forget_through(set(others))
        for graph, other in others.items():
            graph.captured = with_late_gradients(self._plans.planning.measured(other)[0])
        try:
            if len(path) > 1 or (shapes, path) in self._paths.beside:
                self._paths.plan_anew(shapes, path)
                self._paths.settle(shapes, path)
            else:
                (graph,) = path
                graph.buffers.planned_bytes = room = graph.buffers.most_bytes
                made = self._plans.made(graph.captured, graph.weights, graph.around, graph.memory, room_bytes=room)
                graph.problem, plan = made
                graph.plan = self._plans.add(plan, graph)
        except InfeasibleBudgetError as error:  # the step has run with its old plans, and can go on
            log.warning("%s keeps its plans, though its gradients lie otherwise: %s", self.name or "the step", error)

    def _tell_failures(self, result: Any, symbolic: bool, known: Counter[str] | None) -> None:
        """After a call: warn that nothing could be captured, and why, if nothing ever was."""
        reasons = list(internals.capture_failures() - known) if known is not None else []
        if not self.plans and not self.failures:
            found = f" ({reasons[0].splitlines()[0]})" if reasons else "; TORCH_LOGS=graph_breaks says more"
            if reasons or internals.tensor_leaves(result):  # otherwise it has nothing to learn from this batch
                self._reasons.failed(f"no operation with gradients could be captured in it{found}")
        if symbolic and not self._call.ran and self._call.otherwise is None:
            for reason in reasons:
                self._reasons.failed(f"with symbolic sizes, {reason}")

    def _tell_what_runs_no_more(self, result: Any) -> None:
        """After a call: warn if it ran nothing of what calls of its shapes have run by plans before."""
        if self._call.ran or not any(tensor.requires_grad for tensor in internals.tensor_leaves(result)):
            return
        if self._captures.passes and not self._plans.graphs:
            self._reasons.give_up("nothing of what it calls could be captured either")
        elif self._planned_calls.get(self._call.shapes):
            self._reasons.given_up_by_torch()

    def _look_at_what_was_captured(self, graphs: int) -> None:
        """After a call that captured graphs, those from index ``graphs`` on.

        If the unchanged step fits, it runs from now on; what was captured too often is no longer captured.
        """
        shapes, numbers = self._call.shapes, self._call.captured
        if self.leave_alone and not self._is_sharded and self._fits_as_it_is(numbers):
            self._leave_plain(numbers)
            log.info("%s fits as it is: nothing is swapped in for these shapes", self.name or "the step")
        elif len(self._call.ran) == 1 and self.config.background and self._call.ran[0][0].sized is None:
            self._improving.waiting.append(self._call.ran[0][0])
        if not (again := self._captures.again(shapes)) or self._captures.ask_no_more(shapes):
            return
        left = self._captures.leave_what_changes(shapes, self._plans.graphs, self._plans.graphs[graphs:], again)
        if not left:
            self._reasons.give_up(f"it {again}; pass such a value as a tensor, or read it outside")
            return
        self._leave(left)

    def _leave(self, left: set[Graph]) -> None:
        """After a call: these graphs run in eager mode from now on, and their memory is measured beside the remaining ones."""
        self._plans.graphs = [graph for graph in self._plans.graphs if not graph.left]
        self._paths.leave(left)
        self._measuring.left_anew()

    def _plan_as_one(self, result: Any, symbolic: bool) -> None:
        """After a call: plan several graphs together; capture again if the call was not as its capture expected."""
        shapes, path = self._call.shapes, self._call.path
        for graph in path:
            if graph.changes is not None:
                graph.changes.look()
        if self._call.otherwise is not None:
            self._capture_otherwise(self._call.otherwise)
        elif not self._adds_gradients(result):
            self._backend.accumulates = bool
            self._captures.anew()  # with all gradients returned
        elif symbolic and (len(path) != 1 or not path[0].symbolic):
            self._captures.without_symbols(
                "it is captured as several graphs" if len(path) > 1 else "its sizes are not symbolic"
            )
        elif symbolic and path[0].sized is not None:
            sized = self._plans.last_sized
            if self.leave_alone and sized is not None and fits_as_it_is(sized):
                self._plans.leave_plain(shapes, sized.number, sized)
        elif not self._captures.waits and not any(graph.left for graph in path):  # else the next one takes another path
            try:
                self._paths.plan(shapes, path)
            except InfeasibleBudgetError as error:
                if self._goes_on(error):
                    self._paths.plan(shapes, path)
                else:
                    self._plans.or_smallest(error, lambda: self._paths.plan(shapes, path))
            planned = self._paths.numbers(shapes, path) if self.leave_alone and self._is_sharded else None
            if planned and self._fits_as_it_is(planned):
                self._leave_plain(planned)
                log.info("%s fits as it is: nothing is swapped in for these shapes", self.name or "the step")

    @property
    def _is_sharded(self) -> bool:
        """Whether the parameters of the last call's graphs are shards: units that are alike run by one graph, several times."""
        return any(graph.around.sharded for graph in self._call.path)

    def _fits_as_it_is(self, numbers: Sequence[int]) -> bool:
        return not self._recordings.any and all(fits_as_it_is(self.plans[number]) for number in numbers)

    def _leave_plain(self, numbers: Sequence[int]) -> None:
        largest = max(numbers, key=lambda i: self.plans[i].baseline_peak_bytes)
        self._plans.leave_plain(self._call.shapes, largest, self.plans[largest])

    def _adds_gradients(self, result: Any) -> bool:
        """Let a call's only graph add its gradients to ``.grad``, if it may; returns whether this is as expected."""
        accumulators = [graph.accumulator for graph in self._call.path if graph.accumulator is not None]
        if not accumulators:
            return True
        alone = len(self._call.ran) == 1 and internals.lead_only_to(self._call.nodes, internals.tensor_leaves(result))
        self._call.nodes.clear()
        for accumulator in accumulators:
            accumulator.alone = alone
        return alone

    @property
    def waits(self) -> bool:
        """Whether a part of the last call ran as before, and is captured in the next one (see docs/distributed.md)."""
        return self._captures.waits

    @property
    def captured(self) -> int:
        """How many graphs were captured, less those that run as before."""
        return len(self._plans.graphs)

    @property
    def to_be_measured(self) -> bool:
        """Whether the step itself is going to measure one of the next calls: what is held beside its graphs."""
        return self._measuring.wanted

    @property
    def recorded(self) -> bool:
        """Whether there are graphs that are recorded as CUDA graphs, or will be."""
        return self._recordings.any

    # -- between calls ------------------------------------------------------------------------------------------------

    def left_out(self, module: torch.nn.Module) -> list[str]:
        """Names of the parameters that have gradients although no captured graph, nor a compiled module, reads them.

        Dynamo has skipped what a call did with them (a recurrent layer on CUDA, say): it runs as before, and takes memory that
        no plan counts. None where the next call captures more (see `waits`).
        """
        if self.waits:
            return []
        unread = self._captures.unread(self._plans.graphs, module)
        return [name for name, parameter in unread.items() if parameter.grad is not None]

    def left_out_of(self, result: Any, given: Any, modules: Sequence[torch.nn.Module]) -> list[str]:
        """The same before a backward: names of the parameters that it gives gradients between what was given and the result.

        None where they are less than `FEW` of all that are trained: a token between two graphs is no part of a network.
        """
        if self.waits:
            return []
        reached = internals.adds_to(internals.tensor_leaves(result), internals.tensor_leaves(given))
        unread = [self._captures.unread(self._plans.graphs, module) for module in modules]
        found = {name: one for some in unread for name, one in some.items() if id(one) in reached}
        trained = sum(one.numel() for module in modules for one in module.parameters() if one.requires_grad)
        return list(found) if sum(one.numel() for one in found.values()) >= FEW * trained else []

    def tell_left_out(self, names: Sequence[str]) -> None:
        """Warn, once, that what is done with these parameters runs as before."""
        self._reasons.only_a_part(names)

    def not_captured_yet(self, module: torch.nn.Module) -> list[str]:
        """Names of the trained parameters that nothing reads of what has been captured so far; none before anything was."""
        if not self._plans.graphs:
            return []
        unread = self._captures.unread(self._plans.graphs, module)
        return [name for name, parameter in unread.items() if parameter.requires_grad]

    def end_measured(self) -> None:
        """The backward of the last call is done: what runs until the next call is not measured with it."""
        self._measuring.end()

    def close(self) -> None:
        """End the search in the background, and put the CUDA allocator's settings back; the plans stay."""
        self.end_measured()
        self._recordings.forget()
        self._plans.planning.allocator.put_back()
        self._improving.close()

    def begin_anew(self) -> None:
        """What has run so far was no training: count runs, and watch buffers, as if there had been none."""
        self.runs[:] = [0] * len(self.runs)

    @contextlib.contextmanager
    def observed(self, observe: ObserveOp) -> Iterator[None]:
        """While open, every op of the captured graphs is run through ``observe``, in the order of the schedule."""

        def observe_node(node: torch.fx.Node, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
            if node.target is operator.getitem:
                return run()
            return observe(target_name(node.target), module_path(node), args, kwargs, run)

        for graph in self._plans.graphs:
            graph.exchange.observe = observe_node
        try:
            yield
        finally:
            for graph in self._plans.graphs:
                graph.exchange.observe = None

    # -- less memory --------------------------------------------------------------------------------------------------

    def tighten(self, budget_bytes: int | None = None) -> int | None:
        """Lower the budget, because the last call ran out of memory, and plan again what it ran.

        Args:
            budget_bytes: the new budget in bytes; by default the last plan's peak, less a fifth of what it has above
                the floor.

        Returns:
            The budget that everything is planned within from now on, in bytes (more than was asked for, if nothing fits
            that); ``None`` where nothing was captured.

        Raises:
            InfeasibleBudgetError: when what ran cannot do with less than it had.
        """
        plain = self._plans.plain.get(self._call.shapes)
        if budget_bytes is None and plain is not None and self._plans.capture_though_it_fits(self._call.shapes):
            return self.plans[plain].budget_bytes if self._plans.limit is None else self._plans.limit
        numbers = [number for _, number in self._call.ran] or ([plain] if plain is not None else [])
        if self._reasons.gave_up or not numbers:
            return None
        self._recordings.forget()
        ran = [self.last_plan] if self._call.ran and self.last_plan is not None else [self.plans[n] for n in numbers]
        largest = max(ran, key=lambda plan: plan.predicted_peak_bytes)
        if budget_bytes is None:
            floor = largest.graph.floor_bytes
            budget_bytes = floor + int(TIGHTER * max(0, largest.predicted_peak_bytes - floor))
        elif largest.predicted_peak_bytes <= budget_bytes:
            self._paths.come_down(budget_bytes)
            return budget_bytes
        graphs = [graph for graph in self._plans.graphs if any(number in graph.versions for number in numbers)]
        path = self._call.path

        def plan_again() -> None:
            if len(path) > 1:
                self._paths.plan_path(self._call.shapes, path)
            else:
                for graph in graphs:
                    self._plans.again(graph)

        before = self._plans.limit, self._plans.planning.config
        self._paths.come_down(budget_bytes)
        try:
            plan_again()
        except InfeasibleBudgetError as error:
            if error.smallest_bytes >= largest.predicted_peak_bytes:
                self._plans.go_back(*before)
                raise
            budget_bytes = error.smallest_bytes
            self._paths.come_down(budget_bytes)
            plan_again()
        return budget_bytes

    def capture_anew(self) -> None:
        """Capture and plan everything again from the next call on, with what is beside it then."""
        self._captures.anew()

    def make_room(self, nbytes: int) -> bool:
        """Count so many more bytes that are held on the device all through every step, and plan again where there is no room.

        A budget that is a share, or ``"min"``, grows by as many.

        Returns:
            Whether there is room; if not, they are not counted. (Where a call is several graphs, or has symbolic sizes, that is
            not known before the next call, which raises `InfeasibleBudgetError` if there is none.)
        """
        problems = [(graph, graph.problem, graph.buffers.planned_bytes) for graph in self._plans.graphs]
        self._paths.count(nbytes)
        try:
            if len(self._call.ran) == 1:
                self._plans.again(self._call.ran[0][0])
        except InfeasibleBudgetError:
            self._paths.count(-nbytes)
            for graph, problem, planned_bytes in problems:
                graph.problem, graph.buffers.planned_bytes, graph.crowded = problem, planned_bytes, False
            return False
        return True

"""The Dynamo backend: plans each graph that Dynamo has captured, and returns a callable that runs it by its plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat._blocks import block_bytes
from lightning_remat.capture import (
    PARTS,
    Autocast,
    CapturedGraph,
    Fusing,
    Tiling,
    from_joint,
    name_assertions,
    same_device,
    stays,
)
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._channels_last import ChannelsLast
from lightning_remat.capture._checkpoints import checkpoints, refuse_other_second_evaluations
from lightning_remat.capture._nodes import gradient_arguments
from lightning_remat.capture._tangents import Layouts
from lightning_remat.capture.gradients._autocast import cast_arguments, cast_often, share_casts
from lightning_remat.capture.gradients._differentiated import Differentiated
from lightning_remat.capture.gradients._order import gradient_order, without_gradients
from lightning_remat.capture.gradients._ports import detach_views_without_gradients, hands_on_views_alone, with_ports
from lightning_remat.capture.gradients._shared import shared_gradients
from lightning_remat.capture.gradients._stages import Stages, in_stages, stages_of
from lightning_remat.capture.gradients._sums import (
    Sums,
    differentiable_views,
    mark_sums,
    opened,
    refuse_written_views,
    split_sums,
)
from lightning_remat.capture.packed._joint import AddedElsewhereError, add_inside_layers, as_in_eager_mode
from lightning_remat.capture.rewritings import HandOver
from lightning_remat.capture.tracing._data import REFUSAL, REFUSED
from lightning_remat.capture.tracing._functions import differentiable_backwards, differentiates, is_differentiable
from lightning_remat.capture.tracing._inference import without_inference_mode
from lightning_remat.errors import CaptureError, GraphError, InfeasibleBudgetError, RematError, ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.lowering import lower, without_tangents
from lightning_remat.planner._device_memory import DeviceMemory
from lightning_remat.planner._surroundings import Surroundings
from lightning_remat.runtime._accumulate import Accumulator
from lightning_remat.runtime._arrivals import Arrivals
from lightning_remat.runtime._graph import Graph
from lightning_remat.runtime._moving import ChangedActivations, MovingBuffers
from lightning_remat.runtime._planning import OtherLayouts
from lightning_remat.runtime._running import Runner, Step
from lightning_remat.runtime._sized_plans import rounded_up

log = logging.getLogger(__name__)


class NoSymbols(BaseException):
    """A capture with symbolic sizes has failed, for this reason, before anything of the call has run."""


class NoPacking(BaseException):
    """Carries the reason why recurrent layers over packed sequences cannot be part of a plan; nothing of the call has run."""


class Stop(BaseException):
    """Carries a `RematError` through Dynamo, which would swallow the error itself and run the frame in eager mode.

    ``begins``: whether nothing of the call has run.
    """

    def __init__(self, error: RematError, begins: bool) -> None:
        super().__init__(str(error))
        self.error, self.begins = error, begins


class Backend:
    """The backend that Dynamo calls with the graphs of one function.

    Args:
        function: the function that is captured.
        step: the step that its graphs are parts of.
        accumulates: asked when a graph is captured: whether its backward may add gradients to ``.grad`` itself.
        shared: whether what a call reads may be read outside of it too, before the backward (see `ScheduledStep`).
        goes_on: told that nothing fits the budget; returns whether training goes on by the smallest plans.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        step: Step,
        accumulates: Callable[[], bool],
        shared: bool,
        goes_on: Callable[[Exception], bool],
    ) -> None:
        self.function, self.step, self.accumulates, self.shared = function, step, accumulates, shared
        self.goes_on = goes_on

    def begins(self, code: types.CodeType | None) -> bool:
        """Whether nothing of the call has run where a frame of this code is captured, so that it can be called once more."""
        return not self.step.call.ran and code is not None and code is internals.code_of(self.function)

    def __call__(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        symbolic: bool,
        code: types.CodeType | None,
        with_constants: Callable[[], None],
    ) -> Callable[..., Any]:
        """The callable that runs a graph: by its plan, or as Dynamo found it where it cannot be planned.

        Args:
            module: the graph, as Dynamo found it.
            inputs: example arguments.
            symbolic: whether sizes may be symbols.
            code: code of the frame that it was found in.
            with_constants: has the frame traced once more, with Python's numbers as constants, if it has any left.

        Raises:
            NoSymbols: to have the call captured again without symbols.
            NoPacking: to have the call captured again, with packed sequences left alone.
            Stop: with the error that ends the user's call.
            Exception: where a graph with checkpoints (`torch.utils.checkpoint`) cannot be planned: Dynamo then runs the
                frame in eager mode.
        """
        self.step.measuring.give_way()  # both the measured step and the measurement of costs need the profiler
        internals.guard_on_gradients(inputs)
        internals.guard_on_choices()
        in_checkpoints = checkpoints(module)
        name_assertions(module)
        differentiable_backwards(module)
        detach_views_without_gradients(module)
        in_python = not is_differentiable(module)
        if in_python and differentiates(module):
            self.step.reasons.give_up(
                "the backward of an autograd.Function that calls another one is differentiated: torch captures it otherwise; "
                "write what that function computes into the backward to have the step planned"
            )
        if self.step.reasons.gave_up:  # in the middle of a call
            if in_checkpoints or in_python:
                raise CaptureError("the rest of a call that runs as before")
            return as_in_eager_mode(module).forward
        if hands_on_views_alone(module) and not in_checkpoints:
            return as_in_eager_mode(module).forward
        if any(internals.is_distributed(value) for value in inputs):
            self.step.reasons.failed("it computes with distributed tensors, which are left as they are")
            return as_in_eager_mode(module).forward
        self.step.plans.planning.progress("capturing")

        def planned() -> Callable[..., Any]:
            while True:  # each time with what the last one has learned of the device's kernels
                with contextlib.suppress(OtherLayouts):
                    return _Handed(self, module, inputs, symbolic, code, in_checkpoints).captured()

        if self.step.plans.planning.config.fuse == "fast" and not symbolic and not in_checkpoints:
            found = self._with_channels_last(module, planned)
            if found is not None:
                return found
        try:
            return planned()
        except Exception as error:  # whatever torch raises: the graph runs as before, and a warning gives the reason
            with_constants()
            reason = REFUSED if REFUSAL in str(error) else f"{type(error).__name__}: {error}"
            otherwise: NoSymbols | NoPacking | None = None
            if symbolic and not self.step.call.ran:
                otherwise = NoSymbols(reason)
            elif isinstance(error, AddedElsewhereError) and not self.step.call.ran:
                otherwise = NoPacking(reason)
            if otherwise is not None and self.begins(code):
                raise otherwise from error
            if in_checkpoints:  # if this graph ran, nothing would be checkpointed, and random numbers would be others
                self.step.reasons.give_up(reason)
                raise
            if otherwise is not None:
                # What comes before a graph break has run, and may have drawn or changed something.
                self.step.call.otherwise = otherwise
                return as_in_eager_mode(module).forward
            self.step.reasons.failed(reason, error)
            return as_in_eager_mode(module).forward

    def _with_channels_last(
        self, module: torch.fx.GraphModule, planned: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any] | None:
        """What runs a graph with its convolutions on tensors with channels last; ``None`` where it stays as it is."""
        try:
            relaid = ChannelsLast(module)
        except Exception as error:  # noqa: BLE001 - a convolution that cannot be timed, for lack of memory, say
            log.info("%s keeps its tensors' layouts: %s", self.step.reasons.name or "The step", error)
            return None
        if not relaid.convolutions:
            return None
        try:
            return planned()
        except Exception as error:  # noqa: BLE001 - a view of a tensor that lies otherwise, for one
            relaid.take_back()
            log.info("%s keeps its tensors' layouts: %s", self.step.reasons.name or "The step", error)
            return None


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How the joint graph of a captured graph is read, each time that it is traced; it does not hold the inputs.

    Attributes:
        name: name of the step.
        draws_anew: whether a checkpoint in it draws other random numbers when it is evaluated again.
        given_views: positions of the arguments that are differentiable views.
        parameters: for each argument, whether it is a parameter.
        autocast: what autocast did while the graph was captured.
        accumulator: see `Accumulator`; ``None`` where gradients are returned to autograd.
        stages: the arguments whose gradients the accumulator takes together (see `HandOver`).
        last: whether it is the last graph that the function runs: no later one of the call adds to its inputs'
            gradients.
        shared: see `Backend`.
    """

    name: str
    draws_anew: bool
    given_views: Any
    parameters: list[bool]
    autocast: Autocast
    accumulator: Accumulator | None
    stages: tuple[tuple[int, ...], ...]
    last: bool
    shared: bool

    def read(
        self,
        joint: torch.fx.GraphModule,
        _joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[CapturedGraph, Sums]:
        """The captured graph of AOTAutograd's joint graph, and the gradients whose summands autograd adds up."""
        refuse_other_second_evaluations(joint.graph, self.draws_anew)
        refuse_written_views(joint.graph, num_fwd_outputs, self.given_views)
        add_inside_layers(joint.graph)
        share_casts(joint.graph, num_fwd_outputs, self.autocast)  # before sums are looked for: theirs are among them
        sums: Sums = {}
        if self.accumulator is None and not self.last:
            sums = split_sums(joint.graph, num_fwd_outputs)
        elif self.shared:
            sums = mark_sums(joint.graph, num_fwd_outputs)
        captured = from_joint(
            joint,
            num_fwd_outputs,
            static_inputs=static_lifetime_input_indices or (),
            parameters=self.parameters,
            name=self.name,
            hand_over=HandOver(self.accumulator.takes, self.stages) if self.accumulator is not None else None,
        )
        return captured, sums

    def again(
        self, frame: internals.Frame, sums: Sums, tiling: Tiling | None, fusing: Fusing | None, layouts: Layouts
    ) -> CapturedGraph:
        """The graph, or another form of it, traced once more for gradients of these layouts.

        Raises:
            CaptureError: where other gradients would be sums than in the first trace.
        """
        captured: CapturedGraph
        captured, others = frame.joint(layouts, self.read)
        if others != sums:
            raise CaptureError("the gradients that are added up in it are others then")
        form = captured if tiling is None else captured.tiled(tiling)
        if form is None:
            raise CaptureError("nothing in it can be computed in slices then")
        form = form if fusing is None else form.fused(fusing)
        if form is None:
            raise CaptureError("nothing in it can be fused then")
        return form


@dataclasses.dataclass
class _Planned:
    """A graph that `_Handed` has read and planned; ``number`` is that of its plan."""

    captured: CapturedGraph
    problem: ComputationGraph
    around: Surroundings
    memory: DeviceMemory | None
    number: int
    buffers: MovingBuffers


class _Handed:
    """One graph from Dynamo while it is made a `Graph`; it refers to the inputs, so nothing keeps it afterwards."""

    def __init__(
        self,
        backend: Backend,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        symbolic: bool,
        code: types.CodeType | None,
        in_checkpoints: Sequence[torch.fx.Node],
    ) -> None:
        self._step, self._shared = backend.step, backend.shared
        self._module, self._inputs, self._code = module, inputs, code
        self._in_checkpoints = in_checkpoints
        self._begins, self._goes_on = backend.begins(code), backend.goes_on
        around = backend.step.plans.planning.surroundings()
        sharded = around.sharded  # then it is one of several: hooks stand between
        self._whole = internals.is_whole_function(module, inputs) and not sharded
        self._reading = _Reading(
            backend.step.reasons.name,
            draws_anew=any(node.kwargs.get("preserve_rng_state", True) is False for node in in_checkpoints),
            given_views=differentiable_views(inputs),
            parameters=[isinstance(value, torch.nn.Parameter) for value in inputs],
            autocast=Autocast.around(module, inputs),
            accumulator=Accumulator(inputs, backend.step.taken, backend.step.recordings.homes)
            if backend.accumulates() and self._whole
            else None,
            stages=(),
            last=internals.ends_function(module, code, backend.function),
            shared=backend.shared,
        )
        ported, self._views = with_ports(module)
        self._frame = internals.Frame(ported, PARTS, symbolic, stays)
        self._weights: dict[int, int] = {}
        self._sums: Sums = {}
        self._order: tuple[int, ...] = ()
        self._common: frozenset[int] = frozenset()
        self._stages: Stages | None = None
        self._without: frozenset[int] = frozenset()
        self._sharded, self._accumulating = sharded, around.accumulating
        self._casts: frozenset[int] = frozenset()
        self._computed: dict[int, bool] = {}
        self._planned: _Planned | None = None

    def captured(self) -> Callable[..., Any]:
        """The callable that runs it: by a plan, where anything in it needs a gradient."""
        without_inference_mode(self._module)
        compiled, exchange = self._frame.compiled(self._inputs, self._partition)
        if self._planned is None:
            return compiled
        exchange.without = without_tangents
        if self._reading.last and self._sums:
            exchange.opened = functools.partial(opened, sums=self._sums)
            exchange.summed = {first: others for first, *others in self._sums.values()}
        graph = self._graph(self._planned, exchange)
        if self._stages is not None:
            exchange.in_stages = functools.partial(in_stages, stages=self._stages)
        arguments = self._sums, self._order, self._common, self._stages, self._without, self._casts, self._computed
        return Runner(graph, compiled, self._step, *arguments, self._views).run

    def _partition(self, joint: torch.fx.GraphModule, joint_inputs: Any, **described: Any) -> internals.Modules:
        """AOTAutograd's partitioner: reads and plans the joint graph, and lowers it to a forward and a backward."""
        traced = joint.graph, described["num_fwd_outputs"]
        together = internals.processes() > 1 and not self._sharded  # a unit reduces gradients in an order of its own
        self._order, self._without = gradient_order(*traced) if together else (), without_gradients(*traced)
        self._common = shared_gradients(*traced, self._order) if together else frozenset()
        autocast = self._reading.autocast
        if self._shared or not self._whole:
            self._casts = cast_arguments(joint.graph, autocast)
        self._computed = {i: i in autocast.computed for i in cast_often(joint.graph, autocast)}
        # Where gradients are not added to others, it is autograd that takes them, a stage at a time.
        taken = self._reading.accumulator is not None and not self._accumulating
        if self._order and self._whole and self._reading.last and not self._shared:
            nbytes = [one.nbytes if isinstance(one, torch.Tensor) else 0 for one in self._inputs]
            self._stages = stages_of(self._order, nbytes.__getitem__, gradient_arguments(*traced), fine=taken)
        if taken and self._stages is None:
            self._reading = dataclasses.replace(self._reading, accumulator=None)
        elif taken and self._stages is not None:
            self._reading = dataclasses.replace(self._reading, stages=self._stages.arguments)
        captured, self._sums = self._reading.read(joint, joint_inputs, **described)
        # Parameters that the step reaches through an optimizer are not inputs: Dynamo's module holds them.
        for value in (*self._inputs, *self._module.parameters()):
            if isinstance(value, torch.nn.Parameter) and value.requires_grad:
                here = same_device(value.device, captured.device)
                self._weights[id(value)] = block_bytes(value.nbytes, value.device.type) if here else 0
        if captured.symbols:
            sizes = (captured.sizes.values[symbol] for symbol in captured.symbols)
            limits = captured.size_limits()
            captured = captured.at([rounded_up(n, most) for n, most in zip(sizes, limits, strict=True)])
        buffers = MovingBuffers(captured, self._inputs, self._step.call.batch)
        if self._whole and not captured.symbols:
            buffers.planned_bytes = buffers.most_bytes
        first = functools.partial(
            self._step.plans.first,
            captured,
            self._weights,
            self._whole,
            buffers.planned_bytes + self._step.recordings.room_bytes(captured),
            staged=self._stages is not None,
        )
        try:
            with internals.real_tensors(), internals.collected():
                try:
                    captured, problem, plan, around, memory = first()
                except InfeasibleBudgetError as error:
                    if self._begins or not self._goes_on(error):
                        raise
                    captured, problem, plan, around, memory = first()
        except (CaptureError, ScheduleError, GraphError):  # this library's defects must not end the user's step
            raise
        except RematError as error:
            raise Stop(error, self._begins) from error
        number = self._step.plans.number_of(plan)
        self._planned = _Planned(captured, problem, around, memory, number, buffers)
        summands = 0 if self._reading.last else sum(len(positions) - 1 for positions in self._sums.values())
        return dataclasses.replace(lower(captured, plan.schedule), summands=summands)

    def _graph(self, planned: _Planned, exchange: internals.Exchange) -> Graph:
        plans, captured, number = self._step.plans, planned.captured, planned.number
        schedule = plans.all[number].schedule
        planned.buffers.add(number, captured, schedule)
        again = functools.partial(self._reading.again, self._frame, self._sums, captured.tiling, captured.fusing)
        arrivals = Arrivals(exchange, again)
        arrivals.add(0, captured, schedule)
        plainly = None if self._in_checkpoints else as_in_eager_mode(self._module).forward
        draws = [captured.device] if any(op.random for op in captured.graph.ops) else []
        primals = zip(captured.arguments, captured.primals, strict=True)
        written = frozenset(argument for argument, primal in primals if primal in captured.written)
        graph = Graph(
            captured,
            planned.problem,
            self._weights,
            planned.around,
            planned.memory,
            exchange,
            versions={number: 0},
            plan=number,
            buffers=planned.buffers,
            arrivals=arrivals,
            changes=None if self._whole or self._sharded else ChangedActivations(exchange),
            code=self._code,
            plainly=plainly,
            differentiated=Differentiated(plainly, self._frame.around, draws, written)
            if plainly is not None and is_differentiable(self._module)
            else None,
            accumulator=self._reading.accumulator,
            whole=self._whole,
            symbolic=any(map(internals.is_size_of_tensor, self._inputs)),
        )
        exchange.recorder = self._step.recordings.recorder(captured, self._reading.accumulator, planned.buffers)
        self._step.call.captured.append(number)
        with internals.real_tensors():
            plans.tell(plans.all[number])
        if captured.symbols:
            symbols = [internals.expression(value) for value in self._inputs]
            graph.arguments = tuple(symbols.index(symbol) for symbol in captured.symbols)
            graph.sized = plans.of_sizes(graph, captured, number)
        plans.graphs.append(graph)
        return graph

"""Running a captured graph: its forward by the present call's plan, and the checks when its backward begins."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from lightning_remat.capture import _torch as internals
from lightning_remat.capture._tangents import Given
from lightning_remat.capture.gradients._autocast import Casts, casts_in_backward, is_cast_for_each_use, shares_casts
from lightning_remat.capture.gradients._differentiated import OTHER_BITS, Evaluation
from lightning_remat.capture.gradients._ports import Ports
from lightning_remat.capture.gradients._stages import StagedBackward, Stages
from lightning_remat.capture.gradients._sums import HandedOut, Sums, adds_elsewhere, several_of
from lightning_remat.capture.gradients._taken import Taken
from lightning_remat.planner._plan import Plan
from lightning_remat.runtime._call import Call
from lightning_remat.runtime._graph import Graph
from lightning_remat.runtime._measured_step import MeasuredStep
from lightning_remat.runtime._measuring import Measuring
from lightning_remat.runtime._paths import Paths
from lightning_remat.runtime._plans import Plans
from lightning_remat.runtime._reasons import Reasons
from lightning_remat.runtime._recordings import Recordings
from lightning_remat.runtime._sized_plans import SizedPlan


@dataclasses.dataclass(frozen=True)
class Step:
    """What the graphs of one step share while they run.

    Attributes:
        plans: the plans of all graphs.
        paths: the plans of whole calls.
        measuring: the measurements of whole calls.
        call: the present call.
        reasons: told why later calls run as before.
        several_backwards: whether a call may be followed by several backwards, or hold them (manual optimization).
        shared: see `ScheduledStep`; there may also be a backward for each output of a call.
        recordings: of its graphs, where they are recorded.
        taken: the gradients that the present backward has added, or handed over.
        reduces: asked in each call whether its gradients are reduced over processes while its backward runs.
    """

    plans: Plans
    paths: Paths
    measuring: Measuring
    call: Call
    reasons: Reasons
    several_backwards: bool
    shared: bool
    recordings: Recordings
    taken: Taken
    reduces: Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class _Run:
    """One forward of a graph: what its backward needs to know of it.

    Attributes:
        number: number of the plan.
        first: whether it is the plan's first run.
        compare: looks whether buffers have changed since (see `MovingBuffers.watch`).
        added: by position, the parameters whose gradients the `Accumulator` may add.
        handed_out: the gradients that autograd adds up.
        staged: runs the backward in stages; ``None`` where it runs as a whole.
        measured: the measurement of the call; ``None`` if it is not measured.
        position: position of the graph in the call.
        evaluation: see `Differentiated.begins`; ``None`` where its gradients cannot be made differentiable.
        leaves: positions of arguments that the step has made leaves of autograd's graph; not looked for after the first run.
    """

    number: int
    first: bool
    compare: Callable[[], None]
    added: Mapping[int, torch.nn.Parameter]
    handed_out: HandedOut
    staged: StagedBackward | None
    measured: MeasuredStep | None
    position: int
    evaluation: Evaluation | None
    leaves: frozenset[int]


def _is_made_a_leaf(value: Any) -> bool:
    """Whether a tensor gets a gradient that ``torch.autograd.grad`` alone may ask for (``z.detach().requires_grad_()``)."""
    made = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return made and value.requires_grad and value.is_leaf


class Runner:
    """Runs one captured graph, wherever Dynamo calls it.

    Args:
        graph: the graph.
        compiled: runs the version that the graph's exchange has chosen, as one node of autograd's graph.
        step: the step that it is a part of.
        sums: the gradients whose summands autograd adds up.
        order: positions of arguments in the order in which eager mode has their gradients; none where that is of no
            consequence.
        shared: positions of arguments whose gradients share memory (see ``capture.gradients._shared``).
        stages: of its backward, where gradients leave that while it runs.
        without: positions of arguments that get no gradient.
        casts: positions of arguments that eager mode casts once under one autocast region, whatever uses them.
        computed: positions of arguments that are cast several times, each with whether the capture took it for a
            computed tensor or a view: eager mode casts these for each use, and a leaf of autograd's graph once.
        views: positions of the outputs that have a port (see ``capture.gradients._ports``), an extra output that Dynamo does
            not expect.
    """

    def __init__(
        self,
        graph: Graph,
        compiled: Callable[..., Any],
        step: Step,
        sums: Sums,
        order: Sequence[int],
        shared: frozenset[int],
        stages: Stages | None,
        without: frozenset[int],
        casts: frozenset[int],
        computed: Mapping[int, bool],
        views: Any,
    ) -> None:
        self._graph, self._compiled, self._step = graph, compiled, step
        self._order, self._shared, self._stages, self._without = order, shared, stages, without
        self._sums, self._casts, self._computed, self._views = sums, casts, computed, views

    def run(self, *args: Any) -> Any:
        """What the graph returns for these arguments."""
        graph, call, plans = self._graph, self._step.call, self._step.plans
        if graph.left and graph.plainly is not None:
            return graph.plainly(*args)
        if graph.plainly is not None and any(
            is_cast_for_each_use(args[i]) is not computed for i, computed in self._computed.items()
        ):
            self._step.reasons.give_up(
                "under torch.autocast it is given parameters in one call and what was computed in another: eager mode casts "
                "the former once, and the latter for each use"
            )
            return graph.plainly(*args)
        graph.called(call.number, args)
        number, plan = self._plan(args)
        graph.exchange.current = graph.versions[number]
        plans.runs_now(graph, number, plan)
        position = len(call.ran)
        call.ran.append((graph, number))
        measured = self._step.measuring.step
        copies = graph.buffers.copies(args, number, plans.runs[number], call.batch)
        reasons = self._step.reasons
        compare = graph.buffers.watch(args, copies, reasons.name or "captured graph", reasons.give_up)
        handed_out = HandedOut(self._sums)
        if self._casts:
            cast = [get_gradient_edge(args[i]) for i in self._casts if args[i].requires_grad and args[i].is_leaf]
            region = internals.autocast_region(graph.captured.device.type)
            handed_out.casts = Casts(region, frozenset((edge.node, edge.output_nr) for edge in cast))
        staged = self._in_stages(args)
        given: Sequence[Any] = args
        if copies or self._sums or self._order or self._without:
            given = [copies.get(i, value) for i, value in enumerate(args)]
            order = () if staged is not None else self._order
            given = handed_out.inputs(given, order, self._without, self._shared)
        if staged is not None:
            given = staged.inputs(given)
        if measured is not None:
            measured.begins(position, "forward")
        if graph.changes is not None:
            graph.changes.begin(args, call.batch, graph.is_new)
        differentiated = graph.differentiated if staged is None else None
        evaluation = differentiated.begins(args, handed_out, graph.is_new) if differentiated is not None else None
        outputs = self._compiled(*given)
        if graph.changes is not None and graph.is_new:
            graph.changes.watch(args, call.batch, outputs)
        ports = Ports(outputs, self._views)
        if evaluation is not None:
            evaluation.ran(given, outputs[: len(outputs) - len(self._views)], self._views)
        if self._casts:
            for one in outputs:
                if (node := internals.captured_node(one)[0]) is not None:
                    node.casts = handed_out.casts
        if measured is not None:
            measured.ends(position, "forward")
        accumulator = graph.accumulator
        added = {i: args[i] for i in accumulator.positions} if accumulator is not None else {}
        if accumulator is not None:
            accumulator.alone = False  # until it is known what the call returns
            call.nodes.update(internals.captured_node(one)[0] for one in outputs)
        first = plans.runs[number] == 1
        leaves = frozenset(i for i, value in enumerate(args) if first and _is_made_a_leaf(value))
        run = _Run(number, first, compare, added, handed_out, staged, measured, position, evaluation, leaves)
        inputs = args if given is args else (*args, *given)
        internals.on_backward(inputs, outputs, functools.partial(self._backward_begins, run), ports.gradients)
        return outputs[: len(outputs) - len(self._views)]

    def _in_stages(self, args: Sequence[Any]) -> StagedBackward | None:
        """What runs the backward of this call in stages, where there is a use for that."""
        stages, step = self._stages, self._step
        if stages is None or step.recordings.any or not (step.reduces() and stages.are_of(args)):
            return None
        return StagedBackward(stages, step.taken, self._shared)

    def _plan(self, args: Sequence[Any]) -> tuple[int, Plan | SizedPlan]:
        """The number of the plan to run now, and the plan: for the present sizes, call's path, or graph alone."""
        graph, plans = self._graph, self._step.plans
        if graph.sized is not None:
            return plans.of_these_sizes(graph, args)
        number = self._step.paths.number(graph)
        if number is None:
            plans.again(graph, part=bool(self._step.call.ran) or not graph.whole)
            number = graph.plan
        return number, plans.all[number]

    def _backward_begins(
        self,
        run: _Run,
        unused: frozenset[int],
        given: Mapping[int, Given],
        ported: Mapping[int, torch.Tensor],
        node: Any,
        gradients: Sequence[Any],
    ) -> None:
        """Called when a backward begins, before anything of it has run.

        Another backward may come from the outputs that this one leaves out: in the first run of a plan the saved
        tensors are kept for it, to see whether it comes.

        Args:
            run: the forward.
            unused: positions of the outputs that get no gradient.
            given: shape and strides of the gradients, by the position of the output.
            ported: gradients of ports, by their positions among the outputs.
            node: the graph's node in autograd's graph.
            gradients: those that come to the node, by the numbers of its outputs.
        """
        graph, reasons = self._graph, self._step.reasons
        together = self._again(run, node, gradients, ported)
        if torch.is_autocast_enabled(graph.captured.device.type) and casts_in_backward(graph.captured.graph):
            reasons.give_up(
                "its backward is called under torch.autocast, where eager mode computes some of it in low precision: gradients "
                "of this step may have other last bits, and later calls run as before; call backward() after the region"
            )
        run.handed_out.begin()
        self._step.taken.begin()
        if together is not None:
            places = graph.captured.gradient_arguments
            places = places[: len(places) - graph.exchange.summands]
            graph.exchange.instead = [None if i is None else together.get(i) for i in places]
        dropped = graph.leave_out(unused)
        graph.exchange.taken, graph.exchange.staged = run.handed_out.taken, run.staged
        self._notice_what_is_shared(run.handed_out, node)
        graph.exchange.ported = graph.arrivals.tangents(ported)
        self._take_as_given(run.number, given, ported)
        if run.measured is not None:
            run.measured.begins(run.position, "backward")
            graph.exchange.done = functools.partial(run.measured.ends, run.position, "backward")
        without = {graph.captured.gradient_arguments[i] for i in dropped}
        if graph.accumulator is not None:
            graph.accumulator.begin(run.added if together is None else {}, without)
        replays = graph.sized is not None or self._step.recordings.any
        if not replays and graph.exchange.saves_nothing(graph.versions[run.number]):
            internals.keep_saved(node)  # nor is there anything in eager mode that a second backward would miss
        elif internals.needs_kept(node):
            reasons.give_up(
                "two backwards come through one captured graph, each from a part of its outputs (such as one generated batch "
                "that is judged twice): compute what both need twice, or add the losses, to have the step scheduled"
            )
        elif unused and run.first:
            asked_for = run.leaves & without  # by a hook of the step's, as in deep equilibrium models
            may_follow = self._step.several_backwards or self._step.call.runs  # a backward in the step
            if may_follow or (self._step.shared and dropped) or asked_for:
                internals.keep_saved(node)
        run.compare()
        if graph.changes is not None:
            graph.changes.look()

    def _again(
        self, run: _Run, node: Any, gradients: Sequence[Any], ported: Mapping[int, torch.Tensor]
    ) -> Mapping[int, torch.Tensor | None] | None:
        """See to gradients that are to be differentiated, or have been; returns those that stand in for the captured ones.

        Args:
            run: the forward.
            node: the graph's node in autograd's graph, whose backward begins.
            gradients: those that come to it.
            ported: those that come to ports, by the positions of these.
        """
        reasons, evaluation = self._step.reasons, run.evaluation
        differentiated, together = evaluation is not None and evaluation.is_differentiated, None
        if any(internals.is_batched(one) for one in gradients) and not torch.is_grad_enabled():
            reasons.give_up(
                "several gradients of it are computed at once (is_grads_batched=True, vectorize=True), which captured code "
                "cannot do: those of this call are computed as in eager mode, and later calls run as before"
            )
            return evaluation.in_batches(gradients, ported, reasons.give_up) if evaluation is not None else None
        if torch.is_grad_enabled():
            this = (
                "those of this call are computed as in eager mode" if evaluation else "this backward ends in an error"
            )
            reasons.give_up(
                f"its gradients are differentiated again (create_graph=True), which captured code cannot do: {this}, and later "
                "calls run as before; compute such a penalty inside of what is captured, where it is planned too"
            )
            if evaluation is not None:
                evaluation.differentiable(node, ported, reasons.give_up)
        elif differentiated and evaluation is not None:
            together = evaluation.together(node, gradients, ported, reasons.give_up)
        elif evaluation is not None:
            evaluation.over()
        if (torch.is_grad_enabled() or differentiated) and several_of(node) and adds_elsewhere(node):
            reasons.give_up(
                "something is read several times in one part of the step, and elsewhere, whose gradients are differentiated "
                f"again: {OTHER_BITS}"
            )
        return together

    def _notice_what_is_shared(self, handed_out: HandedOut, node: Any) -> None:
        """Give up, or have autograd add up gradients, where tensors that the graph reads are used outside of it too."""
        exchange, reasons = self._graph.exchange, self._step.reasons
        if handed_out.casts is not None and shares_casts(handed_out.casts, node):
            reasons.give_up(
                "weights are used under one torch.autocast by several graphs, or outside of them too: eager mode casts each "
                "once, and adds up its gradients in the low precision. Those of this step may have other last bits, and "
                "later calls run as before; torch.autocast(..., cache_enabled=False), or one autocast for each call, has no "
                "such question"
            )
        if exchange.summed:
            added_to = adds_elsewhere(node)
            exchange.opens = bool(added_to)
            if handed_out.stay(added_to):
                reasons.give_up(
                    "it cannot be told in which order eager mode adds up the gradients of something that it reads several "
                    "times and that is read outside of it too: those of this step may have other last bits"
                )

    def _take_as_given(self, number: int, given: Mapping[int, Given], ported: Collection[int]) -> None:
        """Have a backward run that is made for gradients of these memory layouts, or give up."""
        try:
            self._graph.arrivals.begin(self._graph.versions[number], given, ported)
        except Exception as error:  # noqa: BLE001 - whatever torch raises while it traces
            self._step.reasons.give_up(
                "a gradient lies otherwise in memory than the output that it is of, and no backward could be made for that "
                f"({type(error).__name__}: {error}): the gradients of this step may have other last bits than in eager mode"
            )

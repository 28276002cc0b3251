"""What would change a plan most for the better, by the numbers of the plan itself and of its trade-off curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from lightning_remat.graph import ComputationGraph, Phase, TensorRole
from lightning_remat.report._replay import AGAIN, BESIDE, GRADIENTS, INPUTS, OLD, Moment, Replay
from lightning_remat.report._subject import Planned
from lightning_remat.report._units import format_bytes
from lightning_remat.schedule import WholeStep

WORTH = 0.005
"""Shares of the step's time below this are not worth a word."""

CHEAP = 0.02
"""A smaller budget is cheap up to this share of the step's time without rematerialization."""

FROM_LOSSES = ("log_softmax", "nll_loss", "cross_entropy", "softmax")
"""Parts of the names of ops whose results can often be computed in slices."""

LINK = 25e9
"""Bytes a second that copies to pinned memory reach on common machines: beyond that, nothing is said of the host."""


class TradePoint(NamedTuple):
    """A schedule of the trade-off: the budget it was asked for, its peak in bytes, and the seconds of its step."""

    budget_bytes: int
    peak_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Change:
    """Something to be done, in words, and what it would gain: a share of the step's time, or of its peak."""

    words: str
    gain: float


def changes(
    plan: Planned, before: tuple[Replay, Moment], after: tuple[Replay, Moment], curve: Sequence[TradePoint]
) -> tuple[Change, ...]:
    """What would help most, the best first: by the numbers, and for a step of several graphs also what would make it fewer."""
    if plan.whole is not None:  # what one of them gains is not what the step does
        return _best_first(
            [_part_of_the_batch(plan.whole, plan.budget_bytes), _one_graph(plan.whole), _expandable(plan)]
        )
    found = [
        _more_memory(plan, curve),
        _searched_longer(plan, curve),
        _less_memory(plan, curve),
        _smaller_batch(plan, before[1]),
        _larger_batch(plan, after[1], curve),
        _in_slices(plan, *after),
        _to_the_host(plan, before[0], after[0]),
        _expandable(plan),
    ]
    return _best_first(found)


def _best_first(found: Sequence[Change | None]) -> tuple[Change, ...]:
    return tuple(sorted((one for one in found if one is not None), key=lambda one: -one.gain))


def batch_size(graph: ComputationGraph) -> int:
    """The first dimension of all tensors of the batch; 0 where they do not agree on one."""
    shapes = [graph.tensors[t].shape for t in graph.inputs if graph.tensors[t].role is TensorRole.BATCH]
    firsts = {shape[0] for shape in shapes if shape}
    return firsts.pop() if len(firsts) == 1 else 0


def loss_head(graph: ComputationGraph) -> set[int]:
    """The ops between the last forward op of a submodule and the first backward op of one: the loss, and its backward."""
    inside = [index for index, op in enumerate(graph.ops) if op.module]
    ahead = max((i for i in inside if graph.ops[i].phase is Phase.FORWARD), default=-1)
    behind = min((i for i in inside if graph.ops[i].phase is Phase.BACKWARD), default=len(graph.ops))
    return set(range(ahead + 1, behind))


def _more_memory(plan: Planned, curve: Sequence[TradePoint]) -> Change | None:
    def saved(point: TradePoint) -> float:
        return 1 - point.seconds / plan.predicted_seconds

    dearer = [p for p in curve if p.peak_bytes > plan.predicted_peak_bytes and plan.predicted_seconds > 0]
    helping = [p for p in dearer if saved(p) > WORTH]
    if not helping:
        return None
    enough = max(map(saved, helping)) / 4
    best = max(
        (p for p in helping if saved(p) >= enough),
        key=lambda p: saved(p) / max(1, p.peak_bytes - plan.budget_bytes),
    )
    more = max(0, best.peak_bytes - plan.budget_bytes)
    return Change(
        f"Allow {format_bytes(more)} more (budget {format_bytes(best.peak_bytes)}): {saved(best):.1%} less time a step.",
        saved(best),
    )


def _searched_longer(plan: Planned, curve: Sequence[TradePoint]) -> Change | None:
    within = [p.seconds for p in curve if p.peak_bytes <= plan.budget_bytes]
    if not within or plan.predicted_seconds <= 0 or (saved := 1 - min(within) / plan.predicted_seconds) <= WORTH:
        return None
    return Change(
        "Plan again with more time or another solver: the trade-off has a schedule within this budget that takes "
        f"{saved:.1%} less time a step.",
        saved,
    )


def _less_memory(plan: Planned, curve: Sequence[TradePoint]) -> Change | None:
    most = plan.predicted_seconds + CHEAP * plan.baseline_seconds
    cheap = [p for p in curve if p.peak_bytes < plan.predicted_peak_bytes and p.seconds <= most]
    if not cheap or plan.baseline_seconds <= 0:
        return None
    best = min(cheap, key=lambda p: p.peak_bytes)
    gain = 1 - best.peak_bytes / plan.predicted_peak_bytes
    if gain < CHEAP:
        return None
    extra = best.seconds / plan.predicted_seconds - 1
    cost = f"for {extra:.1%} more time a step" if extra > 0.0005 else "at the same time a step"
    less = format_bytes(plan.predicted_peak_bytes - best.peak_bytes)
    return Change(f"A budget of {format_bytes(best.peak_bytes)} does too: {less} less, {cost}.", gain)


def _fixed(moment: Moment) -> int:
    """Bytes at a moment that do not grow with the batch."""
    roles = {INPUTS[TensorRole.PARAMETER], INPUTS[TensorRole.BUFFER]}
    return sum(n for name, n in moment.parts if name in roles | {BESIDE, GRADIENTS, OLD})


ESTIMATE = "an estimate: what is no parameter, gradient or optimizer state is taken to grow with the batch"


def _smaller_batch(plan: Planned, moment: Moment) -> Change | None:
    size, fixed = batch_size(plan.as_captured), _fixed(moment)
    if size < 2 or plan.overhead <= WORTH or moment.nbytes <= max(fixed, plan.budget_bytes):
        return None
    fits = int(size * (plan.budget_bytes - fixed) / (moment.nbytes - fixed))
    if fits < 1:
        return None
    gain = 1 - plan.baseline_seconds / plan.predicted_seconds
    return Change(
        f"A batch of about {fits} instead of {size} would fit without rematerialization, with {gain:.1%} less time a sample if "
        f"time goes with the batch ({ESTIMATE}).",
        gain * fits / size,
    )


def _part_of_the_batch(whole: WholeStep, budget_bytes: int) -> Change | None:
    peak, fixed = whole.before.most_bytes, whole.always_bytes
    if whole.overhead <= WORTH or peak <= max(fixed, budget_bytes) or budget_bytes <= fixed:
        return None
    share, gain = (budget_bytes - fixed) / (peak - fixed), 1 - 1 / (1 + whole.overhead)
    return Change(
        f"About {share:.0%} of the batch would fit without rematerialization, with {gain:.1%} less time a sample if time goes "
        "with the batch (an estimate: what is always held is taken not to grow with the batch, and all else to).",
        gain * share,
    )


def _one_graph(whole: WholeStep) -> Change:
    return Change(
        f"Capture the step as fewer graphs than {whole.graphs:,}, where Python code and not FSDP divides it "
        "(TORCH_LOGS=graph_breaks says where): one graph can be computed in slices, fused, and have tensors wait on the host.",
        0.0,
    )


def _larger_batch(plan: Planned, moment: Moment, curve: Sequence[TradePoint]) -> Change | None:
    size, fixed = batch_size(plan.graph), _fixed(moment)
    if size < 1 or not curve:
        return None
    least = min(curve, key=lambda p: p.peak_bytes)
    if plan.budget_bytes <= fixed or least.peak_bytes <= fixed:
        return None
    fits = int(size * (plan.budget_bytes - fixed) / (least.peak_bytes - fixed))
    if fits < 1.1 * size:
        return None
    extra = least.seconds / plan.predicted_seconds - 1 if plan.predicted_seconds > 0 else 0.0
    return Change(
        f"A batch of about {fits} instead of {size} would fit this budget at the smallest peak found, with {extra:+.1%} time a "
        f"sample ({ESTIMATE}).",
        0.0,  # an offer: what it is worth, the user knows
    )


def _in_slices(plan: Planned, replay: Replay, moment: Moment) -> Change | None:
    if plan.untiled is not None or replay.timeline.peak_step < 0:
        return None
    ops = plan.graph.ops
    sliceable = {index for index, op in enumerate(ops) if any(part in op.target for part in FROM_LOSSES)}
    if sliceable:
        sliceable |= loss_head(plan.graph)
    at = [one for one in replay.alive(replay.timeline.peak_step) if one.op in sliceable]
    nbytes = sum(one.nbytes for one in at)
    if not at or nbytes < 0.1 * moment.nbytes:
        return None
    targets = " and ".join(sorted({ops[one.op].target for one in at}))
    return Change(
        f"Compute losses in slices, with the same bits: results of {targets} take {format_bytes(nbytes)} of the peak, "
        f'{nbytes / moment.nbytes:.0%}. (In training tiling="exact", the default, does so where that is cheaper, and '
        'tiling="losses" in any case; a graph file is solved as it is.)',
        nbytes / moment.nbytes,
    )


def _to_the_host(plan: Planned, before: Replay, after: Replay) -> Change | None:
    if not plan.graph.device.startswith("cuda") or plan.graph.host is not None or plan.overhead <= WORTH:
        return None
    waits = sum(one.nbytes for one in before.lives if before.is_kept(one)) - sum(
        one.nbytes for one in after.lives if after.is_kept(one)
    )
    if waits <= 0 or plan.baseline_seconds <= 0 or (speed := waits / plan.baseline_seconds) > LINK:
        return None
    gain = 1 - plan.baseline_seconds / plan.predicted_seconds
    return Change(
        f'Let tensors wait on the host (offload="host"): {format_bytes(waits)} that are {AGAIN} now could be copied beside '
        f"the computation where copies run at {format_bytes(speed)}/s or more in either direction: up to {gain:.1%} less time.",
        gain,
    )


def _expandable(plan: Planned) -> Change | None:
    beyond = plan.predicted_reserved_bytes - plan.predicted_allocated_bytes
    if plan.arrangement != "as it is" or beyond < 0.03 * plan.predicted_allocated_bytes:
        return None
    return Change(
        f"Expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): the allocator reserves "
        f"{format_bytes(beyond)} more than the step needs, most of which they would give back.",
        beyond / plan.predicted_reserved_bytes,
    )

"""All methods on one network, measured side by side: their bits, their peaks, and their seconds in turns.

Every method gets the same batch, the same seeds, and a copy of the network: peers one of their own, this project eager's, since
where a copy lies in memory makes a step up to 3 % slower or faster. Two steps are compared with eager's bit by bit, the
allocator's peak is taken over a third, and then the methods take turns, one step each in random order, after some rounds to
warm up: what disturbs the machine disturbs all.

A step is what Lightning does: forward, ``zero_grad``, backward. The old gradients live through the forward.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from benchmarks import networks
from benchmarks.common.unavoidable import unavoidable
from benchmarks.comparison.methods import Call, Method
from benchmarks.comparison.rows import EAGER, OURS, Row
from benchmarks.comparison.verdict import to_match
from lightning_remat import InfeasibleBudgetError, Rematerialized
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.report import format_bytes
from lightning_remat.schedule import simulate

WARM_UP = 3
"""Rounds before those that are timed."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a few seeded steps of a network left: copies of the loss, the gradients and the buffers."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


@dataclasses.dataclass
class Runner:
    """A method at work on a copy of the network."""

    method: Method
    module: nn.Module
    call: Call
    batch: tuple[torch.Tensor, ...]
    row: Row
    times: list[float] = dataclasses.field(default_factory=list)

    def step(self, seed: int) -> torch.Tensor:
        """One training step in Lightning's order; returns the loss."""
        torch.manual_seed(seed)
        loss = self.call(*self.batch)
        self.module.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def timed_step(self, seed: int) -> float:
        """Seconds of one step, until the device is done."""
        device = self.batch[0].device
        _synchronize(device)
        started = time.perf_counter()
        self.step(seed)
        _synchronize(device)
        return time.perf_counter() - started

    def facts(self) -> Facts:
        """Two steps, and what they left."""
        started = time.perf_counter()
        self.step(seed=1)
        _synchronize(self.batch[0].device)
        self.row.first_step_seconds = time.perf_counter() - started
        loss = self.step(seed=2)
        gradients = {name: one.grad for name, one in self.module.named_parameters() if one.grad is not None}
        return Facts(
            loss=_kept(loss),
            gradients={name: _kept(one) for name, one in gradients.items()},
            buffers={name: _kept(one) for name, one in self.module.named_buffers()},
        )


def compare(
    workload: networks.Workload,
    methods: Sequence[Method],
    steps: int,
    duels: int = 0,
    say: Callable[[str], None] = lambda _text: None,
    at_peers: Callable[[int, str], Method] | None = None,
) -> list[Row]:
    """Run every method on a network.

    Args:
        workload: the network; it is copied and left as it is.
        methods: one row each, peers first.
        steps: timed steps of each.
        duels: further ones of the rows that are compared: this project's at a peer's peak, and that peer's.
        say: told in words what is being done.
        at_peers: makes a method of a peer's peak and of the words for it, to run there; see `verdict.to_match`.

    Returns:
        A row for each method; one that fails has the reason in it.
    """
    say("eager, as the reference")
    eager = copy.deepcopy(workload.module)
    reference = _runner(Method(EAGER, "reference", lambda module, _blocks: module), workload, eager).facts()

    def measured(method: Method) -> Runner:
        as_it_is = method.family in (EAGER, OURS)  # what it is given, it leaves as it is
        return _measured(method, workload, eager if as_it_is else copy.deepcopy(workload.module), reference, say)

    runners = [measured(method) for method in methods if method.family != OURS]
    if at_peers:
        _take_turns(runners, WARM_UP)
        for runner in runners:
            runner.row.seconds = min(runner.times, default=None)
        _forget_times(runners)
        for group in to_match([runner.row for runner in runners]):
            smallest = group[0]
            assert smallest.total_peak_bytes and smallest.peak_bytes
            method = at_peers(smallest.total_peak_bytes, format_bytes(smallest.peak_bytes))
            runners.append(measured(method))
            runners[-1].row.opponents = [row.method for row in group]
    runners += [measured(method) for method in methods if method.family == OURS]
    running = sum(runner.row.status == "ok" for runner in runners)
    say(f"timing {running} methods, {WARM_UP} rounds to warm up and {steps} more")
    _take_turns(runners, WARM_UP)
    _forget_times(runners)
    _take_turns(runners, steps)
    opponents = {name for runner in runners for name in runner.row.opponents}
    _take_turns([one for one in runners if one.row.opponents or one.row.method in opponents], duels)
    for runner in runners:
        if runner.row.status == "ok":
            runner.row.round_seconds = runner.times
            runner.row.seconds = statistics.median(runner.times)
            runner.row.seconds_least, runner.row.seconds_most = min(runner.times), max(runner.times)
        else:
            runner.row.seconds = None
    return [runner.row for runner in runners]


def _measured(
    method: Method, workload: networks.Workload, module: nn.Module, reference: Facts, say: Callable[[str], None]
) -> Runner:
    """A method at work on a copy of the network, its results compared and its peak taken."""
    say(method.name)
    runner = _runner(method, workload, module)
    with _failing_into(runner):
        _compare_facts(runner.row, runner.facts(), reference)
        _measure_peak(runner)
    if isinstance(runner.call, Rematerialized):
        _read_plan(runner.row, runner.call)
    if runner.row.status != "ok":
        say(f"{method.name}: {runner.row.note}")
        runner.module.zero_grad(set_to_none=True)
    return runner


def _take_turns(runners: Sequence[Runner], rounds: int) -> None:
    """One timed step more of each, ``rounds`` times, each time in another order: what runs before a step disturbs it."""
    shuffled = random.Random(0)
    for _ in range(rounds):
        for runner in shuffled.sample(runners, len(runners)):
            if runner.row.status == "ok":
                graphs = _graphs_captured()
                with _failing_into(runner):
                    runner.times.append(runner.timed_step(seed=3 + len(runner.times)))
                if _graphs_captured() != graphs:
                    runner.row.note = "captured again while it was timed"


def _forget_times(runners: Sequence[Runner]) -> None:
    for runner in runners:
        runner.times = []


def _runner(method: Method, workload: networks.Workload, module: nn.Module) -> Runner:
    module.load_state_dict(workload.module.state_dict())
    module.zero_grad(set_to_none=True)
    call = method.prepare(module, workload.blocks)
    return Runner(method, module, call, workload.batch, Row(method.name, method.family))


@contextlib.contextmanager
def _failing_into(runner: Runner) -> Iterator[None]:
    """A method that fails is a result too: it becomes its row."""
    try:
        yield
    except InfeasibleBudgetError as error:
        held = held_bytes(runner.module, runner.batch)
        runner.row.status = "infeasible"
        runner.row.budget_bytes = error.budget_bytes
        runner.row.note = (
            f"infeasible: a peak of {format_bytes(error.budget_bytes - held)} was asked for, the smallest feasible is "
            f"{format_bytes(error.smallest_bytes - held)}, set by {error.op}"
            + (f" in {error.module}" if error.module else "")
        )
    except Exception as error:  # noqa: BLE001 - whatever it dies of is what is reported
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        runner.row.status = "dies"
        runner.row.note = f"dies: {type(error).__name__}: {lines[0][:120]}"


def _compare_facts(row: Row, found: Facts, eager: Facts) -> None:
    row.same_loss = torch.equal(found.loss, eager.loss)
    row.same_gradients = _same(found.gradients, eager.gradients)
    row.same_buffers = _same(found.buffers, eager.buffers)
    row.loss_error = _relative_error(found.loss, eager.loss)
    errors = [
        _relative_error(found.gradients[name], one) if name in found.gradients else math.inf
        for name, one in eager.gradients.items()
    ]
    row.gradient_error = max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=0.0)


def _relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    difference = (found.double() - right.double()).abs().max().item()
    size = right.double().abs().max().item()
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def _same(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == right.keys() and all(torch.equal(found[name], one) for name, one in right.items())


def _measure_peak(runner: Runner) -> None:
    device = runner.batch[0].device
    gc.collect()
    held = held_bytes(runner.module, runner.batch, gradients=True)
    peak = peak_memory(lambda: runner.step(seed=3), device)
    runner.row.total_peak_bytes = held + peak
    runner.row.peak_bytes = held + peak - held_bytes(runner.module, runner.batch)


def _read_plan(row: Row, step: Rematerialized) -> None:
    if step.failures:
        row.note = "not captured: " + "; ".join(step.failures)
    elif len(step.plans) != 1:
        row.note = row.note or f"{len(step.plans)} plans"
    plan = step.plan
    if plan is None:
        return
    row.budget_bytes, row.predicted_peak_bytes = plan.budget_bytes, plan.predicted_peak_bytes
    row.predicted_overhead, row.gap = plan.overhead, plan.gap if math.isfinite(plan.gap) else None
    row.solver = f"{plan.solver} ({plan.status.value})"
    row.planning_seconds = plan.cost_seconds + plan.solve_seconds
    if row.total_peak_bytes:
        row.prediction_error = plan.predicted_peak_bytes / row.total_peak_bytes - 1
    if len(step.plans) == 1:
        timeline = simulate(plan.graph, plan.schedule)
        row.peak_op = timeline.peak_op + (f" in {timeline.peak_module}" if timeline.peak_module else "")
        largest = unavoidable(plan.graph)
        row.unavoidable_bytes, row.unavoidable_op = largest.nbytes, largest.op


def _graphs_captured() -> int:
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().cpu()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

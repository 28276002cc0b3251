"""One training step of several networks under every way of saving memory, compared in one run.

    python benchmarks/peers.py --network gpt2 --steps 10

Each network runs in a process of its own. In it every method gets the same batch, the same seeds, and a copy of the network:
peers one of their own, this project eager's, since where a copy lies in memory makes a step up to 3 % slower or faster. Two
steps are compared with eager's bit by bit, the allocator's peak is taken over a third, and then the methods take turns, one
step each in random order, for ``--steps`` rounds after three to warm up: what disturbs the machine disturbs all.
By default this project runs at the peaks that its peers were measured to reach; what holds is told in a second table.

A step is what Lightning does: forward, ``zero_grad``, backward. The old gradients live through the forward.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import functools
import gc
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

import torch
from rich.console import Console
from torch import nn

from benchmarks import networks
from benchmarks.determinism import CUBLAS, settle
from benchmarks.methods import MEMORY_BUDGETS, Call, Method, all_methods, at_bytes
from benchmarks.peers_verdict import Verdict, judge, to_match, unavoidable
from benchmarks.present import EAGER, OURS, Row, picture, rows_table, verdict_table
from lightning_remat import InfeasibleBudgetError, Rematerialized
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.report import format_bytes
from lightning_remat.schedule import simulate

FORMAT, FORMAT_VERSION = "lightning_remat.peers", 2
WARM_UP = 3
AT_PEERS = "peers"
"""Stands among the budgets for the peaks that the peers reach."""
BUDGETS: tuple[float | str, ...] = (1.0, AT_PEERS, "min")
RESULTS = Path(__file__).resolve().parent / "results"


# -- one network ------------------------------------------------------------------------------------------------------


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
        at_peers: makes a method of a peer's peak and of the words for it, to run there; see `benchmarks.peers_verdict`.

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


# -- the whole run ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and write JSON and a picture; returns an exit code: 1 where a run ended without its rows."""
    options = _options(arguments)
    if options.worker:
        _work(options)
        return 0
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("peers.py: --device cuda was asked for, and this machine has no CUDA device", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 200)
    out: Path = options.out or RESULTS / f"peers-{options.size}-{torch.device(options.device).type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    if options.keep and out.exists():
        found = {result["name"]: result for result in json.loads(out.read_text(encoding="utf-8"))["networks"]}
    errors = False
    for name in options.network or networks.networks():
        result = found[name] = {**_in_own_process(name, options), "date": _now(), "settings": _settings(options)}
        errors |= "error" in result
        rows = [Row.from_dict(row) for row in result["rows"]]
        if rows:
            console.print(rows_table(f"{result['description']} on {options.device}", rows))
        if result.get("verdict"):
            console.print(verdict_table("What holds", Verdict.from_dict(result["verdict"])))
        if "error" in result:
            console.print(f"{name}: {result['error']}", style="red", markup=False)
        # After each network: a long run that is ended early leaves what it has.
        _write(out, list(found.values()), options)
    console.print(f"written: {out}, and a picture beside it", markup=False, soft_wrap=True)
    return 1 if errors else 0


def _write(out: Path, found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The JSON file, and the picture where matplotlib is installed."""
    data = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "date": _now(),
        "machine": _machine(options.device),
        "versions": _versions(),
        "settings": _settings(options),
        "networks": found,
    }
    out.write_text(json.dumps(_plain(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    drawn = [(result["description"], [Row.from_dict(row) for row in result["rows"]]) for result in found]
    if any(rows for _, rows in drawn):
        picture([one for one in drawn if one[1]], out.with_suffix(".png"))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "size": options.size,
        "device": options.device,
        "steps": options.steps,
        "duels": options.duels,
        "time_limit": options.time_limit,
        "warm_up": WARM_UP,
        "deterministic": options.deterministic,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=networks.networks(), help="may be repeated; default: all")
    parser.add_argument("--size", default="cpu", choices=networks.SIZES)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each method")
    parser.add_argument(
        "--duels",
        type=int,
        default=0,
        help="further timed steps of what is compared: a peer and this project at its peak",
    )
    parser.add_argument(
        "--budgets", nargs="+", type=_budget, default=BUDGETS, help="this project's: shares, sizes, min or peers"
    )
    parser.add_argument(
        "--memory-budgets", nargs="*", type=float, default=MEMORY_BUDGETS, help="PyTorch's: activation_memory_budget"
    )
    parser.add_argument(
        "--inductor-budgets",
        nargs="*",
        type=float,
        help="the same under Inductor (needs a C++ compiler); default: as above",
    )
    parser.add_argument("--time-limit", type=float, help="seconds of this project's planner; default: its own")
    parser.add_argument("--out", type=Path, help="the JSON file; the picture goes beside it")
    parser.add_argument("--keep", action="store_true", help="keep what the file has of networks that are not run again")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="torch.use_deterministic_algorithms; by default on CUDA, where eager may not repeat its own bits without",
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # run here, and write the rows to this file
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps: give at least 1")
    if options.inductor_budgets is None:
        options.inductor_budgets = options.memory_budgets
    if options.deterministic is None:
        options.deterministic = options.device.startswith("cuda")
    return options


def _budget(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _in_own_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What was found for one network: ``name``, ``description``, ``rows``, and ``error`` where its process failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(file), "--network", name]
        command += ["--size", options.size, "--device", options.device, "--steps", str(options.steps)]
        command += ["--deterministic" if options.deterministic else "--no-deterministic"]
        command += ["--duels", str(options.duels)]
        for option in ("budgets", "memory_budgets", "inductor_budgets"):
            command += [f"--{option.replace('_', '-')}", *map(str, getattr(options, option))]
        command += [] if options.time_limit is None else ["--time-limit", str(options.time_limit)]
        # Costs measured from scratch: the planning seconds of the first budget are those of a first run.
        environment = {**os.environ, "LIGHTNING_REMAT_CACHE": str(Path(folder) / "costs")}
        if options.deterministic:
            environment.setdefault(*CUBLAS)
        ended = subprocess.run(command, env=environment, check=False)
        if file.exists():
            result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        else:
            result = {"name": name, "description": name, "rows": []}
    if ended.returncode:
        result["error"] = f"its process ended with exit code {ended.returncode}"
    return result


def _work(options: argparse.Namespace) -> None:
    """Compare the methods on one network, in this process."""
    (name,) = options.network
    workload = networks.build(name, options.size, options.device)
    nondeterministic = ""
    if options.deterministic:
        # Whether eager repeats itself in spite of an op without a deterministic kernel is in its row.
        trial = copy.deepcopy(workload.module)
        nondeterministic = settle(lambda: trial(*workload.batch).backward())
        del trial
    budgets = [one for one in options.budgets if one != AT_PEERS]
    rows = compare(
        workload,
        all_methods(budgets, options.memory_budgets, options.inductor_budgets, options.time_limit),
        options.steps,
        options.duels,
        say=lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True),
        at_peers=functools.partial(at_bytes, time_limit=options.time_limit) if AT_PEERS in options.budgets else None,
    )
    result = {
        "name": name,
        "description": workload.description,
        "nondeterministic": nondeterministic,
        "rows": [row.to_dict() for row in rows],
    }
    if AT_PEERS in options.budgets:
        result["verdict"] = judge(rows).to_dict()
    options.worker.write_text(json.dumps(_plain(result), allow_nan=False), encoding="utf-8")


def _plain(value: Any) -> Any:
    """``value`` with numbers that JSON cannot hold replaced by ``None``."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _machine(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"system": platform.system(), "processor": _processor(), "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        facts.update(gpu=properties.name, gpu_memory_bytes=properties.total_memory, cuda=torch.version.cuda)
    return facts


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("lightning_remat", "torch", "lightning", "transformers", "pytorchcv", "mip"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


if __name__ == "__main__":
    sys.exit(main())

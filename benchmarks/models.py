"""Many architectures, ten training steps each: eagerly, and within budgets. Which are captured whole, with the same bits?

    python benchmarks/models.py                    # all, a row each, written as they come
    python benchmarks/models.py --only 'Bert|monai' --resume
    python benchmarks/models.py --device cuda      # on a GPU
    python benchmarks/models.py --table            # the rows as Markdown

The architectures are those of `benchmarks.architectures`, one at a time, each in a process of its own with a time limit, so
that a crash is a row. A step is forward, ``zero_grad``, backward and AdamW, in training mode with dropout on. Eager mode runs
twice, since what does not repeat its own bits cannot be compared. Losses, gradients of each step, and parameters, buffers and
the random state after ten steps are compared bit by bit; the peak is that of forward and backward in the last step (the
second may capture again, where the first has left something behind: a mask that is kept, say; and where more than captured
graphs runs in a step, the planner itself measures it, and plans again).

On a GPU eager mode is made deterministic, and a peak is all that is allocated there.

Budgets are shares of what can be saved; where one is infeasible, ``"min"`` is run in its place, and after that 1.0.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from benchmarks.architectures import ARCHITECTURES, Architecture, Training
from benchmarks.common import results
from benchmarks.common.commands import command_line
from benchmarks.common.processes import sent_by
from benchmarks.determinism import settle
from lightning_remat import InfeasibleBudgetError, Rematerialized, rematerialize
from lightning_remat.capture import _torch as internals
from lightning_remat.measure import held_bytes, track_peak
from lightning_remat.report import format_bytes

FORMAT, FORMAT_VERSION = "lightning_remat.models", 1
RESULTS = results.RESULTS / "models-cpu.json"
SHARES = (0.8, 0.6)
STEPS = 10
TIMED = 3
"""Steps that are timed after those that are compared; the fastest counts."""

MOST_NAMES = 4
"""Of what has other bits, said in a row."""

WITHIN = 0.02
"""How far a predicted peak may be from the measured one."""

_PRELOADED = ["benchmarks.models", "transformers", "lightning"]


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Planned:
    """Some steps within a budget.

    Attributes:
        asked: the share, or ``"min"``.
        graphs: captured ones that a step runs.
        differs: names of what has other bits than in eager mode, the first few of them and how many more.
        budget_bytes, predicted_peak_bytes: of the plan; measured_peak_bytes: everything that the step holds.
        overhead: extra time of the plan, as predicted; measured_overhead: against eager's steps.
        rematerializes: whether the plan evaluates anything again.
        seconds: of capture, measuring and planning.
        reasons: why there is more than one graph, or none: Dynamo's words, their first lines.
        failures: what `Rematerialized.failures` says, and the parameters that nothing captured reads.
        exception: what ended the run.
    """

    asked: float | str
    graphs: int = 0
    differs: list[str] = dataclasses.field(default_factory=list)
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    overhead: float | None = None
    measured_overhead: float | None = None
    rematerializes: bool = False
    seconds: float = 0.0
    reasons: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    exception: str = ""

    @property
    def error(self) -> float | None:
        """Of the predicted peak."""
        if not self.measured_peak_bytes or self.predicted_peak_bytes is None:
            return None
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    def troubles(self) -> list[str]:
        """What does not hold, in words."""
        found = [f"ended with {self.exception}"] if self.exception else []
        if self.differs:
            found.append(f"other bits: {', '.join(self.differs)}")
        if self.budget_bytes is not None and (self.measured_peak_bytes or 0) > self.budget_bytes:
            found.append(f"{(self.measured_peak_bytes or 0) / self.budget_bytes - 1:.1%} over the budget")
        if self.error is not None and abs(self.error) > WITHIN:
            found.append(f"peak predicted with an error of {self.error:+.1%}")
        return found


@dataclasses.dataclass
class Row:
    """What was found for one architecture.

    Attributes:
        library, name: of the architecture.
        version: of the library.
        trouble: why there is nothing to compare: not installed, cannot be built, a crash, a time limit, not repeatable.
        parameters: how many it has.
        eager_peak_bytes: everything that a step of eager mode holds; eager_seconds: of such a step.
        planned: one a budget.
        seconds: of all of it.
    """

    library: str
    name: str
    version: str = ""
    trouble: str = ""
    parameters: int = 0
    eager_peak_bytes: int | None = None
    eager_seconds: float | None = None
    planned: list[Planned] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def captured(self) -> str:
        """In one word or two, how much of a step is captured."""
        graphs = max((one.graphs for one in self.planned), default=0)
        if not graphs:
            return "not"
        if graphs > 1:
            return f"{graphs} parts"
        return "in part" if any(one.failures for one in self.planned) else "whole"

    def troubles(self) -> list[str]:
        """What does not hold, in words."""
        found = [self.trouble] if self.trouble else []
        return found + [f"at {one.asked}: {what}" for one in self.planned for what in one.troubles()]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "captured": self.captured, "troubles": self.troubles()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """A row from what `to_dict` gave."""
        own = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**own, "planned": [Planned(**one) for one in data["planned"]]})


# -- one architecture, in a process of its own ------------------------------------------------------------------------


@dataclasses.dataclass
class _Run:
    """Some steps: what they left, and what they took."""

    numbers: dict[str, torch.Tensor]
    peak_bytes: int
    seconds: float
    state_bytes: int
    graphs: int


def examine(
    architecture: Architecture,
    shares: Sequence[float | str] = SHARES,
    time_limit: float = 2.0,
    device: str = "cpu",
) -> Row:
    """Build an architecture, train it eagerly and within budgets, and compare.

    Args:
        architecture: what to build, anew for each run, with the same seed.
        shares: budgets.
        time_limit: seconds that a solver may take for one plan.
        device: where to train it.
    """
    row, started = Row(architecture.library, architecture.name, _version(architecture.library)), time.perf_counter()
    try:
        training = _built(architecture, device)
    except ImportError as error:
        row.trouble = f"not installed ({error})"
        return row
    except Exception as error:  # noqa: BLE001 - whatever it is, the architecture's own library cannot build it so
        row.trouble = f"cannot be built: {_words(error)}"
        return row
    row.parameters = sum(p.numel() for p in training.module.parameters())
    try:
        if device != "cpu":
            settle(functools.partial(_step, training))
            training = _built(architecture, device)
        eager = _train(training, training.module)
        repeated = _train(again := _built(architecture, device), again.module)
    except Exception as error:  # noqa: BLE001 - its own again
        row.trouble = f"does not train in eager mode: {_words(error)}"
        return row
    row.eager_peak_bytes, row.eager_seconds = eager.peak_bytes, min(eager.seconds, repeated.seconds)
    if differs := _differs(eager.numbers, repeated.numbers):
        row.trouble = f"eager mode does not repeat its own bits: {', '.join(differs)}"
    del training, again, repeated
    others: list[float | str] = ["min", 1.0]
    for share in shares:
        found = _plan(architecture, share, eager, time_limit, device)
        while found is None and others:
            found = _plan(architecture, others.pop(0), eager, time_limit, device)
        row.planned += [found] if found is not None else []
    row.seconds = time.perf_counter() - started
    return row


def _built(architecture: Architecture, device: str) -> Training:
    torch.manual_seed(0)
    built = architecture.build()
    training = Training(built.module.to(device).train(), move_data_to_device(built.batch, torch.device(device)))
    gc.collect()
    return training


def _plan(
    architecture: Architecture, asked: float | str, eager: _Run, time_limit: float, device: str
) -> Planned | None:
    """Some steps within a budget; ``None`` where it is infeasible."""
    found = Planned(asked)
    torch.compiler.reset()
    training, before = _built(architecture, device), internals.capture_failures()
    step = rematerialize(training.module, asked, resident_bytes=eager.state_bytes, time_limit=time_limit)
    try:
        ours = _train(training, step)
        found.differs, found.graphs, found.measured_peak_bytes = (
            _differs(eager.numbers, ours.numbers),
            ours.graphs,
            ours.peak_bytes,
        )
        found.measured_overhead = ours.seconds / eager.seconds - 1
    except InfeasibleBudgetError:
        return None
    except Exception as error:  # noqa: BLE001 - a run that ends is what is looked for
        found.exception = _words(error)
    found.seconds = step.scheduled.planning_seconds
    found.reasons = [_in_brief(reason) for reason in internals.capture_failures() - before]
    found.failures = [_FOLDERS.sub("", failure) for failure in step.failures]
    if left_out := step.scheduled.left_out(training.module):
        found.failures.append(f"not captured: what reads {left_out[0]} and {len(left_out) - 1} parameters more")
    if (plan := step.plan) is not None:
        found.budget_bytes, found.predicted_peak_bytes = plan.budget_bytes, plan.predicted_allocated_bytes
        found.overhead, found.rematerializes = plan.overhead, plan.rematerializes
    return found


def _train(training: Training, call: Callable[..., torch.Tensor]) -> _Run:
    """Some steps of a training through ``call``, and some more for their time."""
    module, batch = training.module, training.batch
    device = next(module.parameters()).device
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([p for _, p in parameters], lr=1e-3)
    numbers: dict[str, torch.Tensor] = {}
    losses: list[torch.Tensor] = []

    def forward_and_backward() -> None:
        loss = call(**batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())

    torch.manual_seed(1)
    peak, runs = 0, 0
    for number in range(STEPS):
        if number == STEPS - 1:
            runs = _runs(call)
            held = held_bytes(module, batch, optimizer, gradients=True)
            with track_peak(device) as tracked:
                forward_and_backward()
            assert tracked.peak_bytes is not None, tracked.reason
            peak = held + tracked.peak_bytes if device.type == "cpu" else tracked.allocated_bytes or 0
        else:
            forward_and_backward()
        numbers[f"loss of step {number + 1}"] = _copied(losses.pop())
        # No name for the gradients themselves: it would keep them in the next step.
        numbers.update(
            {f"gradient {number + 1} of {name}": _copied(p.grad) for name, p in parameters if p.grad is not None}
        )
        optimizer.step()
    graphs = _runs(call) - runs
    numbers.update({name: _copied(value) for name, value in module.named_parameters()})
    numbers.update({name: _copied(value) for name, value in module.named_buffers()})
    numbers["random state"] = torch.get_rng_state()
    if device.type == "cuda":
        numbers["random state of the device"] = torch.cuda.get_rng_state(device)
    state_bytes = held_bytes(optimizer)
    seconds = []
    for _ in range(TIMED):
        started = time.perf_counter()
        forward_and_backward()
        losses.pop().item()  # waits for a device
        seconds.append(time.perf_counter() - started)
    return _Run(numbers, peak, min(seconds), state_bytes, graphs)


def _step(training: Training) -> None:
    """A forward and a backward in eager mode."""
    training.module(**training.batch).backward()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """On the host: what is compared takes no memory of a device."""
    return tensor.detach().to("cpu", copy=True)


def _runs(call: object) -> int:
    """How often graphs of a planned step have run."""
    return sum(call.runs) if isinstance(call, Rematerialized) else 0


def _differs(right: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is not there in both with the same bits."""
    names = [
        name
        for name in dict.fromkeys([*right, *found])
        if name not in right or name not in found or not _same_bits(right[name], found[name])
    ]
    return names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], f"and {len(names) - MOST_NAMES} more"]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Like `torch.equal`, but not-a-number is equal to itself."""
    if one.is_sparse or other.is_sparse:
        return one.is_sparse == other.is_sparse and _same_bits(one.to_dense(), other.to_dense())
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def _words(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {_first_line(str(error))} ({Path(place.filename).name}:{place.lineno})"


_FOLDERS = re.compile(r"(?:/[^\s/:()]+)+/(?=[^\s/:()]+\.py)")
"""What comes before a file's name."""


def _in_brief(reason: str) -> str:
    """What Dynamo could not capture, and its explanation."""
    explanation = re.search(r"^\s*Explanation: (.*)$", reason, flags=re.MULTILINE)
    return f"{_first_line(reason)}: {explanation[1][:200]}" if explanation else _first_line(reason)


def _first_line(text: str) -> str:
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "")


def _version(library: str) -> str:
    return results.versions([library]).get(library, "")


# -- all of them ------------------------------------------------------------------------------------------------------


def _work(number: int, time_limit: float, device: str, connection: Any) -> None:
    """Examine one architecture, and send its row."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # libraries: half a second each time that garbage is collected
    connection.send(examine(ARCHITECTURES[number], time_limit=time_limit, device=device).to_dict())


def in_own_process(context: Any, architecture: Architecture, work: Callable[[Any], None], patience: float) -> Row:
    """The row of one architecture, however its process ends.

    Args:
        context: of `multiprocessing`.
        architecture: the one that ``work`` examines.
        work: run in the process; sends the row, as plain data, through the connection that it is given.
        patience: seconds, after which the process is ended.
    """
    started = time.perf_counter()
    try:
        row = Row.from_dict(sent_by(context, work, patience))
    except (EOFError, TimeoutError) as error:
        row = Row(architecture.library, architecture.name, _version(architecture.library), trouble=str(error))
    row.seconds = time.perf_counter() - started
    return row


def _chosen(only: str) -> Iterator[int]:
    for number, architecture in enumerate(ARCHITECTURES):
        if re.search(only, f"{architecture.library}/{architecture.name}"):
            yield number


def read(path: Path) -> list[Row]:
    """Rows from JSON lines, or from the file that `write` makes; of several for one architecture, the last."""
    if path.suffix == ".json":
        found = results.read(path, FORMAT, FORMAT_VERSION)["rows"]
    else:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [Row.from_dict(one) for one in found]
    return list({(row.library, row.name): row for row in rows}.values())


def write(path: Path, rows: Iterable[Row]) -> None:
    """All rows, with the versions and the date."""
    data = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        **results.stamp(("torch", "lightning_remat")),
        "settings": {"shares": SHARES, "steps": STEPS, "threads": 1},
        "rows": [row.to_dict() for row in rows],
    }
    results.write(path, data)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with a count below."""
    lines = [
        "| library | architecture | captured | bits | peak of eager | measured, of the budget | predicted | overhead |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    good = [row for row in rows if not row.troubles()]
    counts = Counter(row.captured for row in good)
    said = ", ".join(f"{count} {captured}" for captured, count in counts.most_common())
    return "\n".join([*lines, "", f"{len(rows)} architectures, {len(good)} of which hold ({said})."])


def _cells(row: Row) -> list[str]:
    captured = row.captured
    if captured != "whole" and row.planned:
        reasons = dict.fromkeys(reason for one in row.planned for reason in (*one.reasons, *one.failures))
        captured += f": {'; '.join(reasons)[:160]}" if reasons else ""
    if row.trouble:
        captured = row.trouble if not row.planned else f"{captured}; {row.trouble}"
    ran = [one for one in row.planned if one.measured_peak_bytes]
    bits = (
        "" if not row.planned else "equal" if not any(one.differs or one.exception for one in row.planned) else "DIFFER"
    )
    peaks = [
        f"{format_bytes(one.measured_peak_bytes or 0)} of {format_bytes(one.budget_bytes or 0)} ({one.asked})"
        for one in ran
    ]
    return [
        f"{row.library} {row.version}".strip(),
        row.name,
        captured.replace("|", "\\|"),
        bits,
        format_bytes(row.eager_peak_bytes) if row.eager_peak_bytes else "",
        ", ".join(peaks),
        ", ".join(f"{100 * one.error:+.1f} %" for one in ran if one.error is not None),
        ", ".join(f"{100 * one.overhead:.0f} %" for one in ran if one.overhead is not None),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen, or print what was found; returns 1 where something does not hold."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="a regular expression that library/name matches somewhere")
    parser.add_argument("--rows", type=Path, default=Path("models.jsonl"), help="JSON lines, added to as rows come")
    parser.add_argument("--resume", action="store_true", help="leave out what has a row")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds for one architecture")
    parser.add_argument("--time-limit", type=float, default=2.0, help="seconds of the planner for one plan")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to train; default: cpu")
    parser.add_argument("--table", action="store_true", help="run nothing: print the rows as Markdown")
    parser.add_argument("--list", action="store_true", help="run nothing: print the names")
    parser.add_argument(
        "--out", type=Path, help=f"write all rows to a JSON file as well (that of the docs is {RESULTS.name})"
    )
    options = parser.parse_args(arguments)
    chosen = list(_chosen(options.only))
    if options.list:
        print("\n".join(f"{ARCHITECTURES[number].library}/{ARCHITECTURES[number].name}" for number in chosen))
        return 0
    if not options.table:
        _run(chosen, options)
    names = {(ARCHITECTURES[number].library, ARCHITECTURES[number].name) for number in chosen}
    rows = [row for row in read(options.rows) if (row.library, row.name) in names]
    if options.table:
        print(table(rows))
    if options.out:
        write(options.out, rows)
    return int(any(row.troubles() for row in rows))


def _run(chosen: Iterable[int], options: argparse.Namespace) -> None:
    """Examine architectures one after the other, and add their rows to the file."""
    known = (
        {(row.library, row.name) for row in read(options.rows)} if options.resume and options.rows.exists() else set()
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder, options.rows.open("a", encoding="utf-8") as file:
        os.environ.update(LIGHTNING_REMAT_CACHE=folder, OMP_NUM_THREADS="1")  # before the server starts
        for number in chosen:
            architecture = ARCHITECTURES[number]
            if (architecture.library, architecture.name) in known:
                continue
            work = functools.partial(_work, number, options.time_limit, options.device)
            row = in_own_process(context, architecture, work, options.patience)
            print(json.dumps(row.to_dict(), allow_nan=False), file=file, flush=True)
            print(
                f"{row.library}/{row.name}: {row.captured}, {row.seconds:.0f} s", "; ".join(row.troubles()), flush=True
            )


if __name__ == "__main__":
    sys.exit(main())

"""A step beside per-block checkpointing and `torch.compile` with PyTorch's own budget: memory, time, bits, first step.

Networks that people train, in bfloat16, each in two processes, one of which compiles; a way of running it is a case. Where
this project has a budget to keep, it is the peak of a compiled step without one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import networks
from benchmarks.comparison.methods import Method, all_methods
from benchmarks.comparison.rows import CHECKPOINT, OURS
from benchmarks.determinism import settle
from benchmarks.gpu.alone import alone, in_turn, lost_seconds, measuring_alone
from benchmarks.gpu.bits import Precision, Training
from benchmarks.gpu.markdown import milliseconds, said
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import (
    FAILED,
    INFEASIBLE,
    MISMATCH,
    OK,
    OVER,
    UNREPEATABLE,
    Case,
    Part,
    Result,
    Settings,
    result,
)
from benchmarks.gpu.steps import (
    Left,
    cleared,
    in_turns,
    infeasible,
    largest_difference,
    left_by,
    not_captured,
    plan_facts,
)
from lightning_remat import InfeasibleBudgetError, Rematerialized, rematerialize
from lightning_remat.measure import held_bytes, track_peak
from lightning_remat.runtime._recordings import WARM_UP

LARGE = {"layers": 24, "width": 1024, "heads": 16}
NETWORKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama-1b": ("llama", {}),
    "gpt2-medium": ("gpt2", {**LARGE, "batch": 4}),
    "resnet50": ("resnet50", {}),
    "vit-large": ("vit", {**LARGE, "batch": 32}),
    "unet": ("unet", {"batch": 4}),
}
"""By name in the table: a network of `benchmarks.networks`, and what is other than in its size for a GPU."""

MEMORY_BUDGETS = (1.0, 0.5, 0.2)
"""Of `activation_memory_budget`."""

COMPILED = "compile, 1"
AT_COMPILED = "the peak of that"
STEPS, UNTIMED, SEEDED = 8, 1, WARM_UP + 3
"""Steps that are timed, steps before those, and seeded ones of which the bits are compared: a recorded one is among them."""

TIME_LIMIT = 20.0
WAYS: Mapping[str, dict[str, Any]] = {
    "fast": {"budget": AT_COMPILED, "fuse": "fast"},
    "fast, recorded": {"budget": AT_COMPILED, "fuse": "fast", "cuda_graphs": True},
    "fused": {"budget": AT_COMPILED, "fuse": "exact"},
    "fused, recorded": {"budget": AT_COMPILED, "fuse": "exact", "cuda_graphs": True},
    "exact": {"budget": AT_COMPILED},
    "smallest": {"budget": "min"},
}
"""This project's ways, and their options."""


def peers(dry: bool) -> dict[str, Method]:
    """The others' ways; a dry run needs no compiler."""
    budgets = {"memory_budgets": MEMORY_BUDGETS if dry else (), "inductor_budgets": () if dry else MEMORY_BUDGETS}
    eager, checkpointed, *compiled = all_methods((), **budgets)
    names = {f"compile, {value:g}": method for value, method in zip(MEMORY_BUDGETS, compiled, strict=True)}
    return {"eager": eager, "checkpoint": checkpointed, **names}


def cases(settings: Settings) -> Sequence[Case]:
    """Every network in every way. What compiles longest begins; what needs its peaks waits for them."""
    compiled, others = _apart(peers(settings.dry))
    names = [name for name, (network, _) in NETWORKS.items() if not settings.networks or network in settings.networks]

    def case(name: str, way: str, group: str, after: Sequence[str] = ()) -> Case:
        waits = [f"{name}, {one}" for one in after]
        return Case(f"{name}, {way}", group, {"network": name, "way": way}, waits, of_others=way not in WAYS)

    found = [case(name, way, f"{name}, compiled") for name in names for way in compiled]
    for name in names:
        found += [case(name, way, name) for way in others]
        found += [
            case(name, way, name, [COMPILED] * (AT_COMPILED in options.values())) for way, options in WAYS.items()
        ]
    return found


def _apart(ways: Iterable[str]) -> tuple[list[str], list[str]]:
    """Compiled ways, and others."""
    found = list(ways)
    return [way for way in found if way.startswith("compile")], [way for way in found if not way.startswith("compile")]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Train in one way from eager's state, compare what is left, measure a step and time some."""
    trial = _trial(case["network"], settings)
    trial.found |= {key.partition(", ")[2]: one for key, one in case.get("found", {}).items()}
    return trial.row(case["way"])


@functools.cache
def _trial(network: str, settings: Settings) -> Trial:
    return Trial(network, settings)


class Trial:
    """One network in this process, with what eager training leaves of it, and the rows that were found.

    Args:
        network: a key of `NETWORKS`.
        settings: of the run.

    Attributes:
        rows: by way.
        found: rows of another process, by way.
    """

    def __init__(self, network: str, settings: Settings) -> None:
        name, changes = NETWORKS[network]
        self.settings = settings
        size, changes = ("tiny", {}) if settings.dry else ("gpu", changes)
        self.workload = networks.build(name, size, settings.device, **changes)
        self.module = self.workload.module
        self.made = Training(self.module, self.workload.batch, Precision())
        self.buffers = {name: one.clone() for name, one in self.module.named_buffers()}
        self.peers = peers(settings.dry)
        with in_turn():  # eager steps hold the most
            self.undetermined = settle(lambda: self.made.step(self.module, self.module))
            self.right = self._trained(self.module, self.module)
            self._cleared()
        self.rows: dict[str, Result] = {}
        self.found: dict[str, Result] = {}

    def row(self, way: str) -> Result:
        """What is found of a way, once."""
        if way not in self.rows:
            self.rows[way] = self._row(way)
            torch._dynamo.reset()
            self._cleared()
        return self.rows[way]

    def known(self, way: str) -> Result:
        """The row of a way, of another process or of this one."""
        return self.found.get(way) or self.row(way)

    def compiled_bytes(self) -> int:
        """The peak of a compiled step without a budget: as a budget, parameters and batch included.

        Raises:
            RuntimeError: where it does not run.
        """
        row = self.known(COMPILED)
        if not row.get("peak_bytes"):
            raise RuntimeError(f"the compiled step does not run: {row.get('error')}")
        return int(row["peak_bytes"]) + held_bytes(self.module, self.made.batch)

    def _row(self, way: str) -> Result:
        ours = way in WAYS
        method = Method(OURS, way, functools.partial(self._ours, WAYS[way])) if ours else self.peers[way]
        module = copy.deepcopy(self.module) if method.family == CHECKPOINT else self.module
        fields: dict[str, Any] = {"description": self.workload.description, "nondeterministic": self.undetermined}
        before = self._cleared()
        try:
            call = method.prepare(module, self.workload.blocks)
            began, lost = time.perf_counter(), lost_seconds()
            with measuring_alone():
                self.made.step(module, call)
            fields["first_step_seconds"] = time.perf_counter() - began - (lost_seconds() - lost)
            left = self._trained(module, call)
        except InfeasibleBudgetError as error:
            return result(status=INFEASIBLE, **fields, **infeasible(error))
        except Exception as error:
            if ours:
                raise
            line = next((line for line in str(error).splitlines() if line.strip()), "")
            return result(status="dies", error=f"{type(error).__name__}: {line[:200]}", **fields)
        with alone():
            fields |= self._peaks(module, call, before)
            fields |= self._timed(module, call)
        fields["differing"] = sorted(left.differences(self.right))
        fields["loss_error"] = largest_difference(left.losses, self.right.losses, self.right.losses)
        return self._judged(way, call, fields) if isinstance(call, Rematerialized) else result(**fields)

    def _judged(self, way: str, call: Rematerialized, fields: dict[str, Any]) -> Result:
        """What is wrong with a way of this project's."""
        fields |= plan_facts(call.plan)
        options, reason = WAYS[way], not_captured(call)
        call.close()
        wrong = [MISMATCH] if fields["differing"] and options.get("fuse") != "fast" else []
        if reason:
            return result(*wrong, FAILED, error=reason, **fields)
        if not options.get("cuda_graphs"):  # a recorded step's memory does not count as allocated
            peak = fields["peak_bytes"] + held_bytes(self.module, self.made.batch)
            wrong += [OVER] if peak > fields["budget_bytes"] else []
        return result(*wrong, status=UNREPEATABLE if self.known("eager")["differing"] else OK, **fields)

    def _ours(self, options: Mapping[str, Any], module: nn.Module, _blocks: Sequence[str]) -> Rematerialized:
        given = {"time_limit": TIME_LIMIT, **self.settings.options, **options}
        if given["budget"] == AT_COMPILED:
            given["budget"] = self.compiled_bytes()
        return rematerialize(module, **given)

    def _trained(self, module: nn.Module, call: Callable[..., torch.Tensor]) -> Left:
        """What seeded steps leave; the parameters stay as they are."""
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(self.buffers[name])
        module.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        losses = [self.made.step(module, call) for _ in range(SEEDED)]
        return dataclasses.replace(left_by(module, losses), parameters={})

    def _peaks(self, module: nn.Module, call: Callable[..., torch.Tensor], before: int) -> dict[str, int | None]:
        """The most that a step, beside its old gradients, takes of the device above what was allocated before."""
        module.zero_grad(set_to_none=True)
        self.made.step(module, call)
        cleared(self.made.device)
        held, on_device = held_bytes([one.grad for one in module.parameters()]), self.made.device.type == "cuda"
        with track_peak(self.made.device) as peak:
            self.made.step(module, call)
        assert peak.peak_bytes is not None, peak.reason
        if not on_device:
            return {"peak_bytes": held + peak.peak_bytes}
        assert peak.allocated_bytes is not None and peak.reserved_bytes is not None
        return {"peak_bytes": peak.allocated_bytes - before, "reserved_bytes": peak.reserved_bytes - before}

    def _timed(self, module: nn.Module, call: Callable[..., torch.Tensor]) -> dict[str, float]:
        """Median seconds of a step, and of it the median share of an eager step's, which take turns."""
        steps = {
            "eager": lambda: self.made.step(self.module, self.module),
            "way": lambda: self.made.step(module, call),
        }
        found = in_turns(steps, self.made.device, STEPS, UNTIMED)
        ratios = [one / eager for one, eager in zip(found["way"], found["eager"], strict=True)]
        return {"seconds": statistics.median(found["way"]), "of_eager": statistics.median(ratios)}

    def _cleared(self) -> int:
        """Bytes that are allocated on the device once gradients are gone, and nothing is cached."""
        self.module.zero_grad(set_to_none=True)
        return cleared(self.made.device)


def table(results: Mapping[str, Result]) -> str:
    """A table a network."""
    pieces = []
    for name in NETWORKS:
        found = {one["case"]["way"]: one for one in results.values() if one["case"]["network"] == name}
        if not found:
            continue
        description = next((one["description"] for one in found.values() if "description" in one), name)
        columns = (description, "peak, GiB", "reserved, GiB", "ms", "of eager's", "first step, s", "bits", "")
        rows = []
        for way in (*peers(dry=True), *WAYS):
            if (one := found.get(way)) is None:
                continue
            of_eager, first = one.get("of_eager"), one.get("first_step_seconds")
            bits = "" if "differing" not in one else "≠" if one["differing"] else "="
            rows.append(
                (
                    f"lightning_remat, {way}" if way in WAYS else way,
                    "" if WAYS.get(way, {}).get("cuda_graphs") else _gib(one.get("peak_bytes")),
                    _gib(one.get("reserved_bytes")),
                    milliseconds(one.get("seconds")),
                    "" if of_eager is None else f"{of_eager:.2f}",
                    "" if first is None else f"{first:.1f}",
                    bits,
                    said(one) or one.get("note", ""),
                )
            )
        pieces.append(markdown_table(columns, rows))
    return "\n\n".join(pieces)


def _gib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:,.2f}"


PART = Part(
    name="compiler",
    title="Beside the compiler",
    about="Above parameters, buffers and batch; deterministic. `compile, 0.5`: `torch.compile` with that "
    '`activation_memory_budget`. smallest: `budget="min"`; other budgets are the peak of `compile, 1`. fused: '
    '`fuse="exact"`; fast: `fuse="fast"`; recorded: `cuda_graphs=True`, whose memory counts as reserved alone. Steps are timed '
    "in turns with eager ones, while no other process runs on the device; first steps run beside those of other networks.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=420,
    least_seconds=20,
    workers=2 * len(NETWORKS),
)

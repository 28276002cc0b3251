"""A step beside other ways of saving memory: what `benchmarks.peers` finds, under deterministic eager."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.comparison.rows import EAGER, OURS, Row
from benchmarks.gpu.markdown import mib, milliseconds
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import CRASHED, FAILED, MISMATCH, OK, OVER, UNREPEATABLE, Case, Part, Result, Settings, result

NETWORKS = ("gpt2", "resnet50")
ON_DEVICE = (
    "--size gpu --steps 10 --time-limit 15 --memory-budgets 1.0 0.5 --inductor-budgets 0.5 --budgets 1.0 0.7 peers min"
)
DRY = "--size tiny --steps 1 --time-limit 2 --memory-budgets --inductor-budgets --budgets 1.0 min"


def cases(settings: Settings) -> Sequence[Case]:
    """A network each."""
    return [Case(name, name, {"network": name}) for name in settings.networks or NETWORKS]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Compare the methods on one network."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peers.json"
        arguments = ["--network", case["network"], "--device", settings.device, "--deterministic", "--out", str(file)]
        peers.main([*arguments, *(DRY if settings.dry else ON_DEVICE).split()])
        (found,) = json.loads(file.read_text(encoding="utf-8"))["networks"]
    return judged(found)


def judged(found: Mapping[str, Any]) -> Result:
    """What is wrong with this project's rows, of a network as `benchmarks.peers` writes it."""
    rows = [Row.from_dict(row) for row in found["rows"]]
    ours = [row for row in rows if row.family == OURS]
    repeats = any(row.family == EAGER and row.bitwise for row in rows)
    wrong = [MISMATCH] if repeats and any(row.bitwise is False for row in ours) else []
    wrong += [OVER] if any(row.within_budget is False for row in ours) else []
    dead = [f"{row.method}: {row.note}" for row in ours if row.status == "dies" or row.note.startswith("not captured")]
    wrong += [FAILED] if dead else []
    wrong += [CRASHED] if "error" in found else []
    error = "; ".join([*([found["error"]] if "error" in found else []), *dead])
    # An eager row that was compared and differs from eager; a crashed run has none.
    status = UNREPEATABLE if any(row.family == EAGER and row.bitwise is False for row in rows) else OK
    return result(*wrong, status=status, **{**found, **({"error": error} if error else {})})


def table(results: Mapping[str, Result]) -> str:
    """A table a network."""
    pieces = []
    for key, one in results.items():
        columns = (one.get("description", key), "peak, MiB", "ms", "bits", "predicted, of measured", "note")
        rows = []
        for row in map(Row.from_dict, one.get("rows", [])):
            bits = {True: "=", False: "≠", None: ""}[row.bitwise]
            predicted = "" if row.prediction_error is None else f"{row.prediction_error:+.3%}"
            note = row.note if row.status != "ok" or row.note else ""
            rows.append((row.method, mib(row.peak_bytes), milliseconds(row.seconds), bits, predicted, note))
        said = "" if one["status"] == OK else f"**{one['status']}** {one.get('error', '')}".strip() + "\n\n"
        pieces.append(said + markdown_table(columns, rows))
    return "\n\n".join(pieces)


PART = Part(
    name="peers",
    title="Beside peers",
    about="Peak above parameters, buffers and inputs; eager deterministic. bits: loss, gradients and buffers against eager's.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=480,
    least_seconds=200,
)

"""On a torch that is not known the package imports, plans from files, and trains as without it, with one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from lightning_remat.capture._torch._versions import NAMES, RELEASES, Unavailable, missing, unknown_torch
from lightning_remat.errors import CaptureError
from tests.helpers.cases import slow_but
from tests.helpers.graphs import unit_chain
from tests.helpers.private_names import ROOT


def test_the_torch_that_runs_has_every_private_name() -> None:
    gone = missing()
    assert not gone, f"torch {torch.__version__} does not have {gone}"
    assert unknown_torch() == ""


def test_the_range_of_versions_is_what_was_run() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    major, minor = RELEASES[-1].split(".")
    assert f"torch>={RELEASES[0]},<{major}.{int(minor) + 1}" in dependencies
    assert [int(one.split(".")[1]) for one in RELEASES] == list(range(int(RELEASES[0].split(".")[1]), int(minor) + 1))


@pytest.mark.parametrize(
    ("place", "names", "gone"),
    [
        ("torch._dynamo.no_module", "a b", ["torch._dynamo.no_module"]),
        ("torch._guards", "Source NoSource TracingContext.no_get", ["NoSource", "TracingContext.no_get"]),
        ("torch.ops.aten", "add.Tensor _no_op.default", ["_no_op"]),
        ("torch.Tensor", "_version _no_version", ["_no_version"]),
    ],
)
def test_names_that_are_gone_are_found(
    monkeypatch: pytest.MonkeyPatch, place: str, names: str, gone: list[str]
) -> None:
    monkeypatch.setitem(NAMES, place, names)
    assert missing() == [one if one == place else f"{place}.{one}" for one in gone]


def test_what_is_not_there_says_why() -> None:
    gone = Unavailable("no such torch")
    with pytest.raises(CaptureError, match="no such torch"):
        gone.anything.further()
    with pytest.raises(CaptureError, match="no such torch"):
        gone()


@pytest.mark.long
@pytest.mark.parametrize("kind", slow_but({"NEW"}, ["GONE", "NEW"]))
def test_training_on_a_torch_that_is_not_known(kind: str, tmp_path: Path) -> None:
    """Two epochs with the callback, with the strategy and of Fabric, and a plan from a file, in a process of their own."""
    graph = tmp_path / "graph.json"
    unit_chain(6).save(graph)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.unknown_torch", kind, str(graph)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"] and found["fabric equal"] and found["plans"] == 0
    for where in ("callback", "strategy", "fabric"):
        (said,) = found[where]
        version = "9.0.0" if kind == "NEW" else torch.__version__
        for words in (f"on torch {version}", ", ".join(RELEASES[:-1]), RELEASES[-1], "install one of these"):
            assert words in said
        for gone in ("torch._dynamo.symbolic_convert.TensorifyState", "torch.utils._sympy.interp", "_profiler_enabled"):
            assert (gone in said) == (kind == "GONE")
    assert sum("no batch size is looked for" in said for said in found["finder"]) == 1 and len(found["finder"]) == 2
    assert "nothing can be planned" in found["check"] and "nothing is captured" in found["check"]
    assert found["plan"] == 0 and "peak" in found["said"]
    assert found["capture"] == 2 and "nothing can be planned" in found["refused"]
    assert {"planner", "solvers", "cost", "exactness", "callbacks"} <= set(found["rooms"])

"""The examples, in their short forms, as a user runs them."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_remat import Plan
from tests.helpers.cases import slow_but
from tests.helpers.places import ROOT

EXAMPLES = {
    "segmentation": "--size 64 --width 4 --steps 6 --budget 0.8 --time-limit 1",
    "batch_size_finder": "--small --budget 5MiB --steps 2 --time-limit 0.3",
    "ddp": "--small --steps 6 --time-limit 0.3",
    "fsdp2": "--small --steps 8 --time-limit 0.3",
    "hydra": "trainer.max_steps=3 callbacks.remat.budget=0.6 callbacks.remat.time_limit=1 +callbacks.remat.cost_model=unit",
    "lightning_cli": f"fit --config {ROOT / 'examples' / 'lightning_cli' / 'config.yaml'} --trainer.max_steps=3 "
    "--trainer.callbacks.time_limit=1",
    "fabric": "--small --steps 3 --time-limit 1",
    **dict.fromkeys(("vit", "lora", "diffusion", "speech", "gnn", "hf_loop"), "--steps 6 --time-limit 0.3"),
}


# What the others use of the callback has tests of its own.
@pytest.mark.long
@pytest.mark.parametrize("name", slow_but({"lightning_cli", "hf_loop"}, EXAMPLES))
def test_example(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "LIGHTNING_REMAT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name / "train.py"), *EXAMPLES[name].split()]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "predicted peak" in said or "measured" in said
    assert "could not be captured" not in said
    if name == "fsdp2":  # what is saved and shown is of the whole step, not of units that await the others
        paths = sorted(tmp_path.rglob("remat/plan-*.json"))
        assert paths[0].name == "plan-1.json" and paths[0].with_suffix(".html").exists()
        for plan in map(Plan.load, paths):
            assert not plan.for_once and plan.whole is not None and plan.whole.graphs == 7
            assert plan.predicted_peak_bytes == plan.whole.after.most_bytes <= plan.budget_bytes, "it sets the peak"
            assert plan.whole.before.most_bytes == plan.baseline_peak_bytes


def test_every_example_is_run_and_has_a_readme() -> None:
    folders = [folder for folder in (ROOT / "examples").iterdir() if (folder / "train.py").exists()]
    assert {folder.name for folder in folders} == {"byte_gpt", *EXAMPLES}  # byte_gpt is run in test_benchmarks
    assert all((folder / "README.md").exists() for folder in folders)


def test_the_gallery_is_what_its_numbers_say() -> None:
    gallery = runpy.run_path(str(ROOT / "examples" / "gallery.py"))
    numbers = json.loads(gallery["NUMBERS"].read_text())
    assert (ROOT / "examples" / "README.md").read_text() == gallery["page"](numbers)
    assert set(numbers) == set(gallery["SHOWN"])
    assert set(gallery["SHOWN"]) | set(gallery["OTHERS"]) == {"byte_gpt", *EXAMPLES}
    assert all(one["with"] < one["without"] for one in numbers.values())
    assert all(one["equal"] for one in numbers.values())


def test_the_gallery_has_a_small_picture_of_each() -> None:
    gallery = runpy.run_path(str(ROOT / "examples" / "gallery.py"))
    sizes = {path.stem: path.stat().st_size for path in gallery["PICTURES"].glob("*.png")}
    assert set(sizes) == set(gallery["SHOWN"])
    assert max(sizes.values()) < 60_000

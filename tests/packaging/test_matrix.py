"""The table of releases: what ran is counted as pytest says it, and what did not is in it with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import matrix
from tests.helpers.places import ROOT

THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        ("175 passed, 3 skipped, 19 deselected in 54.47s", {"passed": 175, "skipped": 3}),
        ("1 failed, 2 passed, 1 error in 1.00s", {"failed": 2, "passed": 2}),
        ("no tests ran in 0.01s", {}),
        ("", {}),
    ],
)
def test_counts_are_those_of_the_last_line(last: str, counts: dict[str, int]) -> None:
    assert matrix.counted(f"9 passed\n\n{last}\n") == counts if last else matrix.counted("") == counts


def test_pythons_are_those_that_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    stand_in = tmp_path / f"python{THIS}"
    stand_in.write_text("#!/bin/sh\nexit 127\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert matrix.interpreter(THIS) is None
    own = tmp_path / "versions" / f"{THIS}.99" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert matrix.interpreter(THIS) == str(own)


def test_what_is_not_run_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "PYTHONS", (THIS, "3.99"))
    here, there = matrix.rows([])
    assert here.note == "tests not run: no torch for it here; all files compile"
    assert there.note == "not run: not on this machine"
    table = matrix.markdown([here, there]).splitlines()
    assert len({line.count("|") for line in table}) == 1 and len(table) == 4


def test_torches_are_found_in_environments(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    (site / "torch-2.11.0+cpu.dist-info").mkdir(parents=True)
    torches = matrix.found([tmp_path], ["torch==2.13.0"])
    assert torches == [matrix.Torch("3.12", "2.11.0+cpu", site.resolve()), matrix.Torch(THIS, "torch==2.13.0")]


def test_the_tests_that_are_run_are_there() -> None:
    assert all((ROOT / "tests" / one).exists() for one in matrix.TESTS)
    assert any(one.startswith("pytest>=") for one in matrix.requirements_of_tests())

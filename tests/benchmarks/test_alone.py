"""Processes that share a device, made up: a counter that goes on shows that its process has not been stopped."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import alone as sharing
from benchmarks.gpu.environment import ROOT

COUNTS = """
import sys, time
from pathlib import Path
from benchmarks.gpu import alone as sharing
sharing.FOLDER = Path(sys.argv[1])
sharing.join()
path = Path(sys.argv[2])
def write(text):  # at once: it is read at any time
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
def count():
    for number in range(10**6):
        write(f"{number} {sharing.lost_seconds()}")
        time.sleep(0.005)
if sys.argv[3] == "dies":
    with sharing.alone():
        write("0 0")
        time.sleep(600)
elif sys.argv[3] == "elsewhere":
    with sharing.elsewhere():
        count()
else:
    count()
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Starts a process that counts; returns where it writes its number, and the seconds that it has lost."""
    monkeypatch.setattr(sharing, "FOLDER", tmp_path / "shared")
    processes: list[subprocess.Popen[bytes]] = []

    def start(how: str = "counts") -> Path:
        path = tmp_path / f"{len(processes)}.txt"
        processes.append(subprocess.Popen([sys.executable, "-c", COUNTS, sharing.FOLDER, path, how], cwd=ROOT))
        while not (path.exists() and path.read_text()):
            time.sleep(0.01)
        return path

    start.processes = processes  # type: ignore[attr-defined]
    yield start
    for process in processes:
        process.kill()
        process.wait()


def counts(path: Path) -> bool:
    """Whether its process runs."""
    time.sleep(0.1)
    before = path.read_text()
    time.sleep(0.4)
    return path.read_text() != before


def test_others_are_stopped_for_whoever_is_alone(beside: Callable[..., Path]) -> None:
    path = beside()
    assert counts(path)
    with sharing.alone():
        with sharing.alone(), sharing.elsewhere():
            assert not counts(path)
        assert not counts(path)
    assert counts(path)
    assert float(path.read_text().split()[1]) >= 0.5
    with sharing.in_turn():
        assert counts(path)
    assert sharing.lost_seconds() < 0.5


def test_what_needs_no_device_goes_on(beside: Callable[..., Path]) -> None:
    elsewhere, other = beside("elsewhere"), beside()
    with sharing.alone():
        assert counts(elsewhere) and not counts(other)


def test_what_has_died_stops_nobody(beside: Callable[..., Path]) -> None:
    path = beside()
    beside("dies")
    assert not counts(path)
    dead = beside.processes[1]  # type: ignore[attr-defined]
    dead.kill()
    dead.wait()
    sharing.go_on()
    assert counts(path)
    with sharing.alone():
        assert not counts(path)
    assert not (sharing.FOLDER / f"{dead.pid}.here").exists()

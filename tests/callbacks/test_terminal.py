"""Ctrl-C in a terminal, at each stage of the first batch and after it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pexpect
import pytest

from tests.helpers.places import ROOT

INTERRUPTED = 1
"""Lightning's exit status after Ctrl-C."""


def fit(stage: str, folder: Path) -> pexpect.spawn:
    """A fit in a terminal of its own, that takes twenty seconds in one stage."""
    environment = {**os.environ, "LIGHTNING_REMAT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = ["-P", "-m", "tests.helpers.slow_fit", stage, str(folder)]
    environment.pop("COLUMNS", None)  # of the terminal that the tests run in, if any
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])

    def interruptible() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a shell runs in the background

    return pexpect.spawn(
        sys.executable,
        command,
        env=environment,
        encoding="utf-8",
        timeout=120,
        dimensions=(40, 200),
        preexec_fn=interruptible,
    )


@pytest.mark.long
@pytest.mark.parametrize(("stage", "words"), [("capture", "capturing"), ("measure", "measuring operation 1 of")])
def test_an_interrupt_before_there_is_a_plan_ends_training(stage, words, tmp_path):
    terminal = fit(stage, tmp_path)
    terminal.expect_exact(words)
    terminal.expect(r"\((\d+) s\)")
    began = time.monotonic()
    terminal.sendintr()
    terminal.expect_exact("Detected KeyboardInterrupt, attempting graceful shutdown")
    terminal.expect_exact("left alone: True")
    terminal.expect_exact("ran: () []")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert time.monotonic() - began < 15 and terminal.exitstatus == INTERRUPTED
    assert "a batch is done" not in terminal.before and "Traceback" not in terminal.before


@pytest.mark.long
def test_an_interrupt_while_it_solves_takes_the_best_plan_so_far(tmp_path):
    terminal = fit("solve", tmp_path)
    terminal.expect_exact("solving, at most 30 s; Ctrl-C: best so far")
    terminal.expect(r"\([1-9] s\)")  # something was found before
    began = time.monotonic()
    terminal.sendintr()
    terminal.expect_exact("Planning was interrupted: the best plan so far is used.")
    for _ in range(3):
        terminal.expect_exact("a batch is done")
    terminal.expect_exact("training ended")
    terminal.expect_exact("left alone: True")
    terminal.expect_exact("ran: (3,) [True]")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert time.monotonic() - began < 15 and terminal.exitstatus == 0


@pytest.mark.long
def test_an_interrupt_between_two_steps_ends_training(tmp_path):
    terminal = fit("train", tmp_path)
    terminal.expect_exact("a batch is done")
    terminal.sendintr()
    terminal.expect_exact("Detected KeyboardInterrupt, attempting graceful shutdown")
    terminal.expect_exact("left alone: True")
    terminal.expect(r"ran: \([1-9]\d*,\) \[True\]")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == INTERRUPTED

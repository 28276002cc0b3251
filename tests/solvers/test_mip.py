"""Programs are solved in a process of their own: whatever happens to that, planning goes on."""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mip
import pytest
import torch

from lightning_remat.errors import SolverError
from lightning_remat.schedule import verify
from lightning_remat.solvers import Status, solve
from lightning_remat.solvers.common import _mip
from lightning_remat.solvers.common._mip import Model
from tests.helpers.graphs import unit_chain

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks")


def small() -> tuple[Model, mip.Var, mip.Var]:
    model = Model()
    x, y = model.add_var(var_type=mip.BINARY), model.add_var(ub=3.0)
    model.minimize(2 * x + y + 10)
    model.add_constr(3 * x + y >= 2)
    return model, x, y


def pid(model: Model) -> int:
    assert model._process is not None
    return model._process._process.pid


def is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{number}/stat")  # a zombie, where nobody asks for its end
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_program_its_relaxation_and_its_changes() -> None:
    model, x, y = small()
    assert model.optimize(5.0, relax=True) is mip.OptimizationStatus.OPTIMAL
    assert (model.objective_value, x.x, y.x) == pytest.approx((10 + 4 / 3, 2 / 3, 0.0))
    assert model.optimize(5.0) is mip.OptimizationStatus.OPTIMAL
    assert (model.objective_value, model.objective_bound, x.x, y.x) == pytest.approx((12.0, 12.0, 1.0, 0.0))
    assert model.num_solutions >= 1
    x.ub = 0.0
    row = model.add_constr(y <= 2.5)
    assert model.optimize(5.0) is mip.OptimizationStatus.OPTIMAL
    assert (model.objective_value, x.x, y.x) == pytest.approx((12.0, 0.0, 2.0))
    row.rhs = 1.0
    assert model.optimize(5.0) is mip.OptimizationStatus.INFEASIBLE
    row.rhs = 2.25
    y.var_type = mip.INTEGER
    model.begin_at([(y, 2.0)])
    assert model.optimize(5.0) is mip.OptimizationStatus.OPTIMAL
    assert y.x == pytest.approx(2.0)
    model.close()
    assert model.optimize(5.0) is mip.OptimizationStatus.ERROR


def test_without_a_time_limit() -> None:
    assert solve(unit_chain(8), 5, "milp", time_limit=math.inf).status is Status.OPTIMAL


def test_a_process_is_used_again_with_nothing_left_of_the_last_program() -> None:
    model, _, _ = small()
    model.optimize(5.0)
    number = pid(model)
    model.close()
    other = Model()
    z = other.add_var(lb=-1.0, ub=7.0, obj=1.0)
    assert pid(other) == number
    assert other.optimize(5.0, relax=True) is mip.OptimizationStatus.OPTIMAL
    assert (other.objective_value, z.x) == (-1.0, -1.0)
    other.close()


def test_one_that_was_never_solved_leaves_nothing_behind() -> None:
    for _ in range(3):
        small()[0].close()
    model, x, _ = small()
    assert model.optimize(5.0) is mip.OptimizationStatus.OPTIMAL
    assert x.x == pytest.approx(1.0)
    model.close()


def test_the_solver_leaves_this_process_alone() -> None:
    """CBC sets the number of OpenMP's threads to one: reductions would have other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert solve(unit_chain(8), 5, "milp").status is Status.OPTIMAL
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@POSIX
def test_a_crash_is_a_solver_that_found_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, x, _ = small()
    os.kill(pid(model), signal.SIGSEGV)
    with caplog.at_level(logging.WARNING):
        assert model.optimize(5.0) is mip.OptimizationStatus.ERROR
    assert re.search(r"CBC crashed \(SIG\w+\), with a program of 2 columns and 1 rows: planning goes on", caplog.text)
    assert (x.x, model.num_solutions) == (None, 0)
    caplog.clear()
    assert model.optimize(5.0) is mip.OptimizationStatus.ERROR
    assert not caplog.records
    model.close()


@POSIX
def test_planning_goes_on_where_every_program_crashes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, crashed = _mip._Process.ask, []

    def crash(self: _mip._Process, request: dict[str, object], seconds: float) -> dict[str, object]:
        os.kill(self._process.pid, signal.SIGSEGV)
        crashed.append(self._process.pid)
        return real(self, request, seconds)

    monkeypatch.setattr(_mip._Process, "ask", crash)
    graph = unit_chain(30)
    solution = solve(graph, 9, time_limit=20.0)
    assert crashed
    assert solution.schedule is not None
    assert verify(graph, solution.schedule, 9) <= 9
    assert len(caplog.records) == len(crashed)
    alone = solve(unit_chain(8), 5, "milp")
    assert alone.status in (Status.FEASIBLE, Status.TIMEOUT)  # what it starts from, at most
    monkeypatch.undo()
    assert solve(unit_chain(8), 5, "milp").status is Status.OPTIMAL


@POSIX
def test_a_solver_that_does_not_stop_is_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_mip, "GRACE_SECONDS", 0.3)
    model, _, _ = small()
    os.kill(pid(model), signal.SIGSTOP)
    assert model.optimize(0.1) is mip.OptimizationStatus.ERROR
    assert "CBC did not stop when its time was over" in caplog.text


@POSIX
def test_an_interrupt_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: _mip._Process) -> dict[str, object]:
        raise KeyboardInterrupt

    model, _, _ = small()
    number = pid(model)
    monkeypatch.setattr(_mip._Process, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.optimize(5.0)
    assert not is_alive(number)


@POSIX
def test_one_that_nobody_closes_ends() -> None:
    model, _, _ = small()
    model.optimize(5.0)
    number, gone = pid(model), weakref.ref(model)
    del model, _
    gc.collect()
    assert gone() is None
    assert not is_alive(number)


@POSIX
@pytest.mark.parametrize("how", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"])
def test_it_ends_with_the_process_that_started_it(how: str) -> None:
    program = f"""
import os, signal, sys
from lightning_remat.solvers.common._mip import Model
idle, used = Model(), Model()
used.add_var(ub=1.0)
assert used.optimize(5.0, relax=True).name == "OPTIMAL"
print(used._process._process.pid, idle._process._process.pid, flush=True)
idle.close()
{how}
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    numbers = [int(word) for word in done.stdout.split()]
    assert len(numbers) == 2
    until = time.monotonic() + 20
    while any(is_alive(number) for number in numbers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [number for number in numbers if is_alive(number)]


@POSIX
def test_a_forked_process_starts_its_own() -> None:
    program = """
import os, sys
from lightning_remat.solvers.common._mip import Model
def ask():
    model = Model()
    x = model.add_var(lb=0.25, ub=1.0, obj=1.0)
    assert model.optimize(5.0, relax=True).name == "OPTIMAL" and x.x == 0.25
    number = model._process._process.pid
    model.close()
    return number
first = ask()
child = os.fork()
if not child:
    os._exit(1 if ask() == first else 0)
assert ask() == first
assert os.waitpid(child, 0)[1] == 0
print("well")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.returncode) == ("well\n", 0), done.stderr


def test_threads_each_have_their_own() -> None:
    def alone(budget: int) -> float:
        return solve(unit_chain(8), budget, "milp").seconds

    budgets = [5, 6, 5, 6]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(alone, budgets)) == [24, 21, 24, 21]


@pytest.mark.parametrize("why", ["no command", "frozen", "none can be started"])
def test_where_no_process_can_be_started(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_mip._Process, "_idle", type(_mip._Process._idle)(list))
    if why == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", "" if why == "no command" else "/nowhere/python")
    graph = unit_chain(30)
    solution = solve(graph, 9, time_limit=20.0)
    assert solution.schedule is not None
    assert verify(graph, solution.schedule, 9) <= 9
    assert "planning goes on without CBC, for which no process could be started" in caplog.text


def test_a_solver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mip._Process, "_idle", type(_mip._Process._idle)(list))
    monkeypatch.setenv("PMIP_HIGHS_LIBRARY", "/nowhere/libhighs.so")
    with pytest.raises(SolverError, match="python-mip has no solver 'HIGHS' here"):
        solve(unit_chain(8), 5, "milp", solver="HIGHS")


@pytest.mark.long
@POSIX
@pytest.mark.parametrize("how", ["prints", "says nothing"])
def test_an_interpreter_of_its_own_mind(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that prints when it starts is understood; one that never answers is not waited for."""
    monkeypatch.setattr(_mip._Process, "_idle", type(_mip._Process._idle)(list))
    monkeypatch.setattr(_mip, "GRACE_SECONDS", 1.0)
    python = tmp_path / "python"
    then = f'exec "{sys.executable}" "$@"' if how == "prints" else "exec sleep 600"
    python.write_text(f"#!/bin/sh\necho welcome\n{then}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for _ in range(2):  # the first is closed before it has answered, and kept
        _mip.Model().close()
    model, x, _ = small()
    if how == "prints":
        assert model.optimize(20.0) is mip.OptimizationStatus.OPTIMAL and x.x is not None
    else:
        assert model.optimize(0.5) is mip.OptimizationStatus.ERROR
        assert "did not stop when its time was over" in caplog.text
    model.close()
    _mip._Process.end_idle()


@POSIX
def test_without_a_working_directory_and_with_odd_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(str):
        __slots__ = ()

    monkeypatch.setattr(_mip._Process, "_idle", type(_mip._Process._idle)(list))
    monkeypatch.setattr(sys, "path", [*sys.path, Odd("somewhere"), lambda: None])
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    model, x, _ = small()
    assert model.optimize(20.0) is mip.OptimizationStatus.OPTIMAL and x.x is not None
    model.close()
    _mip._Process.end_idle()


def test_a_default_solver_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_mip._Process, "_idle", type(_mip._Process._idle)(list))
    monkeypatch.setenv("PMIP_CBC_LIBRARY", "/nowhere/libCbc.so")
    model, *_ = small()
    assert model.optimize(20.0) is mip.OptimizationStatus.ERROR
    assert "CBC cannot be loaded" in caplog.text

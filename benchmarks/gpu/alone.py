"""One device for several processes: they plan and compile beside each other, and what is timed runs alone.

Whoever is alone stops the other processes of the suite with a signal, except those that say that they need no device now.
Files of a folder say who is there, and locks on them, which the system lets go of where a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(tempfile.gettempdir()) / f"lightning_remat-alone-{os.getuid()}"
DEVICE, HERE, ELSEWHERE, LOST = "device", "here", "elsewhere", "lost"
"""Files: locked by whoever is alone, or in its turn; of each process, locked while it lives; locked while it needs no device;
and with the seconds that it lost."""

ALONE = "alone"

DRAIN_SECONDS = 0.2
"""After which what stopped processes had launched has run."""


def join() -> None:
    """From now on, as long as it lives, this process is stopped while another one is alone."""
    FOLDER.mkdir(exist_ok=True)
    fcntl.flock(os.open(_own(HERE), os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX)  # stays open, and locked


_inside: list[str] = []  # what this process is in


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, the others are stopped."""
    if ALONE in _inside:
        yield
        return
    with in_turn():
        stopped = _stop_others()
        began = time.monotonic()
        _inside.append(ALONE)
        try:
            time.sleep(DRAIN_SECONDS if stopped else 0.0)
            yield
        finally:
            _inside.remove(ALONE)
            for pid in stopped:
                _lose(pid, time.monotonic() - began)
                _signal(pid, signal.SIGCONT)


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Inside, no other process is alone, or in its turn; they go on with all else."""
    if DEVICE in _inside:
        yield
        return
    FOLDER.mkdir(exist_ok=True)
    lost, began = lost_seconds(), time.monotonic()
    with (FOLDER / DEVICE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _lose(os.getpid(), max(0.0, time.monotonic() - began - (lost_seconds() - lost)))
        _inside.append(DEVICE)
        try:
            yield
        finally:
            _inside.remove(DEVICE)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Inside, this process needs no device, and is not stopped; nothing changes for one in its turn."""
    if _inside:
        yield
        return
    FOLDER.mkdir(exist_ok=True)
    with _own(ELSEWHERE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _inside.append(ELSEWHERE)
        try:
            yield
        finally:
            _inside.remove(ELSEWHERE)
            fcntl.flock(file, fcntl.LOCK_UN)
            with (FOLDER / DEVICE).open("w") as device:  # not before whoever is alone now
                fcntl.flock(device, fcntl.LOCK_SH)


def lost_seconds() -> float:
    """For how long this process has been stopped or has waited for its turn."""
    path = _own(LOST)
    return sum(map(float, path.read_text().split())) if path.exists() else 0.0


def go_on() -> None:
    """Let all go on: whoever stopped them has died."""
    for pid in _others():
        _signal(pid, signal.SIGCONT)


@contextlib.contextmanager
def measuring_alone() -> Iterator[None]:
    """Inside, the costs of ops are measured alone, and planning and compiling need no device."""
    import torch._inductor.compile_fx as inductor

    from lightning_remat.capture.fusing import _fused as fusing
    from lightning_remat.runtime._planning import Planning

    with contextlib.ExitStack() as stack:
        stack.enter_context(_run_in(alone, Planning, "measured"))
        for name in ("made", "together", "again"):
            stack.enter_context(_run_in(elsewhere, Planning, name))
        stack.enter_context(_run_in(elsewhere, inductor, "compile_fx"))
        stack.enter_context(_run_in(elsewhere, fusing, "compile_all"))
        yield


@contextlib.contextmanager
def _run_in(where: Callable[[], contextlib.AbstractContextManager[None]], owner: Any, name: str) -> Iterator[None]:
    """Have a function run there, inside."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        with where():
            return own(*args, **kwargs)

    setattr(owner, name, run)
    try:
        yield
    finally:
        setattr(owner, name, own)


def _own(kind: str) -> Path:
    return FOLDER / f"{os.getpid()}.{kind}"


def _others() -> list[int]:
    """The other processes that have joined, and live."""
    found = []
    for path in FOLDER.glob(f"*.{HERE}"):
        pid = int(path.name.partition(".")[0])
        if pid == os.getpid():
            continue
        if _locked(path):
            found.append(pid)
        else:
            for kind in (HERE, ELSEWHERE, LOST):
                (FOLDER / f"{pid}.{kind}").unlink(missing_ok=True)
    return found


def _stop_others() -> list[int]:
    found = [pid for pid in _others() if not _locked(FOLDER / f"{pid}.{ELSEWHERE}")]
    return [pid for pid in found if _signal(pid, signal.SIGSTOP)]


def _locked(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _signal(pid: int, number: signal.Signals) -> bool:
    """Whether it was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _lose(pid: int, seconds: float) -> None:
    with (FOLDER / f"{pid}.{LOST}").open("a") as file:
        file.write(f"{seconds:.3f}\n")

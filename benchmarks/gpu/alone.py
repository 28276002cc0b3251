"""One device for several processes: they plan and compile beside each other, and what is timed runs alone.

A lock on a file, which the system lets go of where its process dies. What takes no lock (a first step that a compiler makes
its kernels in) may still run beside.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_remat.runtime._planning import Planning

FILE = "lightning_remat-alone-on-the-device"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, no other process of this machine is inside."""
    with (Path(tempfile.gettempdir()) / FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def measuring_alone() -> Iterator[None]:
    """Inside, the costs of ops are measured alone."""
    own: Callable[..., Any] = Planning.measured

    @functools.wraps(own)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with alone():
            return own(*args, **kwargs)

    Planning.measured = measured  # type: ignore[method-assign]
    try:
        yield
    finally:
        Planning.measured = own  # type: ignore[method-assign]

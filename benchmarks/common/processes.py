"""Work in a process of its own: what it finds, however it ends.

There are two ways. A process of a script starts from nothing: no costs are known, and no memory is left of what ran before. One
that is forked starts at once, and may be ended when it takes too long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def add_worker(parser: argparse.ArgumentParser) -> None:
    """``--worker FILE``: work in this process, and leave there what is found. For `found_by` alone, so help does not say it."""
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def found_by(command: Sequence[str], defaults: Mapping[str, str] | None = None) -> tuple[Any, int]:
    """Run a script that takes ``--worker``, with an empty cache of costs.

    Args:
        command: the script and its options.
        defaults: environment variables, where they are not set.

    Returns:
        What it left, ``None`` where it left nothing, and its exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        environment = {**(defaults or {}), **os.environ, "LIGHTNING_REMAT_CACHE": str(Path(folder) / "costs")}
        ended = subprocess.run([sys.executable, *command, "--worker", str(file)], env=environment, check=False)
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return found, ended.returncode


def sent_by(context: Any, work: Callable[[Any], None], patience: float) -> Any:
    """Run ``work``, which sends what it finds through the connection that it is given.

    Args:
        context: of `multiprocessing`.
        work: run in the process.
        patience: seconds, after which the process is ended.

    Raises:
        EOFError: where it ends and has sent nothing; with its exit code.
        TimeoutError: where it takes too long.
    """
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs,))
    process.start()
    theirs.close()
    try:
        if not ours.poll(patience):
            process.kill()
            raise TimeoutError(f"not done after {patience:g} s")
        return ours.recv()
    except EOFError:
        process.join()
        raise EOFError(died(process.exitcode)) from None
    finally:
        process.join()


def died(exit_code: int | None) -> str:
    """What is said of a process that left nothing."""
    return f"its process ended with exit code {exit_code}"

"""The simulated device's libraries, compiled when they are first needed, or have changed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def torch_folder() -> Path:
    """Where torch lies, which is not imported for that."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def built(name: str, *, links: bool = True) -> Path:
    """A library of one of the sources here.

    Args:
        name: the source.
        links: whether with torch's libraries; else what it needs of them is found when it is loaded.

    Raises:
        RuntimeError: without a compiler.
        subprocess.CalledProcessError: where it does not compile, with the compiler's words.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError(
            "the simulated device is compiled by g++, which was not found: install it (Debian: apt install g++)"
        )
    source = HERE / name
    torch = torch_folder()
    sources = b"".join(one.read_bytes() for one in (source, *sorted(HERE.glob("*.h"))))
    key = hashlib.sha256(sources + importlib.metadata.version("torch").encode() + sys.version.encode())
    folder = Path(tempfile.gettempdir()) / f"lightning_remat_simulated_{key.hexdigest()[:16]}"
    made = folder / f"{'simulated_device' if links else source.stem}.so"
    if made.exists():
        return made
    folder.mkdir(exist_ok=True)
    headers = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    unfinished = made.with_suffix(".unfinished")
    linked = (
        [f"-L{torch / 'lib'}", *(f"-l{one}" for one in LIBRARIES)] if links else ["-Wl,--unresolved-symbols=ignore-all"]
    )
    command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", "-w", *(f"-I{one}" for one in headers)]
    subprocess.run([*command, str(source), "-o", str(unfinished), *linked], check=True)
    unfinished.rename(made)
    return made

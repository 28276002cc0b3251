"""Where things lie that are kept between runs, and how they are written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """``$LIGHTNING_REMAT_CACHE``, else ``lightning_remat`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    A user without a home has it among the temporary files.
    """
    own = os.environ.get("LIGHTNING_REMAT_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared) / "lightning_remat"
    try:
        return Path.home() / ".cache" / "lightning_remat"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "lightning_remat"


def replace_file(path: Path, text: str) -> None:
    """Write the whole file in one step: a reader sees all of it or what was there before.

    Raises:
        OSError: when it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise

"""Where things lie that are kept between runs, and how they are written."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """``$LIGHTNING_REMAT_CACHE``, else ``lightning_remat`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    A user without a home has one among the temporary files, which nobody else can write.
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
        return _among_temporary_files(Path(tempfile.gettempdir()))


@functools.lru_cache
def _among_temporary_files(parent: Path) -> Path:
    """A directory of this user's. Others may write there: what lies there under our name need not be ours."""
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = parent / ("lightning_remat" if user is None else f"lightning_remat-{user}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if stat.S_ISDIR(found.st_mode) and (user is None or (found.st_uid == user and not found.st_mode & others)):
        return folder
    mine = Path(tempfile.mkdtemp(prefix="lightning_remat-", dir=parent))
    log.warning(
        "%s is not this user's alone: costs and plans are kept in %s, for this process only. Set LIGHTNING_REMAT_CACHE to a "
        "directory of your own.",
        folder,
        mine,
    )
    return mine


def replace_file(path: str | Path, text: str) -> None:
    """Write the whole file in one step: a reader sees all of it or what was there before.

    Raises:
        OSError: when it cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe, a terminal: nothing to put in the place of
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f"{path.stem}-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def forget_the_oldest(files: Iterable[Path], most: int) -> None:
    """Keep as many of these files, the ones that were written or touched last."""
    for file in sorted(files, key=_age)[most:]:
        with contextlib.suppress(FileNotFoundError):  # another process forgot it first
            file.unlink()


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except FileNotFoundError:
        return 0.0

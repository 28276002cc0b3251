"""Files that are kept between runs: where they lie, how they are replaced, and how many stay."""

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
    """The cache: ``$LIGHTNING_REMAT_CACHE``, else ``lightning_remat`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    For a user without a home it is a directory below the system's temporary one that no other user can write to.
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
    """This user's own directory in ``parent``; one of the same name that another user has made is not taken."""
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
    """Replace a file atomically: a reader sees the whole new text, or what was there before.

    A path that exists and is no regular file (a pipe, a terminal) is written to directly.

    Raises:
        OSError: when it cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe, a terminal: no other file can take its place
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
    """Delete all of these files but the ``most`` that were written or touched last."""
    for file in sorted(files, key=_age)[most:]:
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it first
            file.unlink()


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except FileNotFoundError:
        return 0.0

"""Functions of torch's that are replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While open, a class or module has these in the place of its own: owner, name, and what stands there meanwhile."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, replacement)
        yield

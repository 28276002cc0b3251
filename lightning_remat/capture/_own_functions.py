"""Functions of this package's own that stand for several ops, and which of their inputs they may write over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OVERWRITABLE = "overwritable"


def named(function: Callable[..., Any], name: str, overwritable: frozenset[int]) -> Callable[..., Any]:
    """Give a function a name, and say over which of its arguments it may write its first result, where that is ``out``."""
    function.__name__ = function.__qualname__ = name
    function.__dict__[_OVERWRITABLE] = overwritable
    return function


def writes_over(target: Any, position: int) -> bool:
    """Whether a function may write its first result over this one of its arguments."""
    return position in getattr(target, _OVERWRITABLE, ())

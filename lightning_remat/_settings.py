"""Settings of torch, by their dotted names."""

from __future__ import annotations

import operator

import torch


def setting(path: str) -> str:
    """A setting of torch; the error's name where torch does not have it, or refuses to read it (TF32, where it is set anew)."""
    try:
        value = operator.attrgetter(path)(torch)
        return str(value() if callable(value) else value)
    except (AttributeError, RuntimeError) as error:
        return type(error).__name__

"""Captured graphs that run out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_remat.capture._torch import Exchange


@contextmanager
def failing(
    where: str, times: int = 1, after: int = 1, kind: type[Exception] = torch.OutOfMemoryError
) -> Iterator[list[int]]:
    """The forward or the backward of captured graphs runs, and then is out of memory, a few times."""
    original = getattr(Exchange, where)
    calls: list[int] = []

    def fails(self: Exchange, args: list[Any]) -> Any:
        result = original(self, args)
        calls.append(1)
        if after < len(calls) <= after + times:
            raise kind("CUDA: Tried to allocate 1 GiB")
        return result

    setattr(Exchange, where, fails)
    try:
        yield calls
    finally:
        setattr(Exchange, where, original)

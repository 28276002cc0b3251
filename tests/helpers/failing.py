"""Captured graphs that run out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_remat.capture._torch import Exchange
from lightning_remat.capture.gradients._stages import StagedBackward


@contextmanager
def failing(
    where: str, times: int = 1, after: int = 1, kind: type[Exception] = torch.OutOfMemoryError
) -> Iterator[list[int]]:
    """The forward or the backward of captured graphs runs, and then is out of memory, a few times; or a ``stage`` of it."""
    if where == "stage":
        with _stage_failing(times, after, kind) as stages:
            yield stages
        return
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


@contextmanager
def _stage_failing(times: int, after: int, kind: type[Exception]) -> Iterator[list[int]]:
    """The third stage and those behind it, in turn: gradients of the first two have left the backward then."""
    original = StagedBackward._next
    calls: list[int] = []

    def fails(self: StagedBackward, number: int) -> Any:
        result = original(self, number)
        if number == 0:
            calls.append(1)
        failed = len(calls) - 1 - after
        if 0 <= failed < times and number == 2 + failed % (self.stages.last - 1):
            self._running = None
            raise kind("CUDA: Tried to allocate 1 GiB")
        return result

    StagedBackward._next = fails  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        StagedBackward._next = original  # type: ignore[method-assign]

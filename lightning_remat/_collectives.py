"""What is sent between the processes of a group, seen in Python.

The threads of a CPU's backend (gloo) let go of the tensors of a collective some time after it has ended: microseconds, or
milliseconds where other processes want the core. Which of them are then still held is chance, so here a collective counts
as ended when its tensors have been let go of. What the backend has allocated for it (a copy of what is reduced and
scattered) is free then too.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",  # its older name, torch 2.11's
    "reduce_scatter_single",
    "reduce_scatter_tensor",  # likewise
    "all_reduce",
)
"""Those of ``torch.distributed`` that FSDP2 calls; DDP's are called in C++, on buckets that stay."""

PATIENCE = 0.5
"""Seconds after a collective for which its tensors are waited for, at most."""


@contextmanager
def seen_collectives(
    note: Callable[[torch.Tensor], None], ended: Callable[[int, int], None] = lambda _begin, _end: None
) -> Iterator[None]:
    """While open, collectives are seen, and one that is not asynchronous returns when it has ended.

    That is when the backend's threads have let go of what it was given on the CPU. Nothing is done in a process that is in
    no group.

    Args:
        note: called with each tensor that is given to a collective, before it begins.
        ended: called when one on the CPU has ended, with the moments at which it began and ended (as `time.time_ns`); not
            where its tensors are held for longer than is waited.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    originals = {name: getattr(distributed, name) for name in COLLECTIVES if hasattr(distributed, name)}
    for name, collective in originals.items():
        setattr(distributed, name, _noting(collective, note, ended))
    try:
        yield
    finally:
        for name, collective in originals.items():
            setattr(distributed, name, collective)


def _noting(
    collective: Callable[..., Any], note: Callable[[torch.Tensor], None], ended: Callable[[int, int], None]
) -> Callable[..., Any]:
    @functools.wraps(collective)
    def noted(*args: Any, **kwargs: Any) -> Any:
        lent: list[weakref.ref[torch.Tensor]] = []

        def lend(given: Any) -> Any:
            if not isinstance(given, torch.Tensor):
                return given
            note(given)
            if type(given) is not torch.Tensor or given.device.type != "cpu":
                return given
            alias = given.detach()  # nobody else holds it
            lent.append(weakref.ref(alias))
            return alias

        begin = time.time_ns()
        result = collective(*[lend(given) for given in args], **{name: lend(given) for name, given in kwargs.items()})
        if lent and result is None and _released(lent):  # with a result it may still run
            ended(begin, time.time_ns())
        return result

    return noted


def _released(lent: Iterable[weakref.ref[torch.Tensor]]) -> bool:
    """Wait until all of them have been let go of; whether they have within the time that is waited."""
    until = time.monotonic() + PATIENCE
    while held := any(alias() is not None for alias in lent):
        if time.monotonic() >= until:
            break
        time.sleep(0)  # the thread that lets go of a tensor needs the interpreter
    return not held

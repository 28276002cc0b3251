"""What is sent between the processes of a group, seen in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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


@contextmanager
def seen_collectives(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While open, ``note`` is called with each tensor that is given to a collective, before it begins.

    Nothing is done in a process that is in no group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    originals = {name: getattr(distributed, name) for name in COLLECTIVES if hasattr(distributed, name)}
    for name, collective in originals.items():
        setattr(distributed, name, _noting(collective, note))
    try:
        yield
    finally:
        for name, collective in originals.items():
            setattr(distributed, name, collective)


def _noting(collective: Callable[..., Any], note: Callable[[torch.Tensor], None]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def noted(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.Tensor):
                note(given)
        return collective(*args, **kwargs)

    return noted

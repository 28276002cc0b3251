"""Dynamo's settings while it captures, and the garbage collector, which is off meanwhile.

* ``_dynamo.config``: the recompile limit, logging calls and DDP's graph splitting, among others (see `tracing`).
* ``fx.experimental._config``: sizes that happen to be equal are told apart.
* ``guards.profile_guard_manager``: it empties the processor's caches after each capture, and times the guards, for a log.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.guards
from torch.fx.experimental import _config as symbolic_config

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch._distributions import find_divergences
from lightning_remat.capture._torch._fake import grouped_products
from lightning_remat.capture._torch._handlers import as_in_eager_mode
from lightning_remat.capture._torch._loggers import logging_calls, quiet_dynamo
from lightning_remat.capture._torch._numbers import VaryingNumbers

_COLLECTED_OUTSIDE: list[bool] = []
_SELDOM = 500_000
"""Objects that are made, and not let go of, between two runs of the garbage collector (Python: 700)."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector: tracing makes so many objects that looking for cycles is a quarter of its time."""
    _COLLECTED_OUTSIDE.append(gc.isenabled())
    gc.disable()
    try:
        yield
    finally:
        if _COLLECTED_OUTSIDE.pop():
            gc.enable()


def anything_frozen() -> bool:
    """Whether objects are kept out of garbage collection; it takes longer the more there are."""
    return gc.get_freeze_count() > 0


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Inside of `uncollected`: with the garbage collector again, where it was on outside.

    What tracing has made, millions of objects, is in use until the end, and is left out of it; and it runs seldom: it would
    take a fifth of a deep network's first step otherwise.
    """
    if not _COLLECTED_OUTSIDE or not _COLLECTED_OUTSIDE[0] or gc.isenabled():
        yield
        return
    frozen, thresholds = anything_frozen(), gc.get_threshold()
    if not frozen:  # else what the user has frozen would not stay so
        gc.freeze()
    gc.set_threshold(max(_SELDOM, thresholds[0]), *thresholds[1:])
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()


_UNLIMITED = 1 << 30

_MEASURED = "profile_guard_manager"


def _no_seconds(*_: Any) -> float:
    return 0.0


def tracing(dynamic_sources: str = "", numbers: VaryingNumbers | None = None) -> contextlib.AbstractContextManager[Any]:
    """Dynamo's settings while it captures.

    Recompilation is never silently given up (who calls this counts shapes itself), an error inside Dynamo makes the frame
    run as before, a logging call does not break the graph, DDP does not split it, NumPy stays NumPy (torch's own
    version of it rounds otherwise), ``torch.autograd.grad`` is part of the graph (a gradient penalty is one graph then,
    not two of which the first cannot be differentiated twice), and Dynamo's warnings stay off the terminal: what they
    warn of is no fault of the user's, and what is not captured is told by who calls this.

    Args:
        dynamic_sources: inputs that may change without a new capture, in Dynamo's words (``"L['batch_idx']"``).
        numbers: Python numbers that were seen to vary, which become inputs of the graph.
    """
    find_divergences()
    stack = contextlib.ExitStack()
    config = torch._dynamo.config
    settings: dict[str, Any] = {
        "recompile_limit": _UNLIMITED,
        "accumulated_recompile_limit": _UNLIMITED,
        "error_on_recompile": False,
        "suppress_errors": True,
        "optimize_ddp": False,
        "trace_numpy": False,
        "enable_dynamo_decompositions": False,  # `add_` with `alpha` in two roundings, for one
        "trace_autograd_ops": True,
        "allow_rnn": True,  # see `_handlers`
        "skip_nnmodule_hook_guards": False,  # a hook that is registered later runs
        "skip_fsdp_guards": False,  # what is captured for one unit runs for others: they must be alike
    }
    for name in ("ignore_logging_functions", "ignore_logger_methods"):
        if hasattr(config, name):
            settings[name] = set(getattr(config, name)) | logging_calls()
            break
    stack.enter_context(uncollected())
    stack.enter_context(config.patch(settings))
    # Two sizes that were equal when the step was captured are two symbols: they need not be the next time.
    stack.enter_context(symbolic_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
    stack.enter_context(quiet_dynamo())
    stack.enter_context(as_in_eager_mode())
    stack.enter_context(grouped_products())
    if hasattr(torch._dynamo.guards, _MEASURED):
        stack.enter_context(replaced([(torch._dynamo.guards, _MEASURED, _no_seconds)]))
    if numbers is not None:
        stack.enter_context(numbers.symbolic(dynamic_sources))
    if dynamic_sources:
        patch = torch.compiler.config.patch  # type: ignore[attr-defined]
        stack.enter_context(patch(dynamic_sources=dynamic_sources))
    return stack

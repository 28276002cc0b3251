"""Dynamo's loggers and warnings, the calls that it takes for logging, and AOTAutograd's prints of its graphs."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch.fx
from torch._dynamo import symbolic_convert
from torch._dynamo import utils as dynamo_utils


@contextlib.contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Let Dynamo's loggers and warnings through only where the user asked for them (``TORCH_LOGS``, or a set level)."""
    logger, warn_once = logging.getLogger("torch._dynamo"), dynamo_utils.warn_once
    dynamo_utils.warn_once = lambda message, *_args, **_kwargs: logger.info("%s", message)
    try:
        with silent_loggers(), _unnamed_functions():
            yield
    finally:
        dynamo_utils.warn_once = warn_once


@contextlib.contextmanager
def _unnamed_functions() -> Iterator[None]:
    """Dynamo does not read whole files for the names of the functions that its log of calls would give, were it shown."""
    own = getattr(symbolic_convert, "get_funcname", None)
    shown = any(one.isEnabledFor(logging.DEBUG) for one in _loggers("torch._dynamo"))
    if own is None or shown:
        yield
        return
    symbolic_convert.get_funcname = lambda *_: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        symbolic_convert.get_funcname = own  # type: ignore[attr-defined]


@contextlib.contextmanager
def silent_loggers() -> Iterator[None]:
    """Dynamo's loggers say nothing, but where the user asked for it."""
    logger = logging.getLogger("torch._dynamo")
    # torch 2.11 cannot log its own settings, and calls that an error. (To set a level costs half a millisecond a step.)
    # The second, since torch 2.14, tells of an op that raises.
    loggers = [] if logger.level else _loggers("torch._dynamo", "torch._subclasses.fake_tensor")
    silent = [one for one in loggers if not one.level and not one.disabled]
    for one in silent:
        one.disabled = True
    try:
        yield
    finally:
        for one in silent:
            one.disabled = False


def _loggers(*names: str) -> Sequence[logging.Logger]:
    """The loggers whose names begin so."""
    return _known_loggers(names, len(logging.getLogger().manager.loggerDict))


@functools.lru_cache(maxsize=4)
def _known_loggers(names: tuple[str, ...], _known: int) -> Sequence[logging.Logger]:
    """Looked up again when there are more loggers than there were."""
    loggers = logging.getLogger().manager.loggerDict.items()
    return [one for name, one in loggers if name.startswith(names) and isinstance(one, logging.Logger)]


@contextlib.contextmanager
def unprinted() -> Iterator[None]:
    """Graphs are printed, as AOTAutograd does with each of its three, only if a log or a trace of torch's shows them.

    (``TORCH_LOGS``, ``TORCH_TRACE``. AOTAutograd prints them in any case.)
    """
    traced = logging.getLogger(
        "torch.__trace"
    ).handlers  # none are left there once Dynamo has found no place to write to
    if traced or any(one.isEnabledFor(logging.INFO) for one in _loggers("torch._functorch")):
        yield
        return
    own = torch.fx.GraphModule.print_readable
    torch.fx.GraphModule.print_readable = lambda *_args, **_kwargs: ""  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.fx.GraphModule.print_readable = own  # type: ignore[method-assign]


def logging_calls() -> set[Any]:
    """Functions that only say something: loggers' methods, with those that libraries add, and ``warnings.warn``."""
    said = {"debug", "info", "warning", "warn", "error", "critical", "exception", "log"}
    methods = vars(logging.Logger).items()
    own = {method for name, method in methods if name in said}
    hung = {method for _, method in methods if callable(method) and getattr(method, "__module__", "") != "logging"}
    return own | hung | {warnings.warn}

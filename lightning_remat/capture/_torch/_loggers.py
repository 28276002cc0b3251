"""Dynamo's loggers and warnings, and the calls that it takes for logging."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from torch._dynamo import utils as dynamo_utils


@contextlib.contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Let Dynamo's loggers and warnings through only where the user asked for them (``TORCH_LOGS``, or a set level)."""
    logger, warn_once = logging.getLogger("torch._dynamo"), dynamo_utils.warn_once
    dynamo_utils.warn_once = lambda message, *_args, **_kwargs: logger.info("%s", message)
    try:
        with silent_loggers():
            yield
    finally:
        dynamo_utils.warn_once = warn_once


@contextlib.contextmanager
def silent_loggers() -> Iterator[None]:
    """Dynamo's loggers say nothing, but where the user asked for it."""
    logger = logging.getLogger("torch._dynamo")
    # torch 2.11 cannot log its own settings, and calls that an error. (To set a level costs half a millisecond a step.)
    loggers = [] if logger.level else _dynamo_loggers(len(logger.manager.loggerDict))
    silent = [one for one in loggers if not one.level and not one.disabled]
    for one in silent:
        one.disabled = True
    try:
        yield
    finally:
        for one in silent:
            one.disabled = False


@functools.lru_cache(maxsize=1)
def _dynamo_loggers(_known: int) -> list[logging.Logger]:
    """Dynamo's loggers; looked up again when there are more loggers than there were."""
    loggers = logging.getLogger().manager.loggerDict.items()
    its = ("torch._dynamo", "torch._subclasses.fake_tensor")  # the second, since torch 2.14, of an op that raises
    return [one for name, one in loggers if name.startswith(its) and isinstance(one, logging.Logger)]


def logging_calls() -> set[Any]:
    """Functions that only say something: loggers' methods, with those that libraries add, and ``warnings.warn``."""
    said = {"debug", "info", "warning", "warn", "error", "critical", "exception", "log"}
    methods = vars(logging.Logger).items()
    own = {method for name, method in methods if name in said}
    hung = {method for _, method in methods if callable(method) and getattr(method, "__module__", "") != "logging"}
    return own | hung | {warnings.warn}

"""The command ``check``: compares the planned step of a user's module and batch with eager mode, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from lightning_remat.capture import _torch as internals
from lightning_remat.cli._capture import Step, on_device
from lightning_remat.errors import CaptureError, ConfigError, RematError
from lightning_remat.exactness import CheckReport, check
from lightning_remat.planner import RematWarning

TYPES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
"""By precision, named as Lightning names it: the dtype of modules and batches, or the one that autocast casts to."""


def checked(
    make: Callable[[], Step],
    *,
    device: str,
    precision: str | None,
    deterministic: bool,
    progress: Callable[[str], None],
    **options: Any,
) -> CheckReport:
    """Make a step on a device, and compare it with eager mode.

    Args:
        make: makes the step; called while ``device`` is torch's default.
        device: where tensors are made unless the factory says otherwise.
        precision: one of `TYPES`; ``None`` for the dtypes that the factory has chosen.
        deterministic: run under `torch.use_deterministic_algorithms`.
        progress: called with a text about the work in progress.
        **options: arguments of `rematerialize`, ``budget`` among them.

    Raises:
        ConfigError, BudgetError: for a device, a precision or options that cannot be used, or a factory that fails.
        InfeasibleBudgetError: when no schedule fits the budget.
        CaptureError: when the step itself fails; it says why.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic or before)
    try:
        with on_device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)  # the report's notes say it
            function, args, kwargs = make()
            if precision is not None:
                function, args, kwargs = _in_precision((function, args, kwargs), precision, torch.device(device).type)
            try:
                return check(function, *args, named=kwargs, progress=progress, **options)
            except RematError:
                raise
            except Exception as error:  # whatever the user's step raises
                raise CaptureError(f"the step failed: {type(error).__name__}: {error}") from error
    finally:
        torch.use_deterministic_algorithms(before)


def _in_precision(step: Step, precision: str, device: str) -> Step:
    function, args, kwargs = step
    kind = TYPES[precision]
    if precision.endswith("-mixed"):

        def mixed(*given: Any, **named: Any) -> Any:
            with torch.autocast(device, kind):
                return function(*given, **named)

        return mixed, args, kwargs
    if not isinstance(function, torch.nn.Module):
        raise ConfigError(f"--precision {precision} is for a module, and the factory returned a function: set it there")
    for tensor in internals.tensor_leaves((args, kwargs)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(kind)
    return function.to(kind), args, kwargs

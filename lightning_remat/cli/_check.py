"""``check``: a module and a batch, made by a function of the user's, planned and in eager mode: the same bits?"""

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
"""Precisions, named as Lightning names them: what modules and batches are made of, or what autocast casts to."""


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
        make: makes the step; called where the tensors are to be.
        device: where tensors are made unless the factory says otherwise.
        precision: one of `TYPES`; by default all is as it was made.
        deterministic: under `torch.use_deterministic_algorithms`.
        progress: told in words what is being done.
        **options: of `rematerialize`.

    Raises:
        ConfigError: for a device or precision that cannot be used, or a factory that fails.
        CaptureError: when the step itself fails; it says why.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic or before)
    try:
        with on_device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)  # said as notes
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

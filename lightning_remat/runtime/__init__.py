"""A step as it runs: captured on its first call, planned, and run as scheduled."""

from typing import TYPE_CHECKING

from lightning_remat.capture import is_compiled, unknown_torch
from lightning_remat.runtime._agreement import Agreement
from lightning_remat.runtime._modules import modules_of

if TYPE_CHECKING or not unknown_torch():
    from lightning_remat.capture._torch import reduce_after
    from lightning_remat.runtime._step import ScheduledStep
else:
    from lightning_remat.runtime._plain_step import PlainStep as ScheduledStep

    def reduce_after(_loss: object, _model: object) -> None:
        """Nothing is captured, and so nothing repeated."""


__all__ = [
    "Agreement",
    "ScheduledStep",
    "is_compiled",
    "modules_of",
    "reduce_after",
    "unknown_torch",
]

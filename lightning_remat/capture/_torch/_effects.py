"""The forms that effects have in a traced graph: ``_assert_async``, ``with_effects``, ``auto_functionalized`` and ``print``."""

from __future__ import annotations

import torch

assert_async = torch._assert_async

WITH_EFFECTS, PRINT, *_others = (
    getattr(torch.ops.higher_order, name, None)
    for name in ("with_effects", "print", "auto_functionalized", "auto_functionalized_v2")
)
"""The higher-order ops that call an op between effect tokens, and that print (since torch 2.12; ``None`` before)."""

FUNCTIONALIZED = tuple(op for op in _others if op is not None)
"""The higher-order ops that call an operator, which overwrites its arguments, on copies of them, and return these."""

"""The forms that effects have in a traced graph: ``_assert_async``, ``with_effects``, ``auto_functionalized`` and ``print``."""

from __future__ import annotations

import torch

assert_async = torch._assert_async

WITH_EFFECTS, PRINT, *_others = (
    getattr(torch.ops.higher_order, name, None)
    for name in ("with_effects", "print", "auto_functionalized", "auto_functionalized_v2")
)
"""An op that is called between tokens, and one that prints (since torch 2.12)."""

FUNCTIONALIZED = tuple(op for op in _others if op is not None)
"""An operator that overwrites its arguments, called on copies, which are returned."""

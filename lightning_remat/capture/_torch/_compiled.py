"""Marks that ``torch.compile`` leaves on functions and modules, by which ``capture.tracing._compiled`` recognizes them."""

from __future__ import annotations

from torch._dynamo.eval_frame import OptimizedModule

__all__ = ["COMPILED_CALL", "DISABLED", "INLINED", "ORIGINAL", "OptimizedModule"]

INLINED, ORIGINAL = "_torchdynamo_inline", "_torchdynamo_orig_callable"
"""Attributes of a function that ``torch.compile`` has made: what Dynamo traces in its place, and what was compiled."""

DISABLED = "_torchdynamo_disable"
"""Attribute of a function that Dynamo is to leave alone."""

COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module: what ``module.compile()`` has made."""

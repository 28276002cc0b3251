"""Buffers that a step assigns to their own names: ``self.table = self.table.to(x)``.

What `torch.nn.Module` asks such an ``nn.Buffer`` (whether it belongs to the state dict) is known while a step is captured;
Dynamo knows it only of tensors that are given to the step, not of what an op hands on as it is, and the graph breaks there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lightning_remat.capture._torch import TensorVariable, VariableTracker

_ATTRIBUTE = "tp_getattro_impl" if "tp_getattro_impl" in vars(TensorVariable) else "var_getattr"
"""How Dynamo asks for an attribute of a tensor: torch 2.14's name for it, or the one of before."""


@contextlib.contextmanager
def buffers_are_known() -> Iterator[None]:
    """While Dynamo traces: a buffer says whether it is persistent."""
    attribute = vars(TensorVariable)[_ATTRIBUTE]

    def of_buffer(self: Any, tx: Any, name: str) -> Any:
        if name == "persistent" and self.source is None:
            example = self.as_proxy().node.meta.get("example_value")
            if isinstance(example, torch.nn.Buffer):
                return VariableTracker.build(tx, example.persistent)
        return attribute(self, tx, name)

    setattr(TensorVariable, _ATTRIBUTE, of_buffer)
    try:
        yield
    finally:
        setattr(TensorVariable, _ATTRIBUTE, attribute)

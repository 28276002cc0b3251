"""Buffers that a step assigns to their own names are captured: ``self.table = self.table.to(x)``.

``nn.Module`` asks an ``nn.Buffer`` that is assigned to it whether it is ``persistent`` (part of the state dict). Dynamo
can answer for a tensor that the step is given, but not for one that an op has returned as it is, and breaks the graph
there. Here it is answered from the buffer itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lightning_remat.capture._torch import TensorVariable, VariableTracker

_ATTRIBUTE = "tp_getattro_impl" if "tp_getattro_impl" in vars(TensorVariable) else "var_getattr"
"""Name of the method by which Dynamo reads an attribute of a tensor: torch 2.14's, or that of earlier releases."""


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

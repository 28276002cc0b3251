"""Assignments to a tensor's ``.data`` are captured: ``teacher.data = 0.99 * teacher.data + 0.01 * student.data``.

Dynamo traces them as writes to an input's memory, which AOTAutograd refuses. Two kinds need no write:

* What lies in the tensor's own memory, as it does there, changes nothing by being assigned (``weight.data *= mask``: the
  product has been written before).
* A parameter without a gradient is another tensor from then on: what the step reads of it is the value, and the assignment
  itself is done where Dynamo does those of other attributes, after the graph has run. The graph keeps the old memory for
  itself (see `apart`): a backward that evaluates something again reads the old values.

Everything else is left to Dynamo: values of another layout or dtype, and a parameter that autograd has saved before, of which
eager mode's backward reads the new values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._torch import SetAttrVariable, TensorVariable, tensor_leaves

_SETATTR = "_call_setattr" if "_call_setattr" in vars(SetAttrVariable) else "call_setattr"
"""Name of the method by which Dynamo sets an attribute: torch 2.13's, or that of earlier releases."""

REFUSAL = "Encountered a set_ on a graph input"
"""How AOTAutograd's refusal of what is left to Dynamo begins."""

REFUSED = (
    "it assigns to the .data of a tensor that is trained, that it has read with gradients before, or that lies otherwise: "
    "p.data.copy_(value) is captured"
)
"""The same in other words."""

_ASSIGNED = "lightning_remat: its data is assigned"


@contextlib.contextmanager
def data_is_assigned() -> Iterator[None]:
    """While Dynamo traces: assignments to ``.data`` that write to no memory are captured."""
    assign = vars(SetAttrVariable)[_SETATTR]

    def with_data(self: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        tensors = isinstance(owner, TensorVariable) and isinstance(value, TensorVariable)
        if tensors and name.is_python_constant() and name.as_python_constant() == "data":
            old, new = (one.as_proxy().node.meta.get("example_value") for one in (owner, value))
            if owner.source is not None and _alike(old, new):
                if _place(new) == _place(old):
                    return value
                node = owner.as_proxy().node
                if not old.requires_grad and not any(map(_has_gradients, node.users)):
                    kept = value.call_method(tx, "detach", [], {})
                    tx.output.side_effects.store_attr(owner, "data", kept)
                    node.meta[_ASSIGNED] = True
                    owner.proxy = kept.as_proxy()
                    return kept
        return assign(self, tx, owner, name, value)

    setattr(SetAttrVariable, _SETATTR, with_data)
    try:
        yield
    finally:
        setattr(SetAttrVariable, _SETATTR, assign)


def _alike(old: Any, new: Any) -> bool:
    """Whether both are tensors that lie alike."""
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return False
    facts = [(one.shape, one.stride(), one.dtype, one.device, one.layout) for one in (old, new)]
    return facts[0] == facts[1]


def _place(tensor: torch.Tensor) -> tuple[int, Any]:
    """Which memory a tensor of the trace stands for, and where it begins there."""
    return int(tensor.untyped_storage()._cdata), tensor.storage_offset()


def _has_gradients(node: torch.fx.Node) -> bool:
    """Whether gradients come through what a node computes, or that is not known."""
    tensors = tensor_leaves(node.meta.get("example_value"))
    return not tensors or any(one.requires_grad for one in tensors)


def apart(module: torch.fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a captured graph, so that it keeps the old values of each parameter whose ``.data`` is assigned after it."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    assigned = {i for i, node in enumerate(nodes) if _ASSIGNED in node.meta}
    if not assigned:
        return run
    return lambda *values: run(*(one.detach() if i in assigned else one for i, one in enumerate(values)))

"""Floating-point operations of a call, from its shapes alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_remat.capture import OpCall, TensorSpec
from lightning_remat.cost._indices import READ_BY_INDEX, aten_name
from lightning_remat.cost._op_cost import FREE, OpCost

log = logging.getLogger(__name__)

_SAME_FORMULA = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_fused_attention_overrideable_backward": "_scaled_dot_product_flash_attention_backward",
}
"""Attention kernels without a formula in torch's registry; for each, one that has it and the same leading arguments."""

_CONVOLUTION_BACKWARD_GROUPS = 9
_CONVOLUTION_BACKWARD_MASK = 10
"""Positions among the arguments of ``aten.convolution_backward``."""


def flops(calls: Sequence[OpCall | None]) -> list[OpCost]:
    """Floating-point operations of every call, given as if they were seconds: Checkmate's static cost model.

    Only ratios between such costs mean anything (Jain et al., 2020, sec. 6, "FLOPs"). Workspaces are not modelled: 0.
    """
    return [FREE if call is None else OpCost(float(flop_count(call)), 0) for call in calls]


def flop_count(call: OpCall) -> int:
    """FLOPs of one call, a multiply-add counting as two.

    Matrix products, convolutions and attention follow the formulas of ``torch.utils.flop_counter``. Anything else
    counts one FLOP for each element of its largest tensor.
    """
    formula = _formula(call)
    if formula is not None:
        try:
            return formula(call)
        except Exception as error:  # noqa: BLE001 - torch's formulas unpack shapes, and raise anything on one they do not expect
            log.warning("No FLOP count for %s (%s): its elements are counted instead.", call.target, error)
    return elements(call)


def elements(call: OpCall) -> int:
    """Elements of the largest tensor that the call reads or writes whole."""
    return max((math.prod(spec.shape) for spec in touched(call)), default=0)


def touched(call: OpCall) -> list[TensorSpec]:
    """The tensors that the call reads or writes whole, in order: all but the source of an indexed read."""
    inputs = list(call.inputs())
    if aten_name(call) in READ_BY_INDEX:
        # What is read of the source is as large as what is written.
        inputs[:1] = list(call.outputs[:1])
    return [*inputs, *call.outputs]


def _formula(call: OpCall) -> Callable[[OpCall], int] | None:
    """A function that gives the FLOPs of such a call; ``None`` where torch has no formula for it."""
    name = aten_name(call)
    if not name:
        return None
    packet = getattr(torch.ops.aten, _SAME_FORMULA.get(name, name), None)
    registered = flop_registry.get(packet)
    if registered is None:
        return None
    if name == "convolution_backward":
        return lambda call: _convolution_backward(registered, call)
    return lambda call: _apply(registered, call)


def _apply(formula: Callable[..., int], call: OpCall) -> int:
    args, kwargs = call.with_tensors(_shape_only)
    outputs = tuple(_shape_only(spec) for spec in call.outputs)
    return int(formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else outputs))


def _convolution_backward(formula: Callable[..., int], call: OpCall) -> int:
    """FLOPs for the gradients of input and weight, counted apart, since torch's formula for the weight ignores groups.

    With ``g`` groups every output channel meets only one in ``g`` of the input channels, in both gradients.
    """
    args, _ = call.with_tensors(_shape_only)
    gradients = (args[1], args[2], None)  # as large as the input and the weight
    groups = args[_CONVOLUTION_BACKWARD_GROUPS]
    mask = args[_CONVOLUTION_BACKWARD_MASK]

    def share(of_input: bool, of_weight: bool) -> int:
        masked = (*args[:_CONVOLUTION_BACKWARD_MASK], [of_input, of_weight, False])
        return int(formula(*masked, out_val=gradients))

    in_one_group: int = share(False, bool(mask[1])) // groups
    return share(bool(mask[0]), False) + in_one_group


def _shape_only(spec: TensorSpec) -> Any:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")

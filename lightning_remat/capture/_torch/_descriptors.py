"""AOTAutograd's descriptions of what its joint graph takes, computes and returns.

* Its descriptors of inputs and outputs: which argument a primal or a gradient belongs to (it makes one primal of arguments that
  share memory and several of a tensor subclass, and has them in an order of its own), which output a tangent belongs
  to, and which outputs are new values of inputs.
* ``partitioner_tag``, its note on each node, by which those of the backward are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)


def runs_in_forward(node: torch.fx.Node) -> bool:
    """Whether AOTAutograd has noted that a node of its joint graph comes from the forward."""
    return node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")


def output_of_tangent(node: torch.fx.Node) -> int | None:
    """The position, among a captured function's outputs, of that whose gradient a tangent is; ``None`` for others."""
    return output_of(node.meta.get("desc"))


def output_of(description: Any) -> int | None:
    """The same by the tangent's descriptor."""
    return output_described(getattr(description, "output", None))


def output_described(output: Any) -> int | None:
    """The position of an output among a captured function's, by its descriptor; ``None`` for what is none of these."""
    if isinstance(output, IntermediateBaseAOTOutput):  # of several outputs that are views of one tensor
        output = output.base_of
    return output.idx if isinstance(output, PlainAOTOutput) else None


def argument_of(description: Any) -> int | None:
    """The position, among the arguments of a captured function, of what a description of a primal or a gradient is about.

    ``None`` for what AOTAutograd has made of arguments: one base of several that share memory and of which one is written
    to, the parts of a tensor subclass.
    """
    if isinstance(description, GradAOTOutput):
        description = description.grad_of
    return description.idx if isinstance(description, PlainAOTInput) else None


def is_parameter(description: Any, arguments: Sequence[bool]) -> bool:
    """Whether a primal is a parameter, or made of one (the first of several): ``arguments`` tells for a function's arguments.

    Parameters that the captured module holds itself are none of these.
    """
    while (outer := getattr(description, "base_of", None) or getattr(description, "base", None)) is not None:
        description = outer
    if isinstance(description, PlainAOTInput):
        return description.idx < len(arguments) and arguments[description.idx]
    return isinstance(description, ParamAOTInput)


def overwritten(description: Any) -> Any:
    """The description of the primal that an output is the new value of; ``None`` for other outputs."""
    if isinstance(description, SubclassGetAttrAOTOutput):
        whole = overwritten(description.base)
        return None if whole is None else SubclassGetAttrAOTInput(whole, description.attr)
    return description.mutated_input if isinstance(description, InputMutationAOTOutput) else None

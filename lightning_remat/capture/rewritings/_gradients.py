"""Gradients are handed to functions of the caller's where they are made: they are not held until the backward ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._nodes import gradient_arguments, is_tensor

Node = torch.fx.Node


@dataclasses.dataclass(frozen=True)
class HandOver:
    """What takes gradients.

    Attributes:
        functions: by the position of an argument: a function that is called with the argument's gradient and the position.
        stages: positions of arguments whose gradients are held until all of them are there, and handed over then.
    """

    functions: Mapping[int, Callable[..., torch.Tensor | None]] = dataclasses.field(default_factory=dict)
    stages: Sequence[Sequence[int]] = ()


def hand_over_gradients(graph: torch.fx.Graph, num_fwd_outputs: int, hand_over: HandOver) -> None:
    """Call these functions where gradients are made; what they return is returned in the gradients' place.

    A gradient that is returned several times, or that no op of the graph makes, is returned as it is.
    """
    output = graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    alone = {
        position: place
        for place, position in enumerate(gradient_arguments(graph, num_fwd_outputs), num_fwd_outputs)
        if position is not None and position in hand_over.functions and _is_made_for_one(outputs, place)
    }
    order = {node: number for number, node in enumerate(graph.nodes)}
    last = {
        position: max((outputs[alone[one]] for one in stage if one in alone), key=order.__getitem__)
        for stage in hand_over.stages
        for position in stage
        if position in alone
    }
    for position, place in alone.items():
        gradient: Node = outputs[place]
        until = last.get(position, gradient)
        args = (gradient, position) if until is gradient else (gradient, position, until)
        with graph.inserting_after(until):
            handed = graph.call_function(hand_over.functions[position], args)
        handed.meta = {key: item for key, item in gradient.meta.items() if key not in ("val", "tensor_meta")}
        handed.meta.update(val=gradient.meta["val"].new_empty(0), remat_once=True, remat_handed_over=True)
        outputs[place] = handed
    output.args = (tuple(outputs),)


def _is_made_for_one(outputs: Sequence[Any], place: int) -> bool:
    """Whether an op makes this output, and it is returned nowhere else."""
    gradient = outputs[place]
    return is_tensor(gradient) and gradient.op == "call_function" and outputs.count(gradient) == 1

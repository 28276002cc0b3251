"""Gradients are handed to functions of the caller's where they are made: they are not held until the backward ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.fx

from lightning_remat.capture._nodes import gradient_arguments, is_tensor

HandOver = Mapping[int, Callable[[torch.Tensor, int], torch.Tensor | None]]
"""By the position of an argument: a function that is called with the argument's gradient and the position."""


def hand_over_gradients(graph: torch.fx.Graph, num_fwd_outputs: int, hand_over: HandOver) -> None:
    """Call these functions where gradients are made; what they return is returned in the gradients' place.

    A gradient that is returned several times, or that no op of the graph makes, is returned as it is.
    """
    output = graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    for place, position in enumerate(gradient_arguments(graph, num_fwd_outputs), num_fwd_outputs):
        function, gradient = hand_over.get(position) if position is not None else None, outputs[place]
        if function is None or not is_tensor(gradient) or gradient.op != "call_function" or outputs.count(gradient) > 1:
            continue
        with graph.inserting_after(gradient):
            handed = graph.call_function(function, (gradient, position))
        handed.meta = {key: item for key, item in gradient.meta.items() if key not in ("val", "tensor_meta")}
        handed.meta.update(val=gradient.meta["val"].new_empty(0), remat_once=True, remat_handed_over=True)
        outputs[place] = handed
    output.args = (tuple(outputs),)

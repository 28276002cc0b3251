"""Gradients go to functions of the caller's where they are made: none is held until the backward ends.

What such a function returns is returned in the gradient's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.fx

from lightning_remat.capture._nodes import gradient_arguments, is_tensor

HandOver = Mapping[int, Callable[[torch.Tensor, int], torch.Tensor | None]]
"""By the position of an argument, what is given its gradient and the position."""


def hand_over_gradients(graph: torch.fx.Graph, num_fwd_outputs: int, hand_over: HandOver) -> None:
    """Gradients go to these functions where they are made; what they return is returned instead."""
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

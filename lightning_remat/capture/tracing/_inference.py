"""``torch.inference_mode`` in a step: captured as ``torch.no_grad``, and refused on releases of torch that cannot capture it.

The two compute the same. AOTAutograd fails in inference mode at a view of a tensor that was not made in it, and eager mode
does not.
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture._torch import enter_inference_mode, exit_inference_mode, set_grad_enabled
from lightning_remat.errors import CaptureError

CAPTURED = not torch.__version__.startswith(("2.11.", "2.12."))
"""Whether torch can: 2.11 fails in the midst of it, and then no op runs in the process. (2.12 is taken to be alike.)"""


def without_inference_mode(module: torch.fx.GraphModule) -> None:
    """Have a graph of Dynamo's compute without gradients where it computes in inference mode, before AOTAutograd traces it.

    A graph that ends in inference mode, or leaves it for a while, is left as it is.

    Args:
        module: the graph; it is changed in place. Gradients are enabled at its beginning, or not, as they are now.

    Raises:
        CaptureError: where torch cannot capture inference mode and the graph enters it.
    """
    graph = module.graph
    entered = graph.find_nodes(op="call_function", target=enter_inference_mode)
    if entered and not CAPTURED:
        raise CaptureError(
            f"torch.inference_mode cannot be captured by torch {torch.__version__}: update torch (2.13 can), or write "
            "torch.no_grad() in its place"
        )
    left = graph.find_nodes(op="call_function", target=exit_inference_mode)
    if not entered or len(left) < len(entered) or any(node.args != (True,) for node in entered):
        return
    enabled, before = torch.is_grad_enabled(), dict[torch.fx.Node, bool]()
    for node in list(graph.nodes):
        if node.target is enter_inference_mode:
            before[node], enabled = enabled, False
        elif node.target is exit_inference_mode:
            enabled = before[node.args[0]]
        elif node.target is set_grad_enabled:
            enabled = bool(node.args[0])
            continue
        else:
            continue
        node.target, node.args = set_grad_enabled, (enabled,)
    module.recompile()

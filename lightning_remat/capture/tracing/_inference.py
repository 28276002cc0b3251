"""``torch.inference_mode`` in a step is refused on releases of torch that cannot capture it."""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture._torch import enter_inference_mode
from lightning_remat.errors import CaptureError

CAPTURED = not torch.__version__.startswith(("2.11.", "2.12."))
"""Whether torch can: 2.11 fails in the midst of it, and then no op runs in the process. (2.12 is taken to be alike.)"""


def refuse_inference_mode(graph: torch.fx.Graph) -> None:
    """Refuse a graph of Dynamo's that enters inference mode, before AOTAutograd traces it.

    Raises:
        CaptureError: where torch cannot capture inference mode and the graph enters it.
    """
    if not CAPTURED and graph.find_nodes(op="call_function", target=enter_inference_mode):
        raise CaptureError(
            f"torch.inference_mode cannot be captured by torch {torch.__version__}: update torch (2.13 can), or write "
            "torch.no_grad() in its place"
        )

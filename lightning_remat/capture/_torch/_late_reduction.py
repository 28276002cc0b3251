"""The reduction of all gradients that DDP with a static graph puts off to the end of its first backward.

* ``Reducer._delay_all_reduce``: begins it. DDP has the first backward call it when it ends, and one that fails does not.
"""

from __future__ import annotations

from typing import Any

import torch


def reduce_after(loss: torch.Tensor, model: Any) -> None:
    """Have this loss's backward end with that reduction, in the place of one that has failed."""
    engine: Any = torch.autograd.Variable._execution_engine
    ends: Any = loss.register_hook  # without types
    ends(lambda _: engine.queue_callback(model.reducer._delay_all_reduce))

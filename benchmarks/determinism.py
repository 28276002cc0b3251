"""Eager training that repeats its own bits on CUDA: what other bits can be held against.

`torch.use_deterministic_algorithms` with ``warn_only`` is not enough: flash and memory-efficient attention stay as they are
under it, and eager differs from itself. Without, they have deterministic kernels, and an op that has none raises.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""An environment variable and its value, which cuBLAS reads when it starts."""

NONE_THERE = "does not have a deterministic implementation"
"""In the words of torch's error."""


def deterministic(*, warn_only: bool = False) -> None:
    """Set this process to kernels that repeat their bits.

    Args:
        warn_only: warn of an op that has no such kernel, and go on.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time and decides nothing
    # The backward of cuDNN's attention has no deterministic form in its default selection. A no-op on the CPU.
    torch.backends.cuda.enable_cudnn_sdp(False)


def settle(step: Callable[[], object]) -> str:
    """Make this process deterministic, as far as what ``step`` runs can be.

    Args:
        step: an eager training step, on a copy of the module; called once, and once more where an op has no deterministic
            kernel.

    Returns:
        "" where all of it is deterministic. Otherwise torch's words for the op that is not, and the process warns of such ops
        instead: whether eager repeats its bits has to be seen.
    """
    deterministic()
    try:
        step()
    except RuntimeError as error:
        if NONE_THERE not in str(error):
            raise
        said = str(error).partition(NONE_THERE)[0].strip().splitlines()[-1]
    else:
        return ""
    gc.collect()  # what the traceback held
    deterministic(warn_only=True)
    step()
    return said

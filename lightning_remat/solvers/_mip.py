"""The door to the solvers of python-mip."""

from __future__ import annotations

import sys

import mip


def optimize(model: mip.Model, seconds: float, *, relax: bool = False) -> mip.OptimizationStatus:
    """``model.optimize``, after which torch has the threads that it had.

    CBC sets OpenMP's number of threads to one for the whole process. Where torch has been loaded it would compute on one
    core from then on, and reductions would have other bits.

    Args:
        model: what to solve.
        seconds: the most that may take.
        relax: leave integrality out.
    """
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 0
    try:
        return model.optimize(max_seconds=seconds, relax=relax)
    finally:
        if torch is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

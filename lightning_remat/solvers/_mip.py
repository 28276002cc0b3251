"""The door to the solvers of python-mip."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import mip


def silent_model(solver: str = "CBC") -> mip.Model:
    """An empty program, to be minimized, of which nothing is printed.

    CBC prints the first linear program of a model whatever the verbosity (that it is infeasible, say), but none after a solve
    with integers that has come to its end.
    """
    model = mip.Model(sense=mip.MINIMIZE, solver_name=solver)
    model.verbose, preprocess = 0, model.preprocess
    integer = model.add_var("integer", var_type=mip.BINARY)
    model.preprocess = 0
    optimize(model, 10.0)
    model.remove(integer)
    model.preprocess = preprocess
    return model


def optimize(model: mip.Model, seconds: float, *, relax: bool = False) -> mip.OptimizationStatus:
    """``model.optimize``, after which OpenMP has the threads that it had.

    CBC sets their number to one, for the whole process: torch would compute on one core from then on, and reductions would
    have other bits.

    Args:
        model: what to solve.
        seconds: the most that may take.
        relax: leave integrality out.
    """
    with _threads_kept():
        return model.optimize(max_seconds=seconds, relax=relax)


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    # Not through ``torch.set_num_threads``, which fixes MKL's number besides, and with it maybe its results.
    library = _openmp()
    threads = library.omp_get_max_threads() if library is not None else 0
    try:
        yield
    finally:
        if library is not None:
            library.omp_set_num_threads(threads)


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP of this process; ``None`` where nothing has loaded one for all."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such thing
        return None
    return library if hasattr(library, "omp_set_num_threads") else None

"""What other packages add under an entry point: found by name, imported only when it is asked for.

A package says in its ``pyproject.toml``, for a solver::

    [project.entry-points."lightning_remat.solvers"]
    my_solver = "my_package.my_module:my_solver"

Names are read from the packages' metadata, which imports nothing: a package that is broken hides no other one.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from lightning_remat.errors import SolverError


def names(group: str) -> frozenset[str]:
    """The names under which installed packages offer something in ``group``."""
    return frozenset(entry_points(group=group).names)


def load(group: str, name: str) -> object:
    """What the one package that offers ``name`` in ``group`` has there.

    Raises:
        SolverError: when several packages offer it, or when it cannot be imported, naming the package and the reason.
    """
    found = list({point.value: point for point in entry_points(group=group, name=name)}.values())
    if len(found) != 1:
        raise SolverError(
            f"{name!r} ({group}) is offered {len(found)} times: {', '.join(map(_place, found))}; keep one"
        )
    try:
        return found[0].load()
    except Exception as error:  # whatever the package's code raises when it is imported
        raise SolverError(
            f"{name!r} ({group}), offered by {_place(found[0])}, cannot be loaded: {type(error).__name__}: {error}. "
            "Repair or uninstall that package; all other methods work without it."
        ) from error


def _place(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name}" if point.dist is not None else point.value

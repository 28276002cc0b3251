"""What other packages add under an entry point: found by name, imported only when it is asked for.

A package says in its ``pyproject.toml``, for a solver::

    [project.entry-points."lightning_remat.solvers"]
    my_solver = "my_package.my_module:my_solver"

Names are read from the packages' metadata, which imports nothing: a package that is broken hides no other one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from lightning_remat.errors import SolverError

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Functions by name: those registered here, and those that other packages offer.

    Args:
        kind: what the functions are, in a word, for messages.
        group: of the entry points by which other packages add some.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
        self.own: dict[str, F] = {}

    def add(self, name: str, function: F) -> None:
        """Add a function.

        Raises:
            SolverError: when the name is taken.
        """
        if name in self.own:
            raise SolverError(f"a {self.kind} named {name!r} is registered already")
        self.own[name] = function

    def names(self) -> tuple[str, ...]:
        """All names, in alphabetical order."""
        return tuple(sorted({*self.own, *entry_points(group=self.group).names}))

    def get(self, name: str) -> F:
        """The function of a name, imported from another package if need be.

        Raises:
            SolverError: for an unknown name, or another package's that cannot be loaded.
        """
        if name not in self.own and name in entry_points(group=self.group).names:
            offered = load(self.group, name)
            if name not in self.own:  # importing it may have registered it
                if not callable(offered):
                    raise SolverError(f"{name!r} ({self.group}) is a {type(offered).__name__}, not a function")
                self.own[name] = cast(F, offered)
        try:
            return self.own[name]
        except KeyError:
            raise SolverError(f"unknown {self.kind} {name!r}: choose one of {', '.join(self.names())}") from None


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

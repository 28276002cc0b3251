"""Which gradients have left a backward while it ran: where it fails and is repeated, these leave it no second time."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Taken:
    """The gradients that the present backward has added to others, or handed to autograd, by the ids of their parameters.

    A backward that is repeated makes the same gradients, bit for bit, and what became of them before holds.
    """

    def __init__(self) -> None:
        self._added: set[int] = set()
        self._handed: set[int] = set()
        self._repeated = False

    def begin(self) -> None:
        """A backward begins; in a step that is repeated, there may be several before the one that has failed comes again."""
        if not self._repeated:
            self._added.clear()
            self._handed.clear()

    def add(self, parameter: torch.Tensor) -> None:
        """A gradient has been added to the parameter's ``.grad``."""
        self._added.add(id(parameter))

    def hand(self, parameters: Iterable[torch.Tensor]) -> None:
        """Autograd has done with these gradients what is to be done: accumulated them, and called the hooks."""
        self._handed.update(map(id, parameters))

    def is_added(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient has been added already."""
        return id(parameter) in self._added

    def is_handed(self, parameter: torch.Tensor) -> bool:
        """Whether autograd has a gradient already; of the backward that is to be repeated."""
        return self._repeated and id(parameter) in self._handed

    def is_taken(self, parameter: torch.Tensor) -> bool:
        """Whether the backward has added a gradient, or handed it over."""
        return id(parameter) in self._added or id(parameter) in self._handed

    def repeat(self) -> None:
        """The backward that has failed is to be repeated."""
        self._repeated = True

    def end(self) -> None:
        """The step has ended, repeated or not."""
        self._repeated = False

"""What is known of all ops that call one function, found once for each function of a graph."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_remat.capture import _effects, _ops, _overwriting, _scatters
from lightning_remat.capture._nodes import target_name
from lightning_remat.capture._torch import HigherOrderOperator


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Of all ops that call one function.

    Attributes:
        name: what they are called.
        higher_order: whether the function calls others.
        mutates: whether they overwrite inputs.
        view: whether their results lie on the first input's storage.
        random: whether they draw random numbers.
        stays: whether they may have an effect.
        acts: whether they are called for it.
        norm: whether they may be batch norms in training mode.
        copies_storage: whether they copy the storage that their first input lies on.
        writes_over: whether they may have a form that overwrites an input.
    """

    name: str
    higher_order: bool
    mutates: bool
    view: bool
    random: bool
    stays: bool
    acts: bool
    norm: bool
    copies_storage: bool
    writes_over: bool

    @classmethod
    def of(cls, target: Any) -> Kind:
        """The kind of the ops that call ``target``."""
        return cls(
            target_name(target),
            higher_order=isinstance(target, HigherOrderOperator),
            mutates=_ops.mutates(target),
            view=_ops.is_view(target),
            random=_ops.is_random(target),
            stays=_effects.stays(target),
            acts=_effects.calls_to_act(target),
            norm=_ops.may_be_batch_norm(target),
            copies_storage=_scatters.copies_storage(target),
            writes_over=_overwriting.has_form(target),
        )


class Kinds:
    """The kinds of one graph's ops."""

    def __init__(self) -> None:
        self._found: dict[Any, Kind] = {}

    def of(self, target: Any) -> Kind:
        """The kind of the ops that call ``target``."""
        found = self._found.get(target)
        if found is None:
            found = self._found[target] = Kind.of(target)
        return found

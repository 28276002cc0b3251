"""Gradient accumulation inside of a captured backward: each gradient is added to ``.grad`` as soon as it is computed.

Captured code returns all of its gradients when its backward ends, and autograd accumulates them then: for a moment the
old ones and all of the new ones are held. Where one captured graph alone contributes to a parameter's gradient, and no
hook sees it, it is added inside of the backward, by the operation that autograd would have run, and freed.

A recorded backward writes a gradient always to the same memory, its *home*, which ``.grad`` then has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_remat.capture import _torch as internals
from lightning_remat.capture.gradients._taken import Taken

RETURNED = -1
"""Way of a gradient that is returned to autograd (see `Accumulator.ways`)."""

HOME = 0
"""Way of a gradient that a recorded backward adds to its home."""


class Homes:
    """Memory of its own for the gradient of each parameter, the same for all recorded backwards."""

    def __init__(self) -> None:
        self._homes: Any = WeakIdKeyDictionary()

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """A parameter's home; ``None`` where it has none yet."""
        found: torch.Tensor | None = self._homes.get(parameter)
        return found

    def make(self, parameter: torch.nn.Parameter) -> None:
        """See that a parameter has a home; it is laid out as autograd lays out gradients."""
        if parameter not in self._homes:
            self._homes[parameter] = torch.empty_like(parameter, requires_grad=False)

    def clear(self) -> None:
        """Let go of all of them."""
        self._homes.clear()

    def has(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> bool:
        """Whether a gradient lies in the parameter's home."""
        home = self.of(parameter)
        return home is not None and home.data_ptr() == gradient.data_ptr() and home.stride() == gradient.stride()


class Accumulator:
    """Accumulates the gradients of one captured graph's backward.

    Args:
        inputs: the captured function's arguments, when it is captured.
        taken: told of the gradients that are added, and knows which have been.
        homes: where recorded backwards write gradients.

    Attributes:
        positions: positions of the parameters among the arguments whose gradients may be added here.
        alone: whether the present call's gradients come from this graph alone; otherwise they are returned to autograd.
        takes: by a parameter's position among the arguments, what is given its gradient as soon as that is computed
            (see `lightning_remat.capture.from_joint`).
    """

    def __init__(self, inputs: Sequence[object], taken: Taken, homes: Homes | None = None) -> None:
        self._taken = taken
        self.positions = tuple(i for i, value in enumerate(inputs) if _is_plain(value))
        self.alone = False
        self._parameters: dict[int, torch.nn.Parameter] = {}  # of the present backward, until their gradients are there
        self._homes = homes or Homes()
        self._first: torch.Tensor | None = None  # for each position, whether its home holds nothing yet
        self._first_at: tuple[int, ...] | None = None  # what that says
        self._to_homes = False
        self._at_home: dict[int, int] = {}  # positions of the parameters, by the ids of their homes

        def accumulate_grad(gradient: torch.Tensor, position: int, _last: Any = None) -> torch.Tensor | None:
            return self._added(gradient, position)

        self.takes: Mapping[int, Callable[..., torch.Tensor | None]] = dict.fromkeys(self.positions, accumulate_grad)

    def begin(self, parameters: Mapping[int, torch.nn.Parameter], dropped: Collection[int | None]) -> None:
        """A backward begins, with these parameters by position; those at ``dropped`` get no gradients."""
        self._parameters = {
            position: parameter
            for position, parameter in parameters.items()
            if position not in dropped and _is_plain(parameter) and internals.accumulates_into(parameter)
        }

    def _added(self, gradient: torch.Tensor, position: int) -> torch.Tensor | None:
        """Add a gradient, and return ``None``; or return the gradient itself, where autograd has to accumulate it."""
        parameter = self._parameters.pop(position, None)
        if parameter is None:
            return gradient
        if self._taken.is_added(parameter):  # by a backward that has failed since
            return None
        if self._to_homes and self._way(parameter) == HOME:
            return self._added_at_home(gradient, position, parameter)
        old = parameter.grad
        if old is None and (home := self._free_home(parameter)) is not None:
            return home.copy_(gradient).detach()
        if not self.alone or old is None or old.layout is not torch.strided or old.dtype is not gradient.dtype:
            return gradient
        old.add_(gradient)
        self._taken.add(parameter)
        return None

    # -- recorded backwards -------------------------------------------------------------------------------------------

    def ways(self) -> Hashable:
        """What happens to the gradients of the backward that has begun: a recorded one that is replayed must do the same.

        Returns:
            For each of `positions`: `HOME`, `RETURNED`, or where the gradient lies that it is added to.
        """
        return tuple(
            RETURNED if (parameter := self._parameters.get(position)) is None else self._way(parameter)
            for position in self.positions
        )

    def _way(self, parameter: torch.nn.Parameter) -> Hashable:
        old = parameter.grad
        if not self.alone or not parameter.is_floating_point():
            return RETURNED
        if old is None or self._homes.has(parameter, old):
            return HOME
        return old.data_ptr(), old.dtype, old.layout

    def make_homes(self) -> None:
        """See that there are homes for all gradients that a recorded backward, in the place of this one, adds there."""
        for parameter in self._parameters.values():
            if self._way(parameter) == HOME:
                self._homes.make(parameter)

    def homes_are_free(self, positions: Iterable[int]) -> bool:
        """Whether nobody holds what lies in the homes of parameters that have no gradient now."""
        for position in positions:
            parameter = self._parameters.get(position)
            home = self._homes.of(parameter) if parameter is not None else None
            if parameter is None or home is None or (parameter.grad is None and internals.holders(home) > 1):
                return False
        return True

    def _free_home(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The home of a parameter that has no gradient now, if its gradient comes from here alone, and nobody holds it."""
        home = self._homes.of(parameter) if self.alone else None
        return home if home is not None and internals.holders(home) == 1 else None

    @contextlib.contextmanager
    def into_homes(self) -> Iterator[frozenset[int]]:
        """While open, a backward is recorded or replayed; gives the positions whose homes hold nothing yet.

        Where it ends with an exception, the backward may be run once more.
        """
        parameters, self._at_home = dict(self._parameters), {}
        first = frozenset(i for i, parameter in parameters.items() if parameter.grad is None)
        flags = tuple(int(i in first) for i in self.positions)
        if flags != self._first_at and parameters:
            device = next(iter(parameters.values())).device
            if self._first is None:
                self._first = torch.empty(len(flags), dtype=torch.bool, device=device)
            self._first.copy_(torch.tensor(flags, dtype=torch.bool))
            self._first_at = flags
        self._to_homes = True
        try:
            yield first
            self._parameters = {}
        except BaseException:
            self._parameters = parameters
            raise
        finally:
            self._to_homes = False

    def homes_among(self, gradients: Sequence[object]) -> dict[int, int]:
        """The positions of parameters in whose homes some of what the recorded backward returned lies, by its index there."""
        return {index: self._at_home[id(one)] for index, one in enumerate(gradients) if id(one) in self._at_home}

    def _added_at_home(self, gradient: torch.Tensor, position: int, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Add a gradient to its home, which a negative zero is written to first where it holds nothing: that changes no bit."""
        home = self._homes.of(parameter)
        assert home is not None and self._first is not None
        self._at_home[id(home)] = position
        home.masked_fill_(self._first[self.positions.index(position)], -0.0)
        return home.add_(gradient)


def _is_plain(value: object) -> bool:
    """Whether a value is a trainable parameter without hooks that see its gradients."""
    if type(value) is not torch.nn.Parameter or not value.requires_grad:
        return False
    return not value._backward_hooks and not getattr(value, "_post_accumulate_grad_hooks", None)

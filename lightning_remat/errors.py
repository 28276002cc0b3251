"""The project's own exceptions, and its warning. Each message says what was given, what is accepted and what to do."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 3
"""The most names that a message gives, of several."""


def listed(names: Sequence[str]) -> str:
    """The first few of some names, for a message, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


class RematError(Exception):
    """Base of every error that lightning_remat raises on purpose."""


class GraphError(RematError, ValueError):
    """A computation graph that breaks its own rules, or a graph or plan file that cannot be read."""


class ScheduleError(RematError, ValueError):
    """A schedule that breaks a rule; the message names the first broken one and the step."""


class BudgetError(RematError, ValueError):
    """A budget that cannot be understood or used, or that is over what the device has."""


class SolverError(RematError, ValueError):
    """An unknown solver, or options that a solver does not take."""


class CaptureError(RematError, RuntimeError):
    """A training step that cannot be captured; the message is the reason given to the user."""


class ConfigError(RematError, ValueError):
    """An unknown or malformed configuration value."""


class RematWarning(UserWarning):
    """Something runs without rematerialization, or otherwise not as asked; the text says why and what to do."""


class InfeasibleBudgetError(RematError, RuntimeError):
    """No schedule was found within the budget.

    Attributes:
        budget_bytes: the budget asked for, in bytes.
        smallest_bytes: the smallest budget for which a schedule was found, in bytes.
        op: name of the operation during which the peak of that schedule occurs.
        module: path of the module that the operation belongs to ("" where it is unknown).
    """

    def __init__(self, budget_bytes: int, smallest_bytes: int, op: str, module: str) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.op = op
        self.module = module
        where = f"{op} in {module}" if module else op
        super().__init__(
            f"no schedule was found within a budget of {budget_bytes:,} bytes: the smallest feasible budget found is "
            f"{smallest_bytes:,} bytes, set by {where}. Give at least that (or budget='min'), or make the batch smaller."
        )

    def __reduce__(self) -> tuple[type[InfeasibleBudgetError], tuple[int, int, str, str]]:
        return type(self), (self.budget_bytes, self.smallest_bytes, self.op, self.module)

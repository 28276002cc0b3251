"""What was found for one method on one network: a row of the comparison, and the families that methods belong to."""

from __future__ import annotations

import dataclasses
from typing import Any

EAGER, CHECKPOINT, ATEN, INDUCTOR, OURS = "eager", "checkpoint", "pytorch-budget", "pytorch-budget-inductor", "remat"
"""Families of methods: those of one family share a mark in the picture."""

UNSCHEDULED = "lightning_remat, unscheduled (share 1)"
"""The name of this project's row without rematerialization."""

OTHER_LOSS, WRONG = 1e-3, 1e-2
"""A loss further from eager's than the first is of other random numbers; gradients further than the second are wrong."""


@dataclasses.dataclass
class Row:
    """What was found for one method. ``None`` stands for what was not reached or does not apply.

    Attributes:
        method, family: see `benchmarks.comparison.methods.Method`.
        status: ``"ok"``, ``"infeasible"`` or ``"dies"``.
        note: why, or what else there is to know.
        peak_bytes: measured, above parameters, buffers and inputs.
        total_peak_bytes: measured, all of it.
        seconds, seconds_least, seconds_most: of a step: the median and the spread.
        loss_error: |difference| / |eager's|.
        gradient_error: the largest over all parameters of max|difference| / max|eager's|.
        same_loss, same_gradients, same_buffers: bit for bit as in eager.
        budget_bytes, predicted_peak_bytes: of all that is held, as in a plan.
        prediction_error: predicted over measured total peak, less 1.
        predicted_overhead, gap: see `lightning_remat.Plan`.
        solver: which one made the plan, and how it ended.
        planning_seconds: measuring operations and solving, without the capture.
        first_step_seconds: wall time of the first step: capture, compilation and planning included.
        round_seconds: of the step in each timed round: what is in one round was timed side by side.
        opponents: the peers whose measured peak is this row's budget.
        peak_op: during which the peak is predicted.
        unavoidable_bytes, unavoidable_op: see `benchmarks.common.unavoidable`.
    """

    method: str
    family: str
    status: str = "ok"
    note: str = ""
    peak_bytes: int | None = None
    total_peak_bytes: int | None = None
    seconds: float | None = None
    seconds_least: float | None = None
    seconds_most: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    same_loss: bool | None = None
    same_gradients: bool | None = None
    same_buffers: bool | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    prediction_error: float | None = None
    predicted_overhead: float | None = None
    gap: float | None = None
    solver: str | None = None
    planning_seconds: float | None = None
    first_step_seconds: float | None = None
    round_seconds: list[float] = dataclasses.field(default_factory=list)
    opponents: list[str] = dataclasses.field(default_factory=list)
    peak_op: str | None = None
    unavoidable_bytes: int | None = None
    unavoidable_op: str | None = None

    @property
    def bitwise(self) -> bool | None:
        """Whether loss, gradients and buffers are all eager's."""
        if self.same_loss is None:
            return None
        return bool(self.same_loss and self.same_gradients and self.same_buffers)

    @property
    def other_random_numbers(self) -> bool:
        """Whether the loss is so far from eager's that the method must have drawn other random numbers.

        Its gradients are those of another step then, and their error says nothing.
        """
        return self.loss_error is not None and not self.loss_error <= OTHER_LOSS

    @property
    def wrong_gradients(self) -> bool:
        """Whether the gradients are far from eager's although the loss is not."""
        return self.gradient_error is not None and not self.other_random_numbers and not self.gradient_error <= WRONG

    @property
    def within_budget(self) -> bool | None:
        """Whether the measured peak is at most the budget."""
        if self.budget_bytes is None or self.total_peak_bytes is None:
            return None
        return self.total_peak_bytes <= self.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "bitwise": self.bitwise, "within_budget": self.within_budget}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """A row from what `to_dict` gave; files of version 1 have none of the fields that came last."""
        return cls(**{field.name: data[field.name] for field in dataclasses.fields(cls) if field.name in data})

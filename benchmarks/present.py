"""What `peers.py` found, for people: a table a network, and one picture of seconds against peak memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from lightning_remat.report import format_bytes, format_seconds

if TYPE_CHECKING:
    from benchmarks.peers_verdict import Verdict

EAGER, CHECKPOINT, ATEN, INDUCTOR, OURS = "eager", "checkpoint", "pytorch-budget", "pytorch-budget-inductor", "remat"
"""Families of methods: those of one family are one line in the picture."""

UNSCHEDULED = "lightning_remat, unscheduled (share 1)"
"""The name of this project's row without rematerialization."""

OTHER_LOSS, WRONG = 1e-3, 1e-2
"""A loss further from eager's than the first is of other random numbers; gradients further than the second are wrong."""


@dataclasses.dataclass
class Row:
    """What was found for one method. ``None`` stands for what was not reached or does not apply.

    Attributes:
        method, family: see `benchmarks.methods.Method`.
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
        unavoidable_bytes, unavoidable_op: see `benchmarks.peers_verdict.unavoidable`.
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
        """A row from what `to_dict` gave."""
        return cls(**{field.name: data[field.name] for field in dataclasses.fields(cls)})


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """The rows of one network."""
    eager = next((row.seconds for row in rows if row.family == EAGER and row.seconds), None)
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = (
        "peak: bytes above parameters, buffers and inputs, old gradients included; predicted: the error of the predicted "
        "absolute peak; planned in: measuring and solving"
    )
    table.add_column("method", no_wrap=True)
    for name in ("peak", "step", "(least to most)", "of eager", "gradient error", "predicted", "planned in"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bits")
    table.add_column("note")
    for row in rows:
        table.add_row(
            row.method,
            _maybe(row.peak_bytes, format_bytes),
            _maybe(row.seconds, format_seconds),
            f"{format_seconds(row.seconds_least)} to {format_seconds(row.seconds_most)}"
            if row.seconds_least is not None and row.seconds_most is not None
            else "",
            f"{row.seconds / eager:.2f}" if row.seconds and eager else "",
            _maybe(row.gradient_error, lambda error: "0" if error == 0 else f"{error:.0e}"),
            _maybe(row.prediction_error, lambda error: f"{100 * error:+.2f}%"),
            _maybe(row.planning_seconds, format_seconds),
            _bits(row),
            Text("; ".join(part for part in (_trouble(row), row.note) if part)),
        )
    return table


def verdict_table(title: str, verdict: Verdict) -> Table:
    """What holds on one network: its points, and below them what is said of the network as a whole."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("a peer's point", no_wrap=True)
    for name in ("peak", "ours", "predicted", "time of peer's", "(middle half)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bits", no_wrap=True)
    table.add_column("holds")
    for point in verdict.points:
        dominated = f"need not: dominated by {point.dominated_by}" if point.dominated_by else ""
        table.add_row(
            point.peer,
            format_bytes(point.peak_bytes),
            _maybe(point.ours_peak_bytes, format_bytes),
            _maybe(point.prediction_error, lambda error: f"{100 * error:+.2f}%"),
            _maybe(point.ratio, lambda ratio: f"{ratio:.3f}"),
            f"{point.ratio_low:.3f} to {point.ratio_high:.3f}" if point.ratio_low and point.ratio_high else "",
            _maybe(point.bitwise, lambda same: "equal" if same else "differ"),
            Text(f"NO: {', '.join(point.troubles)}" if point.troubles else dominated or "yes"),
        )
    table.caption = Text("\n".join(_sentences(verdict)))
    return table


def _sentences(verdict: Verdict) -> list[str]:
    """What is said of a network as a whole."""
    said = []
    if verdict.smallest_bytes and verdict.smallest_peer_bytes:
        share = verdict.smallest_bytes / verdict.smallest_peer_bytes
        text = (
            f"smallest peak: {format_bytes(verdict.smallest_bytes)} ({verdict.smallest_op}), {share:.2f} of the peers' "
            f"({format_bytes(verdict.smallest_peer_bytes)}, {verdict.smallest_peer})"
        )
        if verdict.unavoidable_bytes:
            text += (
                f"; {verdict.smallest_bytes / verdict.unavoidable_bytes:.2f} of the largest unavoidable working set "
                f"({format_bytes(verdict.unavoidable_bytes)}, {verdict.unavoidable_op})"
            )
        said.append(text)
    if verdict.unscheduled_bytes and verdict.eager_bytes:
        share = verdict.unscheduled_bytes / verdict.eager_bytes
        said.append(f"unscheduled: {format_bytes(verdict.unscheduled_bytes)}, {share:.2f} of eager's")
    said += [f"DOES NOT HOLD: {trouble}" for trouble in verdict.troubles]
    return [*said, "all of it holds"] if verdict.holds else said


def _maybe(value: Any, form: Any) -> str:
    return "" if value is None else str(form(value))


def _bits(row: Row) -> str:
    if row.bitwise is None:
        return ""
    if row.bitwise:
        return "equal"
    parts = {"loss": row.same_loss, "gradients": row.same_gradients, "buffers": row.same_buffers}
    return " and ".join(name for name, same in parts.items() if not same) + " differ"


def _trouble(row: Row) -> str:
    if row.within_budget is False:
        return "OVER ITS BUDGET"
    if row.other_random_numbers:
        return "draws other random numbers: its gradients cannot be compared"
    return "WRONG GRADIENTS" if row.wrong_gradients else ""


_MARKS = {
    EAGER: ("*", "#222222", "eager"),
    CHECKPOINT: ("s", "#c77800", "per-block torch.utils.checkpoint"),
    ATEN: ("^", "#7a7f87", "activation_memory_budget, ATen kernels"),
    INDUCTOR: ("v", "#8e5ea2", "activation_memory_budget, Inductor"),
    OURS: ("o", "#1f6fb4", "lightning_remat"),
}


def picture(networks: Sequence[tuple[str, Sequence[Row]]], path: Path) -> bool:
    """Draw one panel a network, seconds against peak memory, and one mark a method; ``False`` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    columns = min(3, len(networks))
    lines = -(-len(networks) // columns)
    figure = Figure(figsize=(5.0 * columns, 3.8 * lines + 0.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    labelled: dict[str, Any] = {}
    for axes, (name, rows) in zip(panels, networks, strict=False):
        for family, (mark, color, label) in _MARKS.items():
            points = [row for row in rows if row.family == family and row.peak_bytes and row.seconds]
            if not points:
                continue
            x, y = [(row.peak_bytes or 0) / 2**20 for row in points], [1e3 * (row.seconds or 0) for row in points]
            (line,) = axes.plot(x, y, mark, color=color, ls=":", lw=0.8, ms=11 if family == EAGER else 6, label=label)
            labelled.setdefault(label, line)
            wrong = [index for index, row in enumerate(points) if row.wrong_gradients]
            if wrong:
                (crosses,) = axes.plot(
                    [x[i] for i in wrong], [y[i] for i in wrong], "x", color="#c62f2d", ms=11, label="wrong gradients"
                )
                labelled.setdefault("wrong gradients", crosses)
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xlabel("peak above parameters, buffers and inputs [MiB]", fontsize=8)
        axes.set_ylabel("step [ms]", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(networks) :]:
        axes.set_axis_off()
    figure.legend(
        labelled.values(),
        labelled.keys(),
        loc="outside lower center",
        ncols=min(2, columns) + columns // 3,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)
    return True

"""What this project promises against its peers, judged from the rows of one network.

A **point** is what a peer with right results reaches: its measured peak, and its seconds at it. For each there is a row of
this project whose budget is that peak, in bytes. What is looked at:

* at every point: this project's measured peak is within the budget, predicted to `PREDICTION`, its results are eager's bits,
  and its median step takes at most `SLOWER` times the peer's;
* its smallest peak is at most `SMALLEST` of the smallest of any peer, or within `UNAVOIDABLE` of what no schedule can avoid;
* unscheduled, it peaks no higher than eager.

Peaks are those of the table, above parameters, buffers and inputs: shares of all that is held would say less.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.comparison.rows import ATEN, CHECKPOINT, EAGER, OURS, UNSCHEDULED, Row
from lightning_remat.report import format_bytes

PEERS = (EAGER, CHECKPOINT, ATEN)
"""The families whose points count: they run the same kernels."""

SLOWER, PREDICTION, SMALLEST, UNAVOIDABLE = 1.02, 0.01, 0.8, 1.05
SAME_PEAK = 1.01
"""Points whose peaks differ by less share an opponent, at the smallest of their peaks."""
FASTER = 0.95
"""A point need not be matched where another, no larger, took less than this much of its seconds. Eager's always is."""


# -- points and opponents ---------------------------------------------------------------------------------------------


def points(rows: Sequence[Row]) -> list[Row]:
    """The peers' rows with right results, smallest peak first."""
    found = [row for row in rows if row.family in PEERS and row.status == "ok" and row.bitwise]
    return sorted((row for row in found if row.peak_bytes and row.seconds), key=lambda row: row.peak_bytes or 0)


def dominating(row: Row, rows: Sequence[Row], faster: float = 1.0) -> Row | None:
    """The fastest of the points that need no more memory than ``row`` and at most ``faster`` of its seconds."""
    found = [
        other
        for other in points(rows)
        if other is not row
        and (other.peak_bytes or 0) <= (row.peak_bytes or 0)
        and (other.seconds or 0) <= faster * (row.seconds or 0)
    ]
    return min(found, key=lambda other: other.seconds or 0, default=None)


def to_match(rows: Sequence[Row]) -> list[list[Row]]:
    """The points that need an opponent, those of nearly the same peak together, smallest peak first."""
    groups: list[list[Row]] = []
    for row in points(rows):
        if row.family != EAGER and dominating(row, rows, FASTER):
            continue
        if groups and (row.peak_bytes or 0) <= SAME_PEAK * (groups[-1][0].peak_bytes or 0):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


# -- the verdict ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    """A peer's point, and this project at its peak.

    Attributes:
        peer, ours: the rows' names; ``ours`` is "" where there is none within the peer's peak.
        peak_bytes, ours_peak_bytes: measured.
        prediction_error: see `Row`.
        ratio: of the median seconds, this project's over the peer's.
        ratio_low, ratio_high: quartiles of the ratios within each round.
        dominated_by: another peer's point that is no larger and no slower: this one need not be matched.
        troubles: what does not hold.
    """

    peer: str
    peak_bytes: int
    ours: str = ""
    ours_peak_bytes: int | None = None
    prediction_error: float | None = None
    bitwise: bool | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    dominated_by: str | None = None
    troubles: list[str] = dataclasses.field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.troubles


@dataclasses.dataclass
class Verdict:
    """What holds on one network, and what does not.

    Attributes:
        points: largest peak first.
        smallest_bytes: this project's smallest peak with right results; ``smallest_op``: during which it is predicted.
        smallest_peer, smallest_peer_bytes: the peers'.
        unavoidable_bytes: above parameters, buffers and inputs; no schedule peaks lower.
        unavoidable_op: which sets it.
        unscheduled_bytes, eager_bytes: the peaks without rematerialization.
        troubles: what does not hold beside the points' own.
    """

    points: list[Point]
    smallest_bytes: int | None = None
    smallest_op: str | None = None
    smallest_peer: str | None = None
    smallest_peer_bytes: int | None = None
    unavoidable_bytes: int | None = None
    unavoidable_op: str | None = None
    unscheduled_bytes: int | None = None
    eager_bytes: int | None = None
    troubles: list[str] = dataclasses.field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all of it does."""
        return not self.troubles and all(point.holds for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        found = dataclasses.asdict(self)
        for data, point in zip(found["points"], self.points, strict=True):
            data["holds"] = point.holds
        return {**found, "holds": self.holds}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Verdict:
        """A verdict from what `to_dict` gave."""
        fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        names = [field.name for field in dataclasses.fields(Point)]
        return cls(**{**fields, "points": [Point(**{name: one[name] for name in names}) for one in data["points"]]})


def judge(rows: Sequence[Row]) -> Verdict:
    """The verdict on the rows of one network, after all of them were timed."""
    matched = [row for row in rows if row.family == OURS and row.opponents]
    found = Verdict([_point(row, rows, matched) for row in reversed(points(rows))])
    _judge_smallest(found, rows)
    eager = next((row for row in rows if row.family == EAGER), None)
    unscheduled = next((row for row in rows if row.method == UNSCHEDULED), None)
    if eager and unscheduled and eager.peak_bytes and unscheduled.peak_bytes:
        found.eager_bytes, found.unscheduled_bytes = eager.peak_bytes, unscheduled.peak_bytes
        if unscheduled.peak_bytes > eager.peak_bytes:
            found.troubles.append(
                f"{UNSCHEDULED}: peaks {format_bytes(unscheduled.peak_bytes - eager.peak_bytes)} higher than eager"
            )
    for row in rows:
        if row.family == OURS and not row.opponents:  # those with opponents are judged with their points
            found.troubles += [f"{row.method}: {trouble}" for trouble in _faults(row)]
    return found


def _point(peer: Row, rows: Sequence[Row], matched: Sequence[Row]) -> Point:
    assert peer.peak_bytes and peer.total_peak_bytes and peer.seconds
    better = dominating(peer, rows)
    point = Point(peer.method, peer.peak_bytes, dominated_by=better.method if better else None)
    within = [row for row in matched if row.budget_bytes and row.budget_bytes <= peer.total_peak_bytes]
    # Its own opponent; for a point that was left out for another, the largest that has no more memory.
    own = [row for row in matched if peer.method in row.opponents]
    ours = own[0] if own else max(within, key=lambda row: row.budget_bytes or 0, default=None)
    if ours is None:
        point.troubles = [] if better else ["no opponent"]
        return point
    point.ours, point.ours_peak_bytes = ours.method, ours.peak_bytes
    point.prediction_error, point.bitwise = ours.prediction_error, ours.bitwise
    point.troubles = _faults(ours)
    rounds = list(zip(ours.round_seconds, peer.round_seconds, strict=False))  # those without a duel ran fewer
    if rounds:
        own_seconds, peer_seconds = zip(*rounds, strict=True)
        point.ratio = statistics.median(own_seconds) / statistics.median(peer_seconds)
        ratios = [one / other for one, other in rounds]
        if len(ratios) > 1:
            point.ratio_low, _, point.ratio_high = statistics.quantiles(ratios, n=4, method="inclusive")
        if point.ratio > SLOWER and not better:
            point.troubles.append("slower")
    return point


def _faults(row: Row) -> list[str]:
    """What a row of this project breaks whoever it is compared with."""
    if row.status != "ok":
        return [row.status]
    found = [] if row.bitwise else ["other bits"]
    if row.within_budget is False:
        found.append("over its budget")
    if row.prediction_error is None or abs(row.prediction_error) > PREDICTION:
        found.append("predicted wrongly")
    return found


def _judge_smallest(verdict: Verdict, rows: Sequence[Row]) -> None:
    ran = [row for row in rows if row.family == OURS and row.status == "ok" and row.bitwise and row.peak_bytes]
    peers = points(rows)
    ours = min(ran, key=lambda row: row.peak_bytes or 0, default=None)
    if ours is None or not peers:
        return
    assert ours.peak_bytes and ours.total_peak_bytes and peers[0].peak_bytes
    verdict.smallest_bytes, verdict.smallest_op = ours.peak_bytes, ours.peak_op
    verdict.smallest_peer, verdict.smallest_peer_bytes = peers[0].method, peers[0].peak_bytes
    unavoidable = 0
    if ours.unavoidable_bytes is not None:
        unavoidable = ours.unavoidable_bytes - (ours.total_peak_bytes - ours.peak_bytes)
        verdict.unavoidable_bytes, verdict.unavoidable_op = unavoidable, ours.unavoidable_op
    if ours.peak_bytes > SMALLEST * peers[0].peak_bytes and ours.peak_bytes > UNAVOIDABLE * unavoidable:
        verdict.troubles.append(
            f"its smallest peak is over {SMALLEST:g} of the peers', and not within {UNAVOIDABLE - 1:.0%} of what is unavoidable"
        )

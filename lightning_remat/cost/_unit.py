"""Every operation costs the same."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_remat.capture import OpCall
from lightning_remat.cost._op_cost import FREE, OpCost


def unit(calls: Sequence[OpCall | None]) -> list[OpCost]:
    """One "second" for every call, nothing for ``None``: the unit cost model of Checkmate (Jain et al., 2020, sec. 6).

    Workspaces are not modelled: 0 bytes each.
    """
    return [FREE if call is None else OpCost(1.0, 0) for call in calls]

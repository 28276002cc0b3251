"""Steps that are planned with their runs fused, whatever it costs: small networks are mostly faster as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from lightning_remat.capture import CapturedGraph, Fusing
from lightning_remat.runtime import _plans


def take_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each step be planned in its fused form alone, where it has one."""

    def fused(
        captured: CapturedGraph, *, fusing: Fusing | None, **_facts: bool
    ) -> Iterator[tuple[CapturedGraph, float]]:
        form = None if fusing is None else captured.fused(fusing)
        yield captured if form is None else form, math.inf

    monkeypatch.setattr(_plans, "forms", fused)

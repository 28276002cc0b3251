"""Where the time of a first step goes: phases that are taken apart, and leave everything as it was."""

from __future__ import annotations

import time

import pytest

from benchmarks import first_step


def test_a_phase_has_the_seconds_that_the_phases_inside_of_it_have_not() -> None:
    clock = first_step.Clock()
    started = time.perf_counter()
    with clock.phase("planning"), clock.phase("lowering"):
        while time.perf_counter() < started + 0.01:
            pass
    assert clock.seconds["lowering"] >= 0.009 > clock.seconds["planning"] > 0
    assert sum(clock.seconds.values()) <= time.perf_counter() - started


def test_a_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(first_step.CASES, "tiny", ("transformer", {"layers": 1, "width": 16, "length": 8, "batch": 2}))
    before = [getattr(owner, name) for places in first_step.PHASES.values() for owner, name in places]
    found = first_step.first_step("tiny", "100%")
    assert all(found["phases"][name] > 0 for name in first_step.PHASES)
    assert found["seconds"] == pytest.approx(sum(found["phases"].values())) and found["ops"] > 50
    (first, second) = first_step.rows([{"case": "tiny", "first": found, "second": found}])
    assert first[:2] == ["tiny", "first"] and second[1] == "second" and len(first) == 6 + len(first_step.PHASES)
    assert [getattr(owner, name) for places in first_step.PHASES.values() for owner, name in places] == before

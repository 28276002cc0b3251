"""Settings of the tests of models."""

from __future__ import annotations

import pytest

from lightning_remat.capture import _joint

pytest.register_assert_rewrite("tests.models.wild")

EXPECTED_WARNINGS = (
    # Dynamo's own doing, where it meets functions of the user's own.
    "ignore:.* should not be instantiated:DeprecationWarning",
    # torch 2.11.
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Called for the tests of this folder only."""
    for warning in EXPECTED_WARNINGS:
        item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _small_draws_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are to meet what large ones meet: random numbers that are not kept, and drawn a second time."""
    monkeypatch.setattr(_joint, "WORTH_DRAWING_AGAIN", 0)

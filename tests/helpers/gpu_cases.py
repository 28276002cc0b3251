"""Tests for the GPU suite to run: one of each end. Not collected otherwise: the name of this file is no test's."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["a", "b"])
def test_passes(name: str) -> None:
    assert name


def test_fails() -> None:
    assert 1 + 1 == 3


def test_is_skipped() -> None:
    pytest.skip("not here")


def test_dies() -> None:
    os.abort()


def test_comes_after() -> None:
    pass

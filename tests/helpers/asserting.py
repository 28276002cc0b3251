"""Python's own ``assert``: those in the tests themselves are rewritten by pytest."""

from __future__ import annotations

import torch


def asserted(condition: torch.Tensor) -> None:
    assert condition, "so it is not"


def asserted_without_words(condition: torch.Tensor) -> None:
    assert condition

"""Random batches, and their sizes."""

from __future__ import annotations

from typing import Any

import torch

BATCH, LENGTH, VOCABULARY, LABELS = 8, 64, 200, 10
SIDE = 64
"""Pixels of an image's side."""


def tokens(length: int = LENGTH, batch: int = BATCH, least: int = 3) -> torch.Tensor:
    """Token indices of shape (batch, length)."""
    return torch.randint(least, VOCABULARY, (batch, length))


def labelled_tokens(**shape: int) -> dict[str, Any]:
    """Tokens that are their own labels, for language models, and for encoders and decoders."""
    ids = tokens(**shape)
    return {"input_ids": ids, "labels": ids.clone()}


def classified_tokens() -> dict[str, Any]:
    """Tokens, and a class each row."""
    return {"input_ids": tokens(), "labels": torch.randint(0, LABELS, (BATCH,))}


def images(side: int = SIDE, batch: int = BATCH) -> dict[str, Any]:
    """Images of shape (batch, 3, side, side), and a class each."""
    return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, LABELS, (batch,))}


def videos(frames: int = 4, side: int = 32, batch: int = 4) -> dict[str, Any]:
    """Videos of shape (batch, frames, 3, side, side), and a class each."""
    return {"pixel_values": torch.randn(batch, frames, 3, side, side), "labels": torch.randint(0, LABELS, (batch,))}


def waves(samples: int = 8000, batch: int = 4) -> dict[str, Any]:
    """Sound of shape (batch, samples), and twelve letters each."""
    return {"input_values": torch.randn(batch, samples), "labels": torch.randint(3, VOCABULARY, (batch, 12))}


def spoken(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Features of sound, and tokens that say what is heard."""
    return {name: torch.randn(shape), "labels": tokens(24, shape[0])}


def captioned(side: int = 32, length: int = 16) -> dict[str, Any]:
    """Images with texts, for models that learn which belong together. A text ends with the last token there is."""
    ids = torch.randint(3, VOCABULARY - 1, (BATCH, length))
    ids[:, -1] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, side, side), "return_loss": True}


def classes() -> torch.Tensor:
    """A class each row."""
    return torch.randint(0, LABELS, (BATCH,))

"""Architectures that people train, in tiny configurations, from their own libraries: what `benchmarks/models.py` runs.

Each entry of `ARCHITECTURES` is a function that makes a module with its loss inside and a batch for it, both random. They are
small enough for a step of a fraction of a second on one core, and wide enough that activations, not parameters, take the
memory: mostly width 64, two layers, four heads, and batches of 8 x 64 tokens. Dropout is on where the architecture has any.

Libraries are imported when an architecture of theirs is built. A library is a file, transformers several:

* ``_architecture``: what an architecture is, and a module with its loss.
* ``_inputs``: random batches.
* ``_transformers_common``: how models of transformers are built, and what several kinds of them have in common.
* ``_transformers_text``: decoders, state spaces, experts, encoders, and encoders with decoders.
* ``_transformers_images``: images and videos.
* ``_transformers_sound``: waves and features of sound.
* ``_transformers_pairs``: images with texts.
* ``_transformers_series``: time series and decisions.
* ``_pytorchcv``, ``_monai``, ``_diffusers``, ``_peft``, ``_geometric``, ``_x_transformers``: one library each.
"""

from benchmarks.architectures._architecture import Architecture, OfPositions, Training, WithLoss
from benchmarks.architectures._diffusers import DIFFUSERS
from benchmarks.architectures._geometric import GEOMETRIC
from benchmarks.architectures._monai import MONAI
from benchmarks.architectures._peft import PEFT
from benchmarks.architectures._pytorchcv import PYTORCHCV
from benchmarks.architectures._transformers_images import IMAGES_AND_VIDEOS
from benchmarks.architectures._transformers_pairs import IMAGES_WITH_TEXTS
from benchmarks.architectures._transformers_series import SERIES
from benchmarks.architectures._transformers_sound import FEATURES, WAVES
from benchmarks.architectures._transformers_text import OTHER_TEXTS, TEXTS
from benchmarks.architectures._x_transformers import X_TRANSFORMERS

__all__ = ["ARCHITECTURES", "Architecture", "OfPositions", "Training", "WithLoss"]

ARCHITECTURES: tuple[Architecture, ...] = (
    *TEXTS,
    *IMAGES_AND_VIDEOS,
    *WAVES,
    *OTHER_TEXTS,
    *FEATURES,
    *IMAGES_WITH_TEXTS,
    *SERIES,
    *PYTORCHCV,
    *MONAI,
    *DIFFUSERS,
    *PEFT,
    *GEOMETRIC,
    *X_TRANSFORMERS,
)

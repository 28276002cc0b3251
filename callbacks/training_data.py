"""Batches of the training loader, before the fit has asked for any."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.parsing import (
    lightning_getattr,
    lightning_setattr,
)

from lightning_remat.callbacks.lightning_internals import forget_loaders, holders_of, to_device, training_source
from lightning_remat.errors import ConfigError


class TrainingData:
    """Batches of a training loader, of a size that can be set, before the fit has asked for any.

    Args:
        trainer: the Trainer, in a fit that has begun.
        module: the module that is trained.
        name: name of the attribute that holds the batch size; ``None`` if the batch size is not to be changed.
        make: makes the loader from a batch size, in place of such an attribute.

    Attributes:
        before: the batch size before any change; 0 if it is not to be changed.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        name: str | None = None,
        make: Callable[[int], Any] | None = None,
    ) -> None:
        self._trainer, self._module, self._name, self._make = trainer, module, name, make
        self._source = training_source(trainer)
        self._held: list[tuple[Any, Any]] = []
        self.before = 0
        if make is not None:
            self.before = extract_batch_size(self._next())
        elif name is not None:
            self.before = int(lightning_getattr(module, name))  # type: ignore[arg-type]
            holders = holders_of(module, name)
            self._held = [(holder, _get(holder, name)) for holder in holders]

    def _loader(self) -> CombinedLoader:
        loader = self._source.dataloader()
        return loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")

    def set(self, size: int) -> None:
        """From now on, make the loaders with another batch size."""
        if self._make is not None:
            self._source.instance = self._make(size)
        elif self._name is not None:
            lightning_setattr(self._module, self._name, size)
        forget_loaders(self._trainer)

    def put_back(self) -> None:
        """From now on, make the loaders with the batch size from before any change."""
        self.set(self.before)
        for holder, value in self._held:
            _set(holder, str(self._name), value)

    def samples(self) -> int | None:
        """How many samples of the training data each process gets; ``None`` where that is not known."""
        try:
            lengths = [len(loader.dataset) for loader in self._loader().flattened]
        except (TypeError, AttributeError, NotImplementedError):
            return None
        return max(1, min(lengths) // self._trainer.world_size) if lengths else None

    def batch(self, size: int) -> Any:
        """A batch of ``size`` samples, on the device.

        Raises:
            ConfigError: where the loader gives another number of samples.
        """
        self.set(size)
        batch = self._next()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "ambiguous collection": what is ambiguous is not checked
            try:
                given = extract_batch_size(batch)
            except (MisconfigurationException, RecursionError):
                given = size
        if given != size:
            raise ConfigError(
                f"{self._name} was set to {size}, and the training loader gives batches of {given}: it is made with another "
                f"number, or with one that was derived from {self._name} before. Make the loader with {self._name} itself, or "
                "give batch_arg_name, the name of what it is made with."
            )
        return self._on_device(batch)

    def first(self) -> Any:
        """A first batch of the loader as it is, on the device."""
        return self._on_device(self._next())

    def _next(self) -> Any:
        combined = self._loader()
        combined.limits = [1] * len(combined.flattened)
        generators = [(generator, generator.get_state()) for generator in _generators(combined)]
        try:
            batch, _, _ = next(iter(combined))
        finally:
            for generator, state in generators:
                generator.set_state(state)
        return batch

    def _on_device(self, batch: Any) -> Any:
        return to_device(self._trainer, self._module, batch)


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _generators(combined: CombinedLoader) -> list[torch.Generator]:
    """The user's own random generators that the loaders draw from."""
    found: dict[int, torch.Generator] = {}
    for loader in combined.flattened:
        batches = getattr(loader, "batch_sampler", None)
        for thing in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            generator = getattr(thing, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())

"""Python state that a training step changes on its own module: counters (``self.seen += 1``), lists (``self.losses.append``).

Dynamo guards on such values, so that the step would be recompiled every time. What a step changes is found by comparing
before and after it; then a counter is declared to Dynamo as dynamic, and a list is replaced by a stand-in
(`GrowingList`). A list of tensors with gradients (features that hooks collect) is more likely to be emptied by each step: it
is replaced when it has grown twice.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch

from lightning_remat.callbacks.lightning_internals import STEP_COUNTERS


def _names(step: Callable[..., object]) -> list[str]:
    """By which names Dynamo knows the module, the batch and its index in the frame of a training step.

    A decorator's function is the frame, with its own names: the step's are not asked for.
    """
    function = getattr(step, "__func__", step)
    names = ["self", "batch", "batch_idx"]
    found = [f"L['{name}']" for name in names]
    bound = function is not step
    for i, one in enumerate(inspect.signature(function, follow_wrapped=False).parameters.values(), 0 if bound else 1):
        if one.kind is one.VAR_POSITIONAL:
            found[i:] = [f"L['{one.name}'][{k}]" for k in range(len(names) - i)]
        if i == len(names) or one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            break
        found[i] = f"L['{one.name}']"
    return found


def _has_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class OwnState:
    """The counters and lists of a module that its training step was seen to change.

    Args:
        module: the module of the ``training_step``.

    Attributes:
        sources: patterns of Dynamo source names, separated by commas, for what changes from step to step and may be
            read in one: the batch's index, ``global_step``, ``current_epoch``, counters. A graph is valid for all of
            their values, or, where the step branches on one, for those that take the same branch.
        lists: names of the module's lists that grow.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.lists: set[str] = set()
        self._module = module
        self._counters: set[str] = set()
        self._filled: set[str] = set()  # lists that have grown in a step
        own, _, batch_idx = _names(module.training_step)
        self._self = re.escape(own)
        self._always = [re.escape(batch_idx), self._self + STEP_COUNTERS]

    @property
    def sources(self) -> str:
        """Patterns of Dynamo source names for what changes, separated by commas."""
        return ",".join([*self._always, *(rf"{self._self}\.{name}" for name in sorted(self._counters))])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """To be open while a step runs: notes the counters and lists that it changes."""
        attributes = vars(self._module)
        counters = {name: value for name, value in attributes.items() if type(value) is int}
        lengths = {name: len(value) for name, value in attributes.items() if type(value) is list}
        yield
        for name, value in counters.items():
            now = attributes.get(name)
            if type(now) is int and now != value:
                self._counters.add(name)
        for name, length in lengths.items():
            now = attributes.get(name)
            if type(now) is list and len(now) > length:
                if name in self._filled or not any(map(_has_gradient, now[length:])):
                    self.lists.add(name)
                self._filled.add(name)

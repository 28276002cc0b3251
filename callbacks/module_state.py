"""What a training step changes besides parameters, taken down so that the step can be undone."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import torch

from lightning_remat._blocks import block_bytes


class ModuleState:
    """Buffers, random generators, and the module's own numbers, texts and lists, as they are now.

    Args:
        module: the module.
        device: whose random generator is taken down, beside those of the CPU, Python and NumPy.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        own = vars(module)
        self._own = {name: value for name, value in own.items() if isinstance(value, (bool, int, float, str))}
        self._lists = [(value, list(value)) for value in own.values() if type(value) is list]
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - what users draw from
        self._device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take on the device."""
        kind = self._device.type
        return sum(block_bytes(copy.nbytes, kind) for _, copy in self._buffers if copy.device.type == kind)

    def restore(self) -> None:
        """Put all of it back."""
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)
        for value, items in self._lists:
            value[:] = items
        vars(self._module).update(self._own)
        of_python, of_numpy, of_torch = self._random
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random, self._device)

"""A chain of ops as one function that runs it slice by slice, over a grid of cells that know nothing of one another."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.fx

from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._own_functions import named
from lightning_remat.capture._torch import real_tensors

Grid = tuple[int, ...]
"""How many cells there are along each of its dimensions."""

Box = Sequence[tuple[int, int]]
"""Of each dimension of a grid, the cells of a slice: (start, stop)."""

SLICES = 64
"""How many slices a grid is cut into, unless they are then smaller than `LEAST_BYTES`."""

LEAST_BYTES = {"cpu": 1 << 18, "cuda": 1 << 25}
"""By the device's type, what the largest tensor in a slice takes at least: smaller ones take longer, and save nothing."""


def least_bytes(device: torch.device) -> int:
    """`LEAST_BYTES` on a device."""
    return LEAST_BYTES.get(device.type, LEAST_BYTES["cuda"])


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor has the cells of a grid.

    Attributes:
        dims: its dimension along each of the grid's; ``None`` where all cells share it.
        merged: whether its first dimension is all of the grid's as one, the last one's cells next to each other.
    """

    dims: tuple[int | None, ...]
    merged: bool = False

    def cut(self, tensor: torch.Tensor, grid: Grid, box: Box) -> torch.Tensor:
        """A tensor's part in a slice."""
        if self.merged:
            return self._cells(tensor.view(*grid, *tensor.shape[1:]), box).flatten(0, len(grid) - 1)
        return self._cells(tensor, box)

    def put(self, part: torch.Tensor, tensor: torch.Tensor, grid: Grid, box: Box) -> None:
        """Write a slice's part of a tensor."""
        if self.merged:
            part = part.reshape(*(stop - start for start, stop in box), *part.shape[1:])
            tensor = tensor.view(*grid, *tensor.shape[1:])
        self._cells(tensor, box).copy_(part)

    def _cells(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        for dim, (start, stop) in zip(self.dims, box, strict=True):
            if dim is not None:
                tensor = tensor.narrow(dim, start, stop - start)
        return tensor


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain of ops over a grid.

    Attributes:
        program: of its inputs, and of the numbers of cells along the grid's dimensions; it returns a tuple of tensors.
        grid: the cells.
        inputs: spec and place of each input.
        outputs: of each output.
        cell_bytes: what a cell of its largest tensor takes.
        overwritable: positions of the inputs over which the first output may be written: they are as large, and a slice of
            them is read for no other slice.
        least_cells: how many cells a slice has at least.
    """

    program: torch.fx.GraphModule
    grid: Grid
    inputs: tuple[tuple[TensorSpec, Place], ...]
    outputs: tuple[tuple[TensorSpec, Place], ...]
    cell_bytes: int
    overwritable: frozenset[int] = frozenset()
    least_cells: int = 1

    @property
    def cells(self) -> set[int]:
        """How many cells slices have."""
        return {math.prod(stop - start for start, stop in box) for box in self.boxes()}

    def boxes(self) -> Iterator[Box]:
        """The slices, in order."""
        least = least_bytes(self.outputs[0][0].device)
        cells = max(-(-least // self.cell_bytes), -(-math.prod(self.grid) // SLICES), self.least_cells)
        cells = (
            1 << (cells - 1).bit_length()
        )  # so that loops over a slice leave nothing over, if it can be (see `_rounding`)
        inner = len(self.grid) - 1  # the dimension along which a slice has more than one cell, and not all
        while inner and math.prod(self.grid[inner:]) <= cells:
            inner -= 1
        step = max(1, cells // math.prod(self.grid[inner + 1 :]))
        for outer in itertools.product(*map(range, self.grid[:inner])):
            for start in range(0, self.grid[inner], step):
                stop = min(start + step, self.grid[inner])
                yield (*((n, n + 1) for n in outer), (start, stop), *((0, n) for n in self.grid[inner + 1 :]))

    def run(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """The outputs, computed in slices; the first one may be written over an input, ``out``."""
        first, *others = (spec for spec, _ in self.outputs)
        made = (_empty(first) if out is None else out, *map(_empty, others))
        for box in self.boxes():
            parts = [place.cut(one, self.grid, box) for one, (_, place) in zip(tensors, self.inputs, strict=True)]
            results = self.program(*parts, *(stop - start for start, stop in box))
            for result, one, (_, place) in zip(results, made, self.outputs, strict=True):
                place.put(result, one, self.grid, box)
            del results
        return made

    @property
    def name(self) -> str:
        """The same for all chains of the same ops on tensors of the same shapes."""
        facts = (self.program.code, self.grid, self.inputs, self.outputs, self.least_cells)
        return f"in_slices_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`run`, as a function with the chain's `name`."""

        def in_slices(*tensors: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            return self.run(*tensors, out=out)

        return named(in_slices, self.name, self.overwritable)


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


_SEEN: dict[str, bool] = {}


def seen_to_be_exact(chain: Chain) -> bool:
    """Whether slices give the bits of the whole on example data, on this device and with as many threads as there are now.

    How a kernel goes about its work may depend on how much there is of it: this is promised nowhere, and tried instead, once
    for all chains that are alike. What does not fit the device as a whole cannot be tried, and is not seen to be exact.
    """
    key = f"{chain.name} {torch.get_num_threads()}"
    if key not in _SEEN:
        try:
            _SEEN[key] = _equal(chain)
        except torch.OutOfMemoryError:
            return False
    return _SEEN[key]


def _equal(chain: Chain) -> bool:
    device = chain.outputs[0][0].device
    with real_tensors(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        generators = {spec.device: torch.Generator(spec.device).manual_seed(1) for spec, _ in chain.inputs}
        examples = [_example(spec, generators[spec.device]) for spec, _ in chain.inputs]
        whole = chain.program(*examples, *chain.grid)
        if not all(map(_same_bits, chain.run(*examples), whole)):
            return False
        for position in chain.overwritable:
            given = [one.clone() if number == position else one for number, one in enumerate(examples)]
            if not all(map(_same_bits, chain.run(*given, out=given[position]), whole)):
                return False
        return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    nowhere = one.isnan() == other.isnan()
    return bool(torch.all(nowhere & ((one == other) | one.isnan())))


def _example(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """A tensor with made-up values; whole numbers, which may be places in another tensor, are 0."""
    made = torch.zeros(spec.span, dtype=spec.dtype, device=spec.device)
    if spec.dtype.is_floating_point:
        made.normal_(generator=generator)
    elif spec.dtype is torch.bool:
        made.bernoulli_(0.7, generator=generator)
    return made.as_strided(spec.shape, spec.stride)

"""The networks of HiRemate's experiments (Gusak et al. 2025, section 4 and appendices E and F), captured without their memory.

GPT-2 is transformers', the RegNet and the ResNets are pytorchcv's, the Transformer is torch's. UNet, MLP-Mixer (Tolstikhin et
al. 2021), FNO (Li et al. 2020), U-FNO (Wen et al. 2022) and UNO (Rahman et al. 2022) are written here, with the layers that
their authors published. The paper names neither sizes nor batches. Sizes are those of the examples in its authors' repository
(topal-team/rockmate, ``models/``): 256 x 256 pixels; 200 vectors of 512 and 16 heads for the Transformers; a UNet of 32
channels on its first level with batch normalization; RegNetX-32GF (at 3.2 GF its blocks would give 187 forward nodes, not the
173 of Table 4). GPT-2 has 512 tokens, and the width of "medium" with 24 layers and with 96. Batches are those examples' too,
except where Table 4's budget and share imply other activations; see `BATCHES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from benchmarks.networks import MeanSquare, NextToken, SequenceToSequence
from benchmarks.papers.kusumoto_networks import Classifier
from lightning_remat.cli._capture import Step, captured_graph
from lightning_remat.errors import CaptureError
from lightning_remat.graph import ComputationGraph, Op

PIXELS, TOKENS, VECTORS = 256, 512, 200


class UNet(nn.Module):
    """U-Net of Ronneberger et al. 2015 with padding and batch normalization: five levels, from ``width`` channels on."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.down = nn.ModuleList(self._twice(*pair) for pair in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, stride=2) for one in reversed(widths[:-1]))
        self.after = nn.ModuleList(self._twice(2 * one, one) for one in reversed(widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.score = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _twice(before: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (before, width):
            convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        for up, after, skip in zip(self.up, self.after, reversed(skips[:-1]), strict=True):
            x = after(torch.cat([up(x), skip], 1))
        return self.score(x).sigmoid()  # type: ignore[no-any-return]


class Mixing(nn.Module):
    """Two linear layers with a normalization before them and a way around, along the patches or along the channels."""

    def __init__(self, width: int, size: int, hidden: int, patches: bool) -> None:
        super().__init__()
        self.norm, self.patches = nn.LayerNorm(width), patches
        self.network = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + (self.network(y.mT).mT if self.patches else self.network(y))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """MLP-Mixer of Tolstikhin et al. 2021 on patches of 16 pixels, which grow fourfold and channels shrink to half between."""

    def __init__(self, width: int = 512, depth: int = 12, classes: int = 1000) -> None:
        super().__init__()
        count = (PIXELS // 16) ** 2
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        mixings = [
            (Mixing(width, count, 4 * count, True), Mixing(width, width, width // 2, False)) for _ in range(depth)
        ]
        self.mixings = nn.Sequential(*itertools.chain.from_iterable(mixings), nn.LayerNorm(width))
        self.classes = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).mT
        return self.classes(self.mixings(x).mean(1))  # type: ignore[no-any-return]


class SpectralConvolution(nn.Module):
    """The lowest frequencies in each direction times a matrix each, on a grid of any size (Li et al. 2020, section 4)."""

    def __init__(self, before: int, width: int, modes: Sequence[int]) -> None:
        super().__init__()
        low, high = [slice(m) for m in modes], [slice(-m, None) for m in modes]
        self.corners = list(itertools.product(*zip(low[:-1], high[:-1], strict=True), low[-1:]))
        shape = (before, width, *modes)
        self.weights = nn.ParameterList(torch.rand(shape, dtype=torch.cfloat) / (before * width) for _ in self.corners)
        self.width = width

    def forward(self, x: torch.Tensor, grid: Sequence[int] = ()) -> torch.Tensor:
        grid = tuple(grid) or x.shape[2:]
        axes = tuple(range(2, x.dim()))
        spectrum = torch.fft.rfftn(x, dim=axes)
        product = spectrum.new_zeros(x.shape[0], self.width, *grid[:-1], grid[-1] // 2 + 1)
        for corner, weight in zip(self.corners, self.weights, strict=True):
            modes = (slice(None), slice(None), *corner)
            product[modes] = torch.einsum("bi...,io...->bo...", spectrum[modes], weight)
        return torch.fft.irfftn(product, s=grid, dim=axes)  # type: ignore[no-any-return]


_POINTWISE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _pointwise(dimensions: int, *widths: int) -> nn.Sequential:
    """Linear layers on channels, with GELU between them."""
    layers: list[nn.Module] = []
    for pair in itertools.pairwise(widths):
        layers += [_POINTWISE[dimensions - 1](*pair, 1), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def _with_grid(x: torch.Tensor) -> torch.Tensor:
    """A function on a grid, channels last, and the coordinates of its points."""
    axes = torch.meshgrid(*[torch.linspace(0, 1, size) for size in x.shape[1:-1]], indexing="ij")
    return torch.cat([x, torch.stack(axes, -1).expand(*x.shape[:-1], -1)], -1)


class FNO(nn.Module):
    """Fourier neural operator: four Fourier layers with a pointwise network in each, as its authors' later code has them."""

    def __init__(
        self, channels: int, modes: Sequence[int], width: int, padding: int, wide: int, layers: int = 4
    ) -> None:
        super().__init__()
        dimensions, self.padding = len(modes), padding
        self.lift = nn.Linear(channels + dimensions, width)
        self.spectral = nn.ModuleList(SpectralConvolution(width, width, modes) for _ in range(layers))
        self.network = nn.ModuleList(_pointwise(dimensions, width, width, width) for _ in range(layers))
        self.beside = nn.ModuleList(_pointwise(dimensions, width, width) for _ in range(layers))
        self.project = _pointwise(dimensions, width, wide * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(_with_grid(x)).movedim(-1, 1)
        if self.padding:
            x = functional.pad(x, [0, self.padding])
        for index, (spectral, network, beside) in enumerate(zip(self.spectral, self.network, self.beside, strict=True)):
            x = network(spectral(x)) + beside(x)
            if index + 1 < len(self.spectral):
                x = functional.gelu(x)
        return self.project(x[..., : -self.padding] if self.padding else x)  # type: ignore[no-any-return]


class SmallUNet(nn.Module):
    """The U-Net beside a U-Fourier layer (Wen et al. 2022): three levels of equal width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [
                self._block(width, 2),
                nn.Sequential(self._block(width, 2), self._block(width, 1)),
                nn.Sequential(self._block(width, 2), self._block(width, 1)),
            ]
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose3d(before, width, 4, 2, 1), nn.LeakyReLU(0.1, inplace=True))
            for before in (width, 2 * width, 2 * width)
        )
        self.last = nn.Conv3d(2 * width, width, 3, padding=1)

    @staticmethod
    def _block(width: int, stride: int) -> nn.Sequential:
        convolution = nn.Conv3d(width, width, 3, stride, 1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm3d(width), nn.LeakyReLU(0.1, inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [x]
        for block in self.down:
            skips.append(block(skips[-1]))
        x = skips.pop()
        for up in self.up:
            x = torch.cat([skips.pop(), up(x)], 1)
        return self.last(x)  # type: ignore[no-any-return]


class UFNO(nn.Module):
    """U-FNO: three Fourier and three U-Fourier layers on a padded grid of 96 x 200 x 24 points with 12 values each."""

    def __init__(self, width: int = 36, modes: Sequence[int] = (10, 10, 10), padding: int = 8) -> None:
        super().__init__()
        self.padding = padding
        self.lift, self.project = (
            nn.Linear(12, width),
            nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 1)),
        )
        self.spectral = nn.ModuleList(SpectralConvolution(width, width, modes) for _ in range(6))
        self.beside = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(6))
        self.unets = nn.ModuleList(SmallUNet(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = self.padding
        x = functional.pad(x, (0, 0, 0, padding, 0, padding), "replicate")
        x = functional.pad(x, (0, 0, 0, 0, 0, 0, 0, padding))
        x = self.lift(x).movedim(-1, 1)
        for index, (spectral, beside) in enumerate(zip(self.spectral, self.beside, strict=True)):
            y = spectral(x) + beside(x.flatten(2)).view(x.shape)
            x = functional.relu(y + self.unets[index - 3](x) if index >= 3 else y)
        return self.project(x.movedim(1, -1))[:, :-padding, :-padding, :-padding]  # type: ignore[no-any-return]


class OperatorLayer(nn.Module):
    """A layer of UNO: a spectral convolution onto another grid, and a pointwise one whose result is resampled onto it."""

    def __init__(self, before: int, width: int, modes: Sequence[int], normalized: bool) -> None:
        super().__init__()
        self.spectral, self.beside = SpectralConvolution(before, width, modes), nn.Conv3d(before, width, 1)
        self.norm: nn.Module = nn.InstanceNorm3d(width, affine=True) if normalized else nn.Identity()

    def forward(self, x: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
        x = self.norm(self.spectral(x, grid) + _resampled(self.beside(x), grid))
        return functional.gelu(x)


def _resampled(x: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """Low frequencies only, on another grid."""
    spectrum = torch.fft.rfftn(x, dim=(-3, -2, -1))
    low = torch.zeros_like(spectrum)
    ends = [(slice(size // 2), slice(-(size // 2), None)) for size in grid[:2]]
    for rows, columns in itertools.product(*ends):
        corner = (slice(None), slice(None), rows, columns, slice(grid[2] // 2))
        low[corner] = spectrum[corner]
    return _interpolated(torch.fft.irfftn(low, s=tuple(grid), dim=(-3, -2, -1)), grid)


def _interpolated(x: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    return functional.interpolate(x, size=tuple(grid), mode="trilinear", align_corners=True)


class UNO(nn.Module):
    """UNO for 10 steps of a flow on 64 x 64 points to the next 40: seven operators that contract and expand the domain."""

    def __init__(self, width: int = 8, padding: float = 0.2) -> None:
        super().__init__()
        self.padding = padding
        self.lift = nn.ModuleList([nn.Linear(6, width // 2), nn.Linear(width // 2, width)])
        plan = (
            (1, 2, (20, 20, 4), True), (2, 4, (14, 14, 4), False), (4, 8, (6, 6, 4), False), (8, 16, (6, 6, 7), True),
            (16, 4, (6, 6, 7), False), (8, 2, (14, 14, 10), True), (4, 2, (20, 20, 14), False),
        )  # fmt: skip
        self.operators = nn.ModuleList(
            OperatorLayer(before * width, after * width, modes, normalized) for before, after, modes, normalized in plan
        )
        self.project = nn.Sequential(nn.Linear(3 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides = torch.meshgrid(*[torch.linspace(0, 2 * torch.pi, size) for size in x.shape[1:3]], indexing="ij")
        waves = torch.stack([*map(torch.sin, sides), *map(torch.cos, sides)], -1)[:, :, None].expand(*x.shape[:-1], -1)
        steps = torch.linspace(0, 1, x.shape[3])[:, None].expand(*x.shape[:-1], -1)
        x = torch.cat([x, waves, steps], -1)
        for linear in self.lift:
            x = functional.gelu(linear(x))
        padding = int(self.padding * x.shape[3])
        lifted = functional.pad(x.movedim(-1, 1), [0, padding])
        rows, columns, times = lifted.shape[2:]
        grids = [
            (rows * 3 // 4, columns * 3 // 4, times), (rows // 2, columns // 2, times),
            (rows // 4, columns // 4, int(1.6 * times)), (rows // 8, columns // 8, int(1.6 * times)),
            (rows // 2, columns // 2, int(2.4 * times)), (rows * 3 // 4, columns * 3 // 4, int(3.2 * times)),
            (rows, columns, 4 * times),
        ]  # fmt: skip
        results = [lifted]
        for index, (operator, grid) in enumerate(zip(self.operators, grids, strict=True)):
            x = operator(results[-1], grid)
            skip = {4: 2, 5: 1, 6: 0}.get(index)
            results.append(x if skip is None else torch.cat([x, _interpolated(results[skip], grid)], 1))
        return self.project(results[-1][..., : -4 * padding].movedim(1, -1))  # type: ignore[no-any-return]


# -- by name ---------------------------------------------------------------------------------------------------------------


def _gpt2(layers: int, width: int = 1024, heads: int = 16) -> Callable[[int], Step]:
    def make(batch: int) -> Step:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=TOKENS, use_cache=False)
        return NextToken(GPT2LMHeadModel(config)), (torch.zeros(batch, TOKENS, dtype=torch.int64),), {}

    return make


def _transformer(layers: int) -> Callable[[int], Step]:
    def make(batch: int) -> Step:
        vectors = torch.empty(VECTORS, batch, 512)
        network = nn.Transformer(512, 16, layers, layers)
        return SequenceToSequence(network), (vectors, vectors.clone()), {}

    return make


def _images(build: Callable[[], nn.Module]) -> Callable[[int], Step]:
    def make(batch: int) -> Step:
        labels = torch.zeros(batch, dtype=torch.int64)
        return Classifier(build()), (torch.empty(batch, 3, PIXELS, PIXELS), labels), {}

    return make


def _function(build: Callable[[], nn.Module], *shape: int) -> Callable[[int], Step]:
    def make(batch: int) -> Step:
        return MeanSquare(build()), (torch.empty(batch, *shape),), {}

    return make


def _pytorchcv(module: str, name: str) -> nn.Module:
    network = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)()
    network.features.final_pool = nn.AdaptiveAvgPool2d(1)  # its own is for 224 pixels
    return network  # type: ignore[no-any-return]


_NETWORKS: Mapping[str, Callable[[int], Step]] = {
    "GPT 24": _gpt2(24),
    "GPT 96": _gpt2(96),
    "UNet": _function(UNet, 3, PIXELS, PIXELS),
    "MLP-Mixer": _images(Mixer),
    "RegNet32": _images(lambda: _pytorchcv("regnet", "regnetx320")),
    "ResNet101": _images(lambda: _pytorchcv("resnet", "resnet101")),
    "Transformer 6-6": _transformer(6),
    "Transformer 36-36": _transformer(36),
    "FNO 1d": _function(lambda: FNO(1, (16,), 64, 0, 2), 256, 1),
    "FNO 3d": _function(lambda: FNO(10, (16, 16, 16), 64, 6, 4), 64, 64, 40, 10),
    "U-FNO": _function(UFNO, 96, 200, 24, 12),
    "UNO": _function(UNO, 64, 64, 10, 1),
    "ResNet34": _images(lambda: _pytorchcv("resnet", "resnet34")),
    "Transformer 2-2": _transformer(2),
    "GPT 5": _gpt2(5, 768, 12),
    "GPT 12": _gpt2(12, 768, 12),
}
NETWORKS = tuple(_NETWORKS)

BATCHES = {
    "GPT 24": 2, "GPT 96": 1, "UNet": 50, "MLP-Mixer": 100, "RegNet32": 23, "ResNet101": 64, "Transformer 6-6": 32,
    "Transformer 36-36": 7, "FNO 1d": 4400, "FNO 3d": 5, "U-FNO": 3, "UNO": 56, "ResNet34": 100, "Transformer 2-2": 64,
    "GPT 5": 4, "GPT 12": 4,
}  # fmt: skip
"""Examples in a step: those of the authors' repository, but for GPT-2, the Transformer of 36 layers and UNO (2 there), which
are such that activations take about what Table 4's budget and share imply, and for the networks of Table 3 beside."""


def capture(name: str, batch: int) -> ComputationGraph:
    """The training step of one of `NETWORKS`, with the times that a P100 needs at least, and gradients held all through.

    Raises:
        KeyError: for another name.
        CaptureError: when the step is not one graph.
    """
    build = _NETWORKS[name]
    with warnings.catch_warnings():  # nn.Transformer's, of what it will not do for inference
        warnings.simplefilter("ignore", UserWarning)
        found = captured_graph(
            lambda: build(batch),
            cost_model="roofline:P100",
            real=False,
            name=f"{name}, batch {batch}",
            old_gradients=False,
        )
    if found.notes:
        raise CaptureError(f"{name} is more than one graph: {'; '.join(found.notes)}")
    return gradients_resident(found.graph)


def gradients_resident(graph: ComputationGraph) -> ComputationGraph:
    """The graph with the memory of what the backward hands out held all through, outside of what a schedule decides.

    The paper's budget is for activations: parameters and their gradients are beside it.
    """
    own = {graph.tensors[t].storage for t in graph.backward_outputs} - graph.input_storages
    held = sum(graph.storages[s] for s in own)
    storages = tuple(0 if s in own else size for s, size in enumerate(graph.storages))

    def without_gradients(op: Op) -> Op:  # no op runs in place between what is held outside and what is not
        may = tuple(t for t in op.overwritable if graph.tensors[t].storage not in own)
        result = graph.tensors[op.outputs[0]].storage if may else None
        return dataclasses.replace(op, overwritable=() if result in own else may)

    ops = tuple(without_gradients(op) if op.overwritable else op for op in graph.ops)
    return dataclasses.replace(graph, ops=ops, storages=storages, resident_bytes=graph.resident_bytes + held)

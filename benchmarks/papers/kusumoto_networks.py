"""The seven networks of Kusumoto et al. 2019 (section 5) at the level of layers, and the joint graph of a training step.

A layer is a node of their graph: one tensor, with the layer's parameters left out. Networks are traced without memory, on the
meta device, for one image; sizes grow with the batch. What a layer's backward reads is what Chainer, which the paper ran,
keeps for it: a convolution, a linear layer and a batch normalization read their input, a ReLU its output, a pooling and a
local response normalization both, and sums, concatenations, crops and resizings nothing.

VGG19, the ResNets and DenseNet161 are pytorchcv's. U-Net (without padding, 572 to 388 pixels), GoogLeNet (with both
auxiliary losses) and PSPNet (ResNet101, with its auxiliary loss, 713 pixels) are written here: pytorchcv's U-Net pads, it
has no GoogLeNet, and its PSPNet takes no 713 pixels.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional

from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole

CONVOLUTION_COST, OTHER_COST = 10, 1
"""T_v of section 3: of a convolution, and of everything else."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One node of the forward graph.

    Attributes:
        name: of the node.
        kind: see `_KINDS`.
        inputs: indices of the layers that it reads; -1 is the network's input.
        nbytes: of its result, for one image.
        kept_bytes: of what it keeps beside for its backward (a mask, probabilities, scales), for one image.
        parameter_bytes: of its parameters.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    nbytes: int
    kept_bytes: int = 0
    parameter_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Network:
    """A traced network.

    Attributes:
        name: of the network.
        batch: the paper's batch size (Table 1).
        layers: in the order in which they run; the last gives the loss.
        input_bytes: of one image and its label.
    """

    name: str
    batch: int
    layers: tuple[Layer, ...]
    input_bytes: int

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    def joint_graph(self, batch: int, lean: bool = False) -> ComputationGraph:
        """A training step with ``batch`` images, in units of time of the paper; gradients of parameters are held to the end.

        A backward op costs what its layer costs, and twice that where it gives two gradients (the paper counts no backward).

        Args:
            batch: number of images.
            lean: whether a backward op reads what it needs only, and what a layer keeps beside its result can be given up.
                Otherwise it is as the paper's schedules ran: a backward op reads all inputs of its layer, such things stay, as
                does what a local response normalization computed, and a crop is a view of the whole.
        """
        tensors: list[Tensor] = []
        storages: list[int] = []
        ops: list[Op] = []

        def tensor(name: str, nbytes: int, role: TensorRole = TensorRole.INTERMEDIATE) -> int:
            storages.append(nbytes)
            tensors.append(Tensor(name, len(storages) - 1, role=role))
            return len(tensors) - 1

        held = [
            tensor("images", batch * self.input_bytes, TensorRole.BATCH),
            tensor("parameters", self.parameter_bytes, TensorRole.PARAMETER),
        ]
        results: list[int] = []
        kept: list[list[int]] = []
        for layer in self.layers:
            reads = tuple(dict.fromkeys(held[0] if i < 0 else results[i] for i in layer.inputs))
            if layer.kind == "crop" and not lean:
                results.append(reads[0])
                kept.append([])
                continue
            results.append(tensor(layer.name, batch * layer.nbytes if lean or layer.kind != "response" else 0))
            kept.append([tensor(f"{layer.name}.kept", batch * layer.kept_bytes)] if lean and layer.kept_bytes else [])
            cost = CONVOLUTION_COST if layer.kind == "convolution" else OTHER_COST
            ops.append(Op(layer.name, layer.kind, reads, (results[-1], *kept[-1]), Phase.FORWARD, seconds=cost))

        # A gradient may lie on another's memory: sums hand it on, and concatenations hand on parts of it.
        gradients: dict[int, int] = {}
        outputs: list[int] = []
        for index in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[index]
            given = [gradients[index]] if index in gradients else []
            sources = [i for i in layer.inputs if i >= 0]
            found: dict[int, int] = {}
            inputs = [held[0] if i < 0 else results[i] for i in layer.inputs]
            if layer.kind in ("sum", "concatenation") and given:
                passed = given[0]
                if not lean:  # it computes nothing, and its result is the gradient that it is given
                    passed = tensor(f"{layer.name}.passed", storages[given[0]])
                    reads, name = tuple(dict.fromkeys([*given, *inputs])), f"{layer.name}.backward"
                    ops.append(Op(name, layer.kind, reads, (passed,), Phase.BACKWARD, overwritable=(given[0],)))
                found = dict.fromkeys(sources, passed)
            else:
                saved = inputs if "in" in _READS[layer.kind] or not (lean or layer.kind == "relu") else []
                saved = saved + [results[index]] * ("out" in _READS[layer.kind])
                found = {
                    i: tensor(f"{layer.name}.to_{i}", batch * self.layers[i].nbytes) for i in dict.fromkeys(sources)
                }
                weights = [tensor(f"{layer.name}.parameters", layer.parameter_bytes)] if layer.parameter_bytes else []
                outputs += weights
                cost = CONVOLUTION_COST if layer.kind == "convolution" else OTHER_COST
                parts = (bool(found) + bool(weights)) if layer.kind in ("convolution", "linear") else 1
                reads = tuple(dict.fromkeys([*given, *saved, *kept[index]]))
                writes = (*found.values(), *weights)
                ops.append(
                    Op(f"{layer.name}.backward", layer.kind, reads, writes, Phase.BACKWARD, seconds=cost * parts)
                )
            for i, gradient in found.items():
                if i in gradients:
                    both = (gradients[i], gradient)
                    gradient = tensor(f"{layer.name}.sum_{i}", batch * self.layers[i].nbytes)
                    name = f"{layer.name}.accumulate_{i}"
                    ops.append(Op(name, "accumulate", both, (gradient,), Phase.BACKWARD, seconds=OTHER_COST))
                gradients[i] = gradient
        stays = batch * sum(layer.nbytes for layer in self.layers if layer.kind == "response")
        return ComputationGraph(
            tuple(ops),
            tuple(tensors),
            tuple(storages),
            inputs=tuple(held),
            forward_outputs=(results[-1],),
            backward_outputs=tuple(outputs),
            resident_bytes=0 if lean else batch * sum(layer.kept_bytes for layer in self.layers) + stays,
            name=f"{self.name}, batch {batch}",
        )


_READS = {
    "convolution": ("in",),
    "linear": ("in",),
    "normalization": ("in",),
    "relu": ("out",),
    "pooling": ("in", "out"),
    "response": ("in", "out"),
    "dropout": (),
    "loss": (),
    "sum": (),
    "concatenation": (),
    "scale": (),
    "crop": (),
    "resize": (),
}
"""What the backward of each kind of layer reads: its first input, its result."""

_MODULES: dict[type[nn.Module], str] = {
    nn.Conv2d: "convolution",
    nn.ConvTranspose2d: "convolution",
    nn.Linear: "linear",
    nn.BatchNorm2d: "normalization",
    nn.ReLU: "relu",
    nn.MaxPool2d: "pooling",
    nn.AvgPool2d: "pooling",
    nn.AdaptiveAvgPool2d: "pooling",
    nn.LocalResponseNorm: "response",
    nn.Dropout: "dropout",
    nn.Flatten: "reshape",
}
_FUNCTIONS: dict[Any, str] = {
    torch.cat: "concatenation",
    operator.add: "sum",
    operator.iadd: "sum",
    operator.mul: "scale",
    operator.getitem: "crop",
    functional.interpolate: "resize",
    functional.cross_entropy: "loss",
    "view": "reshape",
}


def trace(name: str, module: nn.Module, images: Iterable[int], labels: Iterable[int], batch: int) -> Network:
    """The layers of ``module``, which is called with images and labels and returns the loss.

    Args:
        name: of the network.
        module: on the meta device.
        images: the shape of one image.
        labels: the shape of one label.
        batch: the paper's batch size.
    """
    traced = torch.fx.symbolic_trace(
        module.eval()
    )  # batch normalization of one pixel of one image would refuse to train
    shapes = torch.empty(1, *images, device="meta"), torch.empty(1, *labels, dtype=torch.int64, device="meta")
    ShapeProp(traced).propagate(*shapes)
    modules = dict(traced.named_modules())
    at: dict[torch.fx.Node, int] = {}
    layers: list[Layer] = []
    for node in traced.graph.nodes:
        shape = getattr(node.meta.get("tensor_meta"), "shape", None)
        if node.op == "placeholder":
            at[node] = -1
        if node.op in ("placeholder", "output") or shape is None:
            continue
        sources = [at[source] for source in node.all_input_nodes if source in at]
        part = modules[node.target] if node.op == "call_module" else None
        kind = _FUNCTIONS[node.target] if part is None else _MODULES[type(part)]
        if kind == "reshape":  # no memory of its own
            at[node] = sources[0]
            continue
        if kind == "loss":
            sources = sources[:1]
        parameters = sum(p.numel() for p in part.parameters()) if part is not None else 0
        nbytes = 4 * shape.numel()
        keeps_as_much = isinstance(part, (nn.Dropout, nn.LocalResponseNorm))  # a mask of its type, the scales
        beside = nbytes if keeps_as_much else layers[sources[0]].nbytes if kind == "loss" else 0
        at[node] = len(layers)
        layers.append(Layer(node.name, kind, tuple(sources), nbytes, beside, 4 * parameters))
    return Network(name, batch, tuple(layers), 4 * (shapes[0].numel() + shapes[1].numel()))


class Classifier(nn.Module):
    """A network with the cross entropy of its output."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.network(images), labels)


# -- what pytorchcv does not have ------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """U-Net of Ronneberger et al. 2015, Figure 1: no padding, 572 pixels in, 388 out, two dropouts at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.down = nn.ModuleList(
            self._twice(before, width) for before, width in zip((1, *widths), widths, strict=False)
        )
        # The last deconvolution does not halve the width, as in the model that the paper ran.
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(2 * width, max(width, 128), 2, stride=2), nn.ReLU())
            for width in reversed(widths[:-1])
        )
        self.after = nn.ModuleList(self._twice(width + max(width, 128), width) for width in reversed(widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.ModuleList(nn.Dropout() for _ in range(2))
        self.score = nn.Conv2d(64, 2, 1)

    @staticmethod
    def _twice(before: int, width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for depth, block in enumerate(self.down):
            x = block(self.pool(x) if depth else x)
            if depth >= 3:
                x = self.dropout[depth - 3](x)
            skips.append(x)
        for up, after, skip, cut in zip(self.up, self.after, reversed(skips[:-1]), (4, 16, 40, 88), strict=True):
            x = after(torch.cat([skip[:, :, cut:-cut, cut:-cut], up(x)], 1))
        return self.score(x)  # type: ignore[no-any-return]


class Inception(nn.Module):
    """The module of GoogLeNet, with one ReLU after the concatenation."""

    def __init__(self, before: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, one, 1)
        self.three = nn.Sequential(nn.Conv2d(before, three[0], 1), nn.ReLU(), nn.Conv2d(*three, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(before, five[0], 1), nn.ReLU(), nn.Conv2d(*five, 5, padding=2))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(before, pooled, 1))
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1))  # type: ignore[no-any-return]


class GoogLeNet(nn.Module):
    """GoogLeNet of Szegedy et al. 2015, Table 1, with its two auxiliary classifiers. Returns the sum of the three losses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.LocalResponseNorm(5),
            nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), nn.LocalResponseNorm(5),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(192, 64, (96, 128), (16, 32), 32), Inception(256, 128, (128, 192), (32, 96), 64),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(480, 192, (96, 208), (16, 48), 64),
        )  # fmt: skip
        self.middle = nn.Sequential(
            Inception(512, 160, (112, 224), (24, 64), 64),
            Inception(512, 128, (128, 256), (24, 64), 64),
            Inception(512, 112, (144, 288), (32, 64), 64),
        )
        self.end = nn.Sequential(
            Inception(528, 256, (160, 320), (32, 128), 128),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(832, 256, (160, 320), (32, 128), 128),
            Inception(832, 384, (192, 384), (48, 128), 128),
            nn.AvgPool2d(7), nn.Dropout(0.4), nn.Flatten(), nn.Linear(1024, 1000),
        )  # fmt: skip
        self.first, self.second = self._auxiliary(512), self._auxiliary(528)

    @staticmethod
    def _auxiliary(before: int) -> nn.Sequential:
        head = nn.AvgPool2d(5, 3), nn.Conv2d(before, 128, 1), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*head, nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1000))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        first = functional.cross_entropy(self.first(x), labels)
        x = self.middle(x)
        second = functional.cross_entropy(self.second(x), labels)
        return first + second + functional.cross_entropy(self.end(x), labels)


def _conv(before: int, width: int, size: int, stride: int = 1, dilation: int = 1, relu: bool = True) -> nn.Sequential:
    convolution = nn.Conv2d(before, width, size, stride, dilation * (size // 2), dilation, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), *([nn.ReLU()] if relu else []))


class Bottleneck(nn.Module):
    """The block of ResNet50 and deeper, dilated."""

    def __init__(self, before: int, middle: int, stride: int, dilation: int) -> None:
        super().__init__()
        after = 4 * middle
        self.body = nn.Sequential(
            _conv(before, middle, 1), _conv(middle, middle, 3, stride, dilation), _conv(middle, after, 1, relu=False)
        )
        self.beside = _conv(before, after, 1, stride, relu=False) if before != after else None
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.body(x) + (x if self.beside is None else self.beside(x)))  # type: ignore[no-any-return]


class PSPNet(nn.Module):
    """PSPNet of Zhao et al. 2017 over a dilated ResNet101 with three convolutions at its start; main + 0.4 auxiliary loss."""

    def __init__(self, classes: int = 17) -> None:
        super().__init__()
        width = 128
        stages: list[nn.Module] = []
        for middle, blocks, stride, dilation in ((64, 3, 1, 1), (128, 4, 2, 1), (256, 23, 1, 2), (512, 3, 1, 4)):
            for block in range(blocks):
                stages.append(Bottleneck(width, middle, stride if block == 0 else 1, dilation))
                width = 4 * middle
        stem = _conv(3, 64, 3, 2), _conv(64, 64, 3), _conv(64, 128, 3), nn.MaxPool2d(3, 2, 1)
        self.body = nn.Sequential(*stem, *stages[:30])
        self.last = nn.Sequential(*stages[30:])
        self.pyramid = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(90 // bins), _conv(2048, 512, 1)) for bins in (6, 3, 2, 1)
        )
        self.head = nn.Sequential(_conv(4096, 512, 3), nn.Dropout(0.1), nn.Conv2d(512, classes, 1))
        self.auxiliary = nn.Sequential(_conv(1024, 512, 3), nn.Dropout(0.1), nn.Conv2d(512, classes, 3, padding=1))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        early = self.body(images)
        auxiliary = functional.interpolate(self.auxiliary(early), size=(713, 713), mode="bilinear")
        x = self.last(early)
        levels = [functional.interpolate(level(x), size=(90, 90), mode="bilinear") for level in self.pyramid]
        x = functional.interpolate(self.head(torch.cat([x, *levels], 1)), size=(713, 713), mode="bilinear")
        return functional.cross_entropy(auxiliary, labels) * 0.4 + functional.cross_entropy(x, labels)


def _pytorchcv(module: str, name: str) -> nn.Module:
    import importlib

    network: nn.Module = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)()
    return Classifier(network)


_Factory = tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], int]
_NETWORKS: Mapping[str, _Factory] = {
    "PSPNet": (PSPNet, (3, 713, 713), (713, 713), 2),
    "U-Net": (lambda: Classifier(UNet()), (1, 572, 572), (388, 388), 8),
    "ResNet50": (lambda: _pytorchcv("resnet", "resnet50"), (3, 224, 224), (), 96),
    "ResNet152": (lambda: _pytorchcv("resnet", "resnet152"), (3, 224, 224), (), 48),
    "VGG19": (lambda: _pytorchcv("vgg", "vgg19"), (3, 224, 224), (), 64),
    "DenseNet161": (lambda: _pytorchcv("densenet", "densenet161"), (3, 224, 224), (), 32),
    "GoogLeNet": (GoogLeNet, (3, 224, 224), (), 256),
}
NETWORKS = tuple(_NETWORKS)


def build(name: str) -> Network:
    """One of `NETWORKS`, traced: the factory runs on the meta device, where tensors have no memory."""
    factory, images, labels, batch = _NETWORKS[name]
    with torch.device("meta"):
        module = factory()
    return trace(name, module, images, labels, batch)

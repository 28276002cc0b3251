"""The networks of Checkmate's section 6, captured as joint graphs of forward and backward without their memory.

MobileNet, the VGGs, ResNet50 and SegNet are pytorchcv's. U-Net (Ronneberger et al. 2015, Figure 1, padded so that 416 x 608
pixels go in and come out, no batch normalization) and FCN8 (Long et al. 2015, over VGG16) are written here: pytorchcv's U-Net
is a different one, normalized and resized bilinearly, and its FCN stands on a dilated ResNet.

Checkmate schedules layers, of which a network has some dozens. `layers` makes such a graph of a captured one, which has several
ops a layer.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from benchmarks.papers.kusumoto_networks import Classifier
from lightning_remat.cli._capture import Step, captured_graph
from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.solvers import Problem
from lightning_remat.solvers.common._coarsen import contract
from lightning_remat.solvers.common._problem import PlainProblem

IMAGE, SCENE = (224, 224), (416, 608)
"""Pixels of the classification and of the segmentation networks (section 6.4)."""

CLASSES = 21
"""Of a pixel; the paper does not say."""


def _twice(before: int, width: int) -> nn.Sequential:
    first, second = nn.Conv2d(before, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))


class UNet(nn.Module):
    """U-Net of Ronneberger et al. 2015, Figure 1, with padding: five levels, two convolutions each, deconvolutions."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.down = nn.ModuleList(_twice(*pair) for pair in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1]))
        self.after = nn.ModuleList(_twice(2 * width, width) for width in reversed(widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.score = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for depth, block in enumerate(self.down):
            x = block(self.pool(x) if depth else x)
            skips.append(x)
        for up, after, skip in zip(self.up, self.after, reversed(skips[:-1]), strict=True):
            x = after(torch.cat([skip, up(x)], 1))
        return self.score(x)  # type: ignore[no-any-return]


class FCN8(nn.Module):
    """FCN-8s of Long et al. 2015: VGG16 with convolutions for its linear layers, and scores of three depths added."""

    def __init__(self) -> None:
        super().__init__()
        plan = ((3, 64, 2), (64, 128, 2), (128, 256, 3), (256, 512, 3), (512, 512, 3))
        self.blocks = nn.ModuleList(self._block(*block) for block in plan)
        self.head = nn.Sequential(
            nn.Conv2d(512, 4096, 7, padding=3), nn.ReLU(inplace=True), nn.Dropout2d(),
            nn.Conv2d(4096, 4096, 1), nn.ReLU(inplace=True), nn.Dropout2d(), nn.Conv2d(4096, CLASSES, 1),
        )  # fmt: skip
        self.scores = nn.ModuleList([nn.Conv2d(256, CLASSES, 1), nn.Conv2d(512, CLASSES, 1)])
        self.up = nn.ModuleList(nn.ConvTranspose2d(CLASSES, CLASSES, 4, 2, 1, bias=False) for _ in range(2))
        self.last = nn.ConvTranspose2d(CLASSES, CLASSES, 16, 8, 4, bias=False)

    @staticmethod
    def _block(before: int, width: int, convolutions: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for index in range(convolutions):
            layers += [nn.Conv2d(width if index else before, width, 3, padding=1), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.MaxPool2d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pools: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x)
            pools.append(x)
        x = self.up[0](self.head(x)) + self.scores[1](pools[3])
        x = self.up[1](x) + self.scores[0](pools[2])
        return self.last(x)  # type: ignore[no-any-return]


def _pytorchcv(module: str, name: str, **options: object) -> nn.Module:
    network: nn.Module = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)(**options)
    return network


_NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "MobileNet": (lambda: _pytorchcv("mobilenet", "mobilenet_w1"), IMAGE),
    "VGG16": (lambda: _pytorchcv("vgg", "vgg16"), IMAGE),
    "VGG19": (lambda: _pytorchcv("vgg", "vgg19"), IMAGE),
    "U-Net": (UNet, SCENE),
    "ResNet50": (lambda: _pytorchcv("resnet", "resnet50"), IMAGE),
    "FCN8": (FCN8, SCENE),
    "SegNet": (lambda: _pytorchcv("segnet", "segnet_cityscapes", in_size=SCENE, num_classes=CLASSES), SCENE),
}
NETWORKS = tuple(_NETWORKS)


def capture(name: str, batch: int) -> ComputationGraph:
    """The training step of one of `NETWORKS` with ``batch`` images: costs are FLOPs, no gradients of a step before.

    Raises:
        KeyError: for another name.
    """
    build, pixels = _NETWORKS[name]

    def make() -> Step:
        labels = torch.zeros(batch, *(pixels if pixels == SCENE else ()), dtype=torch.int64)
        return Classifier(build()), (torch.empty(batch, 3, *pixels), labels), {}

    title = f"{name}, batch {batch}"
    return captured_graph(make, cost_model="flops", real=False, name=title, old_gradients=False).graph


# -- from ops to layers ------------------------------------------------------------------------------------------------------

KERNELS = ("convolution", "mm", "pool", "gather", "cat", "softmax")
"""Parts of the names of ops that make a layer: what is cheaper (normalization, ReLU, dropout, sums) belongs to one of them."""

COUNTER = 8
"""Bytes of what counts the batches of a normalization. It may be advanced once only; its layer may run again."""


def layers(graph: ComputationGraph) -> ComputationGraph:
    """A captured graph with each kernel and the cheap ops beside it contracted to one op, forward and backward apart.

    In the forward the cheap ops after a kernel belong to it, in the backward those before it. A layer's tensors stay apart
    (what a convolution and its normalization hand to the backward can be kept one without the other); its workspace is what it
    holds beside its inputs and outputs at its own peak. ReLU and the like run in place inside a layer.
    """
    problem = Problem(graph)
    runs = _runs(problem)
    coarse = contract(_in_place(problem, runs), runs)
    phases = [Phase.BACKWARD if backward else Phase.FORWARD for backward in coarse.is_backward]
    ops = tuple(
        Op(
            f"layer_{node}",
            next((graph.ops[problem.ops[i]].target for i in run if _is_kernel(problem, i)), "layer"),
            coarse.reads[node],
            coarse.writes[node],
            phases[node],
            coarse.seconds[node],
            coarse.workspace[node],
            coarse.random[node],
            coarse.recomputable[node],
            module=problem.module(run.start),
        )
        for node, run in enumerate(runs)
    )
    roles = [TensorRole.TANGENT if made < 0 else TensorRole.INTERMEDIATE for made in coarse.producer]
    return ComputationGraph(
        ops,
        tuple(Tensor(f"value_{v}", v, role=role) for v, role in enumerate(roles)),
        tuple(coarse.nbytes),
        inputs=tuple(coarse.tangents),
        forward_outputs=coarse.forward_outputs,
        forward_transient=coarse.forward_transient,
        backward_outputs=coarse.finals,
        resident_bytes=coarse.base_bytes,
        forward_resident_bytes=coarse.forward_extra_bytes,
        name=f"{graph.name}, layers",
    )


def _is_kernel(problem: Problem, node: int) -> bool:
    return any(part in problem.graph.ops[problem.ops[node]].target for part in KERNELS)


def _runs(problem: Problem) -> tuple[range, ...]:
    """Nodes of each layer: a run begins at a kernel of another module, in the backward ends there."""

    def starts(nodes: Sequence[int]) -> list[int]:
        found: list[int] = []
        for node in nodes:
            if _is_kernel(problem, node) and not (found and problem.module(found[-1]) == problem.module(node) != ""):
                found.append(node)
        return found

    boundary, count = problem.boundary, len(problem)
    forward = [0, *starts(range(boundary))[1:]]
    backward = [boundary, *sorted(node + 1 for node in starts(range(count - 1, boundary - 1, -1))[1:])]
    cuts = [*forward, *backward]
    return tuple(range(start, end) for start, end in zip(cuts, [*cuts[1:], count], strict=True))


def _in_place(problem: Problem, runs: Sequence[range]) -> PlainProblem:
    """The problem with each value that only its overwriter reads, and the result that takes its memory, as one value.

    Where the value comes from another layer, this holds as long as nothing beyond the overwriter's own layer has the result.
    """
    layer = [index for index, run in enumerate(runs) for _ in run]
    handed_out = {*problem.forward_outputs, *problem.forward_transient, *problem.finals}
    becomes: dict[int, int] = {}

    def final(v: int) -> int:
        while v in becomes:
            v = becomes[v]
        return v

    for node in range(len(problem) - 1, -1, -1):  # backwards: what becomes of the result is known
        for v in problem.overwrites[node]:
            made, alone = problem.producer[v], problem.consumers[v] == [node] and v not in handed_out
            if (
                not alone
                or made < 0
                or problem.is_backward[made] != problem.is_backward[node]
                or len(problem.writes[node]) != 1
            ):
                continue
            last = final(problem.writes[node][0])
            stays = last not in handed_out and all(layer[reader] == layer[node] for reader in problem.consumers[last])
            if problem.nbytes[v] == problem.nbytes[last] and (layer[made] == layer[node] or stays):
                becomes[v] = problem.writes[node][0]
                break
    plain = {field.name: getattr(problem, field.name) for field in dataclasses.fields(PlainProblem)}
    plain["overwrites"] = []
    plain["producer"] = list(problem.producer)
    for v in becomes.keys() - set(becomes.values()):  # the first of each chain
        plain["producer"][final(v)] = problem.producer[v]
    plain["reads"] = [tuple(dict.fromkeys(map(final, values))) for values in problem.reads]
    taken = set(becomes.values())
    plain["writes"] = [tuple(final(v) for v in values if v not in taken) for values in problem.writes]
    plain["recomputable"] = [
        may or all(problem.nbytes[v] <= COUNTER for v in values)
        for may, values in zip(problem.recomputable, problem.writes, strict=True)
    ]
    return PlainProblem(**plain)

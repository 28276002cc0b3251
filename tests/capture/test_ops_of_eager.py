"""A captured step runs the operations that eager runs; docs/exactness.md has a row for each that goes by another name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import networks
from lightning_remat import rematerialize
from tests.helpers.places import ROOT

TABLE = ROOT / "docs" / "exactness.md"
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
LARGE = {
    "densenet121",
    "gpt2-nodropout",
    "mobilenet",
    "resnet18",
    "resnet50",
    "swin",
    "transformer-6+6",
}  # of the others' ops
NETWORKS = [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in networks.networks()]


@dataclasses.dataclass(frozen=True)
class Row:
    """One difference that is explained: what eager runs, and what is captured instead (nothing: it is not captured)."""

    on: str
    eager: frozenset[str]
    captured: frozenset[str]


def rows(device: str) -> list[Row]:
    """The table in the docs, for one type of device."""
    found = []
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and "`" in cells[1]:
            names = [frozenset(re.findall(r"`([^`]+)`", cell)) for cell in cells[1:3]]
            found.append(Row(cells[0], *names))
    return [row for row in found if row.on in ("all", device.upper())]


def unexplained(eager: set[str], captured: set[str], device: str) -> tuple[list[str], list[str]]:
    """Ops that only eager runs, and ops that are only captured, without a reason in the table."""
    table = rows(device)
    functional_names = {re.sub(r"_(\.\w+)$", r"\1", name) for name in eager if re.search(r"[a-z0-9]_\.\w+$", name)}
    of_eager = [
        name
        for name in eager - captured
        if re.sub(r"_(\.\w+)$", r"\1", name) not in captured
        and not any(name in row.eager and (not row.captured or row.captured & captured) for row in table)
    ]
    of_capture = [
        name
        for name in captured - eager - functional_names
        if not any(name in row.captured and row.eager & eager for row in table)
    ]
    return sorted(of_eager), sorted(of_capture)


class Names(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def eager_ops(step: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> set[str]:
    with Names() as names:
        step(*batch).backward()
    return names.found


def captured_ops(step: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> set[str]:
    planned = rematerialize(step, budget=1.0, solver="no_remat", cost_model="unit")
    planned(*batch).backward()
    assert planned.plans and not planned.failures
    return {op.target for plan in planned.plans for op in plan.graph.ops}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_networks_of_the_benchmarks(name: str, device: str) -> None:
    workload = networks.build(name, "tiny", device)
    eager = eager_ops(workload.module, workload.batch)
    workload.module.zero_grad()
    assert unexplained(eager, captured_ops(workload.module, workload.batch), device) == ([], [])


class OddParts(nn.Module):
    """What the benchmarks' networks have nothing of: parts that torch's tracing may take apart, or gives other names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.evaluated, self.untracked = nn.BatchNorm2d(8).eval(), nn.BatchNorm2d(8, track_running_stats=False)
        self.instance, self.group = nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8)
        self.plain, self.in_half = nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8)
        self.prelu, self.linear = nn.PReLU(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.instance(self.untracked(self.evaluated(self.stem(x))))
        x = functional.interpolate(x, scale_factor=2, mode="bilinear")
        x = functional.interpolate(x, size=(9, 11), mode="bicubic", align_corners=True)
        x = functional.dropout2d(functional.silu(self.group(x)), 0.2)
        x = self.prelu(self.plain(x)) + self.in_half(x.bfloat16()).float()
        x = functional.adaptive_avg_pool2d(x, 4)
        y = functional.hardswish(x) * 1
        y[:, 2:4] = functional.softplus(x[:, :2])
        y[:, 0] += torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        z = functional.layer_norm(self.linear(y.flatten(2).mT), (8,))
        z = z * (1 + z / 8).prod(1, keepdim=True) * (1 + z / 1024).prod()
        mask = torch.ones(16, 16, dtype=torch.bool, device=x.device).tril()
        z = functional.scaled_dot_product_attention(z[:, None], z[:, None], z[:, None], attn_mask=mask)[:, 0]
        z = torch.addcdiv(z, z, z.square() + 1, value=0.3) + functional.normalize(functional.gelu(z), dim=-1)
        return (
            functional.cross_entropy(z.mean(1), labels, label_smoothing=0.1) + z.std() + torch.lerp(z, z * 2, 0.3).var()
        )


@pytest.mark.parametrize("device", DEVICES)
def test_odd_parts(device: str) -> None:
    torch.manual_seed(0)
    net = OddParts().to(device)
    batch = torch.randn(2, 3, 8, 8, device=device), torch.tensor([1, 5], device=device)
    eager = eager_ops(net, batch)
    net.zero_grad()
    captured = captured_ops(net, batch)
    assert unexplained(eager, captured, device) == ([], [])
    whole = {"aten.upsample_bilinear2d.vec", "aten.upsample_bicubic2d.vec", "aten.upsample_bilinear2d.default"}
    assert whole & captured and whole & captured == whole & eager


def test_a_difference_without_a_row_is_found() -> None:
    """Both ways, and for a row whose other side is missing."""
    assert unexplained({"aten.relu_.default"}, {"aten.relu.default"}, "cpu") == ([], [])
    assert unexplained({"aten.gelu.default"}, {"aten.erf.default"}, "cpu") == (
        ["aten.gelu.default"],
        ["aten.erf.default"],
    )
    softmax = {"aten._safe_softmax.default"}, {"aten._softmax.default"}
    assert unexplained(*softmax, "cpu") == ([], [])
    assert unexplained(softmax[0], set(), "cpu") == (["aten._safe_softmax.default"], [])
    assert unexplained(set(), softmax[1], "cpu") == ([], ["aten._softmax.default"])
    assert unexplained(*softmax, "cuda") == ([], [])
    native = {"aten._native_batch_norm_legit_functional.default"}
    assert unexplained({"aten.cudnn_batch_norm.default"}, native, "cuda") == (
        ["aten.cudnn_batch_norm.default"],
        sorted(native),
    )

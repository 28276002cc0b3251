"""Convolutions on tensors with channels last, where bits may differ: numbers but for rounding and layouts are as before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import rematerialize
from lightning_remat.capture import _channels_last
from lightning_remat.capture._channels_last import ChannelsLast

Tensor = torch.Tensor


class Images(nn.Module):
    """Convolutions, batch norm, a transposed convolution; ``flattened`` how the features are made a vector."""

    def __init__(self, flattened: Any = lambda x: x.flatten(1)) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, bias=False)
        self.third, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Linear(4 * 64, 5)
        self.flattened = flattened

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = functional.relu(self.norm(self.first(x)))
        x = self.third(functional.gelu(self.second(x)))
        return functional.cross_entropy(self.last(self.flattened(x)), torch.arange(len(x)) % 5), x


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Channels last are taken to be faster; how many convolutions of each graph were asked for."""
    asked: list[int] = []

    def always(convolutions: list[Any]) -> bool:
        asked.append(len(convolutions))
        return bool(convolutions)

    monkeypatch.setattr(_channels_last, "_faster", always)
    return asked


def trained(module: nn.Module, step: Any) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    loss, features = step(torch.randn(4, 3, 8, 8))
    loss.backward()
    found = [loss.detach(), features.detach(), *(p.grad for p in module.parameters()), *module.buffers()]
    return features, found


def modules(**kwargs: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    module = Images(**kwargs)
    return module, copy.deepcopy(module)


def test_numbers_are_the_same_but_for_rounding(faster: list[int]) -> None:
    module, other = modules()
    features, right = trained(module, module)
    step = rematerialize(other, budget=1.0, fuse="fast", time_limit=0.5)
    others, got = trained(other, step)
    assert step.runs == (1,) and not step.failures and faster == [3]
    assert all(torch.allclose(one, two, rtol=1e-3, atol=1e-5) for one, two in zip(right, got, strict=True))
    assert others.stride() == features.stride()
    assert all(p.grad.is_contiguous() for p in other.parameters() if p.grad is not None)


def test_the_graph_has_channels_last() -> None:
    found: list[Any] = []

    def compiled(graph: torch.fx.GraphModule, _: Any) -> Any:
        relaid = ChannelsLast(graph)
        text = graph.code
        relaid.take_back()
        found.append((relaid.convolutions, text.count("channels_last"), graph.code.count("channels_last")))
        return graph.forward

    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    torch.compile(Images(), backend=compiled)(torch.randn(4, 3, 8, 8))
    assert found == [(3, 6, 0)]  # the image and what the other two are given, and a weight each


@pytest.mark.parametrize("fuse", ["exact", "off"])
def test_where_bits_are_eagers_nothing_is_asked(fuse: str, faster: list[int]) -> None:
    module, other = modules()
    _, right = trained(module, module)
    _, got = trained(other, rematerialize(other, budget=1.0, fuse=fuse, time_limit=0.5))
    assert not faster and all(map(torch.equal, right, got))


def test_a_view_that_needs_the_layout_keeps_it(faster: list[int], caplog: pytest.LogCaptureFixture) -> None:
    module, other = modules(flattened=lambda x: x.view(len(x), -1))
    _, right = trained(module, module)
    step = rematerialize(other, budget=1.0, fuse="fast", time_limit=0.5)
    with caplog.at_level("INFO", logger="lightning_remat"):
        _, got = trained(other, step)
    assert step.runs == (1,) and not step.failures and faster == [3]
    assert "keeps its tensors' layouts" in caplog.text
    assert all(torch.allclose(one, two, rtol=1e-3, atol=1e-5) for one, two in zip(right, got, strict=True))


class WrittenBetween(nn.Module):
    """Two convolutions of one tensor, which is written to between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.sin()  # has channels first
        with torch.no_grad():  # else what is written over is needed in the backward
            y = self.second(x)
        x.mul_(3.0)
        return (y + self.first(self.third(x))).square().mean(), y


def test_each_convolution_reads_what_is_there(faster: list[int]) -> None:
    torch.manual_seed(1)
    module = WrittenBetween()
    other = copy.deepcopy(module)
    _, right = trained(module, module)
    step = rematerialize(other, budget=1.0, fuse="fast", time_limit=0.5)
    _, got = trained(other, step)
    assert step.runs == (1,) and not step.failures and faster == [3]
    known = zip(right, got, strict=True)
    assert all(one is two is None or torch.allclose(one, two, rtol=1e-3, atol=1e-5) for one, two in known)


def test_what_cannot_be_timed_keeps_its_layout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(_: Any) -> bool:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(_channels_last, "_faster", no_memory)
    module, other = modules()
    _, right = trained(module, module)
    step = rematerialize(other, budget=1.0, fuse="fast", time_limit=0.5)
    with caplog.at_level("INFO", logger="lightning_remat"):
        _, got = trained(other, step)
    assert step.runs == (1,) and not step.failures and "keeps its tensors' layouts: no memory" in caplog.text
    assert all(torch.allclose(one, two, rtol=1e-3, atol=1e-5) for one, two in zip(right, got, strict=True))


def test_nothing_is_there_to_lay_otherwise(faster: list[int]) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    step = rematerialize(module, budget=1.0, fuse="fast", time_limit=0.5)
    step(torch.randn(4, 8)).sum().backward()
    assert step.runs == (1,) and faster == [0]


def test_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    timed: list[Any] = []
    own = _channels_last._Shapes.seconds
    monkeypatch.setattr(
        _channels_last._Shapes, "seconds", lambda self, layout: timed.append((self.x, layout)) or own(self, layout)
    )
    monkeypatch.setattr(_channels_last, "_KNOWN", {})
    _, other = modules()
    step = rematerialize(other, budget=1.0, fuse="fast", time_limit=0.5)
    trained(other, step)
    assert step.runs == (1,) and len(timed) == 6
    assert {layout for _, layout in timed} == {torch.channels_last, torch.contiguous_format}

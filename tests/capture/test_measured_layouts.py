"""Steps are traced with the strides that results really have, where measuring finds others than torch says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_remat import rematerialize
from lightning_remat._recent import Recent
from lightning_remat.capture import TensorSpec, _measured_layouts
from lightning_remat.cost import CostCache, profile
from lightning_remat.exactness import check
from lightning_remat.runtime import _backend
from tests.helpers import training
from tests.helpers.op_calls import call, spec

aten = torch.ops.aten
CPU = torch.device("cpu")


@torch.library.custom_op("lightning_remat_tests::mix", mutates_args=())
def mix(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel that writes its second result column by column, and says otherwise."""
    return torch.cos(x), torch.sin(x).transpose(-1, -2).contiguous().transpose(-1, -2)


@mix.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


mix.register_autograd(
    lambda ctx, _first, second: second * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[0]),
)


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is known yet of how results lie; each trace of a graph is noted."""
    monkeypatch.setattr(_measured_layouts, "_found", Recent())
    monkeypatch.setattr(_measured_layouts, "_targets", set())
    found: list[int] = []
    captured: Any = _backend._Handed.captured

    def noted(handed: Any) -> Any:
        found.append(len(found))
        return captured(handed)

    monkeypatch.setattr(_backend._Handed, "captured", noted)
    return found


class Net(nn.Module):
    """Behind the op, something whose form goes by how its input lies."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.then, self.second = nn.Linear(32, 48), then, nn.Linear(48, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.then(mix(self.first(x))[1]).reshape(*x.shape[:-1], 48)).square().mean()


@pytest.mark.parametrize("then", [torch.tanh, lambda x: x.transpose(1, 2).reshape(-1, 48), lambda x: x.reshape(-1)])
def test_what_an_op_says_wrongly_of_its_results_is_found_by_measuring(
    then: Callable[[torch.Tensor], torch.Tensor], traces: list[int]
) -> None:
    net, x = Net(then), torch.randn(16, 33, 32)
    report = check(net, x, budget="min")
    assert report.equal, report.summary()
    assert len(traces) == 2
    assert check(net, x, budget=1.0).equal
    assert len(traces) == 3, "it is known by now"


def test_it_trains_with_eagers_bits_and_is_planned(traces: list[int]) -> None:
    class Module(training.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = Net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x = batch[0].repeat(1, 2)[:, None].expand(-1, 5, -1)
            return super().training_step(batch, batch_idx) + self.mixed(x)

    training.compare(Module, remat=training.callback("min", cost_model="profile"))
    assert len(traces) == 4, "each of two batch sizes twice"


def test_batches_that_vary_are_captured_one_by_one(traces: list[int]) -> None:
    torch.manual_seed(0)
    net = Net()
    step = rematerialize(net, "min")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (16, 24, 9, 16):
            x = torch.randn(size, 7, 32)
            ours = torch.autograd.grad(step(x), list(net.parameters()))
            training.assert_same(torch.autograd.grad(net(x), list(net.parameters())), ours)
    assert not step.failures
    assert sorted(step.runs) == [1, 1, 2]


def test_a_convolution_of_a_library_that_lays_its_results_out_otherwise(
    monkeypatch: pytest.MonkeyPatch, traces: list[int]
) -> None:
    """As where torch does not know which library the device has: results are said to be in order, which have channels last."""
    original: Any = FakeTensorMode._dispatch_impl

    def in_order(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = original(mode, func, types, args, kwargs)
        if func is not aten.convolution.default or not isinstance(result, FakeTensor):
            return result
        with mode:
            return torch.empty(result.shape, dtype=result.dtype, device=result.device)

    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", in_order)
    FakeTensorMode.cache_clear()
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(2),
        nn.Unflatten(2, (4, 4)),
        nn.BatchNorm2d(8),
        nn.SiLU(),
    )
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    try:
        report = check(net, x, budget="min", loss=lambda y: y.transpose(1, 3).reshape(4, -1).square().sum(0).mean())
    finally:
        FakeTensorMode.cache_clear()
    assert report.equal, report.summary()
    assert len(traces) >= 2


def test_the_strides_are_measured_and_kept(tmp_path: Any) -> None:
    x = spec(4, 6)
    lies = call(torch.ops.lightning_remat_tests.mix.default, x, outputs=(x, x))
    sums = call(aten.t_copy.default, x, outputs=(TensorSpec((6, 4), (1, 6), torch.float32, CPU),))
    right = call(aten.sin.default, x, outputs=(x,))
    ones = call(aten.sin.default, spec(4, 1, 6), outputs=(TensorSpec((4, 1, 6), (6, 5, 1), torch.float32, CPU),))
    cache = CostCache(tmp_path)
    costs = profile([lies, sums, right, ones], CPU, cache=cache)
    assert [cost.real_strides for cost in costs] == [((1, (1, 4)),), ((0, (4, 1)),), (), ()]
    assert cache.load(CPU)[sums.key].real_strides == ((0, (4, 1)),)


def test_what_is_known_is_not_learned_again() -> None:
    x = spec(4, 6)
    one, other = (call(aten.sin.default, x, outputs=(x,)), call(aten.sin.default, spec(5, 6), outputs=(spec(5, 6),)))
    assert not _measured_layouts.learn([one, None], [(), ()])
    assert _measured_layouts.learn([one, other], [[(0, (1, 4))], ()])
    assert not _measured_layouts.learn([one], [[(0, (1, 4))]])
    assert _measured_layouts.measured_strides(aten.sin.default, (torch.empty(4, 6),), {}) == {0: (1, 4)}
    assert not _measured_layouts.measured_strides(aten.sin.default, (torch.empty(5, 6),), {})
    assert not _measured_layouts.measured_strides(aten.cos.default, (torch.empty(4, 6),), {})


class Upsampled(nn.Module):
    """A group norm behind a convolution of what has channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2).unflatten(2, (6, 6))
        return self.last(
            torch.nn.functional.silu(self.norm(self.first(torch.nn.functional.interpolate(x, scale_factor=2))))
        )


class Patches(nn.Module):
    """A batch norm of the features of patches, and a linear layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2).relu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [Upsampled, Patches])
def test_a_device_is_asked_how_its_results_lie(make: Callable[[], nn.Module]) -> None:
    torch.use_deterministic_algorithms(True)
    report = check(make().to("cuda"), torch.randn(4, 36, 8, device="cuda"), budget="min")
    assert report.equal, report.summary()

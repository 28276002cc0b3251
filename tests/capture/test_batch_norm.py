"""cuDNN's batch norm is captured as eager runs it. On the CPU the native kernels stand in for cuDNN's two."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.fx
import torch.utils.checkpoint
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat import rematerialize
from lightning_remat.capture._checkpoints import refuse_other_second_evaluations
from lightning_remat.capture._torch import real_layouts, whole_ops
from lightning_remat.capture.rewritings._batch_norm import call_cudnn
from lightning_remat.errors import CaptureError

aten = torch.ops.aten
Maker = Callable[..., nn.Module]


class Calls:
    """What the stand-ins were called with, in order.

    Attributes:
        forward: the running mean's address; 0 without.
        backward: likewise, and the reserve space's values.
    """

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[tuple[int, list[int]]] = []


@pytest.fixture
def cudnn_on_the_cpu() -> Iterator[Calls]:
    """Kernels for the CPU under the names of cuDNN's, with the native bits; a reserve space that has to be handed on."""
    calls = Calls()

    def address(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    def forward(
        x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
    ) -> Any:
        calls.forward.append(address(mean))
        made = aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
        return *made, torch.arange(3, dtype=torch.uint8) if training else torch.empty(0, dtype=torch.uint8)

    def backward(
        x: Any, grad: Any, weight: Any, mean: Any, var: Any, save_mean: Any, save_var: Any, eps: float, reserve: Any
    ) -> Any:
        calls.backward.append((address(mean), reserve.tolist()))
        every = [True, True, True]
        grad = grad.contiguous(memory_format=torch.channels_last if _channels_last(x) else torch.contiguous_format)
        return aten.native_batch_norm_backward(grad, x, weight, None, None, save_mean, save_var, True, eps, every)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cudnn_batch_norm", forward, "CPU")
        library.impl("cudnn_batch_norm_backward", backward, "CPU")
        yield calls


class _Cudnn(nn.Module):
    """``nn.BatchNorm`` that calls cuDNN's op by name, as torch does on CUDA."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        training = self.training or mean is None
        x = x.contiguous(memory_format=torch.channels_last if _channels_last(x) else torch.contiguous_format)
        return torch.cudnn_batch_norm(x, self.weight, self.bias, mean, var, training, self.momentum, self.eps)[0]


def _channels_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


class Cudnn1d(_Cudnn, nn.BatchNorm1d):
    pass


class Cudnn2d(_Cudnn, nn.BatchNorm2d):
    pass


class Cudnn3d(_Cudnn, nn.BatchNorm3d):
    pass


NATIVE: dict[int, Maker] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CUDNN: dict[int, Maker] = {1: Cudnn1d, 2: Cudnn2d, 3: Cudnn3d}


class Net(nn.Module):
    """Batch norm first, where the input needs no gradient, then of all kinds: one is used twice, the last two are in
    evaluation mode and without running statistics."""

    def __init__(self, norms: dict[int, Maker], dims: int, width: int = 8) -> None:
        super().__init__()
        norm = norms[dims]
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.first, self.twice = norm(3), norm(width)
        self.stem = convolution(3, width, 3, padding=1)
        self.block = nn.Sequential(
            convolution(width, width, 3, padding=1), norm(width, momentum=0.3), nn.ReLU(inplace=True)
        )
        self.frozen, self.without = norm(width).eval(), norm(width, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.stem(self.first(x)))
        x = x + self.block(x)
        return self.without(self.frozen(torch.sin(self.twice(x)))).sigmoid().square().mean()


def outcome(module: nn.Module, step: Callable[..., torch.Tensor], *batch: torch.Tensor) -> dict[str, Any]:
    """Losses of three steps of SGD, and the gradients, parameters and buffers at their end."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    for number in range(3):
        loss = step(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[f"loss {number}"] = loss.detach()
    found.update({f"gradient of {name}": p.grad for name, p in module.named_parameters()})
    return {**found, **module.state_dict()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if not torch.equal(value, other[name])]


def made(norms: dict[int, Maker], dims: int, channels_last: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net, x = Net(norms, dims), torch.randn(8, 3, *([20] if dims == 1 else [10, 10] if dims == 2 else [4, 5, 6]))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return net.to(memory_format=layout), x.contiguous(memory_format=layout)


@pytest.mark.parametrize(
    ("dims", "channels_last", "budget"),
    [(2, False, 1.0), (1, False, "min"), (2, False, "min"), (2, True, "min"), (3, False, "min")],
)
def test_eagers_bits(cudnn_on_the_cpu: Calls, dims: int, channels_last: bool, budget: float | str) -> None:
    del cudnn_on_the_cpu
    net, x = made(
        CUDNN if channels_last else NATIVE, dims, channels_last
    )  # cuDNN's takes the gradient in its own layout
    expected = outcome(net, net, x)
    net, x = made(CUDNN, dims, channels_last)
    step = rematerialize(net, budget=budget, cost_model="unit", solver="greedy")
    assert_same(outcome(net, step, x), expected)
    assert step.plan is not None and not step.failures
    targets = [op.target for op in step.plan.graph.ops]
    assert targets.count("cudnn_batch_norm") == 4  # in training mode, with running statistics
    assert targets.count("aten.cudnn_batch_norm.default") == 2
    assert targets.count("aten.cudnn_batch_norm_backward.default") == 5
    assert not [target for target in targets if "with_update" in target]
    recomputed = {step.plan.graph.ops[op].target for op, n in step.plan.schedule.evaluations.items() if n > 1}
    assert ("cudnn_batch_norm" in recomputed) == (budget == "min")


def test_running_statistics_are_written_once_and_in_place(
    cudnn_on_the_cpu: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    net, x = made(CUDNN, 2)
    net.twice = nn.Identity()  # its first new statistics are read by its second use
    step = rematerialize(net, budget="min", solver="greedy")
    step(x).backward()
    assert "profiled" not in caplog.text  # nothing that could not be
    cudnn_on_the_cpu.forward.clear()
    cudnn_on_the_cpu.backward.clear()
    step(x).backward()
    norms = [module for module in net.modules() if isinstance(module, _Cudnn) and module.running_mean is not None]
    given = [address for address in cudnn_on_the_cpu.forward if address]
    assert sorted(given) == sorted(module.running_mean.data_ptr() for module in norms)  # `frozen` is among them
    assert len(cudnn_on_the_cpu.forward) > len(norms) + 1
    assert cudnn_on_the_cpu.backward == [(0, [0, 1, 2])] * 3


class ReadsStatistics(nn.Module):
    """The new statistics are read after they are written."""

    def __init__(self, norms: dict[int, Maker]) -> None:
        super().__init__()
        self.net, self.norm = Net(norms, 2), norms[2](3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.sin(x))
        scale = (self.norm.running_var + 1).sqrt()
        return self.net(x * scale[:, None, None]) + self.norm.running_mean.sum()


def test_statistics_that_the_step_reads(cudnn_on_the_cpu: Calls) -> None:
    del cudnn_on_the_cpu
    results = []
    for norms in (NATIVE, CUDNN):
        torch.manual_seed(0)
        net, x = ReadsStatistics(norms), torch.randn(4, 3, 12, 12)
        step = rematerialize(net, budget="min", cost_model="unit", solver="greedy") if norms is CUDNN else net
        results.append(outcome(net, step, x))
    assert_same(*results)


class Penalized(nn.Module):
    """The gradient of batch norm is differentiated again."""

    def __init__(self, norms: dict[int, Maker]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), norms[2](6), nn.Tanh(), nn.Conv2d(6, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        y = self.layers(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + gradient.square().sum()


def test_a_gradient_penalty(cudnn_on_the_cpu: Calls) -> None:
    del cudnn_on_the_cpu
    results = []
    for norms in (NATIVE, CUDNN):
        torch.manual_seed(0)
        net, x = Penalized(norms), torch.randn(4, 3, 8, 8)
        step = rematerialize(net, budget="min", cost_model="unit", solver="greedy") if norms is CUDNN else net
        results.append(outcome(net, step, x))
    assert_same(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_weights_in_single(cudnn_on_the_cpu: Calls, dtype: torch.dtype) -> None:
    """As under autocast: cuDNN takes float16, the stand-in both."""

    class Mixed(nn.Module):
        def __init__(self, norm: Maker) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.first(x).to(dtype)).relu()
            return self.last(y.float()).square().mean()

    results = []
    for norms in (NATIVE, CUDNN):
        torch.manual_seed(0)
        net, x = Mixed(norms[2]), torch.randn(4, 3, 12, 12)
        step = rematerialize(net, budget="min", cost_model="unit", solver="greedy") if norms is CUDNN else net
        results.append(outcome(net, step, x))
    assert_same(*results)
    assert step.plan is not None and "cudnn_batch_norm" in {op.target for op in step.plan.graph.ops}
    assert {address for address, _ in cudnn_on_the_cpu.backward} == {0}


def test_without_a_kernel_the_op_that_is_called_stays() -> None:
    """``_batch_norm_with_update`` may also be called by name, where there is no cuDNN."""

    class Update(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = self.weight, self.bias, self.running_mean, self.running_var
            return torch.sin(aten._batch_norm_with_update.default(x, *given, 0.1, self.eps)[0]).square().mean()

    results = []
    for remat in (False, True):
        torch.manual_seed(0)
        net, x = Update(3), torch.randn(4, 3, 12, 12)
        step = rematerialize(net, budget=1.0, cost_model="unit", solver="greedy") if remat else net
        results.append(outcome(net, step, x))
    assert_same(*results)


# -- with fake CUDA tensors: what torch chooses there -----------------------------------------------------------------

FORMATS = {2: torch.contiguous_format, 3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


class Names(TorchDispatchMode):
    """The batch norms that eager runs, by the names of their ops."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        if "batch_norm" in str(func):
            self.found.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def captured_norms(function: Callable[..., Any], *args: torch.Tensor | None) -> list[str]:
    """The batch norms in the captured graph of a function."""
    found: list[str] = []

    def read(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        call_cudnn(module.graph)
        names = [str(getattr(node.target, "__name__", "")) for node in module.graph.nodes]
        found.extend(name.removeprefix("_") for name in names if "batch_norm" in name)
        return module.forward

    with whole_ops(), real_layouts(), torch.no_grad():
        aot_function(function, read)(*args)
    return found


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs torch with CUDA (and no device)")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dims", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_choice_is_eagers(dtype: torch.dtype, dims: int, enabled: bool) -> None:
    kernels = []
    modes = [(True, True), (False, True), (True, False)]  # in training mode or not, with running statistics or not
    with torch.backends.cudnn.flags(enabled=enabled), FakeTensorMode():
        for weights, (training, tracked), like in itertools.product(
            [None, torch.float32, torch.float16, torch.bfloat16], modes, {torch.contiguous_format, FORMATS[dims]}
        ):
            x = torch.randn(4, 8, 5, 6, 7, device="cuda", dtype=dtype)[(slice(None),) * dims + (0,) * (5 - dims)]
            x = x.contiguous(memory_format=like)
            weight = torch.ones(8, device="cuda", dtype=weights or torch.float32)
            affine = (weight, weight) if weights else (None, None)
            statistics = torch.ones(2, 8, device="cuda").unbind() if tracked else (None, None)
            norm = functools.partial(functional.batch_norm, training=training)
            with Names() as eager:
                norm(x, *statistics, *affine)
            (name,) = eager.found
            if tracked and weights:
                choice = torch._C._select_batch_norm_backend(x, *affine, *statistics, training, 1e-5)
                assert name == {"Cudnn": "cudnn_batch_norm", "Native": "native_batch_norm"}[choice.name]
            (traced,) = captured_norms(norm, x, *statistics, *affine)
            assert traced.startswith(name), (weights, training, tracked, like)
            kernels.append(name)
    assert set(kernels) == (
        {"native_batch_norm", "cudnn_batch_norm"}
        if enabled and dims > 2 and dtype is not torch.bfloat16
        else {"native_batch_norm"}
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("cudnn", [True, False])
def test_one_inside_of_a_checkpoint_is_refused_where_its_statistics_move(
    training: bool, checkpointed: bool, cudnn: bool
) -> None:
    graph = torch.fx.Graph()
    x, w, b, mean, var = (graph.placeholder(name) for name in ("x", "w", "b", "mean", "var"))
    if cudnn:  # which is one of training alone
        training = True
        node = graph.call_function(aten._batch_norm_with_update_functional.default, (x, w, b, mean, var, 0.1, 1e-5))
    else:
        node = graph.call_function(
            aten._native_batch_norm_legit_functional.default, (x, w, b, mean, var, training, 0.1, 1e-5)
        )
    if checkpointed:
        node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    graph.output((node,))
    if training and checkpointed:
        with pytest.raises(CaptureError, match="batch norm inside of torch.utils.checkpoint"):
            refuse_other_second_evaluations(graph, draws_anew=False)
    else:
        refuse_other_second_evaluations(graph, draws_anew=False)

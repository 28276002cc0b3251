"""Runs of ops that are one compiled kernel each: with eager's bits, in the plans of whole steps, and what stays as it is."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from benchmarks import networks
from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture import Fusing, TensorSpec
from lightning_remat.capture import _ops as ops
from lightning_remat.capture.fusing import _fused, _runs
from lightning_remat.capture.fusing._fused import Run, same_bits
from lightning_remat.capture.fusing._rules import may_be_fused
from lightning_remat.errors import ConfigError
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.planner._tiling import forms
from tests.helpers.fused_forms import take_fused
from tests.helpers.training import Classifier, callback, compare, seeded_losses

aten = torch.ops.aten
Function = Callable[..., tuple[torch.Tensor, ...]]

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-41, -1e-41, 1e-39, 6e-8, 65504.0, -3e38, 1.0, -1.0, 0.5)


ROUNDS_BETWEEN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether compiled code for the CPU rounds to half precision within a kernel, if it is told to; older torch's does not."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16) if ROUNDS_BETWEEN else (torch.float32,)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    take_fused(monkeypatch)


def kernels(step: Rematerialized) -> list[str]:
    """The runs of a step's plan, by the names of their kernels."""
    assert step.plan is not None and len(step.plans) == 1 and not step.failures
    return [op.target for op in step.plan.graph.ops if op.target.startswith("fused_run")]


def special(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers, of which a third are special ones."""
    generator = torch.Generator().manual_seed(seed)
    plain, which = torch.randn(shape, generator=generator), torch.randint(len(SPECIAL), shape, generator=generator)
    chosen = torch.rand(shape, generator=generator) < 0.3
    return torch.where(chosen, torch.tensor(SPECIAL)[which], plain).to(dtype)


def traced(function: Function, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """A function as a graph of ops, as tracing has it."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def fused(function: Function, *inputs: torch.Tensor) -> tuple[int, tuple[torch.Tensor, ...]]:
    """How many runs a function has, and what it returns when they are fused."""
    module = traced(function, *inputs)
    count = len(module.graph.output_node().all_input_nodes)
    Fusing.EXACT.of(module.graph, count)
    module.graph.lint()
    module.recompile()
    runs = [node for node in module.graph.nodes if getattr(node.target, "__name__", "").startswith("fused_run")]
    return len(runs), module(*inputs)


def assert_fused(function: Function, *inputs: torch.Tensor) -> None:
    """That a function is one run, with its bits, and with its strides."""
    expected = function(*inputs)
    runs, found = fused(function, *inputs)
    assert runs == 1
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(one, other), number
        assert (one.dtype, one.stride()) == (other.dtype, other.stride()), number


# -- which ops, and their bits --------------------------------------------------------------------------------------------

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "square": lambda x: x.pow(2),
    "scaled": lambda x: x * 0.1,
    "scaled by a number": lambda x: aten.mul.Scalar(x, 1 / 3),
    "divided": lambda x: x / 3.3,
    "clamped": lambda x: x.clamp(-1.5, 0.0),
    "from below": lambda x: x.clamp_min(0.0),
    "from above": lambda x: x.clamp_max(-0.0),
    "relu6": functional.relu6,
    "leaky": lambda x: functional.leaky_relu(x, 0.25),
    "shifted": lambda x: x + 1.5,
    "filled": lambda x: x.masked_fill(x > 1, -2.0),
    "infinite": lambda x: x.isneginf().to(x.dtype),
    "in single precision": lambda x: x.float(),
    "in half precision": lambda x: x.to(torch.bfloat16),
}

IN_FULL_PRECISION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "cube": lambda x: x.pow(3),
}

BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "threshold": lambda x, y: aten.threshold_backward.default(x, y, 0),
    "where": lambda x, y: torch.where(x > y, x, y),
    "row": lambda x, y: x * y[..., :1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_may_be_fused_has_the_bits_of_its_ops(dtype: torch.dtype) -> None:
    """All values of half precision, and as many of single; the last thirteen are left over by loops in vectors."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*(one(x) for one in unary.values()), *(one(x, y) for one in BINARY.values()))

    whole = dtype is torch.float32
    unary = {**UNARY, **IN_FULL_PRECISION} if whole else UNARY
    bits = torch.arange(1 << 16, dtype=torch.int32)
    x = (bits * 65521 + 12345).view(dtype) if whole else bits.to(torch.int16).view(dtype)
    x = torch.cat([x, special((13,), dtype, 0)]).view(1, -1)
    y = special(tuple(x.shape), dtype, 1)
    module = traced(function, x, y)
    computed = [node for node in module.graph.nodes if node.op == "call_function" and not ops.is_view(node.target)]
    assert [node.name for node in computed if not may_be_fused(node, exact=True)] == []
    run = Run(module, (TensorSpec.of(x), TensorSpec.of(y)), tuple(map(TensorSpec.of, function(x, y))), True)
    kernel = run.kernel()
    assert kernel is not None
    for name, one, other in zip((*unary, *BINARY), run.function(kernel)(x, y), function(x, y), strict=True):
        assert same_bits(one, other), name


ROUNDED_OTHERWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1),
    "twice an addend": lambda x: torch.add(x, x, alpha=3),
    "fourth power": lambda x: x.pow(4),
    "random": lambda x: torch.rand_like(x),
    "whole numbers": lambda x: x.to(torch.int64),
    "cube in half precision": lambda x: x.to(torch.bfloat16).pow(3),
    "whole numbers in half precision": lambda x: x.to(torch.bfloat16) * torch.arange(8),
    "what half precision has not": lambda x: x.to(torch.bfloat16) + 0.1,
    "twice rounded": lambda x: x.double().to(torch.bfloat16),
}


@pytest.mark.parametrize("name", ROUNDED_OTHERWISE)
def test_what_rounds_otherwise_may_not_be_fused(name: str) -> None:
    module = traced(lambda x: (ROUNDED_OTHERWISE[name](x),), torch.randn(4, 8))
    last: Any = module.graph.output_node().all_input_nodes[0]
    while ops.is_view(last.target):
        last = last.args[0]
    assert not may_be_fused(last, exact=True)


@pytest.mark.skipif(ROUNDS_BETWEEN, reason="runs in half precision have their ops' bits")
def test_what_is_not_rounded_in_between_is_seen() -> None:
    x, y = (special((64, 129), torch.bfloat16, seed) for seed in (0, 1))
    runs, found = fused(lambda x, y: ((x + y) * y,), x, y)
    assert runs == 0 and same_bits(found[0], (x + y) * y)


# -- runs -----------------------------------------------------------------------------------------------------------------


def test_dropout_and_a_sum() -> None:
    mask = torch.rand(3, 7, 37) < 0.8

    def function(mask: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dropped = x * ops.dropout_noise(mask, x.dtype, 1.25)
        return dropped + y, dropped

    for dtype in DTYPES:
        x, y = special((3, 7, 37), dtype, 0), special((3, 7, 37), dtype, 1)
        program = torch.fx.Graph()
        given = [program.placeholder(name) for name in ("mask", "x", "y")]
        noise = program.call_function(ops.dropout_noise, (given[0], dtype, 1.25))
        product = program.call_function(aten.mul.Tensor, (given[1], noise))
        total = program.call_function(aten.add.Tensor, (product, given[2]))
        program.output((total, product))
        for node, value in zip((*given, noise, product, total), (mask, x, y, x, x, x), strict=True):
            node.meta["val"] = value
        specs = [TensorSpec.of(one) for one in (mask, x, y)]
        run = Run(torch.fx.GraphModule({}, program), tuple(specs), (specs[1], specs[1]), True)
        kernel = run.kernel()
        assert kernel is not None and kernel.overwritable == {1, 2}
        expected = function(mask, x, y)
        for position in (None, 1, 2):
            tensors = [mask, x.clone(), y.clone()]
            out = None if position is None else tensors[position]
            found = run.function(kernel)(*tensors, out=out)
            assert all(map(same_bits, found, expected))
            assert out is None or found[0] is out


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (4, 8, 16, 16)])
def test_layouts(shape: tuple[int, ...]) -> None:
    """Results lie as the ops' own do; what is laid out otherwise is written so."""

    def function(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        added = x + y
        turned = (added * 2.0).transpose(1, 2)
        return added, turned.clone(memory_format=torch.contiguous_format), added * row

    x = special(shape, torch.float32, 0).contiguous(memory_format=torch.channels_last)
    y = special(shape, torch.float32, 1).contiguous(memory_format=torch.channels_last)
    assert_fused(function, x, y, torch.randn(shape[-1]))


def test_rows_that_are_masked_out_whole() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.isneginf().all(-1, keepdim=True)
        return (torch.where(rows, 0.0, y) * 3.0,)

    x = torch.randn(6, 33)
    x[2], x[4, 1:] = -math.inf, -math.inf
    assert_fused(function, x, torch.randn(6, 33))


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{name: lambda x, y, mask, op=op: op(x) for name, op in UNARY.items() if "precision" not in name},
    **{name: lambda x, y, mask, op=op: op(x, y) for name, op in BINARY.items()},
    "masked": lambda x, y, mask: torch.where(mask, x, y),
    "noise": lambda x, y, mask: x * mask.to(x.dtype),
    "cast": lambda x, y, mask: (x.float() * 0.3).to(x.dtype),
    "broadcast": lambda x, y, mask: x + y[..., :1, :].expand(x.shape),
    "turned": lambda x, y, mask: (x.mT * y.mT).mT,
}


@pytest.mark.parametrize("seed", range(10))
def test_random_runs(seed: int) -> None:
    """Of drawn ops on drawn shapes in drawn layouts."""
    draw = random.Random(seed)
    dtype = draw.choice(DTYPES)
    shape = draw.choice([(5, 37), (3, 8, 64), (2, 3, 17, 19), (1, 1, 3), (64, 129)])
    steps = draw.choices(list(STEPS), k=draw.randrange(3, 9))
    x, y = special(shape, dtype, seed), special(shape, dtype, seed + 100)
    if draw.random() < 0.3:
        x, y = x.mT.contiguous().mT, y.mT.contiguous().mT
    mask = torch.rand(shape) < 0.7

    def function(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [x]
        for step in steps:
            made.append(STEPS[step](made[-1], y, mask))
        return made[-1], made[len(made) // 2] * 2.0

    expected = function(x, y, mask)
    runs, found = fused(function, x, y, mask)
    assert runs == 1, steps
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other) and one.stride() == other.stride(), steps


# -- whole steps ----------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Residual blocks with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3 if not i else 8, 8, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            made = norm(convolution(x))
            x = functional.relu(functional.dropout(made, 0.1) + x if number else made)
        return (x * 0.5).square().mean()


def workload(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == "convolutions":
        return Convolutions(), torch.randn(4, 3, 23, 27)
    made = networks.build(name, "tiny")
    return made.module, made.batch[0]


def compared(name: str, budget: float | str, half: bool = False, **options: Any) -> Rematerialized:
    """Train with and without a plan, and compare all bits."""
    eager, batch = workload(name)
    module = copy.deepcopy(eager)
    step = rematerialize(
        module, budget=budget, **{"time_limit": 0.5, "cost_model": "flops", "fuse": "exact", **options}
    )
    losses = seeded_losses(module, step, batch, half, lr=0.01), seeded_losses(eager, eager, batch, half, lr=0.01)
    assert all(map(torch.equal, *losses))
    for (place, one), other in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad), place
    for one, other in zip(module.buffers(), eager.buffers(), strict=True):
        assert torch.equal(one, other)
    return step


@pytest.mark.long
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("budget", [1.0, 0.6, "min"])
@pytest.mark.parametrize("name", ["gpt2", "convolutions"])
def test_whole_steps(name: str, budget: float | str) -> None:
    step = compared(name, budget)
    assert len(kernels(step)) >= {"gpt2": 20, "convolutions": 5}[name]
    assert step.plan is not None and step.plan.predicted_peak_bytes <= step.plan.budget_bytes
    assert "one kernel each" in step.plan.notes[-1]


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_autocast() -> None:
    assert len(kernels(compared("convolutions", 0.6, half=True))) >= (5 if ROUNDS_BETWEEN else 1)


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_the_peak_is_as_predicted() -> None:
    module, batch = workload("convolutions")
    step = rematerialize(module, budget=1.0, fuse="exact", time_limit=0.5)

    def training_step() -> None:
        loss = step(batch)
        module.zero_grad()
        loss.backward()

    for _ in range(2):
        training_step()
    held = held_bytes(module, batch, gradients=True)
    peak = held + peak_memory(training_step, "cpu")
    assert kernels(step) and step.plan is not None
    assert peak <= step.plan.budget_bytes
    assert abs(step.plan.predicted_peak_bytes / peak - 1) < 0.01


def test_with_the_callback() -> None:
    remat = callback(0.4, fuse="exact")
    compare(Classifier, remat=remat)
    assert remat.config.fuse == "exact"


def test_it_is_off_unless_asked_for() -> None:
    assert kernels(compared("convolutions", 1.0, fuse="off")) == []
    with pytest.raises(ConfigError, match="fuse='all': give one of 'exact', 'fast', 'off'"):
        rematerialize(nn.Linear(2, 2), fuse="all")


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_any_kernel_where_bits_may_differ() -> None:
    eager, batch = workload("gpt2")
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=1.0, fuse="fast", time_limit=0.5, cost_model="flops")
    for one, other in zip(
        seeded_losses(module, step, batch, False, lr=0.01),
        seeded_losses(eager, eager, batch, False, lr=0.01),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert kernels(step) and step.plan is not None
    assert "aten.tanh.default" not in {op.target for op in step.plan.graph.ops}
    assert "bits may differ" in step.plan.notes[-1]


@pytest.mark.usefixtures("always")
def test_sizes_that_vary_stay_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Hardtanh())
    step = rematerialize(module, budget=1.0, fuse="exact", cost_model="flops")
    for length in range(3, 9):
        step(torch.randn(length, 8)).sum().backward()
    first, last = ({op.target[:9] for op in plan.graph.ops} for plan in (step.plans[0], step.plans[-1]))
    assert "fused_run" in first and "fused_run" not in last


# -- what stays as it is --------------------------------------------------------------------------------------------------


def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.relu(x + y) * 2.0,)


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(3, 41), torch.randn(3, 41)
    monkeypatch.setattr(_fused, "_KERNELS", {})
    original = _fused.compile_all

    def wrong(functions: Sequence[Any], *, exact: bool) -> list[Any]:
        def off(kernel: Any) -> Any:
            def run(tensors: list[torch.Tensor]) -> None:
                last = tensors[-1]
                kernel(tensors)
                last[-1, -1].nextafter_(torch.tensor(math.inf))

            return run

        return list(map(off, original(functions, exact=exact)))

    with monkeypatch.context() as patch:
        patch.setattr(_fused, "compile_all", wrong)
        runs, found = fused(chain, x, y)
        assert runs == 0 and torch.equal(found[0], chain(x, y)[0])
    monkeypatch.setattr(_fused, "_KERNELS", {})
    assert fused(chain, x, y)[0] == 1


def test_what_cannot_be_compiled_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One kernel that fails does not keep another from being used, nor does one that fails once others are waited for."""
    from torch._inductor import async_compile, compile_fx

    monkeypatch.setattr(_fused, "_told", _fused._told.__wrapped__)
    compile_inner, wait, waited = compile_fx.compile_fx_inner, async_compile.AsyncCompile.wait, []

    def missing(module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if any("maximum" in str(node.target) for node in module.graph.nodes):
            raise RuntimeError("no compiler here\nat all")
        return compile_inner(module, *args, **kwargs)

    def failing(self: Any, scope: dict[str, Any]) -> None:
        waited.append(scope)
        wait(self, scope)
        if len(waited) == 1:
            raise ArithmeticError("made wrong")

    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            (torch.maximum(x, y) * 2.0).mm(y.t()),
            ((x + y) * 3.0).mm(y.t()),
            ((x - y) * 4.0).mm(y.t()),
        )

    x, y = torch.randn(7, 5), torch.randn(7, 5)
    with monkeypatch.context() as patch:
        patch.setattr(_fused, "_KERNELS", {})
        patch.setattr(compile_fx, "compile_fx_inner", missing)
        patch.setattr(async_compile.AsyncCompile, "wait", failing)
        with caplog.at_level(logging.WARNING):
            runs, found = fused(several, x, y)
        assert async_compile.AsyncCompile.wait is failing
    assert runs == 1 and len(waited) == 2 and all(map(torch.equal, found, several(x, y)))
    assert "RuntimeError: no compiler here" in caplog.text and "at all" not in caplog.text
    assert "ArithmeticError: made wrong" in caplog.text
    monkeypatch.setattr(_fused, "_KERNELS", {})
    assert fused(several, x, y)[0] == 3


def test_a_run_takes_few_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runs, "MOST_TENSORS", 4)

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = given[0]
        for one in given[1:]:
            total = total + one
        return (total,)

    inputs = [torch.randn(5) for _ in range(5)]
    runs, found = fused(
        function, *inputs
    )  # three are read and one returned, and the next run reads that and two others
    assert runs == 2 and torch.equal(found[0], function(*inputs)[0])


def test_nothing_between_a_run_s_ops_reads_it() -> None:
    """A sum reads the first op's result, and another op both: these are no run."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        doubled = x * 2.0
        total = doubled.sum()
        return (doubled + total,)

    x = torch.randn(5, 6)
    runs, found = fused(function, x)
    assert runs == 0 and torch.equal(found[0], function(x)[0])


# -- which form is planned ------------------------------------------------------------------------------------------------


class Form:
    """Stands for a captured graph."""

    def __init__(self, name: str, forms: tuple[str, ...] = ()) -> None:
        self.name, self.forms = name, forms

    def tiled(self, tiling: Any) -> Form | None:
        return Form(tiling.value, ("exact",)) if tiling.value in self.forms else None

    def fused(self, fusing: Fusing) -> Form | None:
        return Form(f"{self.name} fused") if fusing.value in self.forms else None


@pytest.mark.parametrize(
    ("fits", "tiled", "fusing", "expected"),
    [
        (True, True, None, ["captured"]),
        (True, True, Fusing.EXACT, ["captured fused", "captured"]),
        (True, True, Fusing.FAST, ["captured"]),
        (False, False, Fusing.EXACT, ["captured fused", "captured"]),
        (
            False,
            True,
            Fusing.EXACT,
            ["losses fused", "losses", "captured fused", "captured", "chains fused", "chains"],
        ),
    ],
)
def test_fused_forms_come_first(fits: bool, tiled: bool, fusing: Fusing | None, expected: list[str]) -> None:
    captured: Any = Form("captured", ("exact", "losses", "chains"))
    found: Any = forms(captured, fits=fits, tiled=tiled, fusing=fusing)
    assert [form.name for form, _ in found] == expected

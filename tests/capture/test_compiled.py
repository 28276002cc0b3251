"""What the user has compiled with ``torch.compile`` inside of a step stays theirs, and they are told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import RematWarning, rematerialize
from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback
from lightning_remat.errors import ConfigError
from tests.helpers.training import Classifier, assert_same, fit, loader, network, trainer

# Torch's own import of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

calls: list[str] = []
"""What the compiler below was asked for."""


def recording(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler that runs what it is given, and writes down that it does."""
    calls.append("compile")

    def run(*args: Any) -> Any:
        calls.append("run")
        return module.forward(*args)

    return run


def compiled(function: Any) -> Any:
    return torch.compile(function, backend=recording)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    calls.clear()
    yield
    torch._dynamo.reset()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2))
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * torch.rand_like(x)


class Net(nn.Module):
    """What is compiled stands between two parts that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = network(1)[:-1], nn.Linear(16, 4)
        self.inner, self.function = Inner(), noisy
        self.blocks = nn.ModuleList()

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.before(x) * self.inner.scale)
        x = self.method(self.function(x))
        for block in self.blocks:
            x = block(x)
        return self.after(x).square().mean()


class WithMethod(Net):
    method = compiled(Net.method)


class InnerWithForward(Inner):
    forward = compiled(Inner.forward)


def module(net: Net) -> None:
    net.inner = compiled(net.inner)


def in_place(net: Net) -> None:
    net.inner.compile(backend=recording)


def forward(net: Net) -> None:
    net.inner.forward = compiled(net.inner.forward)


def forward_of_the_class(net: Net) -> None:
    net.inner.__class__ = InnerWithForward


def function(net: Net) -> None:
    net.function = compiled(noisy)


def method(net: Net) -> None:
    net.__class__ = WithMethod


def regions(net: Net) -> None:
    net.blocks = nn.ModuleList(Inner() for _ in range(2))
    for block in net.blocks:
        block.compile(backend=recording)


def whole(net: Net) -> None:
    net.compile(backend=recording)


def train(call: Callable[..., Any], net: nn.Module) -> tuple[list[torch.Tensor], list[str]]:
    torch.manual_seed(3)
    calls.clear()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for _ in range(3):
        loss = call(torch.randn(64, 16))
        net.zero_grad(set_to_none=True)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters())]
        optimizer.step()
    return [*found, *(t.detach().clone() for t in net.state_dict().values())], list(calls)


def made(change: Callable[[Net], None]) -> Net:
    torch.manual_seed(0)
    net = Net()
    change(net)
    return net


@pytest.mark.parametrize(
    ("change", "name", "parts"),
    [
        (module, "Inner", 2),
        (in_place, "Inner", 2),
        pytest.param(forward, "Inner.forward", 2, marks=pytest.mark.slow),
        (forward_of_the_class, "Inner.forward", 2),
        (function, "noisy", 2),
        pytest.param(method, "Net.method", 2, marks=pytest.mark.slow),
        (regions, "Inner", 3),
        (whole, "Net", 0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_their_compiler_runs_it_and_they_are_told(change: Callable[[Net], None], name: str, parts: int) -> None:
    net = made(change)
    expected, asked = train(net, net)
    assert asked.count("run") == (6 if change is regions else 3)
    torch._dynamo.reset()
    net = made(change)
    call = rematerialize(net, budget="min", solver="greedy", cost_model="unit", time_limit=0.5)
    with pytest.warns(RematWarning, match=f": {name} was compiled with torch.compile and stays so") as caught:
        found, ours = train(call, net)
    assert len([one for one in caught if one.category is RematWarning]) == len(call.failures) == 1
    assert ("the rest is planned in parts" in call.failures[0]) == bool(parts)
    assert ours == asked
    assert all(map(torch.equal, found, expected))
    assert sum(call.runs) == 3 * parts
    assert any(plan.rematerializes for plan in call.plans) == bool(parts)
    assert torch._dynamo.is_compiling() is False and WithMethod.method._torchdynamo_inline is Net.method


@pytest.mark.parametrize("given", ["module", "function", "method"])
def test_what_is_given_compiled_runs_as_it_is(given: str) -> None:
    net = made(lambda net: None)
    expected, _ = train(net, net)
    net = made(lambda net: None)
    thing = {"module": net, "function": lambda x: net(x), "method": net.forward}[given]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = rematerialize(compiled(thing), budget="min", cost_model="unit")
        found, asked = train(call, net)
    (told,) = [str(one.message) for one in caught if one.category is RematWarning]
    assert "was compiled with torch.compile" in told
    assert asked == ["compile", "run", "run", "run"]
    assert all(map(torch.equal, found, expected))
    assert not call.plans


def test_what_is_compiled_after_the_capture_is_noticed() -> None:
    net = made(lambda net: None)
    call = rematerialize(net, budget=1.0, cost_model="unit")
    x = torch.randn(64, 16)
    call(x).backward()
    assert call.runs == (1,)
    net.inner.compile(backend=recording)
    with pytest.warns(RematWarning, match="Inner was compiled"):
        call(x).backward()
    assert calls == ["compile", "run"]
    runs = sum(call.runs)
    net.inner._compiled_call_impl = None
    call(x).backward()
    assert calls == ["compile", "run"] and sum(call.runs) == runs + 3  # still in parts, of which it is one


def test_attributes_of_a_compiled_module_are_read_in_the_graph() -> None:
    net = made(module)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight = net.inner.layers[0].weight
        assert hasattr(net.inner, "scale") and not hasattr(net.inner, "nothing")
        return (net.before(x) @ weight).sum() * net.inner.scale

    call = rematerialize(step, budget=1.0, cost_model="unit")
    call(torch.randn(8, 16)).backward()
    assert call.runs == (1,) and not call.failures and not calls


# -- Lightning --------------------------------------------------------------------------------------------------------


class Lit(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.inner = network(1), Inner()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(self.inner(x.sin())), y)


class LitCompiled(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.inner.compile(backend=recording)


class LitCompiledModule(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(self.inner, backend=recording)


@pytest.mark.parametrize("make", [LitCompiled, pytest.param(LitCompiledModule, marks=pytest.mark.slow)])
def test_in_a_lightning_run(make: type[Lit]) -> None:
    plain = fit(make, train=lambda: loader(16))
    asked = list(calls)
    torch._dynamo.reset()
    calls.clear()
    remat = RematCallback(budget="min", solver="greedy", measure=False)
    with pytest.warns(RematWarning, match="Inner was compiled with torch.compile and stays so.*the rest is planned"):
        run = fit(make, remat, train=lambda: loader(16))
    assert calls == asked and calls.count("run") == 2
    assert_same(plain.results, run.results)
    assert remat.plans and len(remat.failures) == 1


class LitCompiledStep(Lit):
    training_step = torch.compile(Lit.training_step, backend=recording)


@pytest.mark.parametrize("make", [Lit, LitCompiledStep])
def test_a_compiled_lightning_module_trains_as_it_is(make: type[Lit]) -> None:
    runs = []
    for callbacks in ([], [RematCallback(budget="min")]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        calls.clear()
        lit = make()
        module = torch.compile(lit, backend=recording) if make is Lit else lit
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(*callbacks).fit(module, loader(16))
        runs.append(
            (lit.state_dict(), list(calls), [str(one.message) for one in caught if one.category is RematWarning])
        )
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1] and "run" in runs[0][1]
    assert not runs[0][2] and len(runs[1][2]) == 1 and "the plain module" in runs[1][2][0]


def test_no_batch_size_is_looked_for_with_one() -> None:
    with pytest.raises(ConfigError, match="compiled with torch.compile"):
        trainer(RematCallback(budget="1GiB"), RematBatchSizeFinder()).fit(torch.compile(Lit()), loader(16))


class Asks(nn.Module):
    """Computes in another way where it is compiled, and calls what is compiled itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.inner.compile(backend=recording)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.addcdiv(x, x, x.square() + 1)) * (2 if torch.compiler.is_compiling() else 3)


def test_their_compiler_is_asked_as_it_is_without_us() -> None:
    results = []
    for planned in (False, True):
        torch._dynamo.reset()
        calls.clear()
        torch.manual_seed(0)
        net = Net()
        net.inner = torch.compile(Asks(), backend=recording, fullgraph=True)
        net.inner.scale = 0.5
        if planned:
            call = rematerialize(net, budget="min", solver="greedy", cost_model="unit", time_limit=0.5)
            with pytest.warns(RematWarning, match="Asks was compiled"):
                results.append(train(call, net))
        else:
            results.append(train(net, net))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1] == ["compile", "run", "run", "run"]


def _gelu(bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_functions_of_torchscript_run_as_they_are() -> None:
    gelu = torch.jit.script(_gelu)
    results = []
    for planned in (None, False, True):  # TorchScript itself rounds otherwise from its third call on
        torch.manual_seed(0)
        module, bias = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

        def loss(x: torch.Tensor, module: nn.Module = module, bias: torch.Tensor = bias) -> torch.Tensor:
            return module(gelu(bias, module(x.sin()))).square().mean()

        step: Any = rematerialize(loss, budget="min", cost_model="unit") if planned else loss
        results.append([])
        for _ in range(4):
            step(torch.randn(8, 16)).backward()
            results[-1] += [p.grad.clone() for p in (*module.parameters(), bias) if p.grad is not None]
    assert all(map(torch.equal, *results[1:]))
    assert len(step.plans) >= 2 and not step.failures

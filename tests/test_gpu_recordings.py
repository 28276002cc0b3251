"""On a CUDA device: steps that are recorded as CUDA graphs have eager's bits, random numbers and gradients."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.callbacks import RematCallback
from lightning_remat.capture._torch import CudaTapes
from lightning_remat.errors import RematWarning
from lightning_remat.runtime._recordings import WARM_UP, Recorder
from tests.helpers import training
from tests.test_gpu import DTYPES, Factory, conv_net, deterministic, gpt2

__all__ = ["deterministic"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = WARM_UP + 6


def recorded(step: Rematerialized) -> int:
    """How many forwards of a step are recorded with their backwards."""
    graphs = step.scheduled._plans.graphs
    recorders = [graph.exchange.recorder for graph in graphs]
    assert all(isinstance(one, Recorder) for one in recorders)
    return sum(one.backward is not None for recorder in recorders for one in recorder._recorded.values())  # type: ignore[union-attr]


def trained(
    module: nn.Module,
    call: Callable[..., torch.Tensor],
    batch: torch.Tensor,
    every: int = 1,
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> list[torch.Tensor]:
    """Losses of seeded training with an optimizer's step after each ``every`` of them; the random state at the end."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    found = []
    for number in range(STEPS * every):
        batch = batch.roll(1, 0)
        with context():
            loss = call(batch)
        if number % every == 0:
            optimizer.zero_grad()
        loss.backward()
        if number % every == every - 1:
            optimizer.step()
        found.append(loss.detach().clone())
    return [*found, torch.cuda.get_rng_state(), torch.get_rng_state()]


def assert_same(module: nn.Module, eager: nn.Module) -> None:
    for (name, one), other in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(module.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("budget", [1.0, 0.6, "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_recorded_steps_have_the_bits_of_eager(make: Factory, dtype: torch.dtype, budget: float | str) -> None:
    eager, batch = make(dtype)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=budget, cuda_graphs=True, time_limit=3.0)
    assert all(map(torch.equal, trained(module, step, batch), trained(eager, eager, batch)))
    assert_same(module, eager)
    assert step.plan is not None and not step.failures and recorded(step) == 1


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_under_autocast_and_with_accumulation(make: Factory, half: torch.dtype) -> None:
    eager, batch = make(torch.float32)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=0.6, cuda_graphs=True, time_limit=3.0)
    options: dict[str, Any] = {"every": 2, "context": lambda: torch.autocast("cuda", half)}
    assert all(map(torch.equal, trained(module, step, batch, **options), trained(eager, eager, batch, **options)))
    assert_same(module, eager)
    assert recorded(step) == 1


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"precision": "16-mixed"}], ids=str)
def test_a_recorded_fit_has_the_bits_of_eager(options: dict[str, Any]) -> None:
    remat = RematCallback("min", artifacts=False, time_limit=3.0, cuda_graphs=True)
    options = {**options, "accelerator": "cuda", "devices": 1, "deterministic": True, "max_epochs": 8}
    plain = training.fit(training.Classifier, gradient_clip_val=0.5, **options)
    scheduled = training.fit(training.Classifier, remat, gradient_clip_val=0.5, **options)
    training.assert_same(plain.results, scheduled.results)
    assert not remat.failures


class AtHome(Callback):
    """Before each step of the optimizer, whether all gradients lie where recorded backwards add them up."""

    def __init__(self, recorders: list[Recorder]) -> None:
        self.recorders = recorders
        self.found: list[bool] = []

    def on_before_optimizer_step(self, _trainer: Any, pl_module: Any, _optimizer: Any) -> None:
        if self.recorders:
            homes, parameters = self.recorders[0]._shared.homes, list(pl_module.parameters())
            self.found.append(all(p.grad is not None and homes.has(p, p.grad) for p in parameters))


def test_gradients_lie_where_the_recorded_backward_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are accumulated: no copies of them are made."""
    replayed: list[Recorder] = []
    replay = Recorder._replay_backward

    def seeing(self: Recorder, *args: Any) -> Any:
        replayed.append(self)
        return replay(self, *args)

    monkeypatch.setattr(Recorder, "_replay_backward", seeing)
    remat = RematCallback("min", artifacts=False, time_limit=3.0, cuda_graphs=True)
    at_home = AtHome(replayed)
    options: dict[str, Any] = {"accelerator": "cuda", "devices": 1, "deterministic": True, "max_epochs": 12}
    training.fit(training.Classifier, remat, at_home, accumulate_grad_batches=2, **options)
    assert len(replayed) >= 6 and len(at_home.found) >= 6 and all(at_home.found)


@pytest.mark.parametrize("number", [0, 1], ids=["forward", "backward"])
def test_what_cannot_be_recorded_runs_as_before(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is waited for while something is recorded, which CUDA does not allow."""
    calls = iter(range(100))
    record = CudaTapes.record

    def waits(self: CudaTapes, run: Callable[..., Any], args: list[Any], noted: Any) -> Any:
        this = next(calls)

        def run_and_wait(given: list[Any]) -> Any:
            found = run(given)
            if this == number:
                torch.ones(1, device="cuda").item()
            return found

        return record(self, run_and_wait, args, noted)

    monkeypatch.setattr(CudaTapes, "record", waits)
    eager, batch = gpt2(torch.float32)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=0.6, cuda_graphs=True, time_limit=3.0)
    with pytest.warns(RematWarning, match="without CUDA graphs"):
        found = trained(module, step, batch)
    assert all(map(torch.equal, found, trained(eager, eager, batch)))
    assert_same(module, eager)
    assert recorded(step) == 0


def reserved() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_a_backward_that_is_not_replayed_after_a_forward_that_was() -> None:
    """Gradients of earlier steps are held, and must stay. Attention's dropout has its states in other places then."""
    eager, batch = gpt2(torch.float32)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=0.6, cuda_graphs=True, time_limit=3.0)
    found: list[list[torch.Tensor]] = []
    for one, call in ((eager, eager), (module, step)):
        torch.manual_seed(1)
        held: list[torch.Tensor] = []
        for number in range(STEPS + 3):
            one.zero_grad()
            loss = call(batch)
            torch.autograd.backward(loss, retain_graph=number >= STEPS)
            if number >= STEPS:  # once more, onto gradients that are there
                loss.backward()
                held += [parameter.grad for parameter in one.parameters() if parameter.grad is not None]
        found.append(held)
    assert recorded(step) == 1
    assert found[0] and all(map(torch.equal, *found))


def test_a_closed_step_gives_its_memory_back() -> None:
    module, batch = gpt2(torch.float32)
    trained(module, module, batch)
    module.zero_grad()
    before = reserved()  # with cuBLAS's workspaces
    step = rematerialize(module, budget=0.6, cuda_graphs=True, time_limit=3.0)
    trained(module, step, batch)
    held = reserved()
    step.close()
    module.zero_grad()
    assert reserved() < held
    assert reserved() - before <= 20 * 2**20


def literal(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, 3.0], device=x.device).sum() + torch.tensor(0.5).to(x.device)


def counted(x: torch.Tensor) -> torch.Tensor:
    """Added to in place: each step has a copy of its own."""
    places = (torch.arange(8)[None] % 3).to(x.device, torch.float32)
    places += 1
    return x + places


@pytest.mark.parametrize("changed", [literal, counted])
def test_constants_from_the_host_lie_on_the_device(changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    network, data = torch.nn.Linear(8, 8).cuda(), [torch.randn(4, 8, device="cuda") for _ in range(8)]

    def call(x: torch.Tensor) -> torch.Tensor:
        return changed(network(changed(x)).tanh()).square().mean()

    step = rematerialize(call, "min", cuda_graphs=True, cost_model="unit", time_limit=1.0)
    found = []
    for run in (call, step):
        held: list[torch.Tensor] = []
        for x in data:
            network.zero_grad()
            loss = run(x)
            loss.backward()
            held += [loss.detach().clone(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]
        found.append(held)
    assert all(map(torch.equal, *found)) and len(found[0]) == 3 * len(data)
    assert recorded(step) == 1 and step.plan is not None
    assert not any("_to_copy" in op.target for op in step.plan.graph.ops)


@pytest.mark.parametrize(("copies", "words"), [("to the device", "device=..."), ("to the host", "copy it afterwards")])
def test_a_copy_that_the_step_waits_for_is_told_of(copies: str, words: str) -> None:
    network, data = torch.nn.Linear(8, 8).cuda(), [torch.randn(4, 8, device="cuda") for _ in range(6)]

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = network(x).square().mean()
        if copies == "to the host":
            return loss, loss.detach().cpu()
        return loss * torch.tensor([1.0, 3.0]).sum().to(x.device), loss

    step = rematerialize(call, "min", cuda_graphs=True, cost_model="unit", time_limit=1.0)
    with pytest.warns(RematWarning, match=f"without CUDA graphs: .* copies a tensor .*{words}"):
        found = [step(x) for x in data]
    for x, pair in zip(data, found, strict=True):
        assert all(map(torch.equal, call(x), pair))
    assert step.plan is not None

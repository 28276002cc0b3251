"""`rematerialize` on what people hand it: every kind of call, parameters of every kind, hooks, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import InfeasibleBudgetError, rematerialize
from lightning_remat.capture import _torch as internals
from lightning_remat.errors import BudgetError, ConfigError
from lightning_remat.lowering import read_again
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.planner import RematWarning
from lightning_remat.runtime import _plans
from tests.helpers.nets import Net, captured_whole, check, inputs, net, same

# -- the signature ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: tuple[torch.Tensor, ...]


class TestSignature:
    def test_positional_and_keyword_arguments(self) -> None:
        def forward(self: Net, x: torch.Tensor, scale: float = 1.0, *, shift: torch.Tensor) -> torch.Tensor:
            return (self.last(self.first(x).tanh()) * scale + shift).square().mean()

        step = check(net(forward), inputs(), 2.0, kwargs={"shift": torch.ones(4)})
        assert captured_whole(step)

    def test_dict_batch_and_dict_output(self) -> None:
        def forward(self: Net, batch: dict[str, Any]) -> dict[str, Any]:
            output = self.last(self.first(batch["x"]).tanh())
            loss = functional.mse_loss(output, batch["y"][0])
            return {"loss": loss, "output": output, "best": output.argmax(1), "name": batch["name"], "count": 3}

        module, batch = net(forward), {"x": inputs(), "y": [torch.ones(32, 4)], "name": "a"}
        step = check(module, batch)
        assert captured_whole(step)
        got = step(batch)
        assert got["name"] == "a" and got["count"] == 3 and got["best"].dtype == torch.int64

    def test_dataclass_batch_and_tuple_output(self) -> None:
        def forward(self: Net, batch: Batch) -> tuple[torch.Tensor, Batch]:
            output = self.last(self.first(batch.x).tanh())
            return functional.mse_loss(output, batch.y[0]), Batch(output, (output.detach() * 2,))

        module, batch = net(forward), Batch(inputs(), (torch.ones(32, 4),))
        step = check(module, batch)
        assert captured_whole(step)
        _, got = step(batch)
        assert isinstance(got, Batch)
        assert torch.equal(got.y[0], 2 * got.x) and got.x.requires_grad and not got.y[0].requires_grad

    def test_several_outputs_with_gradients(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = self.first(x).tanh()
            return self.last(hidden), hidden, hidden.detach()

        found = []
        for wrap in (False, True):
            module = net(forward)
            call = rematerialize(module, budget="min", cost_model="unit") if wrap else module
            output, hidden, free = call(inputs())
            assert not free.requires_grad
            (output.sum() + hidden.square().sum()).backward()
            found.append([output, hidden, free, *(p.grad for p in module.parameters())])
        assert all(map(torch.equal, *found))

    def test_an_output_that_no_loss_uses(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.first(x).tanh()
            return self.last(hidden).sum(), hidden

        assert captured_whole(check(net(forward), inputs()))

    def test_what_leads_to_no_loss_gets_no_gradient(self) -> None:
        """Not even zeros: with those an optimizer would decay its weights."""

        def forward(self: Net, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = self.first(x).tanh()
            return self.last(hidden).sum(), self.other(hidden), self.other(hidden.detach()).sum(), x + 1

        module = net(forward, other=nn.Linear(32, 4))
        assert captured_whole(check(module, inputs()))

    def test_one_or_another_loss(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = self.first(x).tanh()
            return self.last(hidden).sum(), self.other(hidden).sum()

        found = []
        original = net(forward, other=nn.Linear(32, 4))
        for wrap in (False, True):
            module = copy.deepcopy(original)
            call = rematerialize(module, budget="min", cost_model="unit") if wrap else module
            for losses in (lambda a, b: a, lambda a, b: b, lambda a, b: a + b):
                module.zero_grad()
                losses(*call(inputs())).backward()
                found.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
        assert sum(gradient is None for gradients in found[:3] for gradient in gradients) == 4
        for eager, ours in zip(found[:3], found[3:], strict=True):
            assert all(map(same, eager, ours))

    def test_inputs_that_need_gradients(self) -> None:
        gradients = []
        for wrap in (False, True):
            module, x = net(), inputs().requires_grad_()
            torch.manual_seed(1)
            (rematerialize(module, budget="min", cost_model="unit") if wrap else module)(x).backward()
            gradients.append(x.grad)
        assert gradients[0] is not None and gradients[1] is not None and torch.equal(*gradients)

    def test_a_function(self) -> None:
        module = net()

        def function(x: torch.Tensor, times: int) -> torch.Tensor:
            return module(x) * times

        step = rematerialize(function, budget="min", cost_model="unit")
        assert step.__name__ == "function" and step.original is function
        step(inputs(), 3).backward()
        assert step.runs == (1,) and step.plan is not None

    def test_an_input_that_is_changed_in_place(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.5)
            return self.last(self.first(x).tanh()).square().mean()

        results = []
        for wrap in (False, True):
            module, x = net(forward), inputs()
            (rematerialize(module, budget="min", cost_model="unit") if wrap else module)(x).backward()
            results.append([x, module.first.weight.grad])
        assert all(map(torch.equal, *results))

    @pytest.mark.parametrize("broken", [False, True])
    def test_an_output_that_is_changed_in_place(self, broken: bool) -> None:
        """The sum is written over a view; autograd forbids to write to views of what a captured graph returns."""

        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            rows = x.unflatten(0, (-1, 2))
            y = rows.mean() + functional.dropout(self.last(self.first(rows).tanh()), 0.1)
            if broken:
                torch._dynamo.graph_break()
                y += 1
            return y

        results = []
        for wrap in (False, True):
            module = net(forward)
            step: Any = rematerialize(module, budget=1.0, cost_model="unit") if wrap else module
            torch.manual_seed(1)
            output = step(inputs())
            assert not output._is_view()
            output += 1
            output.square().mean().backward()
            results.append([output, *(one.grad for one in module.parameters())])
        assert all(map(torch.equal, *results)) and len(step.plans) == 1 + broken

    @pytest.mark.parametrize("budget", [1.0, "min"])
    @pytest.mark.parametrize("view", [torch.t, lambda weight: weight[:2], lambda weight: weight.split(2)[1][None]])
    def test_a_view_of_a_parameter_that_is_handed_out(self, view: Any, budget: float | str) -> None:
        """Nothing is computed with the parameter itself: its gradient comes through the view alone."""

        def forward(self: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.last(self.first(x).tanh()).square().mean(), view(self.other.weight)

        results = []
        for wrap in (False, True):
            module = net(forward)
            module.other = nn.Linear(4, 4)
            step: Any = rematerialize(module, budget=budget, cost_model="unit") if wrap else module
            loss, handed_out = step(inputs())
            (loss + handed_out.square().sum()).backward()
            results.append([module.first.weight.grad, module.other.weight.grad])
        assert all(map(torch.equal, *results)) and captured_whole(step, 1)

    def test_a_parameter_that_is_handed_out_detached(self) -> None:
        """It has no gradient, and autograd does not come to its hooks."""

        def forward(self: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.last(self.first(x).tanh()).square().mean(), self.other.weight.t().detach()[:2]

        module, told = net(forward), list[nn.Parameter]()
        module.other = nn.Linear(4, 4)
        module.other.weight.register_post_accumulate_grad_hook(told.append)
        step = rematerialize(module, budget="min", cost_model="unit")
        loss, handed_out = step(inputs())
        (loss + handed_out.sum()).backward()
        assert module.other.weight.grad is None and not told and not handed_out.requires_grad

    @pytest.mark.parametrize("view", [None, "view", "slice", "detach"])
    def test_an_output_that_the_backward_computes_from_must_not_be_changed(self, view: str | None) -> None:
        """Eager mode saves what it has made of it, and does not mind; here autograd has to notice."""

        def forward(self: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = nn.functional.linear(x.unflatten(0, (-1, 2)), self.first.weight)
            views = {"view": hidden.view(-1), "slice": hidden[1:], "detach": hidden.detach()}
            return views.get(view or "", hidden), functional.gelu(hidden - 1)

        module = net(forward)
        first, second = rematerialize(module, budget="min", cost_model="unit")(inputs())
        first.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.sum().backward()


@pytest.mark.parametrize("drop", [functional.dropout, lambda x, p: functional.dropout(x.square(), p)])
def test_dropout_of_everything_draws_nothing(drop: Any) -> None:
    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        x = drop(self.first(x), 1.0) + functional.dropout(self.first(x).tanh(), 0.5)
        return self.last(functional.dropout(x, 0.3).tanh()).square().mean()

    step = check(net(forward), inputs())
    assert captured_whole(step)
    states = []
    for call in (net(forward), step):
        torch.manual_seed(0)
        call(inputs()).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class TestBuffers:
    @pytest.mark.parametrize("budget", [1.0, "min"])
    def test_a_batch_norm_whose_output_nobody_reads(self, budget: float | str) -> None:
        """Its running statistics move all the same, once a step."""

        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            self.norm(y)
            return self.last(y.tanh()).square().mean()

        results = []
        for wrap in (False, True):
            module = net(forward)
            module.norm = nn.BatchNorm1d(module.first.out_features)
            step: Any = rematerialize(module, budget=budget, cost_model="unit") if wrap else module
            for _ in range(2):
                step(inputs()).backward()
            results.append([module.first.weight.grad, *module.norm.buffers()])
        assert all(map(torch.equal, *results)) and captured_whole(step)
        assert int(module.norm.num_batches_tracked) == 2


class TestParameters:
    def test_frozen_and_tied(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(self.last(self.first(x).tanh()), self.first.weight[:, :4]).square().mean()

        module = net(forward)
        module.last.weight.requires_grad_(False)
        step = check(module, inputs())
        assert captured_whole(step)

    def test_complex_numbers(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.fft.rfft(self.first(x)) @ self.weight
            return spectrum.abs().square().mean()

        module = net(forward)
        module.weight = nn.Parameter(torch.randn(17, 5, dtype=torch.complex64))
        assert captured_whole(check(module, inputs()))

    def test_sparse_gradients_run_as_before(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(self.embed(x))).square().mean()

        with pytest.warns(RematWarning, match="only strided tensors can be scheduled"):
            step = check(net(forward, embed=nn.Embedding(10, 8, sparse=True)), torch.arange(10))
        assert not step.plans and len(step.failures) == 1


# -- the module stays what it is --------------------------------------------------------------------------------------


class TestModule:
    def test_forward_hooks_fire(self) -> None:
        module, seen = net(), []
        module.first.register_forward_hook(lambda _module, _inputs, output: output * 2)
        module.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape))
        step = check(module, inputs())
        assert not step.failures and len(seen) >= 2

    def test_hooks_of_gradients_fire(self) -> None:
        results = []
        for wrap in (False, True):
            module = net()
            seen: list[torch.Tensor] = []
            module.first.weight.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()) or gradient * 3)
            torch.manual_seed(1)
            (rematerialize(module, budget="min", cost_model="unit") if wrap else module)(inputs()).backward()
            assert len(seen) == 1
            results.append([seen[0], module.first.weight.grad])
        assert all(map(torch.equal, *results))

    def test_nothing_about_it_changes(self) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        keys, attributes, forward = list(module.state_dict()), set(vars(module)), module.forward
        step = rematerialize(module, budget="min", cost_model="unit")
        step(inputs()).sum().backward()
        assert list(module.state_dict()) == keys and set(vars(module)) == attributes and module.forward == forward
        assert type(module) is nn.Sequential and step.original is module
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(copied(inputs()), module(inputs()))
        changed = copy.deepcopy(module)
        with torch.no_grad():
            changed[0].weight.zero_()
        assert not torch.equal(changed(inputs()), module(inputs()))


# -- errors -----------------------------------------------------------------------------------------------------------


class TestErrors:
    def test_an_infeasible_budget_names_the_smallest_and_the_op(self) -> None:
        module = net()
        step = rematerialize(module, budget=1000, cost_model="unit")
        torch.manual_seed(1)
        state = torch.get_rng_state()
        with pytest.raises(InfeasibleBudgetError) as caught:
            step(inputs())
        assert torch.equal(torch.get_rng_state(), state)
        error = caught.value
        assert error.budget_bytes == 1000 and error.smallest_bytes > 1000 and error.op
        assert f"{error.smallest_bytes:,}" in str(error) and error.op in str(error)
        again = rematerialize(module, budget=error.smallest_bytes, cost_model="unit")
        again(inputs()).backward()
        assert again.plan is not None and again.plan.predicted_peak_bytes <= error.smallest_bytes

    @pytest.mark.parametrize("budget", ["much", "8 parsecs", 0.0, 1.5, -1, 0, None, float("nan"), True])
    def test_a_malformed_budget_is_refused_at_once(self, budget: Any) -> None:
        with pytest.raises(BudgetError):
            rematerialize(net(), budget=budget)

    def test_an_unknown_option_is_refused_at_once(self) -> None:
        with pytest.raises(ConfigError, match="unknown option 'solvers'"):
            rematerialize(net(), solvers="milp")
        with pytest.raises(ConfigError, match="choose one of"):
            rematerialize(net(), solver="magic")
        with pytest.raises(ConfigError, match="module or a function"):
            rematerialize(3)  # type: ignore[arg-type]

    def test_the_users_own_error_is_the_users(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

        step = rematerialize(net(forward), budget="min", cost_model="unit")
        with pytest.raises(KeyError, match="mine"):
            step(inputs())


def test_only_buffers_are_copied_to_see_whether_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights and the batch are read again as well, and may be large."""
    copied: list[torch.Size] = []
    monkeypatch.setattr(internals, "copied", lambda value: copied.append(value.shape) or value.clone())

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).requires_grad_(False)
            self.register_buffer("shift", torch.randn(16))
            self.head = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.head(x)
            for layer in self.base:
                h = torch.tanh(layer(h + self.shift) * x)
            return h.square().mean()

    torch.manual_seed(0)
    module, x = Frozen(), torch.randn(64, 16)
    call = rematerialize(module, budget="min", cost_model="unit")
    for _ in range(4):
        call(x).backward()
    assert call.plan.rematerializes
    again = read_again(call._step._plans.graphs[0].captured, call.plan.schedule)
    assert len(again) > 1
    assert copied == [module.shift.shape] * 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_it_was(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off while torch traces, and as it was during planning and afterwards, whatever is raised."""
    during: list[bool] = []
    original = _plans.Plans.first
    monkeypatch.setattr(_plans.Plans, "first", lambda *a, **k: during.append(gc.isenabled()) or original(*a, **k))
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        step = rematerialize(net(), budget="min", cost_model="unit")
        step(inputs()).backward()
        assert step.plan.rematerializes
        with pytest.raises(InfeasibleBudgetError):
            rematerialize(net(), budget="1KiB", cost_model="unit")(inputs())
        assert during == [enabled] * 2 and gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


class Named(torch.Tensor):
    """A tensor by another name."""


class Unnamed(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Named, Unnamed])
def test_tensors_of_a_subclass(kind: type[torch.Tensor]) -> None:
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))

        def loss(x: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
            return module(x).square().mean()

        step: Any = rematerialize(loss, budget="min", solver="greedy", cost_model="unit") if wrap else loss
        results.append([])
        for _ in range(4):
            module.zero_grad()
            x = torch.randn(4, 8).as_subclass(kind).requires_grad_()
            step(x).backward()
            assert x.grad is not None
            gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
            results[-1] += [x.grad.as_subclass(torch.Tensor), *gradients, *(b.clone() for b in module.buffers())]
    assert all(map(torch.equal, *results))
    assert step.runs == (4,) and not step.failures


def test_layers_that_are_unfrozen_and_no_longer_fit_the_budget_end_no_training() -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 1))

    def freeze(module: nn.Sequential, count: int) -> None:
        for i, part in enumerate(module):
            part.requires_grad_(i >= count)

    def trained(module: nn.Sequential, call: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizer, losses = torch.optim.SGD(module.parameters(), 0.01), []
        for count in (14, 0):
            freeze(module, count)
            for _ in range(5):
                losses.append(call(torch.randn(64, 64)).square().mean())
                optimizer.zero_grad()
                losses[-1].backward()
                optimizer.step()
        return [*losses, *module.parameters()]

    options: dict[str, Any] = {"cost_model": "unit", "solver": "greedy"}
    frozen = layers()
    freeze(frozen, 14)
    least = rematerialize(frozen, budget="min", **options)
    least(torch.randn(64, 64)).mean().backward()
    module, eager = layers(), layers()
    step = rematerialize(module, budget=int(1.05 * least.plan.budget_bytes), **options)
    with pytest.warns(RematWarning, match="no longer fits its budget"):
        found = trained(module, step)
    assert all(map(torch.equal, trained(eager, eager), found))
    assert step.runs == (5, 5)


def test_a_share_that_is_too_little_for_a_later_batch_ends_no_training() -> None:
    sizes = [256] * 4 + [1, 2, 3, 4, 5, 6, 7]
    options: dict[str, Any] = {"cost_model": "unit", "solver": "greedy"}

    def layers() -> nn.Module:
        torch.manual_seed(0)
        parts = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
        return nn.Sequential(*parts, nn.Linear(64, 1))

    def trained(module: nn.Module, call: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found = []
        for rows in sizes:
            module.zero_grad()
            call(torch.randn(rows, 64)).mean().backward()
            found += [torch.clone(p.grad) for p in module.parameters() if p.grad is not None]
        return found

    module, eager = layers(), layers()
    step = rematerialize(module, budget=0.3, **options)
    with pytest.warns(RematWarning, match="does not fit its budget, a share, with every batch"):
        found = trained(module, step)
    assert all(map(torch.equal, trained(eager, eager), found)) and not step.failures
    assert sum(step.runs) == len(sizes) and step.plans[0].rematerializes
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in step.plans)
    with pytest.raises(InfeasibleBudgetError):  # as a first batch
        rematerialize(module, budget=0.01, **options)(torch.randn(256, 64))


class HooksItself(nn.Module):
    """Dynamo leaves a function alone that registers hooks, and captures what that calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 512)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)).tanh().tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: list[torch.Tensor] = []
        hook = self.first.register_forward_hook(lambda _module, _args, output: features.append(output))
        y = self.hidden(x)
        hook.remove()
        return self.second(y).exp().sum() + features[0].exp().sum()


def test_what_dynamo_skips_is_told_and_counted() -> None:
    torch.manual_seed(0)
    eager, x = HooksItself(), torch.randn(256, 32)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget="min", time_limit=0.5)

    def train(call: Any, parameters: Any) -> torch.Tensor:
        loss = call(x)
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        return loss.detach()

    with pytest.warns(RematWarning, match=r"only a part of HooksItself could be captured: what is done with second\."):
        losses = [train(step, module.parameters())]
    assert sum(step.runs) == 1
    losses += [train(step, module.parameters()) for _ in range(2)]
    held = held_bytes(module, (x,), gradients=True, device="cpu")
    measured = held + peak_memory(lambda: train(step, module.parameters()), "cpu")
    assert step.plan is not None and measured > 1.5 * step.plans[0].predicted_peak_bytes
    assert measured == pytest.approx(step.plan.predicted_peak_bytes, rel=0.02), "what runs beside the plan is counted"
    assert losses == [train(eager, eager.parameters())] * 3
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_what_is_computed_before_a_call_is_no_part_of_it() -> None:
    model = nn.ModuleDict(
        {"encoder": nn.Linear(8, 32), "head": nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))}
    )
    step = rematerialize(lambda hidden: model["head"](hidden).square().mean(), budget="min", time_limit=0.5)
    hidden = model["encoder"](torch.randn(16, 8)).tanh()
    hidden.retain_grad()  # Dynamo asks for it
    step(hidden).backward()
    assert model in step.modules and not step.failures and step.runs == (1,)


def test_that_nothing_is_captured_any_more_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(8, 8)
    step = rematerialize(module, budget="min", time_limit=0.5)
    step(x).sum().backward()
    captures = step.scheduled._captures  # as where Dynamo has reached its limits
    monkeypatch.setattr(captures, "chosen", lambda leaves: (step.scheduled.function, False, []))
    assert not step(torch.randn(4, 8)).isnan().any() and not step.failures, (
        "of other shapes nothing was captured before"
    )
    with torch.no_grad():
        step(x)
    with pytest.warns(RematWarning, match="torch has given up on what was captured"):
        step(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x).sum().backward()
    assert sum(step.runs) == 1 and len(step.failures) == 1

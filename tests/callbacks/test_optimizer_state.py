"""The state of an optimizer that has not stepped yet, against what it really holds after its first step."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from lightning_remat.callbacks.optimizer_state import optimizer_state_bytes
from lightning_remat.measure import held_bytes
from lightning_remat.planner import RematWarning
from tests.helpers.training import Classifier, assert_same, callback, compare, fit, loader
from tests.helpers.training import network as classifier

CPU = torch.device("cpu")
optim = torch.optim


class OwnAttributes(optim.Optimizer):
    """Written by a user: keeps things on itself, draws random numbers, and asks for a tensor's value."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.norms = []
        self.scale = torch.ones(())

    @torch.no_grad()
    def step(self, closure=None):
        self.scale.mul_(0.5)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.norms.append(p.grad.norm().item())
                state = self.state[p]
                if not state:
                    state["noise"] = torch.randn(3, *p.shape, dtype=torch.float64)
                p.add_(p.grad, alpha=-group["lr"])


class Wrapper(optim.Optimizer):
    """Holds another optimizer on the same parameters, as lookahead and the like do."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["slow"] = p.detach().clone()


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "SGD foreach": lambda p: optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p),
    "Adam foreach": lambda p: optim.Adam(p, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, fused=True),
    "AdamW amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "AdamW single": lambda p: optim.AdamW(p, foreach=False),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "RMSprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adafactor": lambda p: optim.Adafactor(p),
    "own attributes": OwnAttributes,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    net[2].weight.requires_grad_(False)
    return net


def groups(net: nn.Module):
    return [{"params": list(net[0].parameters())}, {"params": list(net[1:].parameters()), "weight_decay": 0.1}]


def train(net: nn.Module, optimizer) -> None:
    net(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exact(name):
    net = network()
    optimizer = OPTIMIZERS[name](groups(net))
    with warnings.catch_warnings():
        # Torch's own advice, where a scheduler is made before the first step.
        warnings.simplefilter("error")
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
        predicted = optimizer_state_bytes([optimizer], CPU)
    train(net, optimizer)
    scheduler.step()
    assert predicted == held_bytes(optimizer, device=CPU)
    assert (predicted == 0) == (name == "SGD")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_and_parameters_are_untouched(name):
    net = network()
    optimizer = OPTIMIZERS[name](groups(net))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    before = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    attributes = {key: repr(value) for key, value in vars(optimizer).items()}
    parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
    optimizer_state_bytes([optimizer], CPU)
    assert calls == []
    assert parameters == [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert {key: repr(value) for key, value in vars(optimizer).items()} == attributes
    assert_same(before[1], optimizer.state_dict())
    assert_same(before[2], torch.get_rng_state())
    assert_same(before[0], net.state_dict())
    assert all(p.grad is None for p in net.parameters())
    optimizer.zero_grad()
    net(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    assert calls == ["before", "after"]


def test_wrapped_optimizer_leaves_the_parameters_alone():
    net = network()
    wrapper = Wrapper(optim.SGD(net.parameters(), 0.1, momentum=0.9))
    before = copy.deepcopy(net.state_dict())
    predicted = optimizer_state_bytes([wrapper], CPU)
    assert_same(before, net.state_dict())
    assert wrapper.inner.state_dict()["state"] == {}
    train(net, wrapper)
    assert predicted == held_bytes(wrapper, device=CPU)


def test_existing_state_is_counted_as_it_is():
    net = network()
    optimizer = optim.Adam(net.parameters())
    train(net, optimizer)
    assert optimizer_state_bytes([optimizer], CPU) == held_bytes(optimizer, device=CPU) > 0


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "Adagrad"])  # torch makes its state with it
def test_a_group_that_is_added_later(name):
    net = network()
    optimizer = OPTIMIZERS[name](groups(net)[:1])
    train(net, optimizer)
    optimizer.add_param_group({"params": list(net[1:].parameters())})
    predicted = optimizer_state_bytes([optimizer], CPU)
    train(net, optimizer)
    assert predicted == held_bytes(optimizer, device=CPU)
    assert predicted == optimizer_state_bytes([optimizer], CPU)


def test_parameters_that_ask_for_gradients_later():
    net = network()
    optimizer = optim.Adam(net.parameters())
    train(net, optimizer)
    before = held_bytes(optimizer, device=CPU)
    net[2].weight.requires_grad_(True)
    predicted = optimizer_state_bytes([optimizer], CPU)
    train(net, optimizer)
    assert predicted == held_bytes(optimizer, device=CPU) > before


def test_existing_state_is_not_copied():
    net = network()
    optimizer = Wrapper(optim.SGD(net[:2].parameters(), 0.1, momentum=0.9))
    train(net, optimizer)
    for state in (*optimizer.state.values(), *optimizer.inner.state.values()):
        state["uncopyable"] = threading.Lock()
    before = held_bytes(optimizer, device=CPU)
    added = {"params": list(net[3:].parameters())}
    optimizer.inner.add_param_group(added)
    optimizer.param_groups = optimizer.inner.param_groups
    assert optimizer_state_bytes([optimizer], CPU) == before + held_bytes(added, device=CPU)


def test_state_that_is_not_kept_by_parameter_is_counted_as_it_is():
    net = network()
    optimizer = optim.Adam(net.parameters())
    optimizer.state["all"] = {"momentum": torch.zeros(100)}
    assert optimizer_state_bytes([optimizer], CPU) == held_bytes(optimizer, device=CPU)


def test_restored_state_is_counted_as_it_is():
    net = network()
    optimizer = optim.Adam(groups(net))
    train(net, optimizer)
    restored = optim.Adam(groups(net))
    restored.load_state_dict(optimizer.state_dict())
    assert optimizer_state_bytes([restored], CPU) == held_bytes(optimizer, device=CPU)


def test_several_optimizers_are_added_up():
    net = network()
    one, other = optim.Adam(net[0].parameters()), optim.Adagrad(net[1:].parameters())
    both = optimizer_state_bytes([one, other], CPU)
    assert both == optimizer_state_bytes([one], CPU) + optimizer_state_bytes([other], CPU)


def test_another_device_holds_nothing():
    assert optimizer_state_bytes([optim.Adam(network().parameters())], torch.device("meta")) == 0


def test_lbfgs_warns():
    net = network()
    with pytest.warns(RematWarning, match=r"LBFGS's state cannot be found .*reserve"):
        assert optimizer_state_bytes([optim.LBFGS(net[0].parameters())], CPU) == 0


def test_lbfgs_with_state():
    net = network()
    optimizer = optim.LBFGS(net[0].parameters())
    x = torch.randn(4, 8)

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer_state_bytes([optimizer], CPU) == held_bytes(optimizer, device=CPU) > 0


class WantsAClosure(optim.Adam):
    """Its step cannot be tried, so that its state is known once it is there."""

    def step(self, closure):
        loss = closure()
        super().step()
        return loss


def test_a_group_that_is_added_to_an_optimizer_that_wants_a_closure_warns():
    net = network()
    optimizer = WantsAClosure(net[:2].parameters())
    net(torch.randn(4, 8)).square().sum().backward()
    optimizer.step(lambda: None)
    optimizer.add_param_group({"params": list(net[2:].parameters())})
    with pytest.warns(RematWarning, match=r"WantsAClosure's state cannot be found .*reserve"):
        assert optimizer_state_bytes([optimizer], CPU) == held_bytes(optimizer, device=CPU) > 0


class Finetuned(Classifier):
    def __init__(self):
        super().__init__()
        self.backbone, self.net = classifier(2, 64)[:-1], nn.Linear(64, 4)

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(self.backbone(x)), y)

    def configure_optimizers(self):
        return optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


def test_a_step_stays_within_its_budget_when_a_backbone_is_unfrozen():
    def data():
        return loader(64, 16, 64)

    remat = callback("min", measure=True)
    _, scheduled, _ = compare(
        Finetuned, plans=2, train=data, max_epochs=3, callbacks=lambda: [Finetuning()], remat=remat
    )
    assert len(scheduled.trainer.optimizers[0].param_groups) == 2
    assert remat.measured_peak_bytes == pytest.approx(remat.plan.predicted_peak_bytes, rel=0.01)
    assert remat.measured_peak_bytes <= remat.plan.budget_bytes


class Added(Finetuned):
    """The backbone asks for gradients all along."""

    def configure_optimizers(self):
        return optim.Adam(self.net.parameters(), lr=0.01)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.backbone.parameters())})

    def on_before_zero_grad(self, optimizer):
        self.backbone.zero_grad()  # the optimizer does not, before it has the backbone


def test_plans_count_the_state_of_parameters_that_are_added_to_an_optimizer():
    remat = callback("min", measure=True)
    compare(Added, plans=1, train=lambda: loader(64, 16, 64), max_epochs=3, remat=remat)
    assert remat.measured_peak_bytes == pytest.approx(remat.plan.predicted_peak_bytes, rel=0.01)
    assert remat.measured_peak_bytes <= remat.plan.budget_bytes


def test_without_room_for_the_state_of_added_parameters_there_is_a_warning():
    first = callback("min")
    fit(Added, first, train=lambda: loader(64, 16, 64))
    remat = callback(first.plan.budget_bytes)
    with pytest.warns(RematWarning, match=r"parameters were added .*no room for the [\d,]+ bytes of state"):
        fit(Added, remat, train=lambda: loader(64, 16, 64), max_epochs=2)
    assert len(remat.plans) == 1 and sum(remat.runs) == 8


class Closed(Finetuned):
    def configure_optimizers(self):
        return WantsAClosure(self.parameters(), lr=0.01)


def test_plans_count_state_that_is_not_known_before_the_first_step():
    remat = callback("min", measure=True)
    with pytest.warns(RematWarning, match=r"WantsAClosure's state cannot be found before its first step"):
        _, scheduled, _ = compare(Closed, plans=1, train=lambda: loader(64, 16, 64), max_epochs=2, remat=remat)
    assert held_bytes(scheduled.trainer.optimizers, device=CPU) > 2**14
    assert remat.measured_peak_bytes == pytest.approx(remat.plan.predicted_peak_bytes, rel=0.01)
    assert remat.measured_peak_bytes <= remat.plan.budget_bytes


def test_without_room_for_state_that_comes_later_there_is_a_warning():
    first = callback("min")
    with pytest.warns(RematWarning, match=r"cannot be found before its first step"):
        fit(Closed, first, train=lambda: loader(64, 16, 64), limit_train_batches=1)
    remat = callback(first.plan.budget_bytes)
    no_room = r"the state of WantsAClosure was not known .*no room for the [\d,]+ bytes of state"
    with pytest.warns(RematWarning, match=no_room), pytest.warns(RematWarning, match="cannot be found"):
        fit(Closed, remat, train=lambda: loader(64, 16, 64), max_epochs=2)
    assert len(remat.plans) == 1 and sum(remat.runs) == 8

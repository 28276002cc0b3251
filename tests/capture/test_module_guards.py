"""Guards on modules, which are asked only when something has changed that they read."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture._torch import _module_guards
from lightning_remat.capture._torch._module_guards import ModuleGuards
from tests.helpers.cases import diagonal


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.0)
        self.scale = 2.0
        self.shape = [1, -1]
        self.table = {"factor": 3}
        self.more: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.norm(self.linear(x))).tanh() * self.scale * self.table["factor"]
        if len(self.shape) > 2:
            y = y + 1
        if self.more is not None:
            y = y.sin()
        return x + y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.heads = nn.ModuleDict({"out": nn.Linear(8, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.heads["out"](x).square().mean()
        return out


class Guarded(Net):
    """One whose attributes are looked up by a method of its own, as those of Lightning's modules are."""

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Other(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether all was as it had been, each time that it was looked at."""
    found: list[bool] = []
    unchanged = _module_guards._Group.unchanged

    def noted(group: _module_guards._Group, module: nn.Module) -> bool:
        found.append(unchanged(group, module))
        return found[-1]

    monkeypatch.setattr(_module_guards._Group, "unchanged", noted)
    return found


def _planned(function: Callable[..., torch.Tensor]) -> Rematerialized:
    return rematerialize(function, budget="min", cost_model="unit", solver="greedy", time_limit=1.0)


def _state(net: nn.Module, loss: torch.Tensor) -> list[torch.Tensor | None]:
    return [loss.detach(), *(p.grad for p in net.parameters()), *net.buffers()]


def _equal(net: nn.Module, eager: nn.Module, step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    ours, theirs = step(x), eager(x)
    for one in (net, eager):
        one.zero_grad()
    if theirs.requires_grad:
        ours.backward()
        theirs.backward()
    pairs = zip(_state(net, ours), _state(eager, theirs), strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def _hook(net: Net) -> None:
    net.blocks[1].linear.register_forward_hook(lambda _module, _inputs, output: output * 2)


def _pre_hook(net: Net) -> None:
    net.blocks[2].norm.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 2,))


def _hook_in_new_dict(net: Net) -> None:
    net.blocks[1].linear._forward_hooks = OrderedDict()
    _hook(net)


def _frozen(net: Net) -> None:
    net.blocks[1].linear.weight.requires_grad_(False)


def _evaluated(net: Net) -> None:
    net.blocks[1].norm.eval()


def _all_evaluated(net: Net) -> None:
    net.eval()


def _other_module(net: Net) -> None:
    torch.manual_seed(6)
    net.blocks[1].linear = Other(8, 8)


def _alike_module(net: Net) -> None:
    torch.manual_seed(5)
    net.blocks[1].linear = nn.Linear(8, 8)


def _other_constant(net: Net) -> None:
    net.blocks[2].scale = 0.5


def _item(net: Net) -> None:
    net.blocks[2].table["factor"] = 5


def _longer(net: Net) -> None:
    net.blocks[0].shape.append(1)


def _no_longer_none(net: Net) -> None:
    net.blocks[0].more = 3


def _own_forward(net: Net) -> None:
    linear = net.blocks[0].linear
    plain = linear.forward
    linear.forward = lambda x: plain(x) * 3  # type: ignore[method-assign]


def _other_class(net: Net) -> None:
    net.blocks[0].linear.__class__ = Other


def _parametrized(net: Net) -> None:
    parametrize.register_parametrization(net.blocks[0].linear, "weight", Doubled())


def _removed(net: Net) -> None:
    del net.blocks[2]


def _added(net: Net) -> None:
    torch.manual_seed(7)
    net.blocks.append(Block())


def _no_bias(net: Net) -> None:
    net.blocks[1].linear.bias = None  # type: ignore[assignment]


def _wider(net: Net) -> None:
    net.zero_grad()
    net.heads["out"].weight.data = torch.ones(2, 8)
    net.heads["out"].bias.data = torch.ones(2)


def _tied(net: Net) -> None:
    net.blocks[0].linear.weight = net.blocks[1].linear.weight


def _tied_buffers(net: Net) -> None:
    net.blocks[0].norm.running_mean = net.blocks[1].norm.running_mean


def _moved_buffer(net: Net) -> None:
    net.blocks[0].norm.running_mean = torch.full((8,), 0.25)


def _attributes_replaced(net: Net) -> None:
    block = net.blocks[1]
    block.__dict__ = {**block.__dict__, "scale": 4.0}


def _data(net: Net) -> None:
    net.blocks[1].linear.weight.data = torch.ones(8, 8).t()


CHANGES = [value for name, value in list(globals().items()) if name.startswith("_") and callable(value)]
CHANGES = [one for one in CHANGES if getattr(one, "__annotations__", {}).keys() == {"net", "return"}]
UNSEEN = {_wider} if torch.__version__.startswith("2.11.") else set[object]()
"""Changes that torch's own guards do not see."""


@pytest.mark.parametrize(("change", "kind"), diagonal(CHANGES, [Net, Guarded]))
def test_a_change_is_noticed(change: Callable[[Net], None], kind: type[Net], answers: list[bool]) -> None:
    if change in UNSEEN:
        pytest.skip("torch goes on with the old sizes")
    net = kind()
    eager, x = copy.deepcopy(net), torch.randn(4, 8)
    step = _planned(net)
    for _ in range(3):
        assert _equal(net, eager, step, x)
    assert answers[-2:] == [True, True]
    change(net)
    change(eager)
    answers.clear()
    assert _equal(net, eager, step, x)
    assert False in answers or change is _data
    for _ in range(3):
        assert _equal(net, eager, step, x)
    assert answers[-1]
    assert step.plans and not step.failures


def test_there_are_changes() -> None:
    assert len(CHANGES) == 24


def test_what_guards_do_not_read_may_change(answers: list[bool]) -> None:
    net, x = Guarded(), torch.randn(4, 8)
    eager = copy.deepcopy(net)
    step = _planned(net)
    for number in range(6):
        net.blocks[0].seen = number  # type: ignore[assignment]
        net.seen = number  # type: ignore[assignment]
        assert _equal(net, eager, step, x)
    assert answers[-4:] == [True] * 4
    assert step.plans and not step.failures


def test_what_changes_in_each_call_is_no_longer_looked_at(answers: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules take turns in one captured frame."""
    looked: list[object] = []
    same = _module_guards._Seen.same
    monkeypatch.setattr(_module_guards._Seen, "same", lambda seen: looked.append(seen) or same(seen))
    nets, x = [Net(), Net()], torch.randn(4, 8)
    copies = copy.deepcopy(nets)

    def both(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net(x)  # type: ignore[no-any-return]

    step = _planned(both)
    for _ in range(12):
        for net, eager in zip(nets, copies, strict=True):
            assert _equal(net, eager, lambda x, net=net: step(net, x), x)  # type: ignore[misc]
    assert answers and not any(answers[-8:])
    known = len(looked)
    step(nets[0], x)
    assert len(looked) == known
    assert step.plans and not step.failures


def test_a_module_that_is_gone_is_let_go_of() -> None:
    net, x = Net(), torch.randn(4, 8)
    step = _planned(net)
    for _ in range(3):
        step(x).backward()
    gone = weakref.ref(net.blocks[1].linear)
    _alike_module(net)
    step(x).backward()
    gc.collect()
    assert gone() is None


def test_no_step_is_kept_by_its_guards() -> None:
    net, x = Net(), torch.randn(4, 8)
    step = _planned(net)
    for _ in range(3):
        step(x).backward()
    gone = weakref.ref(net)
    del step, net
    for _ in range(3):
        gc.collect()
    assert gone() is None


def test_the_reason_of_a_capture_is_told_as_before() -> None:
    net, x = Net(), torch.randn(4, 8)
    step = _planned(net)

    def train() -> None:
        for number in range(8):
            net.blocks[1].more = (number,)
            step(x).backward()

    told = "changes" if torch.__version__.startswith("2.11.") else "more"  # which has no reasons
    with pytest.warns(UserWarning, match=told):
        train()


def test_guards_stay_where_torch_has_no_such_check(monkeypatch: pytest.MonkeyPatch, answers: list[bool]) -> None:
    monkeypatch.delattr(_module_guards._compiled, "TensorGuards")
    net, x = Net(), torch.randn(4, 8)
    eager = copy.deepcopy(net)
    step = _planned(net)
    for change in (_hook, _evaluated):
        assert _equal(net, eager, step, x)
        change(net)
        change(eager)
        assert _equal(net, eager, step, x)
    assert not answers
    with ModuleGuards().grouped():
        pass

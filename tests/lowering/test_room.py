"""Small tensors' batch norms and convolutions run as eager mode calls them where a schedule has room, and nowhere else."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.capture._overwriting import batch_norm_backward
from lightning_remat.lowering import _aten
from lightning_remat.lowering._room import SMALL_BYTES, Room
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.schedule import Compute, simulate

aten = torch.ops.aten
TRAINED_AGAIN = (aten.native_batch_norm_backward.default, batch_norm_backward, aten.convolution_backward.default)
BUDGETS = (1.0, 0.7, 0.4, "min")


class Block(nn.Module):
    def __init__(self, width: int, inplace: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=inplace) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.act = nn.ReLU(inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.norms[0](self.first(x)))
        return self.act(self.norms[1](self.second(h)) + x)


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width, bool(i % 2)) for i in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Lowered:
    """What is lowered: the room that was found, and the calls of the backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Any, Any, Room]] = []
        self.calls: Counter[Any] = Counter()
        room, lower = _aten.room, _aten.lower_backward

        def looked(captured, schedule):
            self.found.append((captured, schedule, room(captured, schedule)))
            return self.found[-1][2]

        def lowered(*args, **kwargs):
            module = lower(*args, **kwargs)
            self.calls = Counter(node.target for node in module.graph.nodes if node.target in TRAINED_AGAIN)
            return module

        monkeypatch.setattr(_aten, "room", looked)
        monkeypatch.setattr(_aten, "lower_backward", lowered)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Lowered:
    return Lowered(monkeypatch)


def trained(module: nn.Module, step: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    for number in range(3):
        optimizer.zero_grad()
        loss = step(x)
        loss.backward()
        optimizer.step()
        found[f"loss {number}"] = loss.detach()
    found.update({name: p.grad for name, p in module.named_parameters()})
    return found | {f"state of {name}": value for name, value in module.state_dict().items()}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
def test_bits_and_peaks(lowered: Lowered, budget: float | str, channels_last: bool) -> None:
    torch.manual_seed(0)
    eager, x = Net(), torch.randn(2, 3, 16, 16)
    if channels_last:
        eager, x = eager.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(eager)
    step = rematerialize(other, budget=budget, solver="greedy", time_limit=0.5)
    expected, got = trained(eager, eager, x), trained(other, step, x)
    assert not step.failures and len(step.plans) == 1
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(value, got[name]) and value.stride() == got[name].stride(), name
    other.zero_grad()
    measured = held_bytes(other, x, gradients=True) + peak_memory(lambda: step(x).backward(), "cpu")
    assert 0.98 * step.plans[0].predicted_peak_bytes <= measured <= step.plans[0].predicted_peak_bytes


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_more_is_held_than_at_the_peak(lowered: Lowered, budget: float | str) -> None:
    torch.manual_seed(0)
    step = rematerialize(Net(), budget=budget, solver="greedy", time_limit=0.5)
    step(torch.randn(2, 3, 16, 16)).backward()
    captured, schedule, room = lowered.found[-1]
    held = simulate(captured.graph, schedule).during
    most = held[schedule.boundary :].max()
    besides = held * 0
    for number in room.plain:
        assert captured.nodes[schedule.steps[number].op].target is batch_norm_backward
        besides[number] += 2 * 2 * 8 * 16 * 16 * 4 if schedule.steps[number].over >= 0 else 2 * 8 * 16 * 16 * 4
    for first, op in room.joined.items():
        last = next(i for i in room.done if schedule.steps[i].op == op)
        assert schedule.boundary <= first < last
        storages = {captured.graph.tensors[t].storage for t in captured.graph.ops[op].outputs}
        besides[first:last] += sum(captured.graph.storages[s] for s in storages)
    assert (held + besides)[schedule.boundary :].max() == most
    # Each at least once: what is slow when it is measured decides what is evaluated again.
    evaluated = [captured.nodes[one.op] for one in schedule.steps[schedule.boundary :] if isinstance(one, Compute)]
    of_norms = [node for node in evaluated if node is not None and node.target is batch_norm_backward]
    halves = [node for node in evaluated if node is not None and "remat_half" in node.meta]
    wholes = [node for node in evaluated if node is not None and node.target is aten.convolution_backward.default]
    wholes = [node for node in wholes if "remat_half" not in node.meta]
    assert (len({*of_norms}), len({*halves}), len({*wholes})) == (8, 16, 1)
    norms, plain = lowered.calls[batch_norm_backward], lowered.calls[aten.native_batch_norm_backward.default]
    assert (norms, plain) == (len(of_norms) - len(room.plain), len(room.plain))
    assert lowered.calls[aten.convolution_backward.default] == len(halves) + len(wholes) - len(room.joined)
    if budget == 1.0:
        assert len(room.plain) >= 6 and len(room.joined) >= 4


def test_large_tensors_are_left_as_planned(lowered: Lowered) -> None:
    step = rematerialize(Net(depth=1), budget=1.0, solver="greedy", time_limit=0.5)
    for side, small in ((16, True), (512, False)):
        x = torch.randn(1, 3, side, side)
        assert (8 * side * side * 4 <= SMALL_BYTES) is small
        step(x).backward()
        assert bool(lowered.found[-1][2].plain) is small
        assert (lowered.calls[batch_norm_backward] == 2) is not small


def test_what_is_read_must_be_there(lowered: Lowered) -> None:
    """Halves stay apart where the later one reads what is made between the two."""
    step = rematerialize(Net(), budget="min", solver="greedy", time_limit=0.5)
    step(torch.randn(2, 3, 16, 16)).backward()
    captured, schedule, room = lowered.found[-1]
    for first, op in room.joined.items():
        last = next(i for i in room.done if schedule.steps[i].op == op)
        between = [step.op for step in schedule.steps[first + 1 : last] if isinstance(step, Compute)]
        made = {t for one in between for t in captured.graph.ops[one].outputs}
        assert made.isdisjoint(captured.graph.ops[op].inputs)

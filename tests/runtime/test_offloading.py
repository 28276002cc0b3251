"""Steps whose tensors may wait on the host: which do, and what is told where they stay on the device."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import Plan, rematerialize
from lightning_remat.errors import RematWarning
from lightning_remat.graph import Host
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.planner import _host
from lightning_remat.runtime import _recordings
from lightning_remat.schedule import OUTSIDE
from tests.exactness.test_exactness import Outcome, check_budget, eager, gpt2, unet
from tests.helpers.cases import slow_but
from tests.helpers.host_copies import Copies, planned_with_copies
from tests.helpers.nets import Net, inputs, net, same
from tests.helpers.tapes import FakeTapes

OPTIONS: dict[str, Any] = {"offload": "host", "cost_model": "unit", "tiling": "off", "time_limit": 0.5}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return planned_with_copies(monkeypatch)


def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
    return self.last(functional.dropout(self.first(x).tanh().sin(), 0.2)).square().mean()


def trained(module: nn.Module, call: Any, batches: list[torch.Tensor], loss: Any = lambda x: x) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        losses.append(loss(call(batch)))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [*losses, *(p.detach() for p in module.parameters())]


def both(
    module: nn.Module, batches: list[torch.Tensor], loss: Any = lambda x: x, **options: Any
) -> tuple[Any, nn.Module]:
    """Train with and without; the results must be the same. Returns the step, and its module."""
    other = copy.deepcopy(module)
    step = rematerialize(other, **{"budget": 0.5, **OPTIONS, **options})
    assert all(map(same, trained(module, module, batches, loss), trained(other, step, batches, loss)))
    return step, other


def test_a_plan_says_what_waits_on_the_host(copies: Copies, tmp_path: Any) -> None:
    step, _ = both(net(forward), [inputs()] * 2)
    plan = step.plan
    assert plan.copies == 2 * len(copies.to_host) // 2 and plan.host_bytes == sum(copies.to_host) // 2 > 0
    assert f"on the host ({plan.copies} copies)" in plan.summary()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (
        loaded == plan and loaded.graph.host == plan.graph.host and loaded.timeline().seconds == plan.predicted_seconds
    )


def test_without_the_option_nothing_is_copied(copies: Copies) -> None:
    step, _ = both(net(forward), [inputs()], offload="off")
    assert step.plan.graph.host is None and not step.plan.copies and not copies.to_host
    assert "host" not in step.plan.graph.to_dict() and "copies" not in step.plan.to_dict()


def test_a_loss_outside_of_it_is_measured_and_planned_for(copies: Copies) -> None:
    def logits(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.dropout(self.first(x).tanh().sin(), 0.2))

    def loss(found: torch.Tensor) -> torch.Tensor:
        return (found.repeat(1, 64).sin() * 2).square().mean()

    step, module = both(net(logits), [inputs()] * 4, loss, budget="64MiB", cost_model="profile")
    assert step.plan.copies and len(step.plans) > 1
    assert [op.workspace_bytes > 0 for op in step.plan.graph.ops if op.name == OUTSIDE] == [True]

    def training_step() -> None:
        found = loss(step(inputs()))
        module.zero_grad()
        found.backward()

    measured = held_bytes(module, inputs(), gradients=True) + peak_memory(training_step, "cpu")
    assert measured <= step.plan.budget_bytes


@pytest.mark.filterwarnings("ignore:.*cannot be recorded")
def test_a_schedule_with_copies_is_not_recorded(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    tapes: list[FakeTapes] = []

    def make(device: torch.device) -> FakeTapes:
        tapes.append(FakeTapes(device))
        return tapes[-1]

    monkeypatch.setitem(_recordings.TAPES, "cpu", make)
    module = net(forward)
    with pytest.warns(RematWarning, match="cannot be recorded.*copied to the host and back") as told:
        both(module, [inputs()] * 8, cuda_graphs=True)
    assert len(told) == 1 and copies.to_host and not any(one.tapes for one in tapes)
    both(module, [inputs()] * 8, cuda_graphs=True, offload="off")
    assert any(one.tapes for one in tapes)


def test_of_several_graphs_nothing_is_copied_and_that_is_logged_once(
    copies: Copies, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Net, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh().sin()
        torch._dynamo.graph_break()
        return self.last(x.cos()).square().mean()

    with caplog.at_level(logging.INFO, "lightning_remat"):
        both(net(broken), [inputs()] * 4, budget=1.0)
    assert not copies.to_host
    assert sum("keeps its tensors on the device: it is captured as several graphs" in m for m in caplog.messages) == 1


def test_of_sizes_that_vary_nothing_is_copied_and_that_is_logged_once(
    copies: Copies, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning_remat"):
        both(net(forward), [inputs(rows) for rows in (8, 16, 24, 32, 40, 48, 56)], budget=1.0)
    before = len(copies.to_host)
    assert sum("keeps its tensors on the device: its sizes vary" in m for m in caplog.messages) == 1
    assert before <= 4 * 8  # of the first calls alone, whose sizes were taken for fixed


@pytest.mark.long
@pytest.mark.parametrize("make", slow_but({gpt2}, [gpt2, unet]))
def test_networks_train_with_eagers_bits_within_the_budget_for_less(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By plans, with copies as fast as a GPU's."""
    monkeypatch.setattr(_host, "copy_speeds", lambda *_: Host(0, 2e10, 2e10, 1e-6))
    overhead = {}
    for offload in ("off", "host"):
        module, batch, right = eager(make)
        step = rematerialize(module, budget=0.5, offload=offload, tiling="off", time_limit=4.0)
        Outcome(module, step, batch).assert_same(right)
        assert step.plan is not None and not step.failures
        check_budget(step, module, batch)
        overhead[offload] = step.plan.overhead
    assert step.plan.copies and overhead["host"] < overhead["off"] / 2

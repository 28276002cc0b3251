"""Dynamo turned off, or set to be strict, by the user: training goes on, and a warning says by what."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_remat import Rematerialized, RematWarning, rematerialize
from tests.helpers.training import WIDTH, network


def step_of(module: torch.nn.Module) -> Rematerialized:
    return rematerialize(module, budget=0.6, cost_model="unit", solver="greedy")


def trained(call: Any, module: torch.nn.Module, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    module.zero_grad()
    loss = call(torch.randn(rows, WIDTH)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def same(step: Rematerialized, module: torch.nn.Module, eager: torch.nn.Module, rows: int) -> bool:
    return all(map(torch.equal, trained(step, module, rows), trained(eager, eager, rows)))


@pytest.fixture
def modules() -> tuple[torch.nn.Module, torch.nn.Module]:
    made = network()
    return made, copy.deepcopy(made)


TURNED_OFF = {
    "config": (lambda: torch._dynamo.config.patch(disable=True), "TORCH_COMPILE_DISABLE=1"),
    "eager": (lambda: torch.compiler.set_stance("force_eager"), r'set_stance\("force_eager"\)'),
    "strict": (lambda: torch.compiler.set_stance("fail_on_recompile"), r'set_stance\("fail_on_recompile"\)'),
}


@pytest.mark.parametrize("how", TURNED_OFF)
def test_for_a_while(how: str, modules: tuple[torch.nn.Module, torch.nn.Module]) -> None:
    """The warning comes once; what is captured afterwards is planned."""
    module, eager = modules
    step = step_of(module)
    off, by = TURNED_OFF[how]
    with off():
        with pytest.warns(RematWarning, match=by) as told:
            assert all(same(step, module, eager, rows) for rows in (8, 12))
        assert len(told) == 1 and len(step.failures) == 1 and not step.plans
    assert same(step, module, eager, 8)
    assert step.runs == (1,) and step.plan.rematerializes


@pytest.mark.parametrize("unset", [False, True])
def test_by_the_environment(
    unset: bool, modules: tuple[torch.nn.Module, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo reads the variable when a function is given to it."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    module, eager = modules
    step = step_of(module)
    if unset:
        monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with pytest.warns(RematWarning, match="" if unset else "TORCHDYNAMO_DISABLE=1"):
        assert same(step, module, eager, 8)
    assert not step.plans and len(step.failures) == 1


def test_new_shapes_are_captured_though_the_users_own_may_not_be(
    modules: tuple[torch.nn.Module, torch.nn.Module],
) -> None:
    module, eager = modules
    step = step_of(module)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert all(same(step, module, eager, rows) for rows in (8, 12))
    assert len(step.plans) == 2 and sum(step.runs) == 2 and not step.failures

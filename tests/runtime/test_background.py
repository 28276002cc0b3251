"""A plan that gets cheaper while training runs: the search in a process of its own, and what happens when that goes wrong."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch

from lightning_remat import rematerialize
from lightning_remat.callbacks import RematCallback
from lightning_remat.planner import Plan, RematConfig, _make, make_plan
from lightning_remat.planner._plan_cache import PlanCache
from lightning_remat.runtime import Agreement, _improving, _search
from lightning_remat.runtime._search import Search
from lightning_remat.runtime._shared_search import TellingSearch, ToldSearch
from lightning_remat.solvers import Solution, Status, solve
from tests.helpers.graphs import unit_chain

CHAIN = unit_chain(24)
BUDGET = 8


@functools.cache
def dear_plan() -> Plan:
    """A valid plan that is far from the cheapest."""
    plan = make_plan(CHAIN, RematConfig(budget=BUDGET, solver="linearized_greedy"))
    best = solve(CHAIN, BUDGET, "auto")
    assert plan.predicted_seconds > 1.05 * best.seconds
    return plan


def wait_for(search: Search, seconds: float = 60.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = search.better()
        if found is not None or not search.running:
            return found
        time.sleep(0.05)
    raise AssertionError("nothing was found, and the search goes on")


@pytest.mark.long
def test_the_process_finds_a_cheaper_schedule_and_ends() -> None:
    plan = dear_plan()
    search = Search(plan, RematConfig(budget=BUDGET, time_limit=2.0))
    process = search._process
    assert process is not None
    solution = wait_for(search)
    assert solution is not None and solution.schedule is not None
    assert solution.seconds < plan.predicted_seconds
    assert solution.peak_bytes <= BUDGET
    while search.running:
        search.better()
        time.sleep(0.05)
    assert process.returncode == 0
    assert search.completed
    assert not search._better.parent.exists()


def test_closing_ends_the_process() -> None:
    search = Search(dear_plan(), RematConfig(budget=BUDGET, time_limit=600.0))
    process = search._process
    assert process is not None and process.poll() is None
    search.close()
    assert process.poll() is not None
    assert not search.running and search.better() is None


def test_the_process_ends_when_the_training_does() -> None:
    search = Search(dear_plan(), RematConfig(budget=BUDGET, time_limit=600.0))
    process = search._process
    assert process is not None and process.stdin is not None
    time.sleep(2.0)
    process.stdin.close()  # what the system does with the pipes of a process that is gone
    assert process.wait(timeout=30) == 0


def test_a_killed_process_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    search = Search(dear_plan(), RematConfig(budget=BUDGET, time_limit=600.0))
    assert search._process is not None
    os.kill(search._process.pid, signal.SIGKILL)
    search._process.wait()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert search.better() is None
    assert len(caplog.records) == 1
    assert "signal 9" in caplog.text and "the plan at hand stays" in caplog.text
    assert not search.running


def test_an_error_in_the_process_is_told(caplog: pytest.LogCaptureFixture) -> None:
    plan = dear_plan()
    broken = dataclasses.replace(plan, budget_bytes="much")  # type: ignore[arg-type]
    search = Search(broken, RematConfig(budget=BUDGET))
    with caplog.at_level(logging.WARNING):
        assert wait_for(search) is None
    assert len(caplog.records) == 1
    assert "exit code 1" in caplog.text and "TypeError" in caplog.text


def test_a_full_disk_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_search.tempfile, "mkdtemp", full)
    with caplog.at_level(logging.WARNING):
        search = Search(dear_plan(), RematConfig(budget=BUDGET))
        assert search.better() is None and not search.running
        search.close()
    assert ["No space left" in record.message for record in caplog.records] == [True]


def test_a_schedule_that_does_not_fit_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    search = Search(dear_plan(), RematConfig(budget=BUDGET, time_limit=600.0))
    search._better.write_text('{"budget_bytes": 8, "solution": {}}')
    with caplog.at_level(logging.WARNING):
        assert search.better() is None
    assert len(caplog.records) == 1 and "cannot be used" in caplog.text
    assert not search.running


def test_another_process_is_told_what_is_found_and_verifies_it(caplog: pytest.LogCaptureFixture) -> None:
    plan, store = dear_plan(), torch.distributed.HashStore()
    here, there = Agreement("fit", store=store), Agreement("fit", store=store)
    assert here.first("better") and not there.first("better") and here.first("other")
    told, other = ToldSearch(plan, there, "better"), ToldSearch(plan, Agreement("fit", store=store), "better")
    assert told.better() is None and told.running
    search = TellingSearch(plan, RematConfig(budget=BUDGET, time_limit=2.0), here, "better")
    found = wait_for(search)
    while search.running:
        found = search.better() or found
    assert found is not None and search.completed
    told._asked = 0.0
    heard = told.better()
    assert heard is not None and not told.running and not told.completed
    assert heard.schedule == found.schedule and heard.seconds == found.seconds < plan.predicted_seconds
    other._plan = dataclasses.replace(plan, budget_bytes=found.peak_bytes - 1)
    with caplog.at_level(logging.WARNING):
        assert other.better() is None
    assert "cannot be used" in caplog.text and not other.running


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(64))
        for _ in range(12)
    ]
    return torch.nn.Sequential(*layers)


class Boring(pl.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(call, module: torch.nn.Module, x: torch.Tensor, steps: int, between=lambda step: None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for number in range(steps):
        between(number)
        loss = call(x).square().mean()
        module.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in module.parameters()), torch.get_rng_state()]


def test_a_better_plan_is_swapped_in_between_two_steps_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first plan is a dear one; the process is the real one.
    monkeypatch.setattr(_make, "solve", lambda graph, budget, *_, **__: solve(graph, budget, "chen_sqrt"))
    x = torch.randn(512, 64)
    eager = net()
    expected = train(eager, eager, x, 6)
    module = net()
    step = rematerialize(module, budget=0.5, background=True, time_limit=6.0, cost_model="roofline:A100-40")

    def between(number: int) -> None:
        if number == 3:  # wait for the process, whatever it takes
            until = time.monotonic() + 60
            while step._step._improving.search is not None and time.monotonic() < until:
                step._step._improving.take()
                time.sleep(0.1)

    found = train(step, module, x, 6, between)
    assert all(map(torch.equal, expected, found))
    first, *better = step.plans
    assert better and step.runs[0] == 3 and sum(step.runs) == 6 and step.runs[-1] >= 1
    assert better[0].predicted_seconds < first.predicted_seconds
    assert better[-1].predicted_peak_bytes <= first.budget_bytes
    assert step.plan is better[-1]
    config = step._step.config
    assert PlanCache().path(first.graph, first.budget_bytes, config).exists()  # the next run begins with it
    step.close()

    torch._dynamo.reset()
    again = rematerialize(net(), budget=0.5, background=True, time_limit=6.0, cost_model="roofline:A100-40")
    again._step._plans.planning._costs = step._step._plans.planning._costs
    for _ in range(3):
        again(x)
        assert again._step._improving.search is None
    assert again.plan is not None and again.plan.predicted_seconds == better[-1].predicted_seconds


class Endless:
    """A search that finds nothing and goes on."""

    begun: ClassVar[list[Plan]] = []
    completed = False

    def __init__(self, plan: Plan, _config: RematConfig) -> None:
        self.begun.append(plan)
        self.running = True

    def better(self) -> None:
        return None

    def close(self) -> None:
        self.running = False


@pytest.mark.long
def test_one_search_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_improving, "Search", Endless)
    monkeypatch.setattr(Endless, "begun", [])
    step = rematerialize(net(), budget=0.5, background=True, cost_model="roofline:A100-40")
    for length in (256, 320, 384, 256):
        step(torch.randn(length, 64)).square().mean().backward()
    first, second, _ = step.plans
    assert Endless.begun == [first]
    search, _ = step._step._improving.search
    search.running = False  # it came to its end
    for length in (256, 320):
        step(torch.randn(length, 64)).square().mean().backward()
    assert Endless.begun == [first, second]
    assert not PlanCache().path(first.graph, first.budget_bytes, step._step.config).exists()  # it was not completed
    step.close()
    assert step._step._improving.search is None and not step._step._improving.waiting


@pytest.mark.long
def test_a_copy_is_captured_anew_and_trains_its_own_weights() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    step = rematerialize(net(), budget=0.5, background=True, cost_model="unit")
    step(x).sum().backward()
    other = copy.deepcopy(step)
    assert other.original is not step.original
    assert other.plans == ()
    with torch.no_grad():
        for p in other.original.parameters():
            p.mul_(0.5)
    torch.manual_seed(1)
    expected = other.original(x)
    torch.manual_seed(1)
    assert torch.equal(other(x), expected)
    assert repr(other) == repr(step)
    for one in (step, other):
        one.close()


@pytest.mark.long
def test_training_goes_on_when_the_process_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(512, 64)
    eager = net()
    expected = train(eager, eager, x, 4)
    module = net()
    step = rematerialize(module, budget=0.5, background=True, time_limit=600.0)

    def between(number: int) -> None:
        if number == 2:
            assert step._step._improving.search is not None
            search, _ = step._step._improving.search
            assert search._process is not None
            search._process.kill()
            search._process.wait()

    with caplog.at_level(logging.WARNING, "lightning_remat"):
        found = train(step, module, x, 4, between)
    assert all(map(torch.equal, expected, found))
    assert sum(step.runs) == 4
    assert len([r for r in caplog.records if "the plan at hand stays" in r.message]) == 1


@pytest.mark.long
@pytest.mark.parametrize(("background", "limits"), [(True, [2.0, 30.0]), (False, [30.0])])
def test_the_first_plan_is_asked_for_in_two_seconds(
    background: bool, limits: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[float] = []

    def never(_graph: object, _budget: int, _method: str, limit: float, **_: object) -> Solution:
        asked.append(limit)
        return dataclasses.replace(best, schedule=None, status=Status.TIMEOUT)

    best = solve(CHAIN, BUDGET, "auto")
    cache, config = PlanCache(tmp_path), RematConfig(budget=BUDGET, background=background)
    with monkeypatch.context() as patch:
        patch.setattr(_make, "solve", never)
        plan = make_plan(CHAIN, config, cache=cache)  # where two seconds are too few, it is the whole time
    assert plan.solver == "smallest" and asked == limits

    tmp_path.joinpath("none").touch()
    for file in tmp_path.iterdir():
        file.unlink()
    make_plan(CHAIN, config, cache=cache)
    assert cache.path(CHAIN, BUDGET, config).exists() is not background  # a first plan is not the last word


def test_the_callback_ends_the_search_with_the_fit(tmp_path: Path) -> None:
    callback = RematCallback(budget=0.5, background=True, time_limit=600.0)
    module = Boring(net())
    trainer = pl.Trainer(
        max_steps=4, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    seen: list[Search] = []
    module.on_train_batch_end = lambda *_: seen.extend(  # type: ignore[method-assign]
        [callback._step._improving.search[0]] if callback._step._improving.search else []
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=16))
    assert callback.failures == () and sum(callback.runs) == 4
    assert seen and not any(search.running for search in seen)

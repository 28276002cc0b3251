"""RematCallback with tensors that wait on the host: the same numbers in a Trainer, within the budget, and what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_remat.callbacks import RematCallback
from lightning_remat.callbacks.dashboard import plan_metrics
from lightning_remat.graph import Host
from lightning_remat.planner import _host
from tests.helpers.host_copies import Copies, planned_with_copies
from tests.helpers.training import Classifier, assert_clean, assert_same, fit, loader


class Large(Classifier):
    """A few MiB of activations over small weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        self.net = nn.Sequential(*layers)


def large() -> torch.utils.data.DataLoader[Any]:
    return loader(5 * 1024, 1024, width=64)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Copies take no time to speak of, so that they are the cheapest choice; counts them."""
    monkeypatch.setattr(_host, "copy_speeds", lambda *_: Host(0, 1e14, 1e14))
    return Copies().count(monkeypatch)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_a_fit_has_the_same_numbers_within_the_budget(options: dict[str, Any], fast: Copies) -> None:
    plain = fit(Large, train=large, **options)
    remat = RematCallback(0.3, offload="host", artifacts=False, time_limit=2.0)
    scheduled = fit(Large, remat, train=large, **options)
    assert_same(plain.results, scheduled.results)
    assert_clean(scheduled.trainer, scheduled.module)
    assert not remat.failures and remat.plan is not None
    assert remat.plan.copies and fast.to_host and sum(fast.to_host) >= 4 * remat.plan.host_bytes
    assert remat.measured_peak_bytes is not None and remat.measured_peak_bytes <= remat.plan.budget_bytes


def test_host_budget_is_the_most_that_waits_there(fast: Copies) -> None:
    remat = RematCallback(0.3, offload="host", host_budget="600KiB", artifacts=False, time_limit=2.0)
    fit(Large, remat, train=large)
    assert remat.plan is not None and 0 < remat.plan.host_bytes <= 600 * 2**10
    assert remat.plan.rematerializes, "the rest is computed again"
    assert remat.plan.graph.host is not None and remat.plan.graph.host.bytes == 600 * 2**10


def test_what_waits_on_the_host_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = planned_with_copies(monkeypatch)
    remat = RematCallback(0.5, offload="host", cost_model="unit", measure=False)
    fit(Classifier, remat, train=lambda: loader(16), logger=CSVLogger(tmp_path))
    plan = remat.plan
    assert plan is not None and copies.to_host
    metrics = plan_metrics(plan)
    assert metrics["remat/on_the_host_GiB"] * 2**30 == plan.host_bytes == sum(copies.to_host) // 2
    (file,) = tmp_path.rglob("plan-1.json")
    saved = json.loads(file.read_text())
    assert (saved["copies"], saved["host_bytes"]) == (plan.copies, plan.host_bytes)
    assert saved["graph"]["host"]["bytes"] > 0

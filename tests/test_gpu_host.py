"""On a CUDA device: steps whose tensors wait on the host have eager's bits, and the memory that was predicted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_remat import rematerialize
from lightning_remat.callbacks import RematCallback
from lightning_remat.cost import copy_speeds
from tests.helpers import training
from tests.helpers.host_copies import planned_with_copies
from tests.test_gpu import DTYPES, Factory, conv_net, deterministic, gpt2, peaks, train

__all__ = ["deterministic"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_copies_have_the_bits_of_eager(make: Factory, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what waits for the backward goes to the host: far more than a plan would send."""
    copies = planned_with_copies(monkeypatch)
    eager, batch = make(dtype)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=0.5, offload="host", tiling="off")
    assert all(map(torch.equal, train(module, step, batch, 5), train(eager, eager, batch, 5)))
    assert all(map(torch.equal, module.state_dict().values(), eager.state_dict().values()))
    plan = step.plan
    assert plan is not None and len(copies.to_host) == 5 * plan.copies // 2 > 0
    assert 0 < sum(copies.to_host) == sum(copies.to_device) <= 5 * plan.host_bytes


@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_memory_is_what_was_predicted(make: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    planned_with_copies(monkeypatch)
    module, batch = make(torch.float32)
    step = rematerialize(module, budget=0.5, offload="host", tiling="off")

    def training_step() -> None:
        loss = step(batch)
        module.zero_grad(set_to_none=True)
        loss.backward()

    training_step()
    training_step()
    measured, _ = peaks(training_step)
    plan = step.plan
    assert plan is not None and plan.predicted_allocated_bytes == pytest.approx(measured, rel=0.01)
    assert measured < plan.baseline_peak_bytes


def test_memory_that_was_copied_is_used_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps without waiting for the device: a copy that came late would have other bits."""
    planned_with_copies(monkeypatch)
    eager, batch = gpt2(torch.float32)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=0.5, offload="host", tiling="off")
    assert all(map(torch.equal, train(module, step, batch, 40), train(eager, eager, batch, 40)))


@pytest.mark.parametrize("budget", [0.4, "min"])
@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_planned_copies_have_the_bits_of_eager(make: Factory, budget: Any) -> None:
    eager, batch = make(torch.float32)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=budget, offload="host", time_limit=5.0)
    assert all(map(torch.equal, train(module, step, batch, 5), train(eager, eager, batch, 5)))
    assert step.plan is not None and step.plan.graph.host is not None


def test_a_fit_has_the_bits_of_eager() -> None:
    remat = RematCallback(0.4, artifacts=False, time_limit=3.0, offload="host")
    options: dict[str, Any] = {"accelerator": "cuda", "devices": 1, "deterministic": True, "max_epochs": 4}
    plain = training.fit(training.Classifier, **options)
    scheduled = training.fit(training.Classifier, remat, **options)
    training.assert_same(plain.results, scheduled.results)
    assert not remat.failures


def test_speeds_of_copies() -> None:
    speeds = copy_speeds(torch.device("cuda"))
    assert 1e8 < speeds.to_host < 1e12 and 1e8 < speeds.to_device < 1e12 and speeds.latency < 0.01

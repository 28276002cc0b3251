"""Gradients that are made last because they are larger than what they are made of."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_remat import rematerialize
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.runtime import _plans
from lightning_remat.schedule import Compute


class Classifier(torch.nn.Module):
    """A convolution on large images, and a linear layer that is wide for the batch: in the backward it comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU(),
            torch.nn.MaxPool2d(4), torch.nn.Flatten(),
        )  # fmt: skip
        self.head = torch.nn.Sequential(torch.nn.Linear(64 * 24 * 24, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images)).square().mean()


def steps(call, module: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    losses = []
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        loss = call(images)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_a_wide_layers_gradient_waits_for_the_activations_to_go(
    budget: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    original, images = Classifier(), torch.randn(8, 3, 96, 96)
    eager = copy.deepcopy(original)
    expected = steps(eager, eager, images)
    peaks, plans = [], []
    for late in (False, True):
        torch._dynamo.reset()
        module = copy.deepcopy(original)
        with monkeypatch.context() as patch:
            if not late:
                patch.setattr(_plans, "with_late_gradients", lambda captured: captured)
            # At the smallest peak a solver may find by itself that the gradient can wait: without, it is not scheduled.
            step = rematerialize(module, budget=budget if late else 1.0, old_gradients=False, time_limit=3.0)
            assert all(map(torch.equal, expected, steps(step, module, images)))
        assert step.failures == () and step.plan is not None

        def once(module: torch.nn.Module = module, step=step) -> None:
            module.zero_grad(set_to_none=True)
            step(images).backward()

        once()
        module.zero_grad(set_to_none=True)
        peaks.append(held_bytes(module, images) + peak_memory(once, "cpu"))
        plans.append(step.plan)
    weight = original.head[0].weight.nbytes
    assert plans[1].baseline_peak_bytes < plans[0].baseline_peak_bytes
    assert plans[0].predicted_peak_bytes - plans[1].predicted_peak_bytes > 0.9 * weight
    assert peaks[0] - peaks[1] > 0.9 * weight
    for plan, peak in zip(plans, peaks, strict=True):
        assert 0.95 * plan.predicted_peak_bytes <= peak <= plan.budget_bytes
    order = [plans[1].graph.ops[one.op] for one in plans[1].schedule.steps if isinstance(one, Compute)]
    large = [i for i, op in enumerate(order) if any(plans[1].graph.storages[plans[1].graph.tensors[t].storage] == weight
             for t in op.outputs) and not plans[1].graph.is_view[plans[1].graph.ops.index(op)]]  # fmt: skip
    assert min(large) > max(i for i, op in enumerate(order) if "convolution_backward" in op.name)


def test_nothing_moves_where_it_lowers_nothing() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
    step = rematerialize(module, budget=1.0, cost_model="unit")
    step(torch.randn(512, 4)).sum().backward()
    assert step.plan is not None
    names = [op.name for op in step.plan.graph.ops]
    torch._dynamo.reset()
    step(torch.randn(256, 4)).sum().backward()
    assert [op.name for op in step.plan.graph.ops] == names

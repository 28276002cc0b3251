"""Hidden states that transformers records: the first call that asks for them is one graph, with eager's bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize

transformers = pytest.importorskip("transformers", minversion="5.17")


class OfLayers(nn.Module):
    """A loss of what two layers return."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
        self.model = transformers.CLIPVisionModel(config)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        states = self.model(images, output_hidden_states=True).hidden_states
        return states[-2].square().mean() + states[1].mean()


def test_the_first_call_is_one_graph() -> None:
    torch.manual_seed(0)
    eager = OfLayers()
    other = copy.deepcopy(eager)
    step = rematerialize(other, "min", cost_model="unit", solver="greedy", time_limit=0.05)
    for seed in range(3):
        losses = []
        for module, run in ((other, step), (eager, eager)):
            torch.manual_seed(seed)
            module.zero_grad()
            losses.append(run(torch.randn(2, 3, 16, 16)))
            losses[-1].backward()
        assert torch.equal(*losses)
        pairs = zip(eager.parameters(), other.parameters(), strict=True)
        assert all(p.grad is None if q.grad is None else torch.equal(p.grad, q.grad) for p, q in pairs)
    assert step.runs == (3,) and not step.failures
    hooks = [[len(one._forward_hooks) for one in module.modules()] for module in (eager, other)]
    assert hooks[0] == hooks[1] and sum(hooks[0])

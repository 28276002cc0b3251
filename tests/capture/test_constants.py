"""Constants that are made in the host's memory, and copied to a device; here it is the one that has no memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_remat.capture.rewritings._constants import MOST_BYTES, constants_on_their_device

aten = torch.ops.aten
GIVEN = torch.tensor([1.0, 2.0])


def literal(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0]).to("meta")


def places(x: torch.Tensor) -> torch.Tensor:
    return x + (2 * torch.arange(2)[None].repeat(3, 1).cumsum(0) + 1).to("meta", torch.float64)


def of_another_layout(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(2, 1, 3).permute(2, 1, 0).squeeze(1).to("meta")


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(2).to("meta")


def added_up(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(2, 3).sum(1).to("meta")


def large(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(MOST_BYTES // 4 + 1).to("meta")[:2]


def given(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the user's, who may write to it."""
    return x + GIVEN.to("meta")


def traced(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(3, 2, device="meta"))


def moves(module: torch.fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=aten._to_copy.default))


@pytest.mark.parametrize("function", [literal, places, of_another_layout])
def test_they_are_copied_where_they_lie(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = traced(function)
    (moved,) = module.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    was = moved.meta["val"]
    constants_on_their_device(module.graph)
    module.graph.lint()
    assert moves(module) == 0
    (copy,) = module.graph.find_nodes(op="call_function", target=aten.clone.default)
    constant = getattr(module, copy.args[0].target)
    for one in (copy.meta["val"], aten.clone.default(constant)):
        assert (one.shape, one.stride(), one.dtype, one.device) == (was.shape, was.stride(), was.dtype, was.device)
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert calls == [aten.clone.default, aten.add.Tensor], "what made it is gone"


@pytest.mark.parametrize("function", [drawn, added_up, large, given])
def test_others_stay(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = traced(function)
    before = module.graph.python_code("self").src
    constants_on_their_device(module.graph)
    assert moves(module) == 1 and module.graph.python_code("self").src == before

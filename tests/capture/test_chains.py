"""Chains of ops that run in slices: attention written out, losses, what lies between two products; with eager's bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture import CapturedGraph, TensorSpec, Tiling
from lightning_remat.capture.tiling import _losses, _sliced
from lightning_remat.capture.tiling._sliced import Chain, Place
from lightning_remat.runtime import _plans

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_sliced.LEAST_BYTES, "cpu", 1 << 12)
    monkeypatch.setattr(_losses, "LEAST_BYTES", 1 << 12)


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rematerialized], list[str]]:
    """Plans the form with chains, whatever it costs; called with a step, it names the ops that run in slices."""

    def forms(captured: CapturedGraph, *, smallest: bool) -> Iterator[tuple[CapturedGraph, float]]:
        form = captured.tiled(Tiling.CHAINS)
        yield captured if form is None else form, math.inf

    monkeypatch.setattr(_plans, "forms", forms)

    def named(step: Rematerialized) -> list[str]:
        assert step.plan is not None and len(step.plans) == 1 and not step.failures
        return [op.name for op in step.plan.graph.ops if op.target.startswith("in_slices")]

    return named


# -- the function ---------------------------------------------------------------------------------------------------------


def softmax_chain(grid: tuple[int, ...], merged: bool, classes: int = 3) -> Chain:
    """Doubled softmax, and its sum, over a grid."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for number in range(len(grid)):
        graph.placeholder(f"cells_{number}")
    y = graph.call_function(aten.mul.Tensor, (graph.call_function(aten._softmax.default, (x, -1, False)), 2.0))
    graph.output((y, graph.call_function(aten.sum.dim_IntList, (y, [-1]))))
    shape = (math.prod(grid), classes) if merged else (*grid, classes)
    one, other = (TensorSpec.of(torch.empty(s)) for s in (shape, shape[:-1]))
    place = Place(tuple(range(len(grid))), merged)
    return Chain(
        torch.fx.GraphModule({}, graph),
        grid,
        ((one, place),),
        ((one, place), (other, place)),
        4 * classes,
        frozenset({0}),
    )


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_slices_are_all_cells_once(sizes: list[int], slices: int, cells: int, merged: bool) -> None:
    grid = tuple(sizes)
    chain = softmax_chain(grid, merged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sliced, "SLICES", slices)
        patch.setitem(_sliced.LEAST_BYTES, "cpu", cells * chain.cell_bytes)
        seen = torch.zeros(grid, dtype=torch.int64)
        most = max(cells, -(-math.prod(grid) // slices))
        for box in chain.boxes():
            part = seen[tuple(slice(start, stop) for start, stop in box)]
            assert 0 < part.numel() <= most
            part += 1
        assert (seen == 1).all()
        x = torch.randn(chain.inputs[0][0].shape)
        whole = chain.program(x, *grid)
        for out in (None, x):
            assert all(map(torch.equal, chain.function()(x, out=out), whole))


def test_a_chain_is_named_by_what_it_computes() -> None:
    one, same, other = softmax_chain((2, 3), False), softmax_chain((2, 3), False), softmax_chain((2, 3), False, 4)
    assert one.name == same.name == one.function().__name__ != other.name != softmax_chain((2, 3), True).name


def test_what_computes_otherwise_in_slices_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sliced, "_SEEN", {})
    chain = softmax_chain((64,), False, 64)
    assert _sliced.seen_to_be_exact(chain)
    for node in chain.program.graph.nodes:
        if node.target is aten.mul.Tensor:
            node.args = (node.args[0], chain.program.graph.find_nodes(op="placeholder")[1])  # the number of cells
    chain.program.recompile()
    assert not _sliced.seen_to_be_exact(chain)


# -- whole steps ----------------------------------------------------------------------------------------------------------


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return functional.dropout(scores.masked_fill(later, -math.inf).softmax(-1), 0.2) @ v


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


def with_a_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One a sample, shared by its heads, as transformers add it."""
    mask = torch.zeros(len(q), 1, 1, q.shape[2]).masked_fill(torch.arange(q.shape[2]) > q.shape[2] // 2, -1e9)
    return torch.softmax(q @ k.mT * 0.1 + mask.to(q), -1) @ v


def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Samples and heads are one dimension."""
    one, other, values = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(functional.dropout(torch.bmm(one, other.mT).softmax(-1), 0.1), values).view_as(q)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return torch.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdim=True), v)


def capped_in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = 30 * torch.tanh(q @ k.mT / 30)
    return functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


class Transformer(nn.Module):
    """Two blocks, and the mean of their squared output."""

    def __init__(self, attention: Callable[..., torch.Tensor], width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.embed = nn.Embedding(50, width)
        self.inner = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            split = inner(x).unflatten(-1, (3, self.heads, -1))
            q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
            x = x + outer(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x.square().mean()


def train(module: nn.Module, call: Callable[..., torch.Tensor], batch: torch.Tensor, half: bool) -> list[torch.Tensor]:
    """Losses of three seeded steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = call(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def compared(eager: nn.Module, batch: torch.Tensor, budget: float | str = "min", half: bool = False) -> Rematerialized:
    """Train with and without a plan, and compare all bits."""
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=budget, time_limit=0.5, cost_model="flops")
    assert all(map(torch.equal, train(module, step, batch, half), train(eager, eager, batch, half)))
    for (name, one), other in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad), name
    return step


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("attention", [written_out, torchs, with_a_mask, merged, by_hand, capped_in_float32])
def test_attention(attention: Callable[..., torch.Tensor], kind: str, chains: Callable[..., list[str]]) -> None:
    torch.manual_seed(0)
    eager, tokens = Transformer(attention), torch.randint(0, 50, (3, 48))
    eager.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    step = compared(eager, tokens, half=kind == "autocast")
    assert step.plan is not None
    assert len(chains(step)) >= 4, "forward and backward of each block"
    matrices = {t.dtype for t in step.plan.graph.tensors if math.prod(t.shape) == 3 * 4 * 48 * 48}
    assert matrices <= {"bool"}, "only what is drawn is there as a whole"

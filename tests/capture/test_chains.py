"""Chains of ops that run in slices: attention written out, losses, what lies between two products; with eager's bits."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture import CapturedGraph, TensorSpec, Tiling
from lightning_remat.capture._sorting import sort
from lightning_remat.capture.tiling import _losses, _sliced
from lightning_remat.capture.tiling._sliced import Chain, Place
from lightning_remat.runtime import _plans
from tests.helpers.cases import diagonal
from tests.helpers.training import seeded_losses

aten = torch.ops.aten

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_CUDA)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where eager repeats its own bits."""
    before = torch.are_deterministic_algorithms_enabled()
    if request.param == "cuda":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(_sliced.LEAST_BYTES, kind, 1 << 12)
        monkeypatch.setitem(_losses.LEAST_BYTES, kind, 1 << 12)


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rematerialized], list[str]]:
    """Plans the form with chains, whatever it costs; called with a step, it names the ops that run in slices."""

    def forms(captured: CapturedGraph, **_facts: bool) -> Iterator[tuple[CapturedGraph, float]]:
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
        most = 1 << (max(cells, -(-math.prod(grid) // slices)) - 1).bit_length()
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


def test_what_does_not_fit_as_a_whole_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sliced, "_SEEN", {})

    def full(_chain: Chain) -> bool:
        raise torch.OutOfMemoryError("no memory")

    chain = softmax_chain((64,), False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sliced, "_equal", full)
        assert not _sliced.seen_to_be_exact(chain)
    assert _sliced.seen_to_be_exact(chain), "there may be room later"


# -- whole steps ----------------------------------------------------------------------------------------------------------


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return functional.dropout(scores.masked_fill(later, -math.inf).softmax(-1), 0.2) @ v


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


def with_a_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One a sample, shared by its heads, as transformers add it."""
    late = torch.arange(q.shape[2], device=q.device) > q.shape[2] // 2
    mask = torch.zeros(len(q), 1, 1, q.shape[2], device=q.device).masked_fill(late, -1e9)
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


def compared(eager: nn.Module, batch: torch.Tensor, budget: float | str = "min", half: bool = False) -> Rematerialized:
    """Train with and without a plan, and compare all bits."""
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=budget, time_limit=0.5, cost_model="flops")
    assert all(
        map(same, seeded_losses(module, step, batch, half, lr=0.01), seeded_losses(eager, eager, batch, half, lr=0.01))
    )
    for (name, one), other in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert same(one, other) and same(one.grad, other.grad), name
    return step


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in all bits; not-a-numbers are where there are any, since a sum over many rows may diverge."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))


@pytest.mark.parametrize(
    ("attention", "kind"),
    diagonal(
        [written_out, torchs, with_a_mask, merged, by_hand, capped_in_float32], ["autocast", "float32", "bfloat16"]
    ),
)
def test_attention(
    attention: Callable[..., torch.Tensor], kind: str, device: str, chains: Callable[..., list[str]]
) -> None:
    torch.manual_seed(0)
    eager, tokens = Transformer(attention).to(device), torch.randint(0, 50, (3, 48), device=device)
    eager.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    step = compared(eager, tokens, half=kind == "autocast")
    assert step.plan is not None
    # On CUDA dropout draws and multiplies at once, and products in float32 have other bits in slices.
    whole = device == "cuda" and (kind == "float32" or attention in (written_out, torchs, merged))
    assert len(chains(step)) >= 4 or whole, "forward and backward of each block"
    if whole:
        return
    matrices = {t.dtype for t in step.plan.graph.tensors if math.prod(t.shape) == 3 * 4 * 48 * 48}
    assert matrices <= {"bool"}, "only what is drawn is there as a whole"


# -- losses, and random chains --------------------------------------------------------------------------------------------

CLASSES = {True: 128, False: 117}
"""Whether loops over rows in vectors leave nothing over."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def over_classes(draw: random.Random, classes: int) -> Loss:
    """Cross entropy with whatever it may be given."""
    options: dict[str, Any] = {
        "label_smoothing": draw.choice([0.0, 0.1]),
        "reduction": draw.choice(["mean", "sum", "none"]),
    }
    if draw.random() < 0.3:
        options["weight"] = torch.linspace(0.5, 1.5, classes)
    if draw.random() < 0.5:
        options["ignore_index"] = 3
    probabilities = draw.random() < 0.2

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given = {name: value.to(x) if name == "weight" else value for name, value in options.items()}
        if probabilities:
            given.pop("ignore_index", None)
            target = functional.one_hot(target, classes).to(x.dtype) * 0.9 + 0.1 / classes  # type: ignore[assignment]
        return functional.cross_entropy(x, target, **given).mean()

    return loss


def over_pixels(draw: random.Random, classes: int) -> Loss:
    """Classes are the second of four dimensions."""
    ignored, smoothing = draw.choice([-100, 3]), draw.choice([0.0, 0.1])

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        pixels = x.view(8, 4, 4, classes).permute(0, 3, 1, 2)
        return functional.cross_entropy(pixels, target.view(8, 4, 4), ignore_index=ignored, label_smoothing=smoothing)

    return loss


def elementwise(draw: random.Random, classes: int) -> Loss:
    """Losses of each number, with logits or without, averaged or summed, some of them by hand."""
    name = draw.choice(
        ["binary_cross_entropy_with_logits", "mse_loss", "kl_div", "smooth_l1_loss", "huber", "soft_margin"]
    )
    reduction = draw.choice(["mean", "sum"])

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wanted = functional.one_hot(target, classes).to(x.dtype)
        if name == "kl_div":
            return functional.kl_div(
                functional.log_softmax(x, -1),
                wanted * 0.5 + 1e-3,
                reduction="batchmean" if reduction == "mean" else "sum",
            )
        if name == "huber":
            return functional.huber_loss(x, wanted, reduction=reduction, delta=0.7)
        if name == "soft_margin":
            return functional.soft_margin_loss(x, wanted * 2 - 1, reduction=reduction)
        return getattr(functional, name)(x, wanted, reduction=reduction)  # type: ignore[no-any-return]

    return loss


def by_itself(draw: random.Random, classes: int) -> Loss:
    """A mean of something."""
    return lambda x, target: (x * target.unsqueeze(1).to(x.dtype)).square().mean()


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "tanh gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3))),
    "silu": functional.silu,
    "mish": lambda x: x * torch.tanh(functional.softplus(x)),
    "softmax": lambda x: 9 * torch.softmax(x, -1),
    "log softmax": lambda x: torch.log_softmax(x, -1),
    "dropout": lambda x: functional.dropout(x, 0.2),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "rms": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
    "shifted": lambda x: x - x.amax(-1, keepdim=True),
    "clamped": lambda x: x.clamp(-2, 2),
    "gated": lambda x: x * torch.sigmoid(x.sum(-1, keepdim=True)),
    "in float32": lambda x: x.float().exp().clamp(max=9).to(x.dtype),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "scaled": lambda x: x * torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype, device=x.device),
    "in two": lambda x: x.view(2, -1, x.shape[1]).transpose(1, 2).sin().transpose(1, 2).reshape(x.shape),
    "all rows": lambda x: x - x.mean(0),
}
"""What a chain may do with rows of classes; the last one does not know rows apart."""


class RandomChain(nn.Module):
    """Tokens to rows of classes, over steps that were drawn, to a loss that was drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.classes = CLASSES[draw.random() < 0.7]
        self.embed, self.head = nn.Embedding(self.classes, 16), nn.Linear(16, self.classes)
        self.steps = draw.choices(list(STEPS), k=draw.randrange(1, 5))
        self.back = draw.random() < 0.3
        self.loss = draw.choice([over_classes, over_classes, over_pixels, elementwise, by_itself])(draw, self.classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.head(self.embed(tokens))
        for step in self.steps:
            x = STEPS[step](x)
        if self.back:  # a product between two chains
            x = functional.linear(functional.linear(x, self.head.weight.T), self.head.weight)
        return self.loss(x, tokens)


def check_random_chain(seed: int, named: Callable[[Rematerialized], list[str]], device: str = "cpu") -> bool:
    """Whether a part of a random chain ran in slices; its bits are eager's in any case."""
    torch.manual_seed(seed)
    kind = seed % 3
    eager = RandomChain(seed).to(device)
    tokens = torch.randint(0, eager.classes, (128,), device=device)
    eager.to(torch.bfloat16 if kind == 1 else torch.float32)
    return bool(named(compared(eager, tokens, half=kind == 2)))


def test_random_chains(device: str, chains: Callable[[Rematerialized], list[str]]) -> None:
    found = [check_random_chain(seed, chains, device) for seed in range(6)]
    assert sum(found) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_random_chains(part: int, device: str, chains: Callable[[Rematerialized], list[str]]) -> None:
    found = []
    for seed in range(100 + 30 * part, 130 + 30 * part):
        torch._dynamo.reset()
        found.append(check_random_chain(seed, chains, device))
    assert sum(found) >= 15


class ReadEarly(nn.Module):
    """A result of the chain is read before the chain's second mask is drawn, and a mask is drawn in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.aside = nn.Embedding(128, 16), nn.Linear(16, 128), nn.Linear(1, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(torch.relu(self.head(self.embed(tokens))), 0.1)
        aside = functional.dropout(self.aside(x.mean(-1, keepdim=True)), 0.5)
        return (functional.dropout(x * 2.0, 0.3).softmax(-1).sum(-1) + aside.sum(-1)).square().mean()


def test_masks_are_drawn_in_order(device: str, chains: Callable[[Rematerialized], list[str]]) -> None:
    torch.manual_seed(0)
    assert chains(compared(ReadEarly().to(device), torch.randint(0, 128, (128,), device=device))) or device == "cuda"


def test_what_cannot_be_put_in_order_stays_whole() -> None:
    """The second random op would have to come before the first."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.bernoulli.p, (x, 0.5))
    second = graph.call_function(aten.bernoulli.p, (x, 0.5))
    graph.output(graph.call_function(aten.add.Tensor, (first, second)))
    assert sort(graph)
    first.args = (second, 0.5)
    assert not sort(graph)

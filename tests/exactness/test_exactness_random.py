"""Random small networks at random budgets: eager's bits, whatever they are made of."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lightning_remat import InfeasibleBudgetError, rematerialize

WIDTH = 12
DROPOUTS = (0.1, 0.15, 0.3, 0.5)
STEPS = 2


class Part(nn.Module):
    """One piece of a network; what it does is a function of itself and its input, of the same shape as its output."""

    def __init__(self, run: Callable[[Part, torch.Tensor], torch.Tensor], p: float, **parts: nn.Module) -> None:
        super().__init__()
        self.run, self.p = run, p
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


# -- pieces for sequences, of shape (batch, time, width) ---------------------------------------------------------------


def mlp(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(functional.gelu(self.up(x)), self.p)
        return x + self.down(hidden)

    return Part(run, p, up=nn.Linear(WIDTH, 2 * WIDTH), down=nn.Linear(2 * WIDTH, WIDTH))


def attention(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        heads = self.inward(self.norm(x)).view(batch, time, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), dropout_p=self.p, is_causal=True)
        return x + self.outward(mixed.transpose(1, 2).reshape(batch, time, WIDTH))

    parts = {"norm": nn.LayerNorm(WIDTH), "inward": nn.Linear(WIDTH, 3 * WIDTH), "outward": nn.Linear(WIDTH, WIDTH)}
    return Part(run, p, **parts)


def multihead(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        mixed, weights = self.attention(x, x, x)
        return mixed * (1 + weights.mean())

    return Part(run, p, attention=nn.MultiheadAttention(WIDTH, 3, dropout=p, batch_first=True))


def gated(p: float) -> Part:
    """Branches from one tensor by chunk and split, changed in place, and put together again."""

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.both(x).chunk(2, dim=-1)
        left, right = torch.split(value.tanh(), [4, WIDTH - 4], dim=-1)
        value = torch.cat([right, left], dim=-1)
        value = value.mul_(2.0)
        return functional.dropout(value * gate.sigmoid(), self.p)

    return Part(run, p, both=nn.Linear(WIDTH, 2 * WIDTH))


def in_place(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu_()
        y = y + x
        y.add_(x, alpha=0.5)
        y[:, 0] = 0.25
        y[..., 1:3].mul_(0.5)
        return functional.dropout(y, self.p, inplace=True)

    return Part(run, p, linear=nn.Linear(WIDTH, WIDTH))


def batch_norm(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.transpose(1, 2)).permute(0, 2, 1)
        return functional.dropout(y, self.p) + self.norm(x.flatten(0, 1)).view_as(x)  # twice: its statistics move twice

    return Part(run, p, norm=nn.BatchNorm1d(WIDTH))


def sorted_values(p: float) -> Part:
    """Ops with several outputs, of which not all are used."""

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        values, order = self.linear(x).sort(dim=-1)
        best, _ = values.topk(3, dim=-1)
        variance, mean = torch.var_mean(best, dim=-1, keepdim=True)
        return functional.dropout(values.gather(-1, order), self.p) * mean + variance

    return Part(run, p, linear=nn.Linear(WIDTH, WIDTH))


def noise(p: float) -> Part:
    """Random numbers of several kinds, some of which nobody uses."""

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        y = self.linear(x + 0.1 * torch.randn_like(x))
        y = functional.rrelu(y, training=True) * torch.bernoulli(torch.full_like(y, 1 - self.p))
        return functional.alpha_dropout(y, self.p, training=True)[torch.randperm(y.shape[0])]

    return Part(run, p, linear=nn.Linear(WIDTH, WIDTH))


def moving_average(p: float) -> Part:
    """A buffer that is read, changed, and read again."""

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x - self.average).sigmoid()
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return functional.dropout(y * self.average.sum(), self.p)

    part = Part(run, p, linear=nn.Linear(WIDTH, WIDTH))
    part.register_buffer("average", torch.rand(WIDTH))
    return part


SEQUENCE_PARTS = (mlp, attention, multihead, gated, in_place, batch_norm, sorted_values, noise, moving_average)


# -- pieces for images, of shape (batch, width, height, height) --------------------------------------------------------


def residual(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu_(self.one_norm(self.one(x)))
        y = self.two_norm(self.two(y))
        y += x
        return functional.dropout2d(y.relu_(), self.p)

    parts: dict[str, nn.Module] = {}
    for name in ("one", "two"):
        parts[name] = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        parts[f"{name}_norm"] = nn.BatchNorm2d(WIDTH)
    return Part(run, p, **parts)


def pooled(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        y, where = functional.max_pool2d(self.conv(x), 2, return_indices=True)
        return functional.max_unpool2d(functional.dropout(y, self.p), where, 2) + x

    return Part(run, p, conv=nn.Conv2d(WIDTH, WIDTH, 1))


def upsampled(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        y = functional.avg_pool2d(self.norm(x), 2)
        smooth = functional.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return functional.leaky_relu_(self.conv(smooth), 0.1) + functional.interpolate(y, scale_factor=2.0)

    return Part(run, p, norm=nn.GroupNorm(3, WIDTH), conv=nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH))


def transposed(p: float) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        y = self.back(functional.silu(self.down(x)))
        return torch.cat([y[:, ::2], functional.dropout(x, self.p)[:, 1::2]], dim=1)

    down, back = nn.Conv2d(WIDTH, WIDTH, 2, stride=2), nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
    return Part(run, p, down=down, back=back)


IMAGE_PARTS = (residual, pooled, upsampled, transposed)


class Sequences(nn.Module):
    """Token indices to a loss; the embedding's weight is the last layer's too."""

    def __init__(self, parts: list[Part], skip: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.skip = skip

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(tokens)
        for part in self.parts:
            x = part(x)
        if self.skip:
            x = x + first
        return functional.cross_entropy(functional.linear(x, self.embed.weight).flatten(0, 1), tokens.flatten())


class Images(nn.Module):
    """Images to a loss."""

    def __init__(self, parts: list[Part], skip: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.parts = nn.ModuleList(parts)
        self.skip = skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = x = self.stem(images)
        for part in self.parts:
            x = part(x)
        if self.skip:
            x = x * first
        return x.mean((2, 3)).square().mean()


@st.composite
def networks(draw: st.DrawFn) -> Callable[[], tuple[nn.Module, torch.Tensor]]:
    images = draw(st.booleans())
    choice = st.tuples(st.sampled_from(IMAGE_PARTS if images else SEQUENCE_PARTS), st.sampled_from(DROPOUTS))
    chosen = draw(st.lists(choice, min_size=2, max_size=4))
    shared = draw(st.booleans())  # the first piece is used once more at the end
    skip = draw(st.booleans())

    def make() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        parts = [part(p) for part, p in chosen]
        if shared:
            parts.append(parts[0])
        if images:
            return Images(parts, skip), torch.randn(3, 3, 8, 8)
        return Sequences(parts, skip), torch.randint(0, 20, (4, 6))

    make.__qualname__ = f"{[(part.__name__, p) for part, p in chosen]}, shared={shared}, skip={skip}"
    return make


def train(module: nn.Module, step: Callable[..., torch.Tensor], batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        loss = step(batch)
        optimizer.zero_grad()
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            found[f"gradient {number} of {name}"] = parameter.grad.clone()
        optimizer.step()
    found["random state"] = torch.get_rng_state()
    return found | {f"state {name}": value.clone() for name, value in module.state_dict().items()}


BUDGETS = st.one_of(st.just("min"), st.floats(0.2, 1.0).map(lambda share: round(share, 2)))


@pytest.mark.long
@settings(max_examples=14, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(make=networks(), budget=BUDGETS)
def test_a_random_network_trains_with_eagers_bits(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], budget: str | float
) -> None:
    torch._dynamo.reset()
    plain, batch = make()
    module = copy.deepcopy(plain)
    right = train(plain, plain, batch)
    step = rematerialize(module, budget=budget, cost_model="unit", time_limit=0.5)
    try:
        got = train(module, step, batch)
    except InfeasibleBudgetError:
        step = rematerialize(module, budget="min", cost_model="unit", time_limit=0.5)
        got = train(module, step, batch)
    assert right.keys() == got.keys()
    assert not [name for name, value in right.items() if not torch.equal(value, got[name])]
    assert step.runs == (STEPS,) and not step.failures

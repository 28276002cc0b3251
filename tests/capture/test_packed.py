"""Packed sequences: captured whole, with eager's bits, within the budget, and once for all lengths."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture.packed import _joint, _tracing
from lightning_remat.measure import held_bytes, peak_memory
from tests.helpers.training import Classifier, assert_same, callback, fit

SEQUENCES, LONGEST, WORDS, WIDE, HIDDEN = 4, 6, 20, 8, 6
GIVEN = WIDE * 3

Forward = Callable[[Any, Any, Any], torch.Tensor]


def pack(x: torch.Tensor, lengths: Any, **options: Any) -> PackedSequence:
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False, **options)


def predicted(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    """What follows each word of each sequence."""
    x = functional.dropout(self.embed(tokens), 0.1)
    output, last = self.layers(pack(x, lengths))
    padded, _ = pad_packed_sequence(output, batch_first=True)
    last = last[0] if isinstance(last, tuple) else last
    loss = functional.cross_entropy(self.head(padded).flatten(0, 1), tokens[:, : padded.shape[1]].flatten())
    return loss + last.square().mean()


class Net(nn.Module):
    def __init__(self, layers: nn.Module | None = None, use: Forward = predicted) -> None:
        super().__init__()
        self.layers = layers or nn.LSTM(WIDE, HIDDEN, 2, batch_first=True, dropout=0.3)
        self.embed, self.use = nn.Embedding(WORDS, WIDE), use
        options = self.layers
        wide: Any = getattr(options, "proj_size", 0) or getattr(options, "hidden_size", HIDDEN)
        self.head = nn.Linear(wide * (2 if getattr(options, "bidirectional", False) else 1), WORDS)
        self.first = nn.Parameter(torch.randn(2, SEQUENCES, HIDDEN))

    def forward(self, tokens: Any, lengths: Any) -> torch.Tensor:
        return self.use(self, tokens, lengths)


def batches(count: int = 3) -> Iterator[tuple[torch.Tensor, Any]]:
    """Words, and lengths of which the longest is that of all words: a batch is as wide as it must be."""
    numbers = torch.Generator().manual_seed(3)
    for _ in range(count):
        lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=numbers)
        lengths[0] = LONGEST
        yield torch.randint(WORDS, (SEQUENCES, LONGEST), generator=numbers), lengths


def listed(count: int = 3) -> Iterator[tuple[torch.Tensor, Any]]:
    return ((tokens, lengths.tolist()) for tokens, lengths in batches(count))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Zeros of the same sign, too."""
    return one.dtype == other.dtype and torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


def trained(
    module: nn.Module, step: Callable[..., torch.Tensor], data: Iterable[Sequence[Any]], autocast: bool = False
) -> list[torch.Tensor]:
    """Losses and gradients of optimizer steps."""
    torch.manual_seed(1)
    optimizer, found = torch.optim.AdamW(module.parameters(), lr=1e-2), []
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = step(*batch)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
    return found


def check(make: Callable[[], nn.Module], data: Callable[[], Iterable[Any]] = batches, **options: Any) -> Rematerialized:
    """Train without and with a plan, to the same bits."""
    torch.manual_seed(0)
    module = make()
    other = copy.deepcopy(module)
    step = rematerialize(other, budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    plain, planned = trained(module, module, data(), **options), trained(other, step, data(), **options)
    assert len(plain) == len(planned) and all(map(same_bits, plain, planned))
    return step


def is_whole(step: Rematerialized) -> bool:
    """Whether each step was one graph, with the layers in it."""
    targets = [{op.target for op in plan.graph.ops} for plan in step.plans]
    return not step.failures and all("recorded_layer_backward" in one for one in targets)


# -- eager's bits -------------------------------------------------------------------------------------------------------


def given_states(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    _, (hidden, cell) = self.layers(pack(self.embed(tokens), lengths), (self.first, self.first))
    return cell.square().sum() + hidden[1].sum()


def changed_rows(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    packed = pack(self.embed(tokens), lengths)
    rows = PackedSequence(packed.data.relu() * 2, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    return self.layers(rows)[0].data.square().mean() + packed.data.square().mean()


def with_a_teacher(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    with torch.no_grad():
        target = self.layers(pack(self.embed(tokens), lengths))[0].data
    return (self.layers(pack(self.embed(tokens) + 1, lengths))[0].data - target).square().mean()


def padded_otherwise(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    packed = pack_padded_sequence(self.embed(tokens).transpose(0, 1), lengths, enforce_sorted=False)
    padded, back = pad_packed_sequence(self.layers(packed)[0], padding_value=-1.0, total_length=9)
    return (padded.square().mean((0, 2)) / back.to(padded.dtype)).sum()


def sorted_by_itself(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    packed = pack_padded_sequence(self.embed(tokens), lengths.sort(descending=True)[0], batch_first=True)
    return self.layers(packed)[0].data.square().mean()


def lengths_of_a_mask(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    return predicted(self, tokens, ((tokens != 0) & (tokens != 1)).sum(1).clamp(min=1))


def lengths_after_convolutions(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    return predicted(self, tokens, (lengths.float() * 0.5).ceil().long() // 2 + 1)


def both_ways(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    """The gradient of the rows is a sum, and added to another one."""
    packed = pack(self.embed(tokens), lengths)
    return self.layers(packed)[0].data.square().sum() * packed.data.square().mean()


def lstm(**options: Any) -> nn.Module:
    return nn.LSTM(WIDE, HIDDEN, 2, **{"batch_first": True, "dropout": 0.3, **options})


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterable[Any]]]] = {
    "lstm": (lambda: Net(lstm(bidirectional=True)), batches),
    "lstm without biases": (lambda: Net(lstm(bias=False)), listed),
    "lstm with projections": (lambda: Net(lstm(proj_size=3)), batches),
    "lstm of float64": (lambda: Net(lstm()).double(), batches),
    "lstm frozen": (lambda: Net(lstm().requires_grad_(False)), batches),
    "lstm in evaluation": (lambda: Net(lstm()).eval(), batches),
    "gru": (lambda: Net(nn.GRU(WIDE, HIDDEN, 2, batch_first=True, dropout=0.3, bidirectional=True)), listed),
    "rnn": (lambda: Net(nn.RNN(WIDE, HIDDEN, 2, batch_first=True, dropout=0.3)), batches),
    "rnn of relu": (lambda: Net(nn.RNN(WIDE, HIDDEN, nonlinearity="relu", bidirectional=True)), batches),
    "given states": (lambda: Net(lstm(), given_states), batches),
    "changed rows": (lambda: Net(lstm(), changed_rows), batches),
    "with a teacher": (lambda: Net(lstm(), with_a_teacher), batches),
    "padded otherwise": (lambda: Net(lstm(batch_first=False), padded_otherwise), batches),
    "sorted by itself": (lambda: Net(lstm(), sorted_by_itself), batches),
    "lengths of a mask": (lambda: Net(lstm(), lengths_of_a_mask), batches),
    "lengths after convolutions": (lambda: Net(lstm(), lengths_after_convolutions), batches),
    "both ways": (lambda: Net(lstm(bidirectional=True), both_ways), batches),
}
QUICK = {"lstm", "gru", "rnn", "given states", "both ways", "lengths of a mask"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES])
def test_bits(name: str) -> None:
    step = check(*CASES[name])
    assert is_whole(step) or (name == "lstm frozen" and not step.failures)


@pytest.mark.parametrize("data", [batches, listed])
def test_lengths_that_vary_are_captured_with_symbols(data: Callable[[int], Iterable[Any]]) -> None:
    step = check(Net, lambda: data(12))
    assert is_whole(step) and len(step.plans) < 8 and sum(step.runs) == 12


def equally_long(count: int = 3) -> Iterator[tuple[torch.Tensor, Any]]:
    return ((tokens, torch.full_like(lengths, LONGEST)) for tokens, lengths in batches(count))


def one_sequence(count: int = 3) -> Iterator[tuple[torch.Tensor, Any]]:
    return ((tokens[:1], lengths[:1]) for tokens, lengths in batches(count))


@pytest.mark.parametrize(
    "make", [lambda: lstm(bidirectional=True), lambda: lstm(proj_size=3), lambda: nn.GRU(WIDE, HIDDEN)]
)
@pytest.mark.parametrize("data", [equally_long, pytest.param(one_sequence, marks=pytest.mark.slow)])
def test_equal_lengths(make: Callable[[], nn.Module], data: Callable[[], Iterable[Any]]) -> None:
    """Newer releases of torch run an LSTM over them as one over padded sequences, which has other bits."""
    layers = make()
    layers.batch_first = True
    step = check(lambda: Net(copy.deepcopy(layers)), data)
    fused = isinstance(layers, nn.LSTM) and not layers.proj_size and _tracing.fuses_equal_lengths(torch.float32, True)
    assert len(step.plans) == 1 and not step.failures
    assert fused == any(op.target == "lstm_layer" for op in step.plan.graph.ops)  # type: ignore[union-attr]


def packed_before(ordered: bool) -> Iterator[tuple[PackedSequence, None]]:
    """Batches that a collate function has packed."""
    for tokens, lengths in batches(6):
        x, given = functional.one_hot(tokens, GIVEN).float(), lengths.sort(descending=True)[0] if ordered else lengths
        yield pack_padded_sequence(x, given, batch_first=True, enforce_sorted=ordered), None


@pytest.mark.parametrize("ordered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_batch_that_is_packed(ordered: bool) -> None:
    def use(self: Any, packed: PackedSequence, _: None) -> torch.Tensor:
        output, hidden = self.layers(packed)
        padded, _lengths = pad_packed_sequence(output)
        return self.head(padded).square().mean() + hidden.sum()

    step = check(lambda: Net(nn.GRU(GIVEN, HIDDEN, 2), use), lambda: packed_before(ordered))
    assert is_whole(step) and sum(step.runs) == 6


# -- sums ---------------------------------------------------------------------------------------------------------------


def twice(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    return predicted(self, tokens, lengths) * predicted(self, tokens.flip(0), lengths)


def penalized(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    return predicted(self, tokens, lengths) + sum(p.square().sum() for p in self.layers.parameters())


def one_after_the_other(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    output, hidden = self.layers(pack(self.embed(tokens), lengths))
    output, again = self.layers(output, hidden)
    return output.data.square().mean() + (again * hidden).sum()


USED_TWICE: dict[Forward, Callable[[], nn.Module]] = {
    twice: lstm,
    penalized: lstm,
    one_after_the_other: lambda: nn.GRU(WIDE, WIDE, batch_first=True),
}


@pytest.mark.parametrize(
    "use", [twice, *(pytest.param(use, marks=pytest.mark.slow) for use in (penalized, one_after_the_other))]
)
def test_weights_that_are_used_twice(use: Any) -> None:
    """Eager adds the gradients of each time to those that are there."""
    assert is_whole(check(lambda: Net(USED_TWICE[use](), use)))


def test_other_sums_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before is about."""
    monkeypatch.setattr("lightning_remat.runtime._backend.add_inside_layers", lambda graph: None)
    with pytest.raises(AssertionError):
        check(lambda: Net(use=twice))


def test_what_the_layer_is_added_to_must_not_depend_on_it() -> None:
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    b = graph.call_function(torch.neg, (a,))
    c = graph.call_function(torch.exp, (a,))
    d = graph.call_function(torch.sin, (b,))
    graph.output((b, c, d))
    _joint._move_after(b, c)
    assert [node.name for node in graph.nodes] == ["a", "exp", "neg", "sin", "output"]
    _joint._move_after(c, b)
    assert [node.name for node in graph.nodes] == ["a", "neg", "exp", "sin", "output"]
    with pytest.raises(_joint.AddedElsewhereError, match="depends on them"):
        _joint._move_after(b, d)


# -- what is left alone ---------------------------------------------------------------------------------------------------


def under_autocast(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return predicted(self, tokens, lengths)


@pytest.mark.filterwarnings("ignore:only a part of:lightning_remat.planner.RematWarning")
@pytest.mark.parametrize("use", [predicted, pytest.param(under_autocast, marks=pytest.mark.slow)])
def test_under_autocast_the_rest_is_captured(use: Forward) -> None:
    step = check(lambda: Net(use=use), autocast=use is predicted)
    assert not step.failures and all(step.runs[:2])
    assert not any("layer" in op.target for plan in step.plans for op in plan.graph.ops)


@pytest.mark.filterwarnings("ignore:only a part of:lightning_remat.planner.RematWarning")
def test_where_later_parts_follow_the_rest_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    """They might read the layers' weights as well."""
    torch.manual_seed(0)
    module = Net()
    other = copy.deepcopy(module)

    def of(self: Any) -> Callable[..., torch.Tensor]:
        def step(tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
            padded, _ = pad_packed_sequence(self.layers(pack(self.embed(tokens), lengths))[0], batch_first=True)
            torch._dynamo.graph_break()
            return self.head(padded).square().mean()

        return step

    step = rematerialize(of(other), budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    with caplog.at_level("INFO", logger="lightning_remat"):
        planned = trained(other, step, batches())
    assert all(map(same_bits, trained(module, of(module), batches()), planned))
    assert not step.failures and step.plans
    assert [
        r.message for r in caplog.records if "runs its packed sequences as before: AddedElsewhereError" in r.message
    ]


def penalty_of_gradients(self: Any, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
    loss = predicted(self, tokens, lengths)
    (gradient,) = torch.autograd.grad(loss, [self.embed.weight], create_graph=True)
    return loss + gradient.square().sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning", r"ignore:\s*Previous calculation:UserWarning")
@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="Dynamo breaks the graph at a gradient there")
def test_gradients_that_are_differentiated_again_run_as_before() -> None:
    with pytest.warns(UserWarning, match="differentiated again"):
        step = check(lambda: Net(use=penalty_of_gradients))
    assert not step.plans and len(step.failures) == 1


def test_weights_that_are_read_outside_end_the_planning() -> None:
    torch.manual_seed(0)
    module = Net()
    step = rematerialize(module, budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    (batch,) = batches(1)
    loss = step(*batch) + sum(p.square().sum() for p in module.layers.parameters())
    with pytest.warns(UserWarning, match="in which order"):
        loss.backward()
    assert len(step.failures) == 1


# -- within the budget ----------------------------------------------------------------------------------------------------


class Large(Net):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__(layers)
        self.embed = nn.Embedding(500, 32)
        self.head = nn.Linear(self.head.in_features, 500)


LARGE: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(32, 48, 2, batch_first=True, dropout=0.3),
    "gru": lambda: nn.GRU(32, 48, 2, batch_first=True, bidirectional=True, dropout=0.3),
    "rnn": lambda: nn.RNN(32, 48, 2, batch_first=True, dropout=0.3),
}


def large_batch() -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(5, 31, (16,))
    lengths[0] = 30
    return torch.randint(500, (16, 30)), lengths


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("lstm", "min"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(LARGE, ("min", 1.0))
            if case != ("lstm", "min")
        ),
    ],
)
def test_measured_within_the_budget(name: str, budget: Any) -> None:
    torch.manual_seed(0)
    module, batch = Large(LARGE[name]()), large_batch()
    step = rematerialize(module, budget=budget, solver="greedy", time_limit=0.2)

    def once() -> None:
        loss = step(*batch)
        module.zero_grad(set_to_none=True)
        loss.backward()

    for _ in range(2):
        once()
    plan = step.plan
    assert plan is not None and is_whole(step) and plan.rematerializes == (budget == "min")
    measured = held_bytes(module, batch, gradients=True) + peak_memory(once, "cpu")
    assert measured <= plan.budget_bytes
    assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.01)


class Lit(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = Large(LARGE["lstm"]())

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(*batch)


def test_a_lightning_run_within_the_budget() -> None:
    def data() -> DataLoader[Any]:
        torch.manual_seed(0)
        return DataLoader([large_batch()] * 3, batch_size=None)  # type: ignore[arg-type]

    remat = callback(0.85, measure=True, solver="greedy", time_limit=0.5)
    plain, run = fit(Lit, train=data), fit(Lit, remat, train=data)
    assert_same(plain.results, run.results)
    assert len(remat.plans) == 1 and remat.runs == (3,) and not remat.failures
    assert remat.plan is not None and remat.plan.rematerializes and remat.measured_peak_bytes is not None
    assert remat.measured_peak_bytes <= remat.plan.budget_bytes
    assert remat.plan.predicted_peak_bytes == pytest.approx(remat.measured_peak_bytes, rel=0.01)

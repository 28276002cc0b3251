"""What Python asks of the values in a batch is known before the step: one graph, with eager's bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.nn import functional

from lightning_remat import rematerialize
from lightning_remat.capture.tracing._early import MOST_ANSWERS
from lightning_remat.runtime._captures import MOST_CAPTURES
from tests.helpers.cases import slow_but
from tests.helpers.training import Classifier, compare

Use = Callable[["Words", Tensor, Tensor], Tensor]

BATCHES = 8
WORDS, LENGTH = 6, 12


class Words(nn.Module):
    """A loss for each word of a batch of sentences, and what is made of these."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.words, self.use, self.said = nn.Embedding(20, 8), use, list[Any]()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 20))
        self.calls = 0

    def hidden(self, ids: Tensor) -> Tensor:
        found: Tensor = self.net(self.words(ids))
        return found

    def losses(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.hidden(ids).mT, ids, reduction="none")

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.use(self, ids, mask)


def batches(count: int = BATCHES) -> Iterator[tuple[Tensor, Tensor]]:
    """Sentences of several lengths; every third batch has no padding."""
    draw = torch.Generator().manual_seed(5)
    for number in range(count):
        ids = torch.randint(20, (WORDS, LENGTH), generator=draw)
        lengths = torch.randint(2, LENGTH + 1, (WORDS,), generator=draw)
        mask = torch.arange(LENGTH) < lengths[:, None]
        yield ids, (mask | (number % 3 == 2)).long()


def trained(module: Any, call: Any, count: int) -> list[Any]:
    found: list[Any] = []
    for number, batch in enumerate(batches(count)):
        torch.manual_seed(number)
        module.zero_grad()
        try:
            loss = call(*batch)
            loss.backward()
        except ValueError as error:
            found.append(str(error))
            continue
        found += [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        found += module.said
        del loss
    return [*found, torch.get_rng_state()]


def check(use: Use, count: int = BATCHES) -> Any:
    """Train with a use; returns the step, whose results are eager mode's."""
    torch.manual_seed(0)
    original = Words(use)
    eager, module = copy.deepcopy(original), copy.deepcopy(original)
    step = rematerialize(module, "min", time_limit=0.5, cost_model="unit")
    expected, found = trained(eager, eager, count), trained(module, step, count)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert step.plans
    return step


def graphs(step: Any) -> int:
    return len(step._step._plans.graphs)


def counted(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    return (module.losses(ids) * mask).sum() / mask.sum().item()


def counted_last(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    return module.losses(ids).sum() / int(((ids != 3) & (mask > 0)).sum())


def with_arithmetic(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    number = mask.sum().item()
    return module.losses(ids).sum() * (number % 3 + 1) / (number / 3 + 0.1) + number // 2 - math.sqrt(number)


def floats(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    return module.losses(ids).sum() * mask.float().mean().item() / float(mask.sum())


def told(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    number = mask.sum().item()
    module.said = [f"{number} words", number, number / 2]
    return module.losses(ids).sum() / max(number, 30)


def of_a_break(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    losses = module.losses(ids)
    right = (losses < 2.9).sum().item()  # known to nobody before
    return losses.sum() / (right + 1)


def summed(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    return module.losses(ids).sum() / sum(one.item() for one in mask.sum(1)[:3])


def asserted(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    assert ids.max().item() < 20
    assert mask.any() and mask.sum().item() > 0, "no words"
    return module.losses(ids).mean()


def refused(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    if ids.max() >= 20 or ids.min() < 0:
        raise ValueError("unknown words")
    return module.losses(ids).mean()


def in_a_loop(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    width = 1
    while mask[:, :width].sum() < 20 and width < LENGTH - 4:
        width += 1
    return module.losses(ids)[:, :width].mean()


def under_autocast(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        number = (mask.to(torch.bfloat16) * 0.3).sum().item()
        losses = module.losses(ids)
    return losses.sum() / number


def since_written(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    total = mask.sum()
    mask.bernoulli_(0.5)
    return module.losses(ids).sum() / total.item() + mask.sum()


def labelled(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    labels = ids.clone()
    labels[mask == 0] = -100
    labels[:, 0] = -100
    losses = functional.cross_entropy(module.hidden(ids).mT, labels, reduction="sum")
    return losses / (labels != -100).sum().item()


def filled(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    weights = mask.float()
    weights.mul_(2).sub_(0.5)
    weights[weights < 0] = 0.25
    weights *= 3
    return (module.losses(ids) * weights).sum() / weights.sum().item()


def through_views(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    flat, columns = mask.view(-1), mask.T
    columns[2:4] = 7
    number = flat.sum().item()
    columns.fill_(1)
    return module.losses(ids).sum() / number + flat.sum() / mask.sum().item()


def of_numbers(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    module.calls += 1
    seen = (torch.arange(BATCHES + 1) * 0.1)[module.calls].item()
    decay = 0.9 - module.calls / 50
    return module.losses(ids).sum() * seen / (mask.sum(1) * decay).max().item()


def of_what_was_asked(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    number = mask.sum().item()
    share = (mask.sum(1) / number).max().item()
    return module.losses(ids).sum() * share / (mask.float() + share).mean().item() / number


ONCE = [counted, counted_last, with_arithmetic, floats, told, summed, asserted, refused, under_autocast]
WRITTEN = [since_written, labelled, filled, through_views]


@pytest.mark.parametrize("use", [*ONCE, *WRITTEN])
def test_one_graph_holds_for_all_numbers(use: Use) -> None:
    step = check(use)
    assert graphs(step) == 1 and step.runs[0] == BATCHES and not step.failures


@pytest.mark.parametrize("use", [of_numbers, of_what_was_asked])
def test_values_of_numbers_that_vary_are_known_too(use: Use) -> None:
    step = check(use)
    assert graphs(step) <= 2 and sum(step.runs) == BATCHES and not step.failures  # a counter is a constant at first


def test_one_part_holds_for_all_numbers_of_a_break() -> None:
    step = check(of_a_break)
    assert graphs(step) == 2 and sum(step.runs) == 2 * BATCHES and not step.failures


def when_whole(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    losses = module.losses(ids)
    return losses.mean() if mask.all() else (losses * mask).sum() / mask.sum()


def negated(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    padded = not mask.all()
    return module.losses(ids).mean() * (2 if padded else 1)


def either(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    return (module.losses(ids) * (mask.all() or mask[0].any())).mean()


@pytest.mark.parametrize("use", [when_whole, negated, either])
def test_each_answer_is_a_graph(use: Use) -> None:
    step = check(use)
    assert graphs(step) == 2 and sum(step.runs) == BATCHES and not step.failures


def trimmed(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    longest = mask.sum(1).max()
    return (module.losses(ids[:, :longest]) * mask[:, :longest]).sum()


def trimmed_and_written(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    longest = mask.sum(1).max()
    ids, mask = ids[:, :longest], mask[:, :longest]
    ids[ids == 3] = 4
    return (module.losses(ids) * mask).sum() / (ids != 4).sum().item()


def trimmed_and_asked(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    ids = ids[:, : mask.sum(1).max().item()]
    known = torch.arange(ids.shape[1]) < mask.sum(1)[:, None]
    return module.losses(ids).mean() if known.all() else (module.losses(ids) * known).sum() / known.sum()


def cut_off(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    shorter = (mask.sum(1).min() - LENGTH).item()
    return functional.pad(module.losses(ids), (0, shorter)).sum() if shorter else module.losses(ids).sum()


def counting(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    longest = int(mask.sum(1).max())
    return (module.losses(ids)[:, :longest] * torch.arange(longest)).sum()


def repeated(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    counts = mask.sum(1)
    hidden = torch.repeat_interleave(module.hidden(ids)[:, 0], counts, dim=0)
    return hidden.square().mean() + module.hidden(ids)[torch.repeat_interleave(counts), 0].mean()


def found(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    rows, columns = torch.where(mask > 0)
    picked = module.losses(ids)[rows, columns].mean()
    places = torch.argwhere(mask)
    return picked + module.losses(ids)[places[:, 0], places[:, 1]].sum() / len(mask.nonzero())


def selected(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    return module.words(ids.masked_select(mask > 0)).square().mean()


def balanced(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    weights = 1 / (1 + torch.bincount(ids[mask > 0], minlength=20).float())
    return (module.losses(ids) * weights[ids]).mean()


def by_class(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    classes, places, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    runs = torch.unique_consecutive(mask.view(-1))
    sums = torch.zeros(len(classes)).index_add(0, places.view(-1), module.losses(ids).view(-1))
    return (sums / counts).mean() * len(runs) + ids[0].unique().sum()


@pytest.mark.long
@pytest.mark.parametrize(
    "use",
    slow_but(
        {trimmed_and_asked, cut_off, repeated, found, selected, in_a_loop},
        [
            balanced, by_class, trimmed, trimmed_and_written, trimmed_and_asked, cut_off, counting, repeated, found,
            selected, in_a_loop,
        ],
    ),
)  # fmt: skip
def test_sizes_that_follow_from_values_become_symbols(use: Use) -> None:
    step = check(use)
    assert graphs(step) <= 5 and sum(step.runs) == BATCHES and not step.failures


def counter(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    module.calls += 1
    return module.losses(ids).mean() * min(1.0, module.calls / 5)


def test_a_modules_counter_is_an_input() -> None:
    step = check(counter)
    assert graphs(step) <= MOST_CAPTURES and sum(step.runs) == BATCHES and not step.failures


def raised(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    if mask.all():
        raise ValueError(f"nothing is masked of {mask.sum().item()} words")
    return module.losses(ids).mean()


def test_errors_are_raised_as_in_eager_mode() -> None:
    step = check(raised)
    assert graphs(step) == 1


def as_power(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    return (module.losses(ids) + 1).pow(mask.sum().item() % 3 + 1).mean()


def by_logarithm(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    return module.losses(ids).sum() / math.log(mask.sum().item() + 1)


def chosen(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    losses = module.losses(ids)
    first, second = (losses * 2).cos(), (losses * 3).sin()
    hard = int((losses > 3).sum())
    return first[: hard % 5 + 1].sum() + second.mean()


@pytest.mark.long
@pytest.mark.parametrize("use", [as_power, by_logarithm, chosen])
@pytest.mark.filterwarnings("ignore:.*captured 5 times for the same shapes")
def test_numbers_that_must_be_known_are_constants(use: Use) -> None:
    check(use)


class Reported(Classifier):
    """Logs numbers, and skips a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if torch.isnan(x).any():
            return None
        scores = self.net(x)
        number = (y > 0).sum().item()
        loss = functional.cross_entropy(scores, y, reduction="none") * (y > 0)
        self.log("number", float(number), batch_size=len(y))
        self.log("loss", loss.sum() / max(number, 1), batch_size=max(number, 1), on_epoch=True)
        return loss.sum() / max(number, 1)


class Skips(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            batch[0][0, 0] = math.nan


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_lightning_step() -> None:
    _, _, remat = compare(Reported, plans=None, callbacks=lambda: [Skips()])
    assert not remat.failures and len({tuple(plan.graph.inputs) for plan in remat.plans}) == len(remat.plans)


class Scaled(nn.Module):
    """A layer that sets its scale by the first batch, and counts in a buffer, as flows and codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("known", torch.tensor(False))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.known:
            with torch.no_grad():
                self.scale.div_(x.std((0, 1)) + 0.1)
                self.known.fill_(True)
        decay = min(0.9, (1 + self.seen.item()) / (4 + self.seen.item()))
        self.seen += 1
        return torch.tanh(self.linear(x) * self.scale) * decay


def flows(kind: str) -> tuple[nn.Module, Any]:
    """A network of such layers, and what is called: it, a function that finds it in its closure, or one of its methods."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 8), *(Scaled() for _ in range(2)), nn.Dropout(0.2))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def loss(self, ids: Tensor) -> Tensor:
            return self.net(ids).square().mean()

    def loss(ids: Tensor) -> Tensor:
        return net(ids).square().mean()

    return net, {"module": net, "function": loss, "method": Whole().loss}[kind]


@pytest.mark.parametrize("kind", ["module", "function", "method"])
def test_buffers_are_known_too(kind: str) -> None:
    results = []
    for wrap in (False, True):
        net, call = flows(kind)
        call = rematerialize(call, "min", time_limit=0.5, cost_model="unit") if wrap else call
        results.append([])
        for number, (ids, _) in enumerate(batches()):
            torch.manual_seed(number)
            net.zero_grad()
            loss = call(ids)
            loss.square().mean().backward()
            results[-1] += [
                loss.detach(),
                *(p.grad.clone() for p in net.parameters()),
                *map(torch.clone, net.buffers()),
            ]
            del loss
    assert all(map(torch.equal, *results)) and not call.failures
    assert graphs(call) <= 3  # in front of the first answer, and on both sides of the decay's last value


def each(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    losses = module.losses(ids)
    return losses[0].sum() + sum(one.mean() for one, known in zip(losses, mask, strict=True) if known[5])


@pytest.mark.long
def test_answers_that_are_never_the_same_are_left() -> None:
    step = check(each, 2 * MOST_ANSWERS)
    assert not step._step._captures.early._asked[bool]


def by_lengths(module: Words, ids: Tensor, mask: Tensor) -> Tensor:
    losses = module.losses(ids)
    return sum((losses[i, : int(mask[i].sum())].sum() for i in range(len(ids))), torch.zeros(()))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*captured")
def test_many_sizes_are_left_to_dynamo() -> None:
    step = check(by_lengths)
    assert not step._step._captures.early._sizes


class Judge(Words):
    def judge(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.losses(ids).mean()


def test_what_dynamo_has_skipped_of_one_object_it_captures_of_another() -> None:
    code = Judge.judge.__code__
    skip_code(code)  # as it does where it cannot capture a call
    torch.manual_seed(0)
    step = rematerialize(Judge(counted).judge, "min", time_limit=0.5, cost_model="unit")
    for batch in batches():
        step(*batch).backward()
    assert [graph.code for graph in step._step._plans.graphs] == [code] and step.runs == (BATCHES,)

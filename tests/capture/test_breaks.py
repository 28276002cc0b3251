"""What libraries do in a layer or a loss that need not cut a step: constants, messages, rows chosen by a mask."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import rematerialize
from tests.helpers.training import Classifier, assert_same, compare, fit, loader

log = logging.getLogger("tests.breaks")


class Overlap(Classifier):
    """A loss that finds out its dimensions with tensors, as MONAI's do."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        given = functional.softmax(self.net(x), 1).unsqueeze(-1).unsqueeze(-1)
        target = functional.one_hot(y, 4).to(x.dtype)[..., None, None]
        dims: list[int] = torch.arange(2, given.dim()).tolist()
        half = torch.full((), 2).item() * float(torch.tensor(0.25))
        both = torch.sum(given * target, dim=dims)
        return (1 - both / (half * torch.sum(given + target, dim=dims))).mean()


class Asks(Classifier):
    """A block that asks with TorchScript's question, and a layer that asks where a class comes from."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        for part in self.net:
            x = part(x) if torch.jit.isinstance(x, torch.Tensor) else x
            weight = getattr(part, "weight", None)
            if weight is not None and type(weight).__module__.startswith("elsewhere."):
                raise AssertionError(type(weight).__name__)
        return functional.cross_entropy(x, y)


@pytest.mark.parametrize("module", [Overlap, Asks])
def test_constants_that_python_reads_cut_nothing(module: type[Classifier]) -> None:
    compare(module, plans=2)


def written(x: torch.Tensor) -> list[int]:
    dims = torch.arange(2)
    dims += 1
    return dims.tolist()


def of_the_batch(x: torch.Tensor) -> list[int]:
    return (x.sum((1, 2)) > 0).long().clamp(max=1)[:1].tolist()


@pytest.mark.parametrize("dims", [written, of_the_batch])
def test_what_is_no_constant_is_read_when_the_step_runs(dims: Callable[[torch.Tensor], list[int]]) -> None:
    net = nn.Linear(8, 8)
    planned = rematerialize(lambda x: net(x).tanh().sum(dims(x)).pow(2).mean())
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(4, 3, 8)
        assert torch.equal(planned(x), net(x).tanh().sum(dims(x)).pow(2).mean())


# -- messages ---------------------------------------------------------------------------------------------------------


class Talks(Classifier):
    """A loss that says what it sees, in all ways there are."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        warnings.warn("classes are not balanced", stacklevel=1)
        warnings.warn(f"{len(x)} samples", RuntimeWarning, stacklevel=1)
        log.info("shapes %s and %s", x.shape, tuple(y.shape))
        log.warning("largest class %s", y.max())
        log.debug("nobody hears this %s", loss)
        print("loss", f"{loss:.4f}", y.sum(), sep="|")
        return loss


def said(
    run: Callable[[], Any], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> tuple[Any, list[Any]]:
    """What a run returns, and all that it says: prints, records, warnings, each with its line of code."""
    caplog.clear()
    capsys.readouterr()
    with caplog.at_level(logging.INFO, log.name), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = run()
    mine = [(one.category, str(one.message), one.filename, one.lineno) for one in heard if one.filename == __file__]
    records = [one for one in caplog.records if one.name == log.name]
    logged = [(one.levelno, one.getMessage(), one.pathname, one.lineno, one.funcName) for one in records]
    return result, [capsys.readouterr().out, mine, logged]


def test_messages_cut_nothing_and_are_those_of_eager_mode(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    plain, expected = said(lambda: fit(Talks), capsys, caplog)
    (_, scheduled, _), found = said(lambda: compare(Talks, plans=2), capsys, caplog)
    assert_same(plain.results, scheduled.results)
    assert len(expected[1]) == 6 and len(expected[2]) == 6
    assert found == [expected[0] * 2, expected[1] * 2, expected[2] * 2]  # `compare` trains twice


class Thing:
    def __str__(self) -> str:
        return "a thing"


def test_what_only_python_can_say_is_said_by_python(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    net, thing = nn.Linear(8, 1), Thing()

    def step(x: torch.Tensor) -> torch.Tensor:
        log.warning("about %s", thing)
        return net(x).pow(2).mean()

    planned, x = rematerialize(step), torch.randn(4, 8)
    expected = said(lambda: [step(x), step(x)], capsys, caplog)
    found = said(lambda: [planned(x), planned(x)], capsys, caplog)
    assert_same(expected[0][0].detach(), found[0][0].detach())
    assert expected[1] == found[1] and len(found[1][2]) == 2


def helper(x: torch.Tensor) -> None:
    """Says who called it."""
    warnings.warn("from a helper", FutureWarning, stacklevel=2)
    log.info("rows and more: %s", [x.shape[0], (x.shape[1], "columns")], stacklevel=2)


def by_a_helper(x: torch.Tensor) -> None:
    helper(x)


def lists(x: torch.Tensor) -> None:
    print({"a": (1, 2.5)}, [x.shape[0], 3], x.shape, x.detach().sum())


def by_its_number(x: torch.Tensor) -> None:
    log.log(logging.INFO, "%d rows", x.shape[0])


def with_a_traceback(x: torch.Tensor) -> None:
    try:
        raise ValueError(x.dim())
    except ValueError:
        log.exception("not so")


def to_a_file(x: torch.Tensor) -> None:
    print("rows", x.shape[0], file=sys.stdout)


def a_warning_object(_: torch.Tensor) -> None:
    warnings.warn(UserWarning("an object"), stacklevel=1)


def without_a_category(_: torch.Tensor) -> None:
    warnings.warn("nothing", None, stacklevel=1)


def of_another_thing(x: torch.Tensor) -> None:
    warnings.warn("nothing", UserWarning, 1, x.dim())


@pytest.mark.parametrize(
    "speak",
    [
        by_a_helper,
        lists,
        by_its_number,
        with_a_traceback,
        to_a_file,
        a_warning_object,
        without_a_category,
        of_another_thing,
    ],
)
def test_whatever_is_said_is_said_as_in_eager_mode(
    speak: Callable[[torch.Tensor], None], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of batches of several sizes, so that numbers are symbols."""
    net = nn.Linear(8, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        speak(x)
        return net(x).pow(2).mean()

    planned = rematerialize(step, cost_model="unit", solver="greedy")
    batches = [torch.randn(rows, 8) for rows in (4, 6, 9, 4)]
    expected = said(lambda: [step(x) for x in batches], capsys, caplog)
    found = said(lambda: [planned(x) for x in batches], capsys, caplog)
    assert all(map(torch.equal, expected[0], found[0]))
    assert expected[1] == found[1] and any(expected[1])


def test_a_warning_that_is_an_error_is_one() -> None:
    net = nn.Linear(8, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("not so", stacklevel=1)
        return net(x).pow(2).mean()

    planned, x = rematerialize(step), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="not so"):
        planned(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not so"):
            planned(x)


# -- rows chosen by a mask --------------------------------------------------------------------------------------------


class Chosen(Classifier):
    """Messages along some of the edges, as graph layers send them; labels stand for the edges' ends."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.net[:-1](x)
        ends = y.unsqueeze(0).expand(2, -1)[:, y != 2]
        h = h + torch.zeros_like(h).index_add(0, ends[0], h[y != 2])
        return functional.cross_entropy(self.net[-1](h), y)


def test_rows_that_a_mask_of_the_batch_chooses_cut_nothing() -> None:
    torch.manual_seed(0)
    counts = {(len(y), int((y != 2).sum())) for _, y in loader()}
    compare(Chosen, plans=len(counts))


def test_rows_of_a_batch_that_is_written_to_are_those_of_then() -> None:
    net = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.neg_()
        return net(x[x[:, 0] > 0]).pow(2).sum()

    planned = rematerialize(step)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(16, 8)
        expected = step(x.clone())
        assert torch.equal(planned(x), expected)


def test_masks_of_several_dimensions_and_of_other_batches() -> None:
    net = nn.Linear(8, 8)

    def step(batch: dict[str, Any]) -> torch.Tensor:
        mask = batch["mask"]
        y = net(batch["x"])
        return y[mask].pow(2).sum() + y[:, mask[0] & mask[1]].sum() + y[mask[:, 0], 1].sum()

    planned = rematerialize(step)
    for seed in range(5):
        torch.manual_seed(seed)
        batch = {"x": torch.randn(4, 8, requires_grad=True), "mask": torch.rand(4, 8) > 0.1 * seed}
        gradients = []
        for function in (step, planned):
            loss = function(batch)
            gradients.append([loss, *torch.autograd.grad(loss, [batch["x"], *net.parameters()])])
        assert all(map(torch.equal, *gradients))
    assert not planned.failures and sum(planned.runs) == 5

"""Counters and lists that a training step changes on its own module: captured once more, and never again."""

from __future__ import annotations

import collections
import functools
import types
import weakref

import numpy
import pytest
import torch

from lightning_remat.callbacks.own_state import hands_on
from tests.helpers.training import Classifier, assert_same, callback, compare, fit, loader


def batches():
    return loader(48)  # six


class Keeping(Classifier):
    """``body`` is given the batch and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return self.body(batch, loss)

    def on_train_epoch_end(self) -> None:
        self.seen += [self.count, *self.outputs]
        self.outputs.clear()


class Counts(Keeping):
    def body(self, batch, loss):
        self.count += 1
        return loss


class CountsInTheLoss(Keeping):
    def body(self, batch, loss):
        self.count += batch[0].shape[0]
        return loss * (1 + self.count / 64)


class Appends(Keeping):
    def body(self, batch, loss):
        self.outputs.append(loss.detach())
        return loss


class AppendsResults(Keeping):
    def body(self, batch, loss):
        self.outputs.append({"loss": loss.detach(), "labels": batch[1]})
        self.outputs += [loss * 2]
        self.outputs.extend((1, "two"))
        return loss


class Both(Keeping):
    def body(self, batch, loss):
        self.count += 1
        self.outputs.append(loss.detach())
        return loss


class TheLast(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.last = collections.deque(maxlen=3)

    def body(self, batch, loss):
        self.last.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen += self.last


class History(Keeping):
    """Lists in dicts, objects and parts."""

    def __init__(self) -> None:
        super().__init__()
        self.history = collections.defaultdict(list, {"all": {"losses": []}})
        self.state = types.SimpleNamespace(losses=[])
        self.net[0].losses = []

    def body(self, batch, loss):
        self.history["loss"].append(loss.detach())
        self.history["all"]["losses"].append(loss.detach())
        self.state.losses += [loss.detach()]
        self.net[0].losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        lists = (self.history["loss"], self.history["all"]["losses"], self.state.losses, self.net[0].losses)
        assert [type(one) for one in lists] == [list] * 4 and len({len(one) for one in lists}) == 1
        self.seen += [value for one in lists for value in one]


class NewHistoryEachEpoch(Keeping):
    """Nothing keeps what was collected in the epoch before."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[torch.Tensor]] = {"losses": []}
        self.kept: list[weakref.ref[torch.Tensor]] = []

    def body(self, batch, loss):
        self.history["losses"].append(loss.detach())
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch and batch_idx == 1:
            assert len(self.history["losses"]) == 1 and not any(one() is not None for one in self.kept)

    def on_train_epoch_end(self) -> None:
        self.seen += [value.item() for value in self.history["losses"]]
        self.kept = [weakref.ref(value) for value in self.history["losses"]]
        self.history = {"losses": []}


@pytest.mark.parametrize(
    "make", [Counts, CountsInTheLoss, Appends, AppendsResults, Both, TheLast, History, NewHistoryEachEpoch]
)
def test_one_graph(make):
    _, scheduled, remat = compare(make, train=batches, plans=None, max_epochs=2)
    assert len(remat.plans) <= 2  # with the values of the first step, and for all values
    assert sum(remat.runs) == 12
    assert type(scheduled.module.outputs) is list


class CollectsFeatures(Keeping):
    """Hooks fill a list that each step empties."""

    def __init__(self) -> None:
        super().__init__()
        for part in list(self.net)[:2]:
            part.register_forward_hook(lambda module, args, output: self.outputs.append(output))

    def body(self, batch, loss):
        found = sum(one.abs().mean() for one in self.outputs)
        self.outputs.clear()
        return loss + found


class EmptiesItFirst(CollectsFeatures):
    def loss(self, batch):
        self.outputs.clear()
        return super().loss(batch)

    def body(self, batch, loss):
        return loss + sum(one.abs().mean() for one in self.outputs)


@pytest.mark.parametrize("make", [CollectsFeatures, EmptiesItFirst])
def test_lists_that_each_step_empties(make):
    _, _, remat = compare(make, train=batches, plans=None, max_epochs=2, budget="min")
    assert not remat.failures
    assert (
        len(remat.plans) <= 3 and sum(remat.runs) == 12
    )  # as one graph, and in parts, planned again with what runs beside


class NewListEachEpoch(Keeping):
    def body(self, batch, loss):
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen += self.outputs
        self.outputs = []


class ReadsItsList(Keeping):
    def body(self, batch, loss):
        self.outputs.append(loss.detach())
        if len(self.outputs) > 4:
            self.outputs.pop(0)
        return loss + 0 * torch.stack(list(self.outputs)).sum()


class BindsAnotherList(Keeping):
    def body(self, batch, loss):
        self.outputs.append(loss.detach())
        if self.count < 3:
            self.outputs = [*self.outputs, loss.detach()]
        self.count += 1
        return loss


class GivesItsListAway(Keeping):
    def body(self, batch, loss):
        self.outputs.append(loss.detach())
        self.seen.append(self.outputs[-1])
        return loss


class Averages(TheLast):
    def body(self, batch, loss):
        self.last.append(loss.item())
        self.log("average", sum(self.last) / len(self.last))
        return loss


class HandsItOn(Keeping):
    """What it is given to takes lists only."""

    def body(self, batch, loss):
        self.outputs.append(loss.detach())
        if len(self.outputs) == 3:
            self.log("average", torch.stack(self.outputs).mean())
            self.outputs.clear()
        return loss


class LooksAtItsType(Keeping):
    def body(self, batch, loss):
        self.outputs.append(loss.detach())
        assert isinstance(self.outputs, list)
        return loss


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [NewListEachEpoch, ReadsItsList, BindsAnotherList, GivesItsListAway, Averages, HandsItOn, LooksAtItsType]
)
@pytest.mark.filterwarnings("ignore:.*captured 5 times.*", "ignore:.*could not be captured.*")
def test_lists_used_in_other_ways(make):
    plain, remat = fit(make, train=batches, max_epochs=2), callback(0.9)
    scheduled = fit(make, remat, train=batches, max_epochs=2)
    assert remat.plans
    assert_same(plain.results, scheduled.results)


class Hands:
    """Steps that hand a list on, or do not."""

    def stacks(self):
        return torch.stack(self.losses)

    def in_a_dict(self):
        return print({"losses": self.losses})

    def by_name(self):
        return torch.stack(tensors=self.losses)

    def another(self):
        return self.stacks()

    def of_a_dict(self):
        return torch.cat(self.history["losses"])

    def keeps(self):
        self.alias = self.losses

    def returns(self):
        return self.losses

    def counts(self):
        return (
            len(self.losses)
            + sum(self.losses)
            + self.losses[-1]
            + numpy.mean(self.losses[:2])
            + numpy.mean(self.losses)
        )

    def copies(self):
        return torch.stack(list(self.losses)), torch.tensor(self.losses), torch.stack([*self.losses])

    def appends(self):
        losses = self.losses
        losses.append(2)
        self.losses.append(torch.stack(self.others))
        self.losses += [1]


@pytest.mark.parametrize("name", ["stacks", "in_a_dict", "by_name", "another", "of_a_dict", "keeps", "returns"])
def test_a_step_hands_a_list_on(name):
    assert hands_on(getattr(Hands(), name), "losses")
    assert not hands_on(getattr(Hands(), name), "others")


@pytest.mark.parametrize("name", ["counts", "copies", "appends"])
def test_a_step_keeps_a_list_to_itself(name):
    assert not hands_on(getattr(Hands(), name), "losses")


def test_what_has_no_source_is_taken_to_keep_a_list_to_itself():
    assert not hands_on(len, "losses") and not hands_on(functools.partial(Hands().stacks), "losses")


class OtherNames(Classifier):
    def training_step(this, data, number):  # noqa: N805
        return this.loss(data) * (number + 1)


def test_arguments_of_any_name():
    _, _, remat = compare(OtherNames, train=batches, plans=1)
    assert remat.runs == (6,)

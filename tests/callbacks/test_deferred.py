"""`self.log` and torchmetrics metrics in a captured step: written down, made afterwards, with the same numbers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_remat.callbacks.deferred import Deferred, DeferredValue
from tests.helpers.training import Classifier, assert_clean, callback, compare, loader, trainer


def batches():
    return loader(24)


class Measured(Classifier):
    """``body`` is given the logits, the labels and the loss, and returns what the step returns."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.both = torchmetrics.MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)])
        self.mean = torchmetrics.MeanMetric()  # does not say whether it is differentiable
        self.error = torchmetrics.MeanSquaredError()  # differentiable
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        return self.body(logits, y, nn.functional.cross_entropy(logits, y))

    def on_train_epoch_end(self) -> None:
        if self.accuracy.update_called:
            self.seen.append(self.accuracy.compute())


class ObjectLogged(Measured):
    def body(self, logits, y, loss):
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"a": loss, "b": loss * 2})
        return loss


class ValueLogged(Measured):
    def body(self, logits, y, loss):
        value = self.accuracy(logits, y)
        self.log("accuracy", value, on_step=True, on_epoch=True)
        return {"loss": loss, "accuracy": value}


class UpdateComputeReset(Measured):
    def body(self, logits, y, loss):
        self.accuracy.update(logits, y)
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()
        return loss


class CollectionLogged(Measured):
    def body(self, logits, y, loss):
        self.log_dict(self.both(logits, y))
        return loss


class CollectionObject(Measured):
    def body(self, logits, y, loss):
        self.both.update(logits, y)
        self.log_dict(self.both, on_step=True, on_epoch=True)
        return loss


class CollectionUpdated(Measured):
    def body(self, logits, y, loss):
        self.both.update(logits, y)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.both.compute())
        self.both.reset()


class BufferLogged(Measured):
    """What is logged is its value now, not when the step has returned."""

    def body(self, logits, y, loss):
        self.log("before", self.count)
        self.count += 1
        self.log_dict({"after": self.count})
        self.count += 1
        return loss


ONE_GRAPH = [
    ObjectLogged,
    ValueLogged,
    UpdateComputeReset,
    CollectionLogged,
    CollectionObject,
    CollectionUpdated,
    BufferLogged,
]


class Arithmetic(Measured):
    def body(self, logits, y, loss):
        value = self.accuracy(logits, y)
        self.log("error", 1 - value)
        self.log("accuracy", self.accuracy)
        return {"loss": loss, "twice": value * 2, "sum": value + loss.detach(), "other": loss.detach() + value}


class AsTensor(Measured):
    def body(self, logits, y, loss):
        value = self.accuracy(logits, y)
        self.seen += [value.item(), float(value), bool(value > 0.1)]
        return {"loss": loss, "stacked": torch.stack([value, value]), "mean": value.mean()}


class Branch(Measured):
    def body(self, logits, y, loss):
        return loss * 2 if self.accuracy(logits, y) > 0.3 else loss


class OneOfACollection(Measured):
    def body(self, logits, y, loss):
        self.log("f1", self.both["MulticlassF1Score"](logits, y))
        return loss


class Items(Measured):
    def body(self, logits, y, loss):
        for name, value in self.both(logits, y).items():
            self.log(f"train_{name}", value)
        return loss


class MeanOfLoss(Measured):
    def body(self, logits, y, loss):
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss


class InTheLoss(Measured):
    def body(self, logits, y, loss):
        return loss + self.error(logits, nn.functional.one_hot(y, 4).float())


class Composed(Measured):
    """A metric made of others reads what they were given before."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = self.accuracy * 2

    def body(self, logits, y, loss):
        self.accuracy.update(logits, y)
        return {"loss": loss, "doubled": self.doubled.compute()}


@pytest.mark.parametrize("make", ONE_GRAPH)
def test_one_graph(make):
    _, scheduled, remat = compare(make, train=batches, plans=1)
    assert remat.runs == (3,)
    assert_clean(scheduled.trainer, scheduled.module)


# These ask for a value in the middle of the step: a graph ends there.
@pytest.mark.parametrize("make", [Arithmetic, Branch, OneOfACollection, Items, MeanOfLoss, InTheLoss, Composed])
def test_values_asked_for_in_the_step(make):
    compare(make, train=batches, plans=None, budget=0.9)


def test_a_value_used_as_a_tensor():
    compare(AsTensor, train=lambda: loader(16), plans=None, budget=0.9)


class Formats(Measured):
    def body(self, logits, y, loss):
        value = self.accuracy(logits, y)
        self.text = f"{value:.2f}, {value}, " + "{:.3f}".format(value) + ", %s" % value  # noqa: UP031, UP032
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.text)


class Adds(Measured):
    def body(self, logits, y, loss):
        values = self.both(logits, y)
        self.log_dict(values)
        values["of the step"] = loss.detach()  # after it was logged
        self.log_dict(self.both(logits, y) | {"loss": loss})
        self.sizes = len(values)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((self.sizes, sorted(self.trainer.callback_metrics)))


@pytest.mark.parametrize("make", [Formats, Adds])
def test_values_that_are_written_out_or_added_to(make):
    _, scheduled, _ = compare(make, train=batches, plans=None, budget=0.9)
    assert len(scheduled.module.seen) >= 3


class ReadsWhatItHasLogged(Measured):
    """As ``callback_metrics``' own example in Lightning."""

    name = "callback_metrics"

    def body(self, logits, y, loss):
        self.accuracy(logits, y)
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", self.accuracy, prog_bar=True)
        found = getattr(self.trainer, self.name)
        number = len(found)
        self.log("number", float(number))
        return loss / torch.as_tensor(found["loss"]).detach() * (1 + found["accuracy"])


class ReadsLogged(ReadsWhatItHasLogged):
    name = "logged_metrics"


class ReadsProgress(Measured):
    def body(self, logits, y, loss):
        self.log("loss", loss, prog_bar=True)
        self.log("number", float(len(self.trainer.progress_bar_metrics)))
        return loss


class ReadsTheLastStepsFirst(Measured):
    def body(self, logits, y, loss):
        before = self.trainer.callback_metrics.get("loss", torch.ones(()))
        self.log("loss", loss)
        return loss * before


@pytest.mark.parametrize(
    "make", [ReadsWhatItHasLogged, ReadsLogged, ReadsProgress, ReadsTheLastStepsFirst], ids=lambda make: make.__name__
)
def test_the_trainers_metrics_are_read_in_the_step(make):
    _, _, remat = compare(make, train=batches, plans=None, max_epochs=2)
    assert not remat.failures


class Keeps(Measured):
    def body(self, logits, y, loss):
        self.value = self.accuracy(logits, y)
        self.values = [self.value]
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert type(self.value) is torch.Tensor
        self.seen.append(torch.stack([self.value, *self.values]))


def test_values_kept_by_the_user():
    _, scheduled, _ = compare(Keeps, train=batches, plans=1)
    assert isinstance(scheduled.module.values[0], DeferredValue)
    for copied in (copy.deepcopy(scheduled.module), pickle.loads(pickle.dumps(scheduled.module))):
        assert type(copied.values[0]) is torch.Tensor
        assert float(copied.values[0]) == float(scheduled.module.value)


def test_an_exception_drops_what_was_written_down():
    torch.manual_seed(0)
    module = Measured()
    module.trainer = trainer()
    deferred = Deferred(module)
    own = module.accuracy.update

    def step():
        module.accuracy(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), deferred.active():
        step()
    assert module.accuracy.update == own and "log" not in vars(module) and "forward" not in vars(module.accuracy)
    assert deferred.settle(3) == 3
    assert not module.accuracy.update_called


def test_calls_are_made_once_and_in_order():
    module = Measured()
    module.trainer = trainer()
    expected = MulticlassAccuracy(4)
    deferred = Deferred(module)
    a, b = torch.randn(5, 4), torch.randint(4, (5,))
    with deferred.active():
        first = module.accuracy(a, b)
        assert isinstance(first, DeferredValue)
        assert not module.accuracy.update_called
        second = module.accuracy(a.flip(0), b)
        assert float(second) == float(expected(a, b) * 0 + MulticlassAccuracy(4)(a.flip(0), b))
        third = module.accuracy.compute()
    expected(a.flip(0), b)
    output = deferred.settle({"values": [first, second], "all": third})
    assert torch.equal(output["all"], expected.compute())
    assert all(type(value) is torch.Tensor for value in output["values"])
    assert module.accuracy._update_count == 2


def test_an_error_of_a_metric_reaches_the_user_and_undoes_everything():
    class Wrong(Measured):
        def body(self, logits, y, loss):
            self.accuracy(logits[:, :2], y)
            return loss

    torch.manual_seed(0)
    module, runner = Wrong(), trainer(callback())
    with pytest.raises(Exception, match="number of classes"):
        runner.fit(module, batches())
    assert_clean(runner, module)

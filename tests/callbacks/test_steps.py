"""Training steps of every kind: how they optimize, which batches they take, what they return, and which run as before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_remat.planner import RematWarning
from tests.helpers.small import ONE, NoBatchIdx, Small, quick
from tests.helpers.training import Classifier, assert_same, callback, compare, fit, loader, network

# -- kinds of steps ---------------------------------------------------------------------------------------------------


class Schedulers(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DataloaderIdx(Classifier):
    def training_step(self, batch, batch_idx, dataloader_idx=0):
        return self.loss(batch) * (1 + dataloader_idx)


class ReturnsDict(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits, "name": "step", "batch_idx": 3}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["logits"].sum())
        self.seen.append(outputs["loss"])


class OneInTwo(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            loss = loss + self.net[0].weight.square().mean()
        return loss


class ReadsProgress(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.global_step >= 3:
            loss = loss * 2
        if self.current_epoch > 2:
            loss = loss * 2
        return loss


class LogsProgress(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("step", float(self.global_step))
        self.log("epoch", self.current_epoch)
        return self.loss(batch) * min(1.0, self.global_step / 3)


class Frozen(Classifier):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


class OneCycle(Small):
    """With Adam, ``lr`` and ``betas`` are others in each step."""

    def training_step(self, batch, batch_idx):
        return self.scaled(self.loss(batch), self.optimizers().param_groups)

    def scaled(self, loss, groups):
        return loss

    def configure_optimizers(self):
        body, head = list(self.net[0].parameters()), list(self.net[3].parameters())
        optimizer = torch.optim.Adam([{"params": body, "weight_decay": 0.1}, {"params": head}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LogsItsRate(OneCycle):
    def scaled(self, loss, groups):
        self.log("lr", groups[0]["lr"])
        self.log("of_the_trainer", self.trainer.optimizers[0].param_groups[1]["lr"])
        return loss


class ScalesByItsRate(OneCycle):
    def scaled(self, loss, groups):
        return loss + groups[0]["lr"] * self.net[0].weight.square().sum()


class BranchesOnItsRate(OneCycle):
    def scaled(self, loss, groups):
        return loss * 2 if groups[0]["lr"] > 0.007 else loss


class ReadsCapturable(OneCycle):
    def scaled(self, loss, groups):
        return loss * 2 if groups[0]["capturable"] else loss


class Decays(OneCycle):
    def scaled(self, loss, groups):
        return loss + 0.1 * sum(group["weight_decay"] * p.square().sum() for group in groups for p in group["params"])


class LogsEachRate(OneCycle):
    """Those of a group that is added later, too."""

    def scaled(self, loss, groups):
        for number, group in enumerate(groups):
            self.log(f"lr-{number}", group["lr"])
        return loss

    def configure_optimizers(self):
        return super().configure_optimizers()["optimizer"]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})


class SetsItsRate(LogsEachRate):
    def scaled(self, loss, groups):
        for group in groups:
            group["lr"] = 0.01 * (1 + self.global_step)
        return super().scaled(loss, groups)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [{**group, "params": None} for group in self.trainer.optimizers[0].param_groups]


class ManualTwo(Classifier):
    """Two networks with an optimizer each, in the order of a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = network(2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(x), y)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        other = nn.functional.mse_loss(self.other(x), self.net(x).detach())
        second.zero_grad()
        self.manual_backward(other)
        self.log("bias", self.net[0].bias[0])
        second.step()
        self.log_dict({"loss": loss, "other": other})
        self.lr_schedulers().step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters())
        second = torch.optim.SGD(self.other.parameters(), 0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1)]


class ManualToggled(ManualTwo):
    """The same with frozen halves, gradient clipping, a closure and torch's own backward."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = nn.functional.cross_entropy(self.net(x) + self.other(x), y)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.1)
        first.step()
        self.untoggle_optimizer(first)

        def closure():
            second.zero_grad()
            other = nn.functional.cross_entropy(self.other(x), y)
            other.backward()
            return other

        second.step(closure)


@pytest.mark.parametrize("make", [Schedulers, NoBatchIdx, DataloaderIdx, ReturnsDict, Frozen])
def test_steps(make):
    compare(make, **ONE)


@pytest.mark.filterwarnings(
    "ignore:only a part of ManualToggled:lightning_remat.planner.RematWarning"
)  # not the closure
@pytest.mark.parametrize("make", [ManualTwo, ManualToggled])
def test_manual_optimization_with_two_optimizers(make):
    _, _, remat = compare(make, **{**ONE, "plans": None}, budget=0.7)
    assert len(remat.plans) >= (2 if make is ManualTwo else 1)


def test_a_step_that_depends_on_batch_idx_has_two_graphs():
    _, _, remat = compare(OneInTwo, train=lambda: loader(48), plans=None)
    assert sum(remat.runs) == 6 and len(remat.plans) <= 2


@pytest.mark.parametrize(
    ("make", "plans"),
    [
        (LogsItsRate, 1),
        (ScalesByItsRate, 2),
        (BranchesOnItsRate, 2),
        (ReadsCapturable, 1),
        (Decays, 1),
        (LogsEachRate, 1),
        (SetsItsRate, 1),
    ],
)
def test_what_an_optimizer_says_of_itself_is_read_as_it_is(make, plans):
    plain, _, _ = compare(make, plans=plans, train=lambda: loader(64), remat=quick())
    metrics = [one for one in plain.recorder.metrics if any("lr" in name for name in one)]
    assert len({str(one) for one in metrics}) > 1 or not metrics


@pytest.mark.parametrize(("make", "graphs"), [(ReadsProgress, 3), (LogsProgress, 2)])
def test_global_step_and_current_epoch_do_not_capture_every_step(make, graphs):
    _, _, remat = compare(make, **{**ONE, "plans": None}, max_epochs=5)
    assert sum(remat.runs) == 10
    assert len(remat.plans) <= graphs


# -- kinds of batches -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(loader(16).dataset)


def as_dict() -> Any:
    return DataLoader([{"x": x, "y": y} for x, y in samples()], 8)


def as_dataclass() -> Any:
    def collate(some):
        return Example(torch.stack([x for x, _ in some]), torch.stack([y for _, y in some]))

    return DataLoader(samples(), 8, collate_fn=collate)


class DictBatch(Classifier):
    def loss(self, batch):
        return super().loss((batch["x"], batch["y"]))


class DataclassBatch(Classifier):
    def loss(self, batch):
        return super().loss((batch.x, batch.y))


@pytest.mark.parametrize(("make", "train"), [(DictBatch, as_dict), (DataclassBatch, as_dataclass)])
def test_batches(make, train):
    _, _, remat = compare(make, train=train, plans=1)
    assert remat.runs == (2,)


# -- what a step returns ----------------------------------------------------------------------------------------------


class Returns(Small):
    """Keeps what its hook is given, and a copy of it as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []
        self.copies: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.given.append(outputs)
        self.copies.append(copied(outputs))


def copied(value: Any) -> Any:
    """The numbers of an output, without its gradients."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


class ReturnsMore(Returns):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        more = {"nested": [logits.argmax(1), {"y": y}], "accuracy": (logits.argmax(1) == y).float().mean()}
        return {"batch": batch_idx, "logits": logits, "loss": loss, "detached": logits.detach(), "none": None, **more}


class ReturnsMoreByHand(ReturnsMore):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(output["loss"])
        optimizer.step()
        return {**output, "loss": output["loss"].detach()}


@pytest.mark.parametrize(("make", "accumulate"), [(Returns, 2), (ReturnsMore, 1), (ReturnsMoreByHand, 1)])
def test_outputs_are_those_of_the_plain_step_and_stay_so(make, accumulate):
    """Of the same kind, detached or not, as without the callback; later steps do not overwrite what a hook keeps."""
    options = {"train": lambda: loader(24), "accumulate_grad_batches": accumulate, "remat": quick()}
    one, other, _ = compare(make, plans=None, **options)
    assert_same(one.module.given, other.module.given)
    assert_same(one.module.copies, other.module.copies)
    assert len(other.module.given) == 3
    assert_same(other.module.copies, [copied(outputs) for outputs in other.module.given])
    assert all(outputs["loss"].grad_fn is None for outputs in other.module.given)
    more = ["batch", "logits", "detached", "none", "nested", "accuracy"]
    assert {*other.module.given[0]} == {"loss", *(more if make in (ReturnsMore, ReturnsMoreByHand) else ())}


# -- what runs as before ----------------------------------------------------------------------------------------------


def test_what_cannot_be_captured_trains_as_before():
    class Sparse(Classifier):
        def loss(self, batch):
            x, _ = batch
            weight = torch.ones(8, len(x)).to_sparse().requires_grad_()
            return torch.sparse.mm(weight, self.net(x)).square().sum()

    plain = fit(Sparse, train=ONE["train"])
    remat = callback()
    with pytest.warns(RematWarning, match="runs as before"):
        scheduled = fit(Sparse, remat, train=ONE["train"])
    assert_same(plain.results, scheduled.results)
    assert len(remat.failures) == 1


# Lightning's own warning of what is experimental there.
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning")
def test_a_step_that_takes_the_iterator():
    class TakesIterator(Classifier):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    plain = fit(TakesIterator, train=ONE["train"])
    with pytest.warns(RematWarning, match="dataloader_iter"):
        scheduled = fit(TakesIterator, callback(), train=ONE["train"])
    assert_same(plain.results, scheduled.results)

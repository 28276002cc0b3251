"""A small Lightning module, and two training runs of it to compare: without the callback, and with it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat.callbacks import RematCallback
from lightning_remat.exactness._bits import same_bits
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.schedule import OUTSIDE

WIDTH = 16
FOLDER = tempfile.TemporaryDirectory(prefix="lightning_remat-")  # as long as the process
QUICK = {"solver": "greedy"}


def network(layers: int = 2, width: int = WIDTH) -> nn.Sequential:
    """Linear, batch norm, activation and dropout, a few times, and four classes."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2)]
    return nn.Sequential(*parts, nn.Linear(width, 4))


class Classifier(pl.LightningModule):
    """The usual module: subclasses change the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Validated(Classifier):
    """With validation, test and prediction."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


def loader(samples: int = 20, batch_size: int = 8, width: int = WIDTH, **options: Any) -> DataLoader[Any]:
    """Two batches of 8 and a last one of 4, unless told otherwise."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(samples, width, generator=numbers)
    y = torch.randint(4, (samples,), generator=numbers)
    return DataLoader(TensorDataset(x, y), batch_size, **options)


class Recorder(pl.Callback):
    """Everything that a run logs and returns, batch by batch and epoch by epoch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.metrics: list[dict[str, Any]] = []

    def _metrics(self, trainer: pl.Trainer) -> None:
        self.metrics.append({name: value.clone() for name, value in trainer.callback_metrics.items()})

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(outputs)
        self._metrics(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._metrics(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._metrics(trainer)


@dataclasses.dataclass
class Run:
    """What a training run left behind."""

    trainer: pl.Trainer
    module: Any
    recorder: Recorder
    random: torch.Tensor

    @property
    def results(self) -> dict[str, Any]:
        """All numbers of the run."""
        return {
            "outputs": self.recorder.outputs,
            "metrics": self.recorder.metrics,
            "callback_metrics": dict(self.trainer.callback_metrics),
            "state_dict": self.module.state_dict(),
            "buffers": dict(self.module.named_buffers()),
            "gradients": {name: p.grad for name, p in self.module.named_parameters()},
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "random": self.random,
            "seen": self.module.seen,
        }


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A quiet trainer of one epoch on the CPU that writes nothing."""
    quiet = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "default_root_dir": FOLDER.name,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def fit(
    make: Callable[[], Any],
    *callbacks: pl.Callback,
    train: Any = None,
    val: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Run:
    """Make a module and train it, from the same seed every time."""
    torch.manual_seed(0)
    module = make()
    recorder = Recorder()
    runner = trainer(recorder, *callbacks, **options)
    torch.manual_seed(7)
    data = train() if train is not None else loader()
    if val is True:
        val = loader(12)
    arguments = {"ckpt_path": ckpt_path} if ckpt_path is not None else {}
    runner.fit(module, data, val, **arguments)
    return Run(runner, module, recorder, torch.random.get_rng_state())


def callback(budget: Any = 0.4, **options: Any) -> RematCallback:
    """The callback, quick: no measurements unless asked for, and the greedy solver. What a plan is like has its own tests."""
    # What is measured is compared with what was predicted, workspaces among it.
    model = "profile" if options.get("measure") else "unit"
    quick = {"cost_model": model, "measure": False, "artifacts": False}
    return RematCallback(budget, **{**quick, **({} if {"solver", "time_limit"} & options.keys() else QUICK), **options})


def compare(
    make: Callable[[], Any],
    *,
    plans: int | None = 2,
    budget: Any = 0.4,
    callbacks: Callable[[], Sequence[pl.Callback]] = tuple,
    remat: RematCallback | None = None,
    **options: Any,
) -> tuple[Run, Run, RematCallback]:
    """Train without and with the callback: the same numbers, and the callback really at work.

    ``plans`` is how many are expected (one for each batch size of `loader`); ``None`` for any number.
    """
    plain = fit(make, *callbacks(), **options)
    remat = remat or callback(budget)
    scheduled = fit(make, *callbacks(), remat, **options)
    assert_ran(remat, plans)
    assert_same(plain.results, scheduled.results)
    assert_clean(scheduled.trainer, scheduled.module)
    return plain, scheduled, remat


def seeded_losses(
    module: nn.Module, call: Callable[..., torch.Tensor], batch: torch.Tensor, half: bool, lr: float = 0.1
) -> list[torch.Tensor]:
    """Losses of three steps of a module, which ``call`` stands for; under bfloat16 autocast if ``half``."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=half):
            loss = call(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_ran(remat: RematCallback, plans: int | None = None) -> None:
    """The callback captured everything, rematerialized, and what it captured ran."""
    assert remat.failures == (), remat.failures
    assert remat.plans
    assert all(
        runs
        for plan, runs in zip(remat.plans, remat.runs, strict=True)
        if OUTSIDE not in {op.name for op in plan.graph.ops}  # made for a whole call, that need not come again
    )
    assert any(plan.rematerializes for plan in remat.plans)
    if plans is not None:
        assert len(remat.plans) == plans


def assert_clean(runner: pl.Trainer, module: Any) -> None:
    """Nothing of the callback is left on the strategy, the module or its metrics."""
    assert "training_step" not in vars(runner.strategy)
    assert not {"log", "training_step", "forward"} & set(vars(module))
    for part in module.modules():
        assert "forward" not in vars(part)
        for name in ("update", "compute"):
            if name in vars(part):
                assert "deferr" not in repr(vars(part)[name])


def assert_same(one: Any, other: Any, where: str = "results") -> None:
    """Nested results with bitwise equal tensors."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor), f"{where}: {other!r}"
        assert one.dtype == other.dtype and one.shape == other.shape, where
        assert one.requires_grad == other.requires_grad, where
        assert same_bits(one, other), f"{where}: {one} is not {other}"
    elif isinstance(one, dict):
        assert isinstance(other, dict) and list(one) == list(other), f"{where}: {list(one)} and {list(other)}"
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert type(one) is type(other) and len(one) == len(other), f"{where}: {one} and {other}"
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert one == other, f"{where}: {one!r} is not {other!r}"


LENGTHS = (17, 40, 19, 33, 64, 21, 48, 32, 57, 36, 25, 63)


class Lengths(torch.utils.data.Dataset[Any]):
    """Batches whose first size and width are the same, and whose length is not."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(LENGTHS[index], 16, generator=generator), torch.randint(
            0, 4, (LENGTHS[index],), generator=generator
        )


def batches_of_lengths() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(Lengths(), batch_size=None)


def measured(call: Any, module: torch.nn.Module, x: torch.Tensor, loss: Callable[..., Any]) -> int:
    def step() -> None:
        found = loss(call(x))
        module.zero_grad()
        found.backward()

    return held_bytes(module, x, gradients=True) + peak_memory(step, "cpu")

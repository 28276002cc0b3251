"""On a CUDA device: eager's bits, the predicted peak, the random state, in float32 and bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import rematerialize
from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback
from lightning_remat.measure import held_bytes, peak_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.bfloat16]
MIB = 2**20


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Some of eager's own kernels give other bits each time without."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch._dynamo.reset()
    yield
    torch.use_deterministic_algorithms(before)
    torch._dynamo.reset()


class Block(nn.Module):
    """A GPT-2 block with dropout in all the usual places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.queries_keys_values(self.norms[0](x)).view(batch, time, 3, self.heads, -1)
        attended = functional.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), dropout_p=0.1, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, time, width)
        x = x + functional.dropout(self.attended(attended), 0.1)
        return x + functional.dropout(self.narrow(functional.gelu(self.widen(self.norms[1](x)))), 0.1)


class SmallGPT2(nn.Module):
    """Called with tokens of shape (batch, time); returns the cross entropy of the next one."""

    def __init__(self, layers: int = 4, width: int = 256, vocabulary: int = 1000, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.tokens(tokens) + self.positions, 0.1)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class SmallConvNet(nn.Module):
    """Called with images; returns the mean square of its output. Batch norm, in-place activations, residual sums."""

    def __init__(self, width: int = 32, units: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.units = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(units)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for unit in self.units:
            x = functional.relu(x + unit(x))
        return x.mean(dim=(2, 3)).square().mean()


def gpt2(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = SmallGPT2().to("cuda", dtype)
    return model, torch.randint(0, 1000, (8, 128), device="cuda")


def conv_net(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return SmallConvNet().to("cuda", dtype), torch.randn(8, 3, 64, 64, device="cuda", dtype=dtype)


Factory = Callable[[torch.dtype], tuple[nn.Module, torch.Tensor]]


def train(
    module: nn.Module, call: Callable[..., torch.Tensor], batch: torch.Tensor, steps: int = 3
) -> list[torch.Tensor]:
    """Seeded steps of SGD in Lightning's order; returns the losses. The last gradients stay."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = call(batch)
        module.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("budget", [0.6, "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [gpt2, conv_net])
class TestScheduledStep:
    def test_trains_with_the_bits_of_eager(self, make: Factory, dtype: torch.dtype, budget: float | str) -> None:
        plain, batch = make(dtype)
        scheduled = copy.deepcopy(plain)
        right = train(plain, plain, batch)
        random_state = torch.cuda.get_rng_state(), torch.get_rng_state()
        step = rematerialize(scheduled, budget=budget)
        assert all(map(torch.equal, train(scheduled, step, batch), right))
        assert torch.equal(torch.cuda.get_rng_state(), random_state[0])
        assert torch.equal(torch.get_rng_state(), random_state[1])
        assert step.plan is not None and step.plan.rematerializes and not step.failures
        for (name, one), other in zip(scheduled.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other), name
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name
        for (name, one), other in zip(scheduled.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(one, other), name

    def test_predicts_its_peak_and_keeps_the_budget(
        self, make: Factory, dtype: torch.dtype, budget: float | str
    ) -> None:
        module, batch = make(dtype)
        step = rematerialize(module, budget=budget)

        def training_step() -> None:
            loss = step(batch)
            module.zero_grad(set_to_none=True)
            loss.backward()

        training_step()
        training_step()
        held = held_bytes(module, batch, gradients=True, device="cuda")
        measured = held + peak_memory(training_step, "cuda")
        assert step.plan is not None
        assert step.plan.predicted_peak_bytes == pytest.approx(measured, rel=0.02)
        assert measured <= step.plan.budget_bytes


def test_rematerialization_lowers_the_measured_peak() -> None:
    """So that the tests above cannot pass with schedules that save nothing."""
    peaks = []
    for budget in (1.0, "min"):
        module, batch = gpt2(torch.float32)
        step = rematerialize(module, budget=budget)
        step(batch).backward()
        module.zero_grad(set_to_none=True)
        peaks.append(peak_memory(lambda step=step, batch=batch: step(batch).backward(), "cuda"))
    assert peaks[1] < 0.7 * peaks[0]


def test_peak_memory_is_the_allocators() -> None:
    held = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")]

    def use() -> None:
        both = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        held.clear()
        both.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))

    assert peak_memory(use, "cuda") == 3 * MIB
    assert peak_memory(lambda: None) == 0  # the current CUDA device is the default


def test_the_finders_step_fits_the_device() -> None:
    """Within "auto" on a part of the device: by prediction, and so by the allocator's peak of the confirming step."""
    samples = torch.randint(0, 1000, (4096, 128))

    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch_size = SmallGPT2(), 8

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
            return DataLoader(TensorDataset(samples), self.batch_size)

    finder, remat = RematBatchSizeFinder(), RematCallback(artifacts=False)
    share = 2**30 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        trainer = pl.Trainer(
            accelerator="cuda",
            devices=1,
            max_steps=2,
            callbacks=[remat, finder],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Training())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = finder.found
    assert found is not None and found.batch_size > found.without > 8
    assert found.measured_peak_bytes <= found.plan.budget_bytes
    assert remat.plan is not None and remat.plan.predicted_seconds <= found.plan.predicted_seconds * 1.03

"""On a CUDA device: eager's bits, the predicted peak, the random state, in every precision; the device's memory; Lightning."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Iterator

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import InfeasibleBudgetError, check, rematerialize
from lightning_remat.allocator import AllocatorSettings, Arrangement, CachingAllocator, Footprint
from lightning_remat.budget import device_bytes, device_total_bytes
from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback
from lightning_remat.capture._ops import cudnn_batch_norm
from lightning_remat.capture._torch import allocator_settings
from lightning_remat.capture.tiling._losses import gradient_of_rows, loss_of_rows
from lightning_remat.exactness._bits import digest, sum_of_words
from lightning_remat.exactness._trace import Record, eager_recorded
from lightning_remat.measure import held_bytes, peak_memory, track_peak
from lightning_remat.planner._device_memory import DeviceAllocator, allocated_bytes, held_segments
from tests.helpers import training

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
    # cuDNN's attention has no deterministic backward in its default selection.
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.use_deterministic_algorithms(before)
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)


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
        measured, reserved = peaks(training_step)
        assert step.plan is not None and step.plan.footprint is not None
        assert step.plan.predicted_allocated_bytes == pytest.approx(measured, rel=0.01)
        assert measured <= step.plan.budget_bytes
        assert step.plan.predicted_reserved_bytes >= 0.99 * reserved


def peaks(training_step: Callable[[], None]) -> tuple[int, int]:
    """All that is allocated, and reserved, at the most in a step: bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    with track_peak("cuda") as peak:
        training_step()
    assert peak.allocated_bytes is not None and peak.reserved_bytes is not None
    return peak.allocated_bytes, peak.reserved_bytes


def test_expandable_segments_are_on_while_scheduled_steps_run_and_off_afterwards() -> None:
    """The switch at run time is torch's own; new segments follow it."""
    allocator = DeviceAllocator()
    here = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    try:
        allocator.arrange(Footprint(0, 0, Arrangement.EXPANDABLE), here)
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=here)
        segments = {segment.address: segment for segment in held_segments(here)}
        assert any(
            one.expandable and one.address <= held.data_ptr() < one.address + one.nbytes for one in segments.values()
        )
    finally:
        allocator.put_back()
    other = torch.empty(300 * MIB, dtype=torch.uint8, device=here)
    (own,) = [one for one in held_segments(here) if one.address <= other.data_ptr() < one.address + one.nbytes]
    assert not own.expandable


def test_the_model_of_the_allocator_follows_the_real_one() -> None:
    """Random requests, block by block: the same bytes allocated and reserved."""
    rng = random.Random(0)
    gc.collect()
    torch.cuda.empty_cache()
    here = torch.device("cuda", torch.cuda.current_device())
    model = CachingAllocator(AllocatorSettings.parse(allocator_settings()), segments=held_segments(here))
    live: list[tuple[torch.Tensor, object]] = []
    for _ in range(400):
        if rng.random() < 0.6 or not live:
            size = rng.choice([rng.randint(1, 4096), rng.randint(1, 3 * MIB), rng.randint(1, 64 * MIB)])
            live.append((torch.empty(size, dtype=torch.uint8, device=here), model.allocate(size)))
        else:
            tensor, block = live.pop(rng.randrange(len(live)))
            del tensor
            model.free(block)  # type: ignore[arg-type]
        assert model.allocated_bytes == torch.cuda.memory_allocated(here)
        assert model.reserved_bytes == torch.cuda.memory_reserved(here)


def test_workspaces_of_matrix_products_are_allocated_when_bytes_are_counted() -> None:
    """Those of cuBLAS and cuBLASLt, in this thread and in autograd's, also where backwards run in this one."""
    torch._C._cuda_clearCublasWorkspaces()
    here = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(16, 16, device=here, requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False):
        counted = allocated_bytes(here)
    assert counted == torch.cuda.memory_allocated(here)

    def layer(square: torch.Tensor) -> torch.Tensor:
        square = square.detach()
        return torch.addmm(square[0], square, square) @ square

    y = x @ x
    y.register_hook(lambda gradient: torch.zeros_like(gradient).copy_(layer(gradient)))
    layer(x).sum()
    y.sum().backward()
    del y
    x.grad = None
    gc.collect()
    assert torch.cuda.memory_allocated(here) == counted


@pytest.mark.parametrize("budget", [1.0, 0.6, "min"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16 autocast"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_cudnn_batch_norm_has_the_bits_of_eager(
    layout: torch.memory_format, half: bool, budget: float | str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, batch = conv_net(torch.float32)
    plain, batch = plain.to(memory_format=layout), batch.to(memory_format=layout)
    scheduled = copy.deepcopy(plain)
    step = rematerialize(scheduled, budget=budget)
    results = []
    for module, call in ((plain, plain), (scheduled, step)):

        def under_autocast(images: torch.Tensor, call: Callable[..., torch.Tensor] = call) -> torch.Tensor:
            with torch.autocast("cuda", torch.float16, enabled=half):
                return call(images)

        losses = {f"loss {number}": loss for number, loss in enumerate(train(module, under_autocast, batch))}
        gradients = {f"gradient of {name}": one.grad for name, one in module.named_parameters()}
        results.append({**losses, **gradients, **module.state_dict()})
    right, found = results
    assert not [name for name, value in right.items() if not torch.equal(value, found[name])]
    assert step.plan is not None and not step.failures
    targets = {op.target for op in step.plan.graph.ops}
    assert {"cudnn_batch_norm", "aten.cudnn_batch_norm_backward.default"} <= targets
    assert "could not be profiled" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_cudnn_batch_norm_again_gives_its_bits_and_updates_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(8, 16, 9, 9, device="cuda", dtype=dtype)
    weight, bias, mean, var = (torch.rand(16, device="cuda") for _ in range(4))
    new_mean, new_var = mean.clone(), var.clone()
    op = torch.ops.aten.cudnn_batch_norm.default
    first = op(x, weight, bias, new_mean, new_var, True, 0.1, 1e-5)
    again = op(x, weight, bias, None, None, True, 0.1, 1e-5)
    functional_form = cudnn_batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5)
    assert len(functional_form) == 6 and not torch.equal(mean, new_mean)
    for one, other, third in zip(first[:3], again, functional_form, strict=False):
        assert torch.equal(one, other) and torch.equal(one, third)
    assert torch.equal(functional_form[4], new_mean) and torch.equal(functional_form[5], new_var)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(4096, 50257), (1000, 4003), (77, 50257), (300, 1025), (4096, 1000)])
def test_losses_in_slices_have_the_bits_of_the_whole(rows: int, classes: int, dtype: torch.dtype) -> None:
    """Wherever a slice begins: kernels read rows in vectors, from the first aligned address on."""
    torch.manual_seed(0)
    logits = torch.randn(rows, classes, device="cuda", dtype=dtype)
    target = torch.randint(0, classes, (rows,), device="cuda")
    target[::7] = -100
    right = logits.clone().requires_grad_()
    loss = functional.cross_entropy(right.float(), target)
    (2.5 * loss).backward()
    found, weight = loss_of_rows(logits, target, 1, -100, None, torch.float32)
    assert torch.equal(found, loss)
    gradient_of_rows(torch.full_like(loss, 2.5), logits, target, 1, -100, weight, None, torch.float32, out=logits)
    assert torch.equal(logits, right.grad)


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


# -- precisions, layouts and kernels ----------------------------------------------------------------------------------


def assert_bits_of_eager(
    plain: nn.Module,
    batch: torch.Tensor,
    budget: float | str = 0.6,
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> set[str]:
    """Train eagerly, twice, and scheduled, each forward in a context; returns the names of the ops that were scheduled."""
    scheduled, again = copy.deepcopy(plain), copy.deepcopy(plain)
    step = rematerialize(scheduled, budget=budget, time_limit=5.0)

    def within(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(one: torch.Tensor) -> torch.Tensor:
            with context():
                return call(one)

        return run

    right = train(plain, within(plain), batch)
    assert all(map(torch.equal, train(again, within(again), batch), right)), "eager does not repeat its bits"
    assert all(map(torch.equal, train(scheduled, within(step), batch), right))
    for found in (again, scheduled):
        for (name, one), other in zip(found.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other), name
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name
        for (name, one), other in zip(found.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(one, other), name
    assert step.plan is not None and step.plan.rematerializes and not step.failures
    return {op.target for op in step.plan.graph.ops}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_autocast_has_the_bits_of_eager(make: Factory, dtype: torch.dtype) -> None:
    assert_bits_of_eager(*make(torch.float32), context=lambda: torch.autocast("cuda", dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_last_has_the_bits_of_eager(dtype: torch.dtype) -> None:
    module, batch = conv_net(dtype)
    module = module.to(memory_format=torch.channels_last)
    assert_bits_of_eager(module, batch.contiguous(memory_format=torch.channels_last))


class MaskedAttention(nn.Module):
    """Attention with a mask of its own, twice; called with tensors of shape (batch, time, width)."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = x.shape[1]
        mask = torch.ones(time, time, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            heads = layer(functional.gelu(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=0.1)
            x = x + attended.transpose(1, 2).reshape(x.shape)
        return x.float().square().mean()


@pytest.mark.parametrize(
    ("kernel", "dtype", "op"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, "efficient"),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, "efficient"),
        (SDPBackend.MATH, torch.float32, "softmax"),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
class TestAttention:
    def test_causal(self, kernel: SDPBackend, dtype: torch.dtype, op: str) -> None:
        targets = assert_bits_of_eager(*gpt2(dtype), context=lambda: sdpa_kernel(kernel))
        assert any(op in target for target in targets), targets

    def test_masked(self, kernel: SDPBackend, dtype: torch.dtype, op: str) -> None:
        if kernel is SDPBackend.FLASH_ATTENTION:
            pytest.skip("flash attention takes no mask")
        torch.manual_seed(0)
        batch = torch.randn(8, 128, 128, device="cuda", dtype=dtype)
        module = MaskedAttention().to("cuda", dtype)
        targets = assert_bits_of_eager(module, batch, budget="min", context=lambda: sdpa_kernel(kernel))
        assert any(op in target for target in targets), targets


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_no_budget_is_exceeded_by_a_byte(make: Factory, dtype: torch.dtype) -> None:
    kept = 0
    for share in (0.9, 0.75, 0.5, 0.4):
        module, batch = make(dtype)
        step = rematerialize(module, budget=share, time_limit=5.0)

        def training_step(module: nn.Module = module, step: Callable[..., torch.Tensor] = step) -> None:
            loss = step(batch)  # noqa: B023 - called in this round only
            module.zero_grad(set_to_none=True)
            loss.backward()

        with contextlib.suppress(InfeasibleBudgetError):
            training_step()
            training_step()
            measured, _ = peaks(training_step)
            assert step.plan is not None and measured <= step.plan.budget_bytes, share
            kept += 1
        torch._dynamo.reset()
    assert kept >= 2


def test_a_device_without_an_index_is_the_current_one() -> None:
    assert device_total_bytes("cuda") == device_total_bytes("cuda:0") > 0
    assert device_bytes("cuda") == pytest.approx(device_bytes("cuda:0"), rel=0.01)


def test_auto_stays_within_what_the_process_may_reserve() -> None:
    """The allocator refuses what is over the limit: fragments count."""

    def make() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        model = SmallGPT2(layers=8, width=512, vocabulary=8000, length=512).to("cuda")
        return model, torch.randint(0, 8000, (16, 512), device="cuda")

    plain, batch = make()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    right = train(plain, plain, batch)
    needed = torch.cuda.max_memory_allocated()
    plain = plain.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    limit = int(0.7 * needed)
    torch.cuda.set_per_process_memory_fraction(limit / device_total_bytes("cuda:0"))
    try:
        module, batch = make()
        torch.cuda.reset_peak_memory_stats()
        # The optimizer's momentum is made in the first step: it counts from the beginning.
        step = rematerialize(module, budget="auto", resident_bytes=held_bytes(list(module.parameters())))
        assert all(map(torch.equal, train(module, step, batch), right))
        assert torch.cuda.max_memory_reserved() <= limit
        assert step.plan is not None and step.plan.rematerializes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# -- Lightning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_fit_has_the_bits_of_eager(precision: str) -> None:
    remat = RematCallback(0.5, artifacts=False, time_limit=5.0)
    training.compare(
        training.Classifier, remat=remat, accelerator="cuda", devices=1, precision=precision, deterministic=True
    )
    assert remat.measured_peak_bytes is not None and remat.plan is not None


def test_a_fit_at_auto_that_fits_is_left_alone() -> None:
    remat = RematCallback("auto", artifacts=False)
    options = {"accelerator": "cuda", "devices": 1, "deterministic": True}
    plain = training.fit(training.Classifier, **options)
    scheduled = training.fit(training.Classifier, remat, **options)
    training.assert_same(plain.results, scheduled.results)
    assert not any(plan.rematerializes for plan in remat.plans) and not remat.failures


# -- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_check_finds_eagers_bits(dtype: torch.dtype) -> None:
    net, tokens = SmallGPT2().cuda().to(dtype), torch.randint(1000, (4, 128), device="cuda")
    before = torch.cuda.get_rng_state()
    report = check(net, tokens, budget=0.5, time_limit=5.0)
    assert report.equal and report.plans[1], report.summary()
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_a_check_names_what_does_not_repeat() -> None:
    """Sums by atomic addition, in the order in which threads come."""
    torch.use_deterministic_algorithms(False)
    net = nn.Sequential(nn.Linear(64, 64), Scattered(), nn.Linear(64, 64)).cuda()
    report = check(net, torch.randn(2**16, 64, device="cuda"), budget=0.9, time_limit=5.0)
    assert report.repeats is False, report.summary()
    assert report.first is None or (report.first.module == "1" and "use_deterministic" in report.advice[0])


class Scattered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return torch.zeros_like(x[:1]).index_add(0, rows, x)


def test_digests_and_the_ops_of_a_backward() -> None:
    value = torch.randn(3, 2**20, device="cuda")
    assert digest(value).item() == sum_of_words(value.cpu().reshape(-1)).item() == digest(value.view(-1)).item()
    net, record = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).cuda(), Record()
    with eager_recorded(record, {"": net}):
        net(torch.randn(4, 8, device="cuda")).sum().backward()
    record.end([])
    backward = {(call.op, call.module) for call in record.read()[0] if call.backward}
    assert ("aten.tanh_backward.default", "1") in backward and ("aten.mm.default", "0") in backward


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

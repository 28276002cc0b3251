"""What ops cost: measured one at a time without disturbing the user, or estimated from shapes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_remat import rematerialize
from lightning_remat.capture import OpCall, TensorSpec
from lightning_remat.cost import (
    CostCache,
    DeviceSpec,
    OpCost,
    cost_model,
    device_spec,
    device_specs,
    flops,
    profile,
    roofline,
    unit,
)
from lightning_remat.cost._device_spec import cuda_spec_name
from lightning_remat.cost._fingerprint import fingerprint
from lightning_remat.cost._indices import index_bounds
from lightning_remat.cost._materialize import materialize, tensor
from lightning_remat.cost._timing import NEIGHBOURS_BYTES
from lightning_remat.errors import ConfigError

aten = torch.ops.aten
CPU = torch.device("cpu")
MIB = 1 << 20


def spec(*shape: int, stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> TensorSpec:
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return TensorSpec(shape, tuple(stride), dtype, CPU)


def call(target: Callable[..., Any], *args: Any, outputs: tuple[TensorSpec, ...] = (), **kwargs: Any) -> OpCall:
    return OpCall(target, args, kwargs, outputs)


def mm(m: int, k: int, n: int) -> OpCall:
    return call(aten.mm.default, spec(m, k), spec(k, n), outputs=(spec(m, n),))


def convolution(batch: int, channels: int, size: int, groups: int = 1) -> OpCall:
    x, w = spec(batch, channels, size, size), spec(channels, channels // groups, 3, 3)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    return call(aten.convolution.default, x, w, None, *options, outputs=(x,))


def convolution_backward(batch: int, channels: int, size: int, groups: int, mask: list[bool]) -> OpCall:
    x, w = spec(batch, channels, size, size), spec(channels, channels // groups, 3, 3)
    options = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, mask)
    outputs = tuple(one for one, wanted in zip((x, w), mask, strict=False) if wanted)
    return call(aten.convolution_backward.default, x, x, w, *options, outputs=outputs)


@pytest.fixture
def warnings_logged() -> Iterator[list[logging.LogRecord]]:
    """What the cost modules warn of."""
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.message = record.getMessage()
            found.append(record)

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("lightning_remat.cost")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


# -- profile ----------------------------------------------------------------------------------------------------------


def test_profile_measures_time_and_nothing_for_views() -> None:
    small, none, large = profile([mm(4, 4, 4), None, mm(256, 256, 256)], CPU)
    assert none == OpCost(0.0, 0)
    assert 0 < small.seconds < large.seconds  # 262,144 times the work
    assert small.workspace_bytes == 0


def test_each_distinct_call_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_remat.cost._timing.MAX_REPEATS", 3)
    seen: list[tuple[int, ...]] = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x + 1

    once = [call(spy, spec(n), outputs=(spec(n),)) for n in (3, 5)]
    told: list[tuple[int, int]] = []
    costs = profile([*once, *once, None, once[0]], CPU, progress=lambda done, total: told.append((done, total)))
    for shape in ((3,), (5,)):
        assert seen.count(shape) == 3 + 1, "three times for the clock, once for the memory"
    assert costs[0] == costs[2] == costs[5]
    assert costs[1] == costs[3]
    assert told == [(1, 2), (2, 2)]


def test_random_numbers_of_the_user_stay() -> None:
    x = spec(64, 64)
    calls = [
        call(aten.native_dropout.default, x, 0.5, True, outputs=(x, spec(64, 64, dtype=torch.bool))),
        call(aten.bernoulli.p, x, 0.5, outputs=(x,)),
    ]
    before = torch.get_rng_state()
    costs = profile(calls, CPU)
    assert all(cost.seconds > 0 for cost in costs)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_and_autocast_are_off_inside_and_as_before_outside() -> None:
    inside: list[tuple[bool, bool, bool, torch.dtype]] = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        inside.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                (x @ x).dtype,
            )
        )
        return x

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        profile([call(spy, spec(4, 4), outputs=(spec(4, 4),))], CPU)
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert set(inside) == {(False, False, False, torch.float32)}


def test_nothing_of_an_op_is_held_while_the_next_one_runs() -> None:
    alive: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    held_by_others: set[int] = set()

    def spy(x: torch.Tensor) -> torch.Tensor:
        held_by_others.update(rows for rows, tensor in alive if tensor() is not None and rows != x.shape[0])
        result = x * 2
        alive.extend([(x.shape[0], weakref.ref(x)), (x.shape[0], weakref.ref(result))])
        return result

    profile([call(spy, spec(n), outputs=(spec(n),)) for n in (10, 11, 12)], CPU)
    assert {rows for rows, _ in alive} == {10, 11, 12}
    assert held_by_others == set()


def test_profile_takes_the_memory_of_one_op_at_a_time(tmp_path: Path, warnings_logged: list[logging.LogRecord]) -> None:
    rows = 50 * MIB // 4 // 2  # half for the input, half for the output
    calls = [call(aten.relu.default, spec(rows + i), outputs=(spec(rows + i),)) for i in range(4)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        costs = profile(calls, CPU, cache=CostCache(tmp_path))
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert 50 * MIB <= peak <= 51 * MIB + NEIGHBOURS_BYTES
    # A second profiler would have ended this one: workspaces are left out, and the user is told.
    assert all(cost.seconds > 0 and cost.workspace_bytes == 0 for cost in costs)
    assert ["profiler" in record.message for record in warnings_logged] == [True]
    assert CostCache(tmp_path).load(CPU) == {}, "and must not be kept as measured"


def test_workspace_is_the_peak_above_inputs_and_outputs() -> None:
    def with_temporary(x: torch.Tensor) -> torch.Tensor:
        temporary = torch.empty(3 * MIB, dtype=torch.uint8)
        result = x * x
        del temporary
        return result

    def with_padding(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape[0] + 100)[: x.shape[0]]

    def in_place(x: torch.Tensor) -> torch.Tensor:
        return x.add_(torch.ones(5000))

    def two_on_one(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = x * x
        return result, result[:10]

    x = spec(5000)
    calls = [
        call(with_temporary, x, outputs=(x,)),
        call(with_padding, x, outputs=(x,)),
        call(in_place, x, outputs=(x,)),
        call(two_on_one, x, outputs=(x, spec(10))),
        call(aten.relu.default, x, outputs=(x,)),
    ]
    spaces = [cost.workspace_bytes for cost in profile(calls, CPU)]
    assert spaces == [3 * MIB, 400, 20_000, 0, 0]


def test_convolution_has_a_workspace_of_its_own() -> None:
    """oneDNN lays its operands out anew, which torch's allocator sees."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    (cost,) = profile([convolution(2, 64, 28)], CPU)
    assert cost.workspace_bytes > 0


def test_a_call_that_cannot_run_is_estimated_and_named_once(
    warnings_logged: list[logging.LogRecord], tmp_path: Path
) -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("these numbers are made up")

    bad = [call(picky, spec(n), outputs=(spec(n),)) for n in (100, 10_000)]
    bad_aten = call(aten.mm.default, spec(2, 3), spec(4, 5), outputs=(spec(2, 5),))
    cache = CostCache(tmp_path)
    costs = profile([bad[0], mm(4, 4, 4), bad[1], bad_aten], CPU, cache=cache)
    assert [costs[0], costs[2]] == roofline(bad, "cpu")
    assert costs[3].seconds > 0
    named = [record.message for record in warnings_logged if "picky" in record.message]
    assert len(named) == 1
    assert "ArithmeticError: these numbers are made up" in named[0]
    assert set(cache.load(CPU)) == {mm(4, 4, 4).key}, "estimates must not be kept as measured"


def test_a_call_that_fails_only_under_the_profiler_is_estimated(warnings_logged: list[logging.LogRecord]) -> None:
    def only_unwatched(x: torch.Tensor) -> torch.Tensor:
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("watched")
        return x + 1

    failing = call(only_unwatched, spec(10), outputs=(spec(10),))
    assert profile([mm(2, 2, 2), failing, mm(3, 3, 3)], CPU)[1] == roofline([failing], "cpu")[0]
    assert len(warnings_logged) == 1


def test_profile_refuses_a_device_it_cannot_time() -> None:
    with pytest.raises(ConfigError, match=r"cpu and cuda, and meta was given.*roofline"):
        profile([mm(2, 2, 2)], torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_on_cuda() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def with_temporary(x: torch.Tensor) -> torch.Tensor:
        temporary = torch.empty(3 * MIB, dtype=torch.uint8, device=x.device)
        result = x + 1
        del temporary
        return result

    x = TensorSpec((5000,), (1,), torch.float32, device)
    square = TensorSpec((2048, 2048), (2048, 1), torch.float32, device)
    calls = [
        call(with_temporary, x, outputs=(x,)),
        call(aten.native_dropout.default, x, 0.5, True, outputs=(x, TensorSpec((5000,), (1,), torch.bool, device))),
        call(aten.mm.default, square, square, outputs=(square,)),
    ]
    before = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    held = torch.cuda.memory_allocated(device)
    costs = profile(calls, torch.device("cuda"))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(device), before[1])
    assert torch.cuda.memory_allocated(device) - held < 64 * MIB, "only the libraries' own, lasting workspaces may stay"
    assert costs[0].workspace_bytes == 3 * MIB
    assert costs[2].seconds > costs[0].seconds > 0


# -- made-up arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((4, 3), (3, 1)),
        ((4, 3), (1, 4)),
        ((4, 3), (1, 0)),
        ((5, 4), (0, 0)),
        ((2, 3), (10, 2)),
        ((), ()),
        ((2, 0), (1, 1)),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8]
)
def test_made_tensors_have_the_layout_asked_for(shape: Any, stride: Any, dtype: torch.dtype) -> None:
    asked = spec(*shape, stride=stride, dtype=dtype)
    made = tensor(asked)
    assert (tuple(made.shape), tuple(made.stride()), made.dtype) == (
        shape,
        stride if made.numel() else made.stride(),
        dtype,
    )
    assert made.untyped_storage().nbytes() == asked.nbytes
    if dtype.is_floating_point:
        assert torch.all((made >= 0.0625) & (made <= 1))
    elif dtype is torch.bool:
        assert torch.all(made)
    elif not dtype.is_complex:
        assert torch.all(made == 0)


def test_large_made_tensors_are_filled_to_the_end() -> None:
    made = tensor(spec((1 << 18) + 3))
    assert torch.all((made >= 0.1) & (made < 1))
    assert made[: 1 << 16].unique().numel() > 1000


def test_expanded_inputs_take_no_more_than_their_storage() -> None:
    seen: set[tuple[tuple[int, ...], int]] = set()

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.add((tuple(x.shape), x.untyped_storage().nbytes()))
        return x[0, 0] + 1

    huge = (1 << 30, 1 << 20)
    profile([call(spy, spec(*huge, stride=(0, 0)), outputs=(spec(),))], CPU)
    assert seen == {(huge, 4)}


def test_indices_are_valid_and_spread() -> None:
    indices = spec(1000, dtype=torch.int64)
    table, rows = spec(50, 8), spec(1000, 8)
    embedding = call(aten.embedding.default, table, indices, outputs=(rows,))
    backward = call(aten.embedding_dense_backward.default, rows, indices, 50, -1, False, outputs=(table,))
    for made in (materialize(embedding)[0][1], materialize(backward)[0][1]):
        assert made.min() >= 0
        assert made.max() < 50
        assert made.unique().numel() > 10
    along = spec(7, 9, dtype=torch.int64)
    gather = call(aten.gather.default, spec(7, 9), 1, along, outputs=(spec(7, 9),))
    put = call(
        aten.index_put.default,
        spec(6, 9, 4),
        [None, spec(5, dtype=torch.int64)],
        spec(6, 5, 4),
        True,
        outputs=(spec(6, 9, 4),),
    )
    masked = call(aten.index.Tensor, spec(6, 9), [spec(6, 9, dtype=torch.bool)], outputs=(spec(54),))
    other = call(aten.add.Tensor, along, along, outputs=(along,))
    assert [dict(index_bounds(c)) for c in (gather, put, masked, other)] == [{1: 9}, {1: 9}, {}, {}]
    costs = profile([embedding, backward, gather, put, masked, other], CPU)
    assert all(cost.seconds > 0 for cost in costs)


# -- the cache --------------------------------------------------------------------------------------------------------


def test_known_costs_are_not_measured_again(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    calls = [mm(8, 8, 8), convolution(1, 4, 8), None]
    first = profile(calls, CPU, cache=CostCache(tmp_path), progress=lambda *at: told.append(at))
    assert told == [(1, 2), (2, 2)]
    again = profile([*calls, mm(9, 9, 9)], CPU, cache=CostCache(tmp_path), progress=lambda *at: told.append(at))
    assert told[2:] == [(1, 1)], "only the new op"
    assert again[:3] == first
    assert profile([*calls, mm(9, 9, 9)], CPU, cache=CostCache(tmp_path), progress=lambda *at: told.append(at)) == again
    assert len(told) == 3
    assert not list(tmp_path.glob("*.tmp"))


def test_functions_are_not_kept_on_disk(tmp_path: Path) -> None:
    """A function's key holds an address, which means something else in the next process."""
    profile(
        [call(torch.relu_, spec(3), outputs=(spec(3),)), call(lambda x: x + 1, spec(3), outputs=(spec(3),))],
        CPU,
        cache=CostCache(tmp_path),
    )
    assert CostCache(tmp_path).load(CPU) == {}


def test_costs_are_kept_apart_by_what_chooses_kernels(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    cache.store(CPU, [mm(2, 2, 2)], [OpCost(1.0, 2)])
    assert fingerprint(CPU)["torch"] == torch.__version__
    before = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(not before)
    try:
        assert cache.load(CPU) == {}
    finally:
        torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads + 1)
    try:
        assert cache.load(CPU) == {}
    finally:
        torch.set_num_threads(threads)
    assert cache.load(CPU) == {mm(2, 2, 2).key: OpCost(1.0, 2)}


@contextlib.contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def test_costs_are_kept_apart_by_settings_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(CPU)
    found = []
    for owner, name, value in (
        (torch.backends.mkldnn, "deterministic", True),
        (torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        (torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
        (torch.backends.mkldnn.rnn, "fp32_precision", "bf16"),
    ):
        with changed(owner, name, value):
            found.append(fingerprint(CPU))
    torch.use_deterministic_algorithms(True, warn_only=True)
    found.append(fingerprint(CPU))
    torch.use_deterministic_algorithms(True)
    found.append(fingerprint(CPU))
    torch.use_deterministic_algorithms(False)
    assert fingerprint(CPU) == before
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    found.append(fingerprint(CPU))
    assert len({str(one) for one in (before, *found)}) == 1 + len(found)


def test_costs_are_kept_apart_by_settings_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: the settings are there without a device."""
    cuda, name = torch.backends.cuda, "NVIDIA H100 80GB HBM3"
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    before = fingerprint(device)
    assert before["device"] == name and before["torch"] == torch.__version__
    found = []
    for owner, setting, value in (
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cudnn, "deterministic", True),
        (cuda.matmul, "allow_fp16_accumulation", True),
        (cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    ):
        with changed(owner, setting, value):
            found.append(fingerprint(device))
    for owner, setting, value in (
        (torch.backends.cudnn, "benchmark_limit", 3),
        (cuda, "preferred_linalg_library", lambda: "magma"),
        (cuda, "preferred_blas_library", lambda: "cublaslt"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, setting, value)
            found.append(fingerprint(device))
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            found.append(fingerprint(device))
    with changed(cuda.matmul, "fp32_precision", "none"):  # the older spelling does not put this back
        cuda.matmul.allow_tf32 = True
        found.append(fingerprint(device))
        cuda.matmul.allow_tf32 = False
    with changed(cuda.matmul, "fp32_precision", "tf32"):
        newer = fingerprint(device)
    kernels = "backends.cuda.matmul.fp32_precision"
    assert newer[kernels] == found[-1][kernels] == "tf32" != before[kernels]
    assert fingerprint(device) == before
    assert len({str(one) for one in (before, *found)}) == 1 + len(found)


def test_a_setting_that_is_changed_between_two_runs_has_costs_measured_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path))
    net = torch.nn.Linear(7, 5)

    def run() -> set[str]:
        step = rematerialize(net, budget=1.0)
        step(torch.randn(3, 7)).sum().backward()
        assert len(step.plans) == 1, "captured and planned"
        return {file.name for file in tmp_path.glob("costs-*.json")}

    first = run()
    assert len(first) == 1 and run() == first
    with changed(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"):
        assert len(run() - first) == 1
    assert len(run()) == 2


def test_writers_add_to_each_other(tmp_path: Path) -> None:
    one, other = CostCache(tmp_path), CostCache(tmp_path)
    one.store(CPU, [mm(2, 2, 2)], [OpCost(1.0, 2)])
    other.store(CPU, [mm(3, 3, 3)], [OpCost(3.0, 4)])
    assert one.load(CPU) == {mm(2, 2, 2).key: OpCost(1.0, 2), mm(3, 3, 3).key: OpCost(3.0, 4)}


def test_readers_see_whole_files_while_others_write(tmp_path: Path, warnings_logged: list[logging.LogRecord]) -> None:
    def write(worker: int) -> int:
        cache = CostCache(tmp_path)
        for n in range(1, 11):
            cache.store(CPU, [mm(worker + 1, n, n)], [OpCost(1.0, n)])
        return len(cache.load(CPU))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(write, range(4)))
    assert all(sizes)
    assert not warnings_logged
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "text",
    [
        "{not json",
        "[]",
        '{"format": "lightning_remat.costs", "version": 99, "costs": {}}',
        '{"format": "lightning_remat.costs", "version": 3}',
        '{"format": "lightning_remat.costs", "version": 3, "costs": {"a": [NaN, 0, []]}}',
        '{"format": "lightning_remat.costs", "version": 3, "costs": {"a": [0.5]}}',
        '{"format": "lightning_remat.costs", "version": 3, "costs": {"a": [0.5, 0, [[1, -2]]]}}',
        '{"format": "lightning_remat.costs", "version": 3, "costs": {"a": [0.5, 0, [1]]}}',
        '{"format": "lightning_remat.costs", "version": 3, "costs": {"a": [0.5, -1, []]}}',
        "[" * 100_000,
        "\xff\xfe",
    ],
)
def test_a_corrupt_file_is_told_of_and_written_anew(
    text: str, tmp_path: Path, warnings_logged: list[logging.LogRecord]
) -> None:
    cache = CostCache(tmp_path)
    cache.path(CPU).write_bytes(text.encode("latin-1"))
    costs = profile([mm(2, 2, 2)], CPU, cache=cache)
    assert warnings_logged
    assert all(str(cache.path(CPU)) in record.message for record in warnings_logged)
    warnings_logged.clear()
    assert cache.load(CPU) == {mm(2, 2, 2).key: costs[0]}
    assert not warnings_logged


def test_an_unwritable_directory_is_told_of_once(tmp_path: Path, warnings_logged: list[logging.LogRecord]) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CostCache(tmp_path / "file" / "cache")
    assert profile([mm(2, 2, 2)], CPU, cache=cache)[0].seconds > 0
    assert profile([mm(3, 3, 3)], CPU, cache=cache)[0].seconds > 0
    told = [record.message for record in warnings_logged if "LIGHTNING_REMAT_CACHE" in record.message]
    assert len(told) == 1


def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings_logged: list[logging.LogRecord]
) -> None:
    cache = CostCache(tmp_path)
    cache.store(CPU, [mm(2, 2, 2)], [OpCost(1.0, 2)])
    real = Path.open

    def full(path: Path, mode: str = "r", **kwargs: Any) -> Any:
        file = real(path, mode, **kwargs)
        if mode == "x":
            file.close()
            raise OSError(28, "No space left on device")
        return file

    monkeypatch.setattr(Path, "open", full)
    cache.store(CPU, [mm(3, 3, 3)], [OpCost(3.0, 4)])
    assert "No space left on device" in warnings_logged[0].message
    assert [file.name for file in tmp_path.iterdir()] == [cache.path(CPU).name]
    assert cache.load(CPU) == {mm(2, 2, 2).key: OpCost(1.0, 2)}


def test_the_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LIGHTNING_REMAT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert CostCache().directory == tmp_path / "home" / ".cache" / "lightning_remat"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert CostCache().directory == tmp_path / "xdg" / "lightning_remat"
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path / "own"))
    assert CostCache().directory == tmp_path / "own"


# -- static models ----------------------------------------------------------------------------------------------------


def flop(one: OpCall) -> float:
    (cost,) = flops([one])
    assert cost.workspace_bytes == 0
    return cost.seconds


def test_flops_of_matrix_products_and_convolutions() -> None:
    assert flop(mm(3, 5, 7)) == 2 * 3 * 5 * 7
    assert flop(call(aten.addmm.default, spec(7), spec(3, 5), spec(5, 7), outputs=(spec(3, 7),))) == 2 * 3 * 5 * 7
    assert flop(call(aten.bmm.default, spec(2, 3, 5), spec(2, 5, 7), outputs=(spec(2, 3, 7),))) == 2 * 2 * 3 * 5 * 7
    assert flop(convolution(2, 8, 10)) == 2 * (2 * 10 * 10) * 8 * 8 * 9
    assert flop(convolution(2, 8, 10, groups=8)) == 2 * (2 * 10 * 10) * 8 * 9


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_each_gradient_of_a_convolution_costs_as_much_as_the_convolution(groups: int) -> None:
    forward = flop(convolution(2, 8, 10, groups))
    for mask in ([True, False, False], [False, True, False]):
        assert flop(convolution_backward(2, 8, 10, groups, mask)) == forward
    assert flop(convolution_backward(2, 8, 10, groups, [True, True, False])) == 2 * forward


def test_flops_of_attention_on_any_device() -> None:
    q = spec(2, 4, 16, 8)
    logsumexp = spec(2, 4, 16)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    one = flop(call(forward, q, q, q, 0.0, True, outputs=(q, logsumexp)))
    assert one == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    assert flop(call(backward, q, q, q, q, q, logsumexp, 0.0, True, outputs=(q, q, q))) == 2.5 * one


def test_other_ops_count_their_largest_tensor() -> None:
    assert flop(call(aten.sum.default, spec(30, 20), outputs=(spec(),))) == 600
    assert flop(call(aten.add.Tensor, spec(30, 1), spec(1, 20), outputs=(spec(30, 20),))) == 600
    assert flop(call(len, spec(2, 3), outputs=())) == 6
    ids = spec(5, dtype=torch.int64)
    assert flop(call(aten.embedding.default, spec(50_000, 8), ids, outputs=(spec(5, 8),))) == 40, "only the rows read"
    assert flop(call(aten.arange.default, 4)) == 0


def test_a_formula_that_fails_is_told_of(warnings_logged: list[logging.LogRecord]) -> None:
    assert flop(call(aten.mm.default, spec(2, 3), spec(4, 5), outputs=(spec(2, 5),))) == 20
    assert "aten.mm.default" in warnings_logged[0].message


@pytest.mark.parametrize("device", device_specs())
def test_roofline_grows_with_size(device: str) -> None:
    for make in (
        lambda n: mm(n, n, n),
        lambda n: convolution(1, n, 32),
        lambda n: call(aten.relu.default, spec(n, n), outputs=(spec(n, n),)),
    ):
        seconds = [cost.seconds for cost in roofline([make(n) for n in (8, 64, 512, 4096)], device)]
        assert seconds == sorted(seconds)
        assert device_spec(device).launch_seconds < seconds[0] < seconds[-1]


def test_roofline_is_the_slower_of_computing_and_moving() -> None:
    device = DeviceSpec("mine", {torch.float32: 1e3, torch.float16: 4e3}, bytes_per_second=1e2, launch_seconds=1.0)
    relu = call(aten.relu.default, spec(25), outputs=(spec(25),))
    expanded = call(aten.add.Tensor, spec(25, stride=(0,)), spec(25), outputs=(spec(25),))
    product = mm(50, 50, 50)
    half = spec(50, 50, dtype=torch.float16)
    half_product = call(aten.mm.default, half, half, outputs=(half,))
    seconds = [cost.seconds for cost in roofline([relu, expanded, product, None], device)]
    assert seconds == pytest.approx([1 + 200 / 1e2, 1 + 204 / 1e2, 1 + 30_000 / 1e2, 0.0])
    fast_memory = DeviceSpec("mine", device.flops_per_second, bytes_per_second=1e9, launch_seconds=0.0)
    assert [cost.seconds for cost in roofline([product, half_product], fast_memory)] == pytest.approx([250, 62.5])


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ],
)
def test_devices_are_found_by_the_name_the_driver_gives(driver_name: str, name: str) -> None:
    assert cuda_spec_name(driver_name) == name
    assert device_spec(name.lower()).name == name


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1)])
def test_cuda_devices_are_found_with_and_without_an_index(
    device: str | torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert device_spec(device).name == "L4"


def test_an_unknown_gpu_is_told_of(warnings_logged: list[logging.LogRecord]) -> None:
    assert cuda_spec_name("NVIDIA L40S") in device_specs()
    assert "NVIDIA L40S" in warnings_logged[0].message


# -- by name ----------------------------------------------------------------------------------------------------------


def test_cost_models_by_name(tmp_path: Path) -> None:
    calls = [mm(4, 4, 4), None]
    assert cost_model("unit")(calls, CPU) == unit(calls) == [OpCost(1.0, 0), OpCost(0.0, 0)]
    assert cost_model("flops")(calls, CPU) == flops(calls)
    assert cost_model("roofline")(calls, CPU) == roofline(calls, "cpu")
    assert cost_model("roofline:a100-80")(calls, CPU) == roofline(calls, "A100-80")
    cache = CostCache(tmp_path)
    measured = cost_model("profile", cache=cache)(calls, CPU)
    assert measured[0].seconds > 0
    assert cache.load(CPU) == {calls[0].key: measured[0]}


@pytest.mark.parametrize("name", ["", "time", "profile:H100", "Unit"])
def test_an_unknown_model_lists_what_is_accepted(name: str) -> None:
    with pytest.raises(ConfigError, match=r"profile, roofline, flops, unit or roofline:<device>.*H100") as raised:
        cost_model(name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("name", ["roofline:", "roofline:abacus"])
def test_an_unknown_device_lists_the_table(name: str) -> None:
    with pytest.raises(ConfigError, match=r"T4, V100, A100-40, .*cpu"):
        cost_model(name)
    with pytest.raises(ConfigError, match="abacus"):
        roofline([], "abacus")
    with pytest.raises(ConfigError, match="meta"):
        device_spec(torch.device("meta"))

"""Measured costs on disk: kept apart by what changes them, and whole whoever writes and whatever was there."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import Plan, rematerialize
from lightning_remat.capture._ops import compact, dropout_mask, dropout_noise
from lightning_remat.cost import CostCache, OpCost, profile
from lightning_remat.cost._fingerprint import fingerprint
from tests.helpers.op_calls import call, convolution, mm, spec

CPU = torch.device("cpu")


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


def test_functions_of_this_package_are_kept(tmp_path: Path) -> None:
    """Their names mean the same in another process."""
    mask = call(dropout_mask, (2, 3), (3, 1), 0.1, CPU, outputs=(spec(2, 3, dtype=torch.bool),))
    dropped = call(dropout_noise, mask.outputs[0], torch.float32, 1.5, outputs=(spec(2, 3),))
    compacted = call(compact(torch.ops.aten.mse_loss.default), spec(3), spec(3), outputs=(spec(),))
    costs = profile([mask, dropped, compacted], CPU, cache=CostCache(tmp_path))
    assert CostCache(tmp_path).load(CPU) == {
        one.key: cost for one, cost in zip((mask, dropped, compacted), costs, strict=True)
    }


def test_a_second_run_solves_nothing_where_there_is_dropout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path))

    def plan() -> Plan:
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        step = rematerialize(nn.Sequential(*blocks), "50%", time_limit=2.0)
        step(torch.randn(256, 64)).square().mean().backward()
        assert step.plan is not None and step.plan.rematerializes
        return step.plan

    first = plan()
    torch._dynamo.reset()
    second = plan()
    assert "kept from an earlier run" not in first.notes and "kept from an earlier run" in second.notes
    assert second.graph == first.graph and second.schedule == first.schedule


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
        '{"format": "lightning_remat.costs", "version": 4}',
        '{"format": "lightning_remat.costs", "version": 4, "costs": {"a": [NaN, 0, [], []]}}',
        '{"format": "lightning_remat.costs", "version": 4, "costs": {"a": [0.5]}}',
        '{"format": "lightning_remat.costs", "version": 4, "costs": {"a": [0.5, 0, [[1, -2]], []]}}',
        '{"format": "lightning_remat.costs", "version": 4, "costs": {"a": [0.5, 0, [1], []]}}',
        '{"format": "lightning_remat.costs", "version": 4, "costs": {"a": [0.5, -1, [], []]}}',
        '{"format": "lightning_remat.costs", "version": 4, "costs": {"a": [0.5, 0, [], [[0, [-1]]]]}}',
        '{"format": "lightning_remat.costs", "version": 4, "costs": {"a": [0.5, 0, [], [[0, 1]]]}}',
        '{"format": "lightning_remat.costs", "version": 4, "costs": {"a": [0.5, 0, [], [0]]}}',
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

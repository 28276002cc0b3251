"""The suite for a GPU, dry on the CPU: what its parts find, and that it survives what dies, hangs or is stopped."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks import determinism, networks
from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import (
    architectures,
    batch_size,
    beside_compiler,
    bits,
    gpu_tests,
    host_memory,
    out_of_memory,
    peaks,
    sharded,
    steps,
    table,
    trainer,
)
from benchmarks.gpu import training as gpu_training
from benchmarks.gpu.environment import ROOT, environment, sources
from benchmarks.gpu.part import (
    CRASHED,
    FAILED,
    FAULTS,
    HUNG,
    INAPPLICABLE,
    INFEASIBLE,
    MISMATCH,
    OK,
    OVER,
    SKIPPED,
    UNREPEATABLE,
    Case,
    Result,
    Settings,
)
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import Results, read
from benchmarks.gpu.workers import Runs
from benchmarks.models import Planned, Row
from lightning_remat import Rematerialized, rematerialize
from tests.helpers import gpu_part

DRY = Settings(device="cpu")
HERE = {"device": "cpu", "dry_run": True, "versions": {"torch": "2"}, "sources": "abc"}


# -- processes --------------------------------------------------------------------------------------------------------


def ran(*do: str, seconds: float = 120.0, most: int | None = None, **changes: Any) -> dict[str, Result]:
    """What cases that do this end with, by the word of each."""
    found: dict[str, Result] = {}
    gpu_part.DO[:] = do
    part = dataclasses.replace(gpu_part.PART, **changes)
    runs = Runs(part, DRY, time.monotonic() + seconds, lambda case, one: found.update({case.key: one}), most)
    runs.run(part.cases(DRY))
    return found


class TestProcesses:
    @pytest.mark.slow
    def test_a_crash_is_recorded_and_the_next_case_runs(self) -> None:
        found = ran("print/abort/answer/leave/answer")
        assert [one["status"] for one in found.values()] == [OK, CRASHED, OK, CRASHED, OK]
        assert found["0-1-abort"]["error"] == "its process ended with signal SIGABRT"
        assert any("the last words" in line for line in found["0-1-abort"]["log"])
        assert any("gpu_part.py" in line for line in found["0-1-abort"]["log"])  # where it died
        assert found["0-3-leave"]["error"] == "its process ended with exit code 3"
        assert len({one["process"] for one in found.values() if "process" in one}) == 3

    def test_what_is_raised_is_a_failure_with_its_reason(self) -> None:
        found = ran("raise/answer")
        assert found["0-0-raise"]["status"] == FAILED
        assert found["0-0-raise"]["error"] == "ArithmeticError: why it failed"
        assert any("raise ArithmeticError" in line for line in found["0-0-raise"]["traceback"])
        assert found["0-1-answer"]["status"] == OK

    @pytest.mark.slow
    def test_a_hang_is_ended(self) -> None:
        found = ran("answer/hang/answer", limit_seconds=20.0)  # in which a process has begun, too
        assert [one["status"] for one in found.values()] == [OK, HUNG, OK]

    @pytest.mark.long
    def test_what_is_not_done_in_time_has_no_result(self) -> None:
        assert "0-1-hang" not in ran("answer/hang/answer", seconds=3.0)
        assert ran("answer", seconds=5.0, least_seconds=10.0) == {}

    @pytest.mark.long
    def test_groups_are_processes(self) -> None:
        found = ran("answer/answer", "answer", most=1)
        one, same, other = (one["process"] for one in found.values())
        assert one == same != other

    def test_a_module_that_cannot_be_imported_is_a_crash(self) -> None:
        found = ran("answer", module="tests.helpers.not_there")
        assert found["0-0-answer"]["status"] == CRASHED
        assert any("not_there" in line for line in found["0-0-answer"]["log"])

    def test_an_interruption_ends_what_runs(self) -> None:
        processes = []

        def interrupt(_case: Case, one: Result) -> None:
            processes.append(one["process"])
            raise KeyboardInterrupt

        gpu_part.DO[:] = ["answer/hang"]
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            Runs(gpu_part.PART, DRY, started + 300, interrupt).run(gpu_part.cases(DRY))
        assert time.monotonic() - started < 200
        with pytest.raises(ProcessLookupError):
            os.kill(processes[0], 0)


# -- the whole run ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs the suite with the made-up part alone; returns its exit status, and the cases that were run."""
    monkeypatch.setattr(suite, "PARTS", {"made-up": gpu_part.PART})
    monkeypatch.setattr(table, "PARTS", {"made-up": gpu_part.PART})
    log = tmp_path / "log.txt"

    def run(*do: str, arguments: str = "", here: Mapping[str, Any] = HERE) -> tuple[int, list[str]]:
        gpu_part.DO[:] = do
        log.write_text("")
        monkeypatch.setattr(suite, "environment_of", lambda _device: dict(here))
        given = ["--device", "cpu", "--out", str(tmp_path / "out"), "--test-files", str(log), *arguments.split()]
        return suite.main(given), log.read_text().split()

    return run


Run = Callable[..., tuple[int, list[str]]]


@pytest.mark.slow
class TestSuite:
    @pytest.mark.long
    def test_a_second_run_goes_on_where_the_first_was(self, run: Run, tmp_path: Path) -> None:
        assert run("answer/answer") == (0, ["0-answer", "1-answer"])
        assert run("answer/answer/mismatch/abort") == (1, ["2-mismatch", "3-abort"])
        # What was wrong before is still wrong, without another run of it.
        assert run("answer/answer/mismatch/abort") == (1, [])
        status, cases = run("answer/answer/mismatch/abort", arguments="--again")
        assert status == 1 and len(cases) == 4
        data = read(tmp_path / "out" / "made-up.json")
        assert data["dry_run"] and list(data["environments"].values()) == [HERE]
        assert data["cases"]["0-2-mismatch"]["size"] is None  # JSON has no nan
        page = (tmp_path / "out" / "README.md").read_text()
        assert page.startswith("# Dry run on the CPU") and "says nothing about a GPU" in page
        assert "4 results (2 ok): 1 mismatches, 0 steps over budget, 1 crashes" in page
        assert "0-3-abort: crashed" in page

    @pytest.mark.long
    def test_results_of_other_code_are_made_again(self, run: Run, tmp_path: Path) -> None:
        assert run("answer/answer") == (0, ["0-answer", "1-answer"])
        other = {**HERE, "sources": "def"}
        assert run("answer/answer", here=other) == (0, ["0-answer", "1-answer"])
        assert list(read(tmp_path / "out" / "made-up.json")["environments"].values()) == [other]

    @pytest.mark.long
    def test_a_run_that_was_stopped_keeps_what_it_has(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put = Results.put

        def stopped(self: Results, key: str, one: Result) -> None:
            put(self, key, one)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Results, "put", stopped)
            with pytest.raises(KeyboardInterrupt):
                run("answer/answer/answer")
        assert list(read(tmp_path / "out" / "made-up.json")["cases"]) == ["0-0-answer"]
        assert (tmp_path / "out" / "README.md").exists()
        assert run("answer/answer/answer") == (0, ["1-answer", "2-answer"])

    def test_a_run_without_time_says_so(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("answer", arguments="--minutes 0.000001") == (3, [])
        assert "1 not run" in capsys.readouterr().out

    def test_no_device_is_told(self, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        def none(_device: str) -> dict[str, Any]:
            raise RuntimeError("torch finds no CUDA device on this machine")

        assert run("answer")[0] == 0
        monkeypatch.setattr(suite, "environment_of", none)
        assert suite.main([]) == 2
        assert "no CUDA device" in capsys.readouterr().err

    def test_a_dry_run_is_not_written_among_results(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            suite.main(["--device", "cpu", "--out", str(table.RESULTS)])
        assert "is for what was run on a GPU" in capsys.readouterr().err


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bits.json").write_text("{}")
    with pytest.raises(ValueError, match="no file of results"):
        Results(tmp_path / "bits.json", "bits", HERE)
    Results(tmp_path / "peaks.json", "peaks", HERE).put("one", {"status": OK})
    with pytest.raises(ValueError, match="holds the results of 'peaks'"):
        Results(tmp_path / "peaks.json", "bits", HERE)


def test_the_environment_knows_its_sources(tmp_path: Path) -> None:
    found = environment("cpu")
    assert found["dry_run"] and {"python", "torch"} <= found["versions"].keys()
    assert json.loads(json.dumps(found)) == found
    for name in ("lightning_remat", "callbacks", "benchmarks"):
        (tmp_path / name).mkdir()
    (tmp_path / "benchmarks" / "networks.py").write_text("")
    before = sources(tmp_path)
    (tmp_path / "callbacks" / "one.py").write_text("1")
    assert before != sources(tmp_path) != found["sources"] == sources(ROOT)


# -- bits and determinism ---------------------------------------------------------------------------------------------


@pytest.fixture
def settings_of_torch() -> Iterator[None]:
    filled, cudnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


@pytest.mark.usefixtures("settings_of_torch")
class TestDeterminism:
    def test_what_is_deterministic_raises_from_then_on(self) -> None:
        assert determinism.settle(lambda: torch.ones(2).sum()) == ""
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))

    def test_an_op_without_a_deterministic_kernel_is_named(self) -> None:
        with pytest.warns(UserWarning, match="put_ does not have"):
            assert determinism.settle(lambda: torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))) == "put_"
        assert torch.is_deterministic_algorithms_warn_only_enabled()

    def test_other_errors_come_out(self) -> None:
        with pytest.raises(RuntimeError, match="size of tensor"):
            determinism.settle(lambda: torch.ones(2) + torch.ones(3))


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=4),
    st.lists(st.floats(width=32), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_bits_are_compared_as_bits(one: list[float], other: list[float], dtype: torch.dtype) -> None:
    first, second = torch.tensor(one).to(dtype), torch.tensor(other).to(dtype)
    assert steps.same_bits(first, first.clone())
    stored = first.view(torch.uint8).tolist() == second.view(torch.uint8).tolist()
    assert steps.same_bits(first, second) == (len(one) == len(other) and stored)


def test_differences_are_named_and_measured() -> None:
    right = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.0, math.nan]), "c": torch.ones(1)}
    found = {"a": torch.tensor([1.0, -4.5]), "b": torch.tensor([-0.0, math.nan]), "d": torch.ones(1)}
    assert steps.differing(right, right) == []
    assert steps.differing(found, right) == ["c", "d", "a", "b"]
    assert steps.largest_difference(found, right, ["a"]) == 0.125
    assert steps.largest_difference(found, right, ["c"]) == steps.largest_difference(found, right, ["b"]) == math.inf


# -- parts, dry -------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Called with images and labels; returns a loss. Dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        activations = [layer for _ in range(6) for layer in (nn.SiLU(), nn.Dropout(0.2))]
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 1), nn.BatchNorm2d(8), *activations)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(images).flatten(2).mean(2).float(), labels)


def small(name: str, _size: str = "tiny", device: str = "cpu") -> networks.Workload:
    torch.manual_seed(0)
    batch = torch.randn(4, 2, 16, 16), torch.randint(0, 8, (4,))
    return networks.Workload(name, "a small one", Small().to(device).train(), batch, ())


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch, settings_of_torch: None) -> Iterator[None]:
    monkeypatch.setattr(networks, "build", small)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def first(part: Any, **options: Any) -> Case:
    """The first case of a part for a network that has these options."""
    found = part.cases(dataclasses.replace(DRY, networks=("swin",)))
    return next(case for case in found if options.items() <= case.options.items())


GOOD = Planned(0.6, graphs=1, budget_bytes=100, predicted_peak_bytes=99, measured_peak_bytes=99)


@pytest.mark.parametrize(
    ("planned", "trouble", "status"),
    [
        ([GOOD], "", OK),
        ([dataclasses.replace(GOOD, differs=["w"])], "", MISMATCH),
        ([dataclasses.replace(GOOD, differs=["w"])], "eager mode does not repeat its own bits: w", UNREPEATABLE),
        ([dataclasses.replace(GOOD, measured_peak_bytes=101)], "", OVER),
        ([dataclasses.replace(GOOD, exception="RuntimeError: no")], "", FAILED),
        ([], "not installed (No module named 'monai')", SKIPPED),
    ],
)
def test_a_row_of_an_architecture_is_a_result(planned: list[Planned], trouble: str, status: str) -> None:
    found = architectures.judged(Row("torch", "a", planned=planned, trouble=trouble))
    assert found["status"] == status
    shown = architectures.table({"torch/a": found})
    assert ("| torch | a |" in shown) is bool(planned)


@pytest.mark.usefixtures("small_networks")
class TestParts:
    @pytest.mark.parametrize("precision", ["bfloat16 autocast", "channels last"])
    def test_bits(self, precision: str) -> None:
        found = bits.run(first(bits, precision=precision).options, DRY)
        assert found["status"] == OK, found
        assert found["rematerializes"] and found["eager_repeats"] and found["differing"] == {}
        assert found["measured_peak_bytes"] <= found["budget_bytes"] < found["baseline_peak_bytes"]

    def test_other_bits_are_a_mismatch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Off(Rematerialized):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(*args, **kwargs) * (1 + 2**-20)

        def off(module: nn.Module, budget: Any, **options: Any) -> Rematerialized:
            step = rematerialize(module, budget, **options)
            step.__class__ = Off
            return step

        monkeypatch.setattr(bits, "rematerialize", off)
        found = bits.run(first(bits).options, DRY)
        assert found["status"] == MISMATCH and found["faults"] == [MISMATCH]
        assert {"losses", "gradients", "parameters"} <= found["differing"].keys()
        assert 0 < found["largest_difference"]["losses"] < 1e-5

    def test_what_was_not_captured_shows_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bits, "not_captured", lambda _step: "not captured: so it is")
        found = bits.run(first(bits).options, DRY)
        assert found["status"] == FAILED and found["error"] == "not captured: so it is"

    def test_no_images_no_channels_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def vectors(name: str, *_: Any) -> networks.Workload:
            return networks.Workload(name, "", nn.Linear(2, 2), (torch.ones(1, 2),), ())

        monkeypatch.setattr(networks, "build", vectors)
        assert bits.run(first(bits, precision="channels last").options, DRY)["status"] == INAPPLICABLE

    def test_peaks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = first(peaks, budget=0.6)
        found = peaks.run(case.options, DRY)
        assert found["status"] == OK and found["predicted_peak_bytes"] == pytest.approx(
            found["measured_peak_bytes"], rel=0.02
        )
        over = {"measured_peak_bytes": found["budget_bytes"] + 1}
        monkeypatch.setattr(peaks, "peaks", lambda *_: over)
        torch._dynamo.reset()
        assert peaks.run(case.options, DRY)["faults"] == [OVER]

    def test_host_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ways = {way: host_memory.WAYS[way] for way in ("eager", "1.0", "0.6, host")}
        ways["0.6, host"] = {**ways["0.6, host"], "cost_model": "unit"}  # so that ops take longer than copies
        monkeypatch.setattr(host_memory, "WAYS", ways)
        found = host_memory.run(first(host_memory).options, DRY)
        assert found["status"] == OK, found
        copied = found["rows"]["0.6, host"]
        assert copied["copies"] > 0 and copied["host_bytes"] > 0 and copied["seconds"] > 0
        assert copied["measured_peak_bytes"] == pytest.approx(copied["predicted_peak_bytes"], rel=0.02)
        assert "of 1.0's" in host_memory.table({"swin": found})

    @pytest.mark.slow
    def test_sharded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sharded, "WAYS", {way: sharded.WAYS[way] for way in ("FSDP2", "0.5")})
        (case,) = sharded.cases(dataclasses.replace(DRY, networks=("gpt2",)))
        found = sharded.run(case.options, DRY)
        assert found["status"] == OK, found
        for process in found["rows"]:
            row = process["0.5"]
            assert row["plans"] >= 1 and row["seconds"] > 0 and row["differing"] == {}
            assert row["measured_peak_bytes"] <= row["budget_bytes"]
        assert "of FSDP2's" in sharded.table({"gpt2": found})
        assert not sharded.cases(Settings("cuda")) or torch.cuda.device_count() >= sharded.PROCESSES

    @pytest.mark.parametrize("way", out_of_memory.WAYS)
    def test_out_of_memory(self, way: str) -> None:
        found = out_of_memory.run(first(out_of_memory, way=way, times=1.5).options, DRY)
        assert found["status"] == OK and found["batch_size"] == 6, found
        if way != out_of_memory.EAGER:
            assert found["compared"] and found["differing"] == {} and found["rematerializes"]
            assert found["measured_peak_bytes"] <= found["budget_bytes"]

    def test_trainer(self) -> None:
        found = trainer.run(first(trainer, precision="bf16-mixed").options, DRY)
        assert found["status"] == OK and found["compared"] and found["rematerializes"], found
        assert found["step_seconds"] > 0 and found["eager_step_seconds"] > 0 and found["batch_size"] == 2

    def test_beside_the_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trial = beside_compiler.Trial("gpt2", DRY)
        peers = {way: trial.row(way) for way in ("eager", "compile, 1")}
        for one in peers.values():
            assert one["status"] == OK and one["peak_bytes"] > 0 and one["of_eager"] > 0, one
        assert peers["eager"]["differing"] == []
        monkeypatch.setattr(trial, "compiled_bytes", lambda: 1)
        assert trial.row("exact")["status"] == INFEASIBLE
        found = trial.row("smallest")
        assert found["status"] == OK and found["rematerializes"] and found["differing"] == [], found
        assert found["peak_bytes"] < peers["eager"]["peak_bytes"]
        monkeypatch.setattr(trial, "right", dataclasses.replace(trial.right, losses={}))
        del trial.rows["smallest"]
        assert trial.row("smallest")["faults"] == [MISMATCH]

    def test_batch_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batch_size, "DRY_BUDGET", "256KiB")
        found = batch_size.run(first(batch_size).options, DRY)
        assert found["status"] == OK and found["batch_size"] >= found["without"] > 1, found
        assert found["measured_peak_bytes"] <= found["budget_bytes"] == 256 * 1024 and found["finding_seconds"] > 0


def test_a_run_is_held_against_one_that_repeats() -> None:
    losses = [torch.ones(())]
    module = nn.Linear(2, 2)
    right = steps.left_by(module, losses)
    other = steps.left_by(copy.deepcopy(module), [torch.zeros(())])
    fit = functools.partial(gpu_training.Fit, gpu_training.TRAINED)
    assert gpu_training.against_eager(right, fit(left=right), lambda: fit(left=right))[:2] == ([], None)
    found, status, fields = gpu_training.against_eager(other, fit(left=right), lambda: fit(left=right))
    assert found == [MISMATCH] and status is None and fields["differing"] == {"losses": [1, "0"]}
    found, status, _ = gpu_training.against_eager(other, fit(left=right), lambda: fit(left=other))
    assert found == [] and status == "eager does not repeat its bits"
    stuck = gpu_training.Fit(gpu_training.OUT_OF_MEMORY)
    assert gpu_training.against_eager(other, stuck, lambda: stuck) == ([], None, {"compared": False})


def test_a_share_of_the_device_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    properties = type("Properties", (), {"total_memory": 1000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    with gpu_training.device_limit(0.3, Settings()) as limit:
        assert limit == 300 and shares == [0.3]
    assert shares == [0.3, 1.0]


@pytest.mark.slow  # collects all tests in a process of its own
def test_the_tests_are_cases() -> None:
    """One that takes the process down does not hide the others, and a file without any is one that fails."""
    settings = dataclasses.replace(DRY, test_files=("tests/helpers/gpu_cases.py", "tests/helpers/failing.py"))
    cases = gpu_tests.cases(settings)
    found: dict[str, Result] = {}
    Runs(
        gpu_tests.PART,
        settings,
        time.monotonic() + 500,
        lambda case, one: found.update({case.key.rpartition("/")[2].rpartition("::")[2]: one}),
    ).run(cases)
    assert {name: one["status"] for name, one in found.items()} == {
        "test_passes[a]": OK,
        "test_passes[b]": OK,
        "test_fails": FAILED,
        "test_is_skipped": "skipped",
        "test_dies": CRASHED,
        "test_comes_after": OK,
        "failing.py": FAILED,
    }
    assert "assert (1 + 1) == 3" in found["test_fails"]["error"]


def test_all_files_with_tests_of_a_gpu_are_found() -> None:
    assert {"tests/test_gpu.py", "tests/capture/test_masks.py"} <= set(gpu_tests.files(DRY))


@pytest.mark.parametrize("status", [*FAULTS, "skipped", "infeasible", INAPPLICABLE])
def test_every_table_takes_every_status(status: str, tmp_path: Path) -> None:
    for part in PARTS.values():
        results = Results(tmp_path / f"{part.name}.json", part.name, {**HERE, "dry_run": False, "card": "a card"})
        case = {"network": "net", "precision": "float32", "budget": 0.6}
        wrong = {"faults": [status], "error": "a | b"} if status in FAULTS else {}
        results.put("net, one", {"status": status, "case": case, "nondeterministic": "put_", **wrong})
    page = table.page(tmp_path)
    assert page.startswith("# On a GPU") and "a card" in page and "put_" in page
    assert all(f"## {part.title}" in page for part in PARTS.values())
    assert len({line.count("|") - line.count("\\|") for line in page.splitlines() if line.startswith("| net, one")}) > 1

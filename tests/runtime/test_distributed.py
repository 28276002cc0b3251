"""Two processes train one model: the numbers of DDP without the callback, the same plans in both, buckets counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_remat.errors import ConfigError, InfeasibleBudgetError, RematError
from lightning_remat.runtime import Agreement
from tests.helpers.places import ROOT
from tests.helpers.training import Classifier, callback, trainer

CASES = [
    "plain",
    "unused",
    "static",
    "views",
    "accumulating",
    "shapes",
    "answers",
    "artifacts",
    "auto",
    "measured",
    "measured-views",
    "measured-by-hand",
    "offloaded",
    "checked",
    "checked-static",
]
FAILING = ["forward fails", "backward fails"]


def start(folder: Path, *cases: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.ddp", str(folder), *cases]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def run(folder: Path, *cases: str, processes: int = 2) -> dict[str, list[dict[str, Any]]]:
    """What the processes wrote, by case and rank."""
    ranks = range(processes)
    ended = start(folder, *cases)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return {case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in ranks] for case in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run(tmp_path_factory.mktemp("ddp"), *CASES, *FAILING)


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *FAILING])
def test_the_numbers_are_those_of_ddp(found, case):
    for process in found[case]:
        assert "error" not in process and process["failures"] == []
        assert process["plans"] and any(plan["rematerializes"] or plan["copies"] for plan in process["plans"])
        assert any(process["runs"])


@pytest.mark.slow
def test_sums_over_four_processes_are_those_of_ddp(tmp_path):
    """They depend on where in a bucket a gradient lies, and DDP makes its buckets in the order in which gradients come."""
    for process in run(tmp_path, "four", processes=4)["four"]:
        assert "error" not in process and process["failures"] == []
        assert any(plan["rematerializes"] for plan in process["plans"]) and any(process["runs"])


@pytest.mark.parametrize(("case", "gradients"), [("checked", 10), ("checked-static", 10)])
def test_each_process_checks_its_own_step(found, case, gradients):
    for process in found[case]:
        words = f"checked: loss, {gradients} gradients and 6 buffers are bit for bit those of eager mode"
        assert process["check"].startswith(words)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("shapes", "answers", "artifacts")])
def test_both_run_the_same_plans(found, case):
    first, second = (process["plans"] for process in found[case])
    assert first == second  # the seconds of solving too: it was done once


def test_batches_of_different_shapes_have_plans_of_their_own(found):
    first, second = ([plan["budget"] for plan in process["plans"]] for process in found["shapes"])
    assert first and second and first != second


def test_auto_is_the_smallest_of_all_devices(found):
    assert {plan["budget"] for process in found["auto"] for plan in process["plans"]} == {16_000}


@pytest.mark.parametrize("case", ["measured", "measured-views", "static", "offloaded"])
def test_the_measured_peak_is_within_the_budget_buckets_included(found, case):
    for process in found[case]:
        (plan,) = process["plans"]
        assert process["measured"] <= plan["budget"]
        assert process["measured"] == pytest.approx(plan["predicted"], rel=0.02)


def test_gradients_of_earlier_batches_are_counted_where_they_are_added_up_by_hand(found):
    for process in found["measured-by-hand"]:
        assert len(process["plans"]) > 1
        assert process["measured"] <= process["plans"][-1]["budget"]
        assert process["measured"] == pytest.approx(process["plans"][-1]["predicted"], rel=0.02)


def test_buckets_are_counted(found):
    weights = 4 * (16 * 256 + 256 + 4 * (256 * 256 + 256) + 4 * 256 + 4)
    for case in ("measured", "measured-views"):
        assert all(plan["resident"] >= weights for process in found[case] for plan in process["plans"])


@pytest.mark.slow
def test_one_process_searches_on_for_all(tmp_path):
    taken = []
    for process in run(tmp_path, "background")["background"]:
        assert "error" not in process and process["failures"] == []
        dear, *_ = plans = process["plans"]  # the last batch is smaller, and has a plan of its own
        better = [i for i, plan in enumerate(plans) if i > 0 and plan["budget"] == dear["budget"]]
        assert better and all(plans[i]["seconds"] < dear["seconds"] for i in better)
        assert process["runs"][0] == 3 and sum(process["runs"][i] for i in better) >= 5
        taken.append([plans[i]["schedule"] for i in better])
    assert set(taken[0]) & set(taken[1])  # which process takes what, and when, is its own affair


@pytest.mark.slow
def test_an_infeasible_budget_is_told_in_both(tmp_path):
    for process in run(tmp_path, "infeasible")["infeasible"]:
        assert "smallest feasible budget found is" in process["error"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_process_runs_out_of_memory_and_all_go_on(found, where):
    undisturbed, disturbed = found[f"{where} fails"]
    assert (undisturbed["recoveries"], disturbed["recoveries"]) == (0, 1)
    first, second = ([plan["budget"] for plan in process["plans"]] for process in found[f"{where} fails"])
    assert first[0] == second[0] > first[-1] == second[-1]  # both have come down to the same


@pytest.mark.long
def test_where_one_process_cannot_go_on_all_end_with_its_error(tmp_path):
    """The other waits for gradients that do not come; that it ends, and does not hang, is what is tested."""
    case = "backward always fails"
    ended = start(tmp_path, case, timeout=120)
    assert ended.returncode != 0 or "Tried to allocate" in (tmp_path / f"{case}-1.json").read_text()


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_other_strategies_are_refused_by_name(strategy, monkeypatch):
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

    kind = {"fsdp": FSDPStrategy, "deepspeed": DeepSpeedStrategy}[strategy]
    runner = trainer(callback())
    monkeypatch.setattr(runner.strategy, "__class__", kind)
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.*strategy='ddp'"):
        runner.callbacks[0].setup(runner, Classifier(), "fit")


class TestAgreement:
    def store(self) -> Any:
        return torch.distributed.HashStore()

    def test_one_answers_for_all(self) -> None:
        store, asked = self.store(), []

        def answer() -> dict[str, int]:
            asked.append(1)
            return {"answer": 42}

        assert [Agreement("fit", store=store).once("question", answer) for _ in range(3)] == [{"answer": 42}] * 3
        assert len(asked) == 1
        Agreement("another fit", store=store).once("question", answer)
        assert len(asked) == 2

    def test_large_answers_pass_through_a_store_over_the_network(self) -> None:
        """It takes 8 MiB at once; plans of large graphs are more."""
        store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
        noise = torch.randint(256, (9 * 2**20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        text = noise.numpy().tobytes().hex()  # half of it is left when it is compressed
        here, there = Agreement("fit", store=store), Agreement("fit", store=store)
        assert here.once("question", lambda: {"answer": text}) == {"answer": text}
        assert there.once("question", lambda: None) == {"answer": text}
        here.tell("topic", text)
        assert there.news("topic") == [text] and there.news("topic") == []
        assert Agreement("fit", store=store, processes=1).of_all("all", text) == [text]

    def test_others_wait(self) -> None:
        store, ready, go = self.store(), threading.Event(), threading.Event()

        def slowly() -> str:
            ready.set()
            assert go.wait(10)
            return "late"

        thread = threading.Thread(target=lambda: Agreement("fit", store=store).once("question", slowly))
        thread.start()
        assert ready.wait(10)
        threading.Timer(0.2, go.set).start()
        assert Agreement("fit", store=store).once("question", lambda: "own") == "late"
        thread.join()

    def test_who_waits_too_long_answers_itself(self) -> None:
        store = self.store()
        store.add("lightning_remat/fit/question/asked", 1)  # and never answers
        assert Agreement("fit", patience=0.1, store=store).once("question", lambda: "own") == "own"

    @pytest.mark.parametrize(
        ("error", "kind", "words"),
        [
            (InfeasibleBudgetError(1, 2, "op", "module"), InfeasibleBudgetError, "2 bytes"),
            (ValueError("no good"), RematError, "ValueError: no good"),
        ],
    )
    def test_an_error_is_everybodys(self, error: Exception, kind: type[Exception], words: str) -> None:
        store = self.store()

        def fail() -> None:
            raise error

        with pytest.raises(type(error)):
            Agreement("fit", store=store).once("question", fail)
        with pytest.raises(kind, match=words):
            Agreement("fit", store=store).once("question", lambda: None)

    def test_the_store_of_torch_distributed(self, tmp_path: Path) -> None:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=10))
        try:
            assert Agreement("fit").once("question", lambda: 1) == Agreement("fit").once("question", lambda: 2) == 1
        finally:
            torch.distributed.destroy_process_group()

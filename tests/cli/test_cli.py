"""The command line, called in this process: graphs captured, solved, compared and drawn, and errors in one line."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lightning_remat.cli import _main, main
from lightning_remat.cli._progress import Progress
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner import Plan
from lightning_remat.schedule import verify
from lightning_remat.solvers import available, solve
from tests.helpers.graphs import unit_chain

NETWORKS = """
import torch

class Network(torch.nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1))

    def forward(self, x):
        return self.layers(x).square().mean()

def network(width=32, depth=4, batch=64):
    return Network(width, depth), (torch.randn(batch, width),)

def drifts():
    net = Network(8, 1)
    net.calls = torch.zeros(())
    def step(x):
        with torch.no_grad():
            steps.append(1)
        return net(x) * len(steps)
    return step, torch.randn(4, 8)

steps = []

def huge():
    return Network(100_000, 2), torch.randn(4096, 100_000)

def function_of_names():
    net = Network(8, 1)
    def step(x, scale):
        return net(x * scale)
    return step, {"x": torch.randn(4, 8), "scale": torch.tensor(2.0)}

def reads_values():
    net = Network(8, 1)
    if net.layers[0].weight.sum().item() > 0:
        net = torch.nn.Sequential(net)
    return net, torch.randn(4, 8)

def no_gradients():
    return torch.nn.ReLU(), torch.randn(4)

def no_pair():
    return torch.nn.ReLU()

def fails():
    raise RuntimeError("out of\\npaper")

def step_fails():
    return Network(8, 1), torch.randn(4, 9)
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the command in a folder with a few files; gives back status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_main, "Progress", partial(Progress, after_seconds=1e6))  # however slow the machine is
    Path("networks.py").write_text(NETWORKS)
    unit_chain(8).replace(name="chain").save("chain.json")

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.out, captured.err

    return call


# -- capture --------------------------------------------------------------------------------------------------------------


def test_a_fake_network_has_the_graph_of_the_real_one(run: Run) -> None:
    status, out, err = run("capture", "networks.py:network", "--cost", "flops", "-o", "fake.json")
    assert (status, err) == (0, "")
    assert "saved to fake.json" in out
    status, _, _ = run("capture", "networks.py:network", "--cost", "flops", "--real", "-o", "real.json")
    assert status == 0
    fake, real = ComputationGraph.load("fake.json"), ComputationGraph.load("real.json")
    assert fake == real
    assert fake.name == "network"
    assert fake.seconds > 0
    assert solve(fake, fake.floor_bytes * 100, "no_remat").schedule is not None


def test_a_network_larger_than_any_memory_is_captured(run: Run) -> None:
    status, out, _ = run(
        "capture", "networks.py:huge", "--cost", "roofline:H200", "--no-old-gradients", "--resident", "1GiB"
    )
    assert status == 0, out
    graph = ComputationGraph.load("huge.json")
    parameters = 2 * (100_000 * 100_000 + 100_000) * 4
    assert graph.input_bytes == parameters + 4096 * 100_000 * 4
    assert graph.gradient_bytes == parameters + 4  # the loss's own, which the caller holds
    assert graph.forward_resident_bytes == 0
    assert graph.resident_bytes >= 2**30


def test_the_factory_takes_arguments_and_is_found_by_module(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "networks", raising=False)
    command = ["capture", "networks:network", "--cost", "unit"]
    assert run(*command, "--argument", "batch=7", "--argument", "depth=1", "-o", "small.json")[0] == 0
    assert (7, 32) in {tensor.shape for tensor in ComputationGraph.load("small.json").tensors}
    assert run("capture", "networks:function_of_names", "--cost", "unit")[0] == 0
    assert ComputationGraph.load("function_of_names.json").gradient_bytes == (64 + 8) * 4 + 4


def test_measured_costs_are_those_of_real_tensors(run: Run) -> None:
    assert run("capture", "networks.py:network", "--cost", "profile", "-o", "measured.json")[0] == 0
    graph = ComputationGraph.load("measured.json")
    assert 0 < graph.seconds < 10
    assert all(op.seconds > 0 for op, view in zip(graph.ops, graph.is_view, strict=True) if not view)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["networks.py:nothing"], "no function 'nothing'"),
        (["networks.py"], "give MODULE:FUNCTION"),
        (["missing.py:network"], "missing.py cannot be imported: FileNotFoundError"),
        (["no_such_module_at_all:network"], "cannot be imported: ModuleNotFoundError"),
        (["networks.py:no_pair"], "must return a pair"),
        (["networks.py:fails"], "fails failed: RuntimeError: out of paper"),
        (["networks.py:reads_values"], "with --real the network is made"),
        (["networks.py:step_fails"], "the step failed: "),
        (["networks.py:no_gradients"], "could not be captured: "),
        (["networks.py:network", "--cost", "guess"], "unknown cost model 'guess'"),
        (["networks.py:network", "--resident", "50%"], "--resident '50%'"),
        (["networks.py:network", "--argument", "batch"], "'batch': give NAME=VALUE"),
        (["networks.py:network", "--argument", "bath=3"], "network failed: TypeError"),
        (["networks.py:network", "--device", "abacus"], "device 'abacus' cannot be used"),
    ],
)
def test_what_cannot_be_captured_is_said_in_one_line(run: Run, arguments: list[str], words: str) -> None:
    status, _, err = run("capture", *arguments)
    assert status == 2
    assert err.startswith("lightning-remat: error: ")
    assert words in err
    assert err.count("\n") == 1
    assert not list(Path().glob("*.json")) or [path.name for path in Path().glob("*.json")] == ["chain.json"]


# -- check ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [(), ("--precision", "bf16-true"), ("--precision", "bf16-mixed", "--deterministic"), ("--argument", "depth=2")],
    ids=lambda options: " ".join(options) or "as it is",
)
def test_a_network_is_checked(run: Run, options: tuple[str, ...]) -> None:
    status, out, err = run(
        "check",
        "networks.py:network",
        "--budget",
        "90%",
        "--cost",
        "unit",
        "--method",
        "greedy",
        "-o",
        "r.json",
        *options,
    )
    assert (status, err) == (0, "")
    gradients = 4 if "depth=2" in options else 8
    assert f"checked: loss and {gradients} gradients are bit for bit those of eager mode" in out
    assert json.loads(Path("r.json").read_text())["verdict"] == "equal"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_check_that_fails_says_so_and_ends_with_a_status_of_its_own(run: Run) -> None:
    status, out, _ = run("check", "networks.py:drifts", "--cost", "unit", "--method", "greedy")
    assert status == 1
    assert "eager mode, run twice from the same state, has other bits the second time" in out
    assert "the output loss" in out and "What to do:" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["networks.py:step_fails"], "the step failed: RuntimeError: mat1 and mat2"),
        (["networks.py:network", "--device", "nowhere"], "device 'nowhere' cannot be used"),
        (["networks.py:function_of_names", "--precision", "bf16-true"], "is for a module"),
        (["networks.py:network", "--budget", "1000"], "no schedule was found within a budget"),
    ],
)
def test_checks_that_cannot_be_made(run: Run, arguments: list[str], words: str) -> None:
    status, _, err = run("check", *arguments, "--cost", "unit", "--method", "greedy")
    assert status == 2 and words in err


# -- solve, compare, curve ------------------------------------------------------------------------------------------------


def test_a_plan_is_printed_saved_and_drawn(run: Run) -> None:
    pytest.importorskip("matplotlib")
    command = ["solve", "chain.json", "--budget", "5", "--method", "milp", "--option", "gap=0.001"]
    status, out, err = run(*command, "--out", "plan.json", "--picture", "memory.png")
    assert (status, err) == (0, "")
    for words in ("chain", "milp", "optimal", "+41.2%", "5 B", "saved to plan.json", "drawn to memory.png"):
        assert words in out
    plan = Plan.load("plan.json")
    assert plan.predicted_seconds == 24
    assert verify(plan.graph, plan.schedule, 5) == 5
    assert Path("memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_stands_for_the_step_that_it_is_of(run: Run) -> None:
    of_graph = run("solve", "chain.json", "--budget", "5", "--method", "milp", "--out", "plan.json")
    plan = Plan.load("plan.json")
    dataclasses.replace(plan, graph=Plan.load("plan.json").graph.replace(name="slices"), untiled=plan.graph).save(
        "sliced.json"
    )
    for file in ("plan.json", "sliced.json"):
        of_plan = run("solve", file, "--budget", "5", "--method", "milp", "--out", "again.json")
        assert (of_plan[0], of_plan[2]) == (of_graph[0], of_graph[2]) == (0, "")
        assert Plan.load("again.json").graph == plan.graph
        assert Plan.load("again.json").schedule == plan.schedule


@pytest.mark.parametrize(("budget", "nbytes"), [("50%", 6), ("min", 4), ("1KiB", 1024), ("0.5", 6), ("7", 7)])
def test_budgets_are_read_as_everywhere(run: Run, budget: str, nbytes: int) -> None:
    status, _, _ = run("solve", "chain.json", "--budget", budget, "--out", "plan.json")
    assert status == 0
    assert Plan.load("plan.json").budget_bytes == nbytes


def test_all_methods_are_compared_the_cheapest_first(run: Run) -> None:
    status, out, _ = run("compare", "chain.json", "--budget", "6", "--time-limit", "2")
    assert status == 0
    assert all(method in out for method in available())
    rows = [line for line in out.splitlines() if "optimal" in line or "feasible" in line]
    assert "+23.5%" in rows[0]  # 21 evaluations for 17 ops
    assert "no_remat: this method has no schedule" in out
    status, out, _ = run("compare", "chain.json", "--budget", "6", "--methods", "greedy", "no_remat", "greedy")
    assert status == 0
    assert "milp" not in out
    assert out.count("greedy") == 2  # its row, and the solver in it


def test_a_curve_is_a_table_a_file_and_a_picture(run: Run) -> None:
    pytest.importorskip("matplotlib")
    status, out, err = run(
        "curve", "chain.json", "--methods", "greedy", "chen_sqrt", "--points", "4", "--time-limit", "5"
    )
    assert (status, err) == (0, "")
    record = json.loads(Path("chain.curve.json").read_text())
    points = record["points"]
    assert {point["method"] for point in points} == {"greedy", "chen_sqrt"}
    budgets = sorted({point["budget_bytes"] for point in points})
    assert len(points) == 8
    assert budgets[-1] == record["baseline_peak_bytes"] == max(budgets)
    for point in points:
        if point["status"] in ("optimal", "feasible"):
            assert point["peak_bytes"] <= point["budget_bytes"]
            assert point["overhead"] == pytest.approx(point["seconds"] / 17 - 1)
        else:
            assert point["seconds"] is None
    assert [p["overhead"] for p in points if p["budget_bytes"] == budgets[-1]] == [0, 0]
    assert "chen_sqrt" in out
    assert "+0.0%" in out
    assert Path("chain.curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_curve_has_no_picture(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, _ = run("curve", "chain.json", "--methods", "greedy", "--points", "2", "--out", "other.json")
    assert status == 0
    assert "no picture: matplotlib is not installed" in out
    assert Path("other.json").is_file()
    assert not Path("other.png").exists()


# -- bad input ------------------------------------------------------------------------------------------------------------


def changed(change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    data = json.loads(Path("chain.json").read_text())
    change(data)
    Path("bad.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda data: data["ops"][0].update(inputs=[16]),
            "before it is produced: the ops must be in a topological order",
        ),
        (lambda data: data["storages"].__setitem__(3, -1), "negative size"),
        (lambda data: data["ops"][0].update(seconds=-1.0), "negative cost"),
        (lambda data: data.update(version=99), "graph format version 99 cannot be read"),
        (lambda data: data.update(format="something else"), "not a computation graph"),
        (lambda data: data.pop("ops"), "missing or malformed field"),
    ],
)
@pytest.mark.parametrize("command", ["solve", "compare", "curve"])
def test_a_bad_graph_is_one_clear_line(run: Run, command: str, change: Callable[[dict], object], words: str) -> None:  # type: ignore[type-arg]
    changed(change)
    status, out, err = run(command, "bad.json", *([] if command == "curve" else ["--budget", "50%"]))
    assert (status, out) == (2, "")
    assert err.startswith("lightning-remat: error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["solve", "nowhere.json", "--budget", "5"], "No such file or directory: 'nowhere.json'"),
        (["solve", "networks.py", "--budget", "5"], "is not a JSON file"),
        (["solve", "chain.json", "--budget", "3"], "smallest feasible budget found is 4 bytes, set by b"),
        (["solve", "chain.json", "--budget", "plenty"], "budget='plenty' cannot be used"),
        (["solve", "chain.json", "--budget", "5", "--method", "oracle"], "unknown solver 'oracle': choose one of "),
        (["compare", "chain.json", "--budget", "5", "--methods", "milp", "oracle"], "unknown solver 'oracle'"),
        (["curve", "chain.json", "--methods", "oracle"], "unknown solver 'oracle'"),
        (["curve", "chain.json", "--points", "0"], "--points 0"),
        (
            ["solve", "chain.json", "--budget", "5", "--option", "depth=3"],
            "has no option 'depth'; it takes: seconds, exact",
        ),
        (
            ["solve", "chain.json", "--budget", "5", "--method", "milp", "--option", "gap=small"],
            "gap='small' of 'milp'",
        ),
        (["solve", "chain.json", "--budget", "5", "--option", "gap"], "'gap': give NAME=VALUE"),
        (["solve", "chain.json", "--budget", "5", "--time-limit", "0"], "time limit of 0.0"),
        (["solve", "chain.json", "--budget", "5", "--method", "chen_sqrt"], "chen_sqrt: this method has no schedule"),
        (["solve", "chain.json", "--budget", "9", "--out", "no/such/folder.json"], "No such file or directory"),
    ],
)
def test_bad_arguments_are_one_clear_line(run: Run, arguments: list[str], words: str) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert err.startswith("lightning-remat: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_usage(run: Run) -> None:
    assert run()[0] == 2
    assert run("solve", "chain.json")[0] == 2  # a budget is needed
    status, out, _ = run("--help")
    assert status == 0
    assert all(command in out for command in ("capture", "solve", "compare", "curve"))
    assert run("--version")[0] == 0


# -- progress -------------------------------------------------------------------------------------------------------------


def test_nothing_is_said_at_once_and_plain_lines_later() -> None:
    text = io.StringIO()
    with Progress(Console(file=text), after_seconds=0.2) as progress:
        progress("a moment")
        assert text.getvalue() == ""
        progress("a long solve", 1, 4)
        time.sleep(0.6)
        said = text.getvalue()
        progress("the next")  # long after: at once
        progress("and the one after")  # too soon
    assert said == "[0 s] a long solve (1 of 4 done)\n"
    assert text.getvalue() == said + "[1 s] the next\n"


def test_a_terminal_gets_a_line_that_is_cleared() -> None:
    text = io.StringIO()
    with Progress(Console(file=text, force_terminal=True, width=80), after_seconds=0.1) as progress:
        progress("a long solve")
        time.sleep(0.4)
        assert "a long solve" in text.getvalue()
    assert text.getvalue().endswith("\x1b[2K")  # the line is gone

"""Gradients leave the planned backward while it runs: DDP reduces them beside it, with the numbers that it has otherwise."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat.capture._torch import boxed
from lightning_remat.capture.gradients._stages import FIRST_BYTES, MOST_BYTES, MOST_STAGES, in_stages, stages_of
from tests.runtime.test_distributed import run, start

OVERLAPPED = [
    "overlapped",
    "overlapped-narrow",
    "overlapped-added",
    "overlapped-checked",
    "overlapped-offloaded",
    "overlapped-views",
    "overlapped-accumulating",
    "overlapped-views-accumulating",
]
MEASURED = ["overlapped", "overlapped-views", "overlapped-accumulating", "overlapped-views-accumulating"]
WEIGHTS = 4 * (17 * 512 + 8 * 513 * 512 + 513 * 4)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run(tmp_path_factory.mktemp("overlapped"), *OVERLAPPED)


@pytest.mark.long
@pytest.mark.parametrize("case", OVERLAPPED)
def test_the_numbers_are_those_of_ddp(found, case):
    for process in found[case]:
        assert "error" not in process and process["failures"] == []
        assert any(plan["rematerializes"] or plan["copies"] for plan in process["plans"]) is (
            case != "overlapped-narrow"
        )
        assert any(process["runs"])
        events = {tuple(event) for event in process["events"] if event[0].startswith("stage")}
        counts = {int(name.split()[-1]) for name, _ in events}
        assert counts and min(counts) > 4
        assert events == {(f"stage of {count}", number) for count in counts for number in range(count)}


@pytest.mark.long
def test_a_step_is_checked_that_runs_as_a_whole_meanwhile(found):
    for process in found["overlapped-checked"]:
        assert process["check"].startswith("checked: loss and 20 gradients are bit for bit")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["overlapped-static", "overlapped-tied", "overlapped-sometimes", "overlapped-bf16"])
def test_other_ways_have_the_numbers_of_ddp(tmp_path, case):
    test_the_numbers_are_those_of_ddp(run(tmp_path, case), case)


@pytest.mark.slow
def test_four_processes_have_the_numbers_of_ddp(tmp_path):
    for process in run(tmp_path, "overlapped-four", processes=4)["overlapped-four"]:
        assert "error" not in process and process["failures"] == [] and process["events"]


@pytest.mark.long
def test_the_first_bucket_is_reduced_before_the_last_third_of_the_backward(found):
    """From the second step on: in the first one DDP does not know yet in which order gradients come. Stages are about alike.

    Gradients that are larger than what they are computed from are not put off until the backward's end, as they are elsewhere.
    """
    for case in ("overlapped", "overlapped-narrow"):
        ends = [number for process in found[case] for name, number in process["events"] if name == "first stage ends"]
        assert ends and max(ends) < 66
    for process in found["overlapped"]:
        events = [tuple(event) for event in process["events"] if event[0] != "first stage ends"]
        begins = [i for i, (name, number) in enumerate(events) if name.startswith("stage") and number == 0]
        assert len(begins) == 9
        for begin, end in pairwise([*begins[1:], len(events)]):
            step = [name for name, _ in events[begin:end]]
            stages = len(step) - step.count("bucket")
            assert step.count("bucket") == 2 and step[0] == f"stage of {stages}"
            assert 3 * step.index("bucket") <= 2 * stages


@pytest.mark.long
@pytest.mark.parametrize("case", MEASURED)
def test_the_measured_peak_is_as_predicted(found, case):
    for process in found[case]:
        assert process["measured"] <= process["plans"][0]["budget"]
        assert process["measured"] == pytest.approx(process["plans"][0]["predicted"], rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "times"),
    [
        ("stage fails", 3),
        pytest.param("stage fails, accumulating", 2, marks=pytest.mark.slow),
        pytest.param("first stages fail, static", 2, marks=pytest.mark.slow),
    ],
)
def test_a_backward_is_repeated_whose_gradients_have_left_it_in_part(tmp_path, case, times):
    """The other process waits for the rest of them."""
    undisturbed, disturbed = run(tmp_path, case)[case]
    for process in (undisturbed, disturbed):
        assert "error" not in process and process["failures"] == []
    assert (undisturbed["recoveries"], disturbed["recoveries"]) == (0, times)


@pytest.mark.slow
def test_where_one_process_cannot_go_on_all_end_with_its_error(tmp_path):
    case = "stage always fails"
    ended = start(tmp_path, case, timeout=120)
    assert ended.returncode != 0 or "Tried to allocate" in (tmp_path / f"{case}-1.json").read_text()


@pytest.mark.long
def test_gradients_in_buckets_are_not_held_beside_them(found):
    """Nor beside those to which they are added."""
    for process in found["overlapped"]:
        assert process["plans"][0]["gradients"] > WEIGHTS
    for case in ("overlapped-views", "overlapped-accumulating", "overlapped-views-accumulating"):
        for process in found[case]:
            assert process["plans"][0]["gradients"] <= 64  # that of the loss


@pytest.mark.slow
def test_one_set_of_gradients_less_is_held_where_they_are_accumulated(tmp_path):
    """With few activations beside them the new ones are what the peak is made of."""
    cases = ("accumulated, taken", "accumulated, returned")
    found = run(tmp_path, *cases)
    assert all("error" not in process for case in cases for process in found[case])
    for taken, returned in zip(*(found[case] for case in cases), strict=True):
        assert returned["measured"] - taken["measured"] == pytest.approx(WEIGHTS, rel=0.2)
        for process in (taken, returned):
            assert process["measured"] == pytest.approx(process["plans"][0]["predicted"], rel=0.02)


def test_stages_are_of_the_size_of_buckets():
    weights = [300_000] * 100
    places = [*range(100, 0, -1), None]  # of the gradients
    stages = stages_of(range(1, 101), lambda i: weights[i - 1], places, fine=False)
    assert stages is not None and sum(stages.arguments, ()) == tuple(range(1, 101))
    assert [places[one] for stage in stages.outputs for one in stage] == list(range(1, 101)) and stages.count == 101
    sizes = [sum(weights[i - 1] for i in stage) for stage in stages.arguments]
    assert FIRST_BYTES <= sizes[0] < FIRST_BYTES + 300_000 and len(sizes) <= MOST_STAGES + 1
    assert max(sizes) <= MOST_BYTES + 300_000


def test_small_gradients_have_one_stage_unless_less_is_held_so():
    assert stages_of(range(10), lambda _: 1000, range(10), fine=False) is None
    assert stages_of([0], lambda _: 10**9, [0], fine=True) is None
    stages = stages_of(range(10), lambda _: 1000, range(10), fine=True)
    assert stages is not None and len(stages.arguments) == 10


@pytest.mark.parametrize("view_as", [torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default])
def test_a_gradient_is_handed_out_when_nothing_reads_its_memory_any_more(view_as):
    """Autograd may keep it then, and whoever is given it may write to it. Views are made when they are wanted."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(aten.mul.Tensor, (x, 2.0))
    view = graph.call_function(view_as, (first, [-1]))
    second = graph.call_function(aten.sum.default, (y,))
    third = graph.call_function(aten.sum.default, (view,))
    last = graph.call_function(aten.add.Tensor, (third, 3.0))
    late = graph.call_function(aten.view.default, (first, [4]))
    graph.output((last, late, second, None))
    stages = stages_of([2, 1, 0], lambda _: FIRST_BYTES, [0, 1, 2, 3], fine=False)
    assert stages is not None and stages.outputs == ((2,), (1,), (0,))
    module = in_stages(torch.fx.GraphModule(nn.Module(), graph), stages)
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert names.index("hand_out") == names.index(second.name) + 1
    assert names.index("hand_out_1") == names.index(third.name) + 2 and names[-1] == last.name
    given = [torch.ones(2, 2), torch.ones(3)]
    running = boxed(module)(given)
    handed = next(running)
    assert given == [] and [one.tolist() for one in handed] == [3.0]
    handed.clear()
    (gradient,) = handed = next(running)
    assert gradient.tolist() == [2.0] * 4
    handed.clear()
    gradient.zero_()
    with pytest.raises(StopIteration) as ended:
        next(running)
    assert [one.tolist() for one in ended.value.value] == [11.0]

"""Ops are measured one at a time, and nothing of the user's is disturbed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_remat.capture import TensorSpec
from lightning_remat.cost import CostCache, OpCost, _profile, _timing, profile, roofline
from lightning_remat.cost._timing import NEIGHBOURS_BYTES
from lightning_remat.errors import ConfigError
from tests.helpers.op_calls import call, convolution, mm, spec

aten = torch.ops.aten
CPU = torch.device("cpu")
MIB = 1 << 20


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


@pytest.mark.parametrize("quick", [False, True])
def test_quick_is_one_pass(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call(torch.ops.aten.tanh.default, spec(n), outputs=[spec(n)]) for n in (16, 32)]
    timed: list[float] = []

    def seconds_of(run: Callable[[], object], device: torch.device) -> float:
        timed.append(_timing.seconds_of(run, device))
        return timed[-1]

    monkeypatch.setattr(_profile, "seconds_of", seconds_of)
    costs = profile(calls, torch.device("cpu"), quick=quick)
    assert len(timed) == len(calls) * (1 if quick else _timing.PASSES)
    assert [cost.seconds for cost in costs] == [min(timed[n :: len(calls)]) for n in range(len(calls))]


@pytest.mark.parametrize(("seconds", "repeats"), [(0.0, 6), (0.01, 1), (0.03, 1)])
def test_what_takes_long_is_called_once_in_a_pass(
    seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    called: list[None] = []
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now[0])

    def run() -> None:
        called.append(None)
        now[0] += seconds

    assert _timing.seconds_of(run, torch.device("cpu")) == pytest.approx(seconds)
    assert len(called) == repeats


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

"""Measured peaks are the allocator's, and what objects hold is counted once a storage."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from lightning_remat import _collectives, measure
from lightning_remat._collectives import COLLECTIVES, seen_collectives
from lightning_remat.errors import RematError
from lightning_remat.measure import held_bytes, peak_memory, track_peak

MIB = 2**20
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def mebibyte(device: str) -> torch.Tensor:
    return torch.empty(MIB, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", DEVICES)
class TestPeak:
    def test_what_is_held_together_adds_up(self, device: str) -> None:
        assert peak_memory(lambda: [mebibyte(device) for _ in range(5)], device) == 5 * MIB

    def test_what_is_released_before_does_not(self, device: str) -> None:
        def one_after_the_other() -> None:
            for _ in range(5):
                mebibyte(device)

        assert peak_memory(one_after_the_other, device) == MIB

    def test_nothing_allocated_is_zero(self, device: str) -> None:
        assert peak_memory(lambda: None, device) == 0

    def test_memory_that_existed_before_makes_room_when_released(self, device: str) -> None:
        before = [mebibyte(device) for _ in range(3)]

        def release_then_allocate() -> list[torch.Tensor]:
            before.clear()
            return [mebibyte(device) for _ in range(4)]

        assert peak_memory(release_then_allocate, device) == MIB
        before = [mebibyte(device)]
        assert peak_memory(before.clear, device) == 0

    def test_old_gradients_dropped_in_the_middle_make_room(self, device: str) -> None:
        weight = torch.ones(256, 1024, device=device, requires_grad=True)  # 1 MiB

        def step() -> None:
            loss = weight.square().sum()
            weight.grad = None
            loss.backward()

        first = peak_memory(step, device)
        again = [peak_memory(step, device) for _ in range(3)]
        assert again == [first - MIB] * 3
        step()
        assert peak_memory(step, device) == first - MIB

    def test_views_hold_their_storage_until_the_last_is_gone(self, device: str) -> None:
        views = list(mebibyte(device).split(MIB // 4))

        def halves() -> None:
            del views[2:]
            mebibyte(device)
            views.clear()
            mebibyte(device)

        assert peak_memory(halves, device) == MIB

    def test_addresses_used_again_are_not_confused(self, device: str) -> None:
        kept: list[torch.Tensor] = []
        peak_memory(lambda: kept.extend(mebibyte(device) for _ in range(20)), device)
        kept.clear()
        kept.extend(torch.empty(MIB // 2, dtype=torch.uint8, device=device) for _ in range(40))

        def release_half_then_allocate() -> list[torch.Tensor]:
            del kept[:20]
            return [mebibyte(device) for _ in range(11)]

        assert peak_memory(release_half_then_allocate, device) == MIB

    def test_unreachable_tensors_are_collected_first(self, device: str) -> None:
        cycle: list[object] = [mebibyte(device)]
        cycle.append(cycle)
        del cycle

        def collect_then_allocate() -> torch.Tensor:
            import gc

            gc.collect()
            return mebibyte(device)

        assert peak_memory(collect_then_allocate, device) == MIB

    def test_a_backward_is_seen(self, device: str) -> None:
        weight = torch.ones(256, 1024, device=device, requires_grad=True)  # 1 MiB

        def step() -> None:
            (weight * 2).relu().sum().backward()

        peak = peak_memory(step, device)
        # The product (until relu has run), relu's result (saved), then relu's gradient and the product's beside it.
        assert 2 * MIB <= peak <= 4 * MIB
        assert weight.grad is not None

    def test_the_block_form_sets_the_peak_at_its_end(self, device: str) -> None:
        with track_peak(device) as peak:
            assert peak.peak_bytes is None
            mebibyte(device)
        assert peak.peak_bytes == MIB and peak.reason == "" and peak.device.type == device

    def test_an_exception_passes_and_ends_the_measurement(self, device: str) -> None:
        def fail() -> None:
            mebibyte(device)
            raise KeyError("from the step")

        with pytest.raises(KeyError, match="from the step"):
            peak_memory(fail, device)
        with pytest.raises(KeyError), track_peak(device) as peak:
            fail()
        assert peak.peak_bytes == MIB
        assert peak_memory(lambda: mebibyte(device), device) == MIB


def test_a_running_profiler_is_left_alone() -> None:
    with torch.profiler.profile(profile_memory=True) as users:
        with track_peak("cpu") as peak:
            mebibyte("cpu")
        with pytest.raises(RematError, match="another torch profiler is running"):
            peak_memory(lambda: None, "cpu")
        torch.ones(2).neg()
    assert peak.peak_bytes is None and "another torch profiler" in peak.reason
    assert "aten::neg" in {event.key for event in users.key_averages()}
    assert peak_memory(lambda: mebibyte("cpu"), "cpu") == MIB


def test_what_another_thread_releases_is_free_when_it_is_allocated_again() -> None:
    """The profiler does not see that thread; gloo's are such."""
    # Of such sizes the system maps each block by itself, in the highest gap that fits.
    first, other = 64 * MIB, 48 * MIB
    kept: list[torch.Tensor] = []

    def release_elsewhere() -> None:
        tensors = [torch.empty(first, dtype=torch.uint8)]
        address = tensors[0].data_ptr()
        thread = threading.Thread(target=tensors.clear)
        thread.start()
        thread.join()
        while not kept or (len(kept) < 100 and not -other < kept[-1].data_ptr() - address < first):
            kept.append(torch.empty(other, dtype=torch.uint8))  # fills the gaps above

    peak = peak_memory(release_elsewhere, "cpu")
    assert len(kept) < 100 and peak == first + other * (len(kept) - 1)


@pytest.mark.parametrize(
    ("allocated", "held"),
    [
        ([(100, 50), (100, 80)], [50, 80]),  # at the same place
        ([(100, 50), (90, 20)], [50, 20]),  # ends within
        ([(100, 50), (149, 9)], [50, 9]),  # begins within
        ([(100, 50), (110, 5)], [50, 5]),
        ([(100, 50), (200, 50), (300, 50), (140, 170)], [50, 100, 150, 170]),  # over all of them
        ([(100, 50), (150, 50), (50, 50)], [50, 100, 150]),  # beside each other
        ([(100, 50), (100, 0), (120, 0), (100, -50), (100, 7)], [50, 50, 50, 0, 7]),  # of no size; and seen
        ([(100, 50), (120, -9), (99, -9)], [50, 50, 50]),  # releases of what is older
    ],
)
def test_blocks_that_lie_where_others_lay_replace_them(allocated: list[tuple[int, int]], held: list[int]) -> None:
    changes = list(measure._recorded([(moment, *one) for moment, one in enumerate(allocated)]))
    assert [sum(nbytes for moment, nbytes in changes if moment <= now) for now in range(len(allocated))] == held


def test_what_is_given_to_collectives_is_seen() -> None:
    before = {name: getattr(distributed, name, None) for name in COLLECTIVES}
    gather = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    sent, gathered = torch.ones(3), torch.zeros(3)
    seen: list[torch.Tensor] = []

    def send_and_fail() -> None:
        with seen_collectives(seen.append):
            getattr(distributed, gather)(gathered, input_tensor=sent)
            distributed.all_reduce(sent)
            raise KeyError

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(KeyError):
            send_and_fail()
        distributed.all_reduce(sent)
    finally:
        distributed.destroy_process_group()
    assert list(map(id, seen)) == [id(gathered), id(sent), id(sent)] and gathered.equal(torch.ones(3))
    assert {name: getattr(distributed, name, None) for name in COLLECTIVES} == before
    with seen_collectives(seen.append):  # no group
        assert distributed.all_reduce is before["all_reduce"]


def peak_of_two(monkeypatch: pytest.MonkeyPatch, let_go: threading.Event) -> int | None:
    """The peak of two mebibytes, one after the other; the first is sent, and held by a thread until it is to let go."""

    def send(*sent: torch.Tensor) -> None:
        threading.Thread(target=lambda *_: let_go.wait(60), args=sent).start()

    monkeypatch.setattr(distributed, "all_reduce", send)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with track_peak("cpu") as peak:
            for _ in range(2):
                distributed.all_reduce(mebibyte("cpu"))
    finally:
        let_go.set()
        distributed.destroy_process_group()
    return peak.peak_bytes


def test_a_collective_has_ended_when_its_tensors_have_been_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    clock = SimpleNamespace(
        monotonic=time.monotonic, time_ns=time.time_ns, sleep=lambda _: let_go.set() or time.sleep(0.001)
    )
    monkeypatch.setattr(_collectives, "time", clock)
    assert peak_of_two(monkeypatch, let_go) == MIB


def test_what_a_collective_has_allocated_is_free_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's threads may be the last to hold it, and release it unseen."""
    over = threading.Event()

    def send(sent: torch.Tensor) -> None:
        own, released = [sent.clone()], threading.Event()

        def release() -> None:
            own.clear()
            released.set()
            over.wait(60)  # what it has released stays in a cache of its own

        threading.Thread(target=release).start()
        released.wait(60)

    monkeypatch.setattr(distributed, "all_reduce", send)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with track_peak("cpu") as peak:
            sent = torch.empty(512, dtype=torch.uint8)
            for _ in range(3):
                distributed.all_reduce(sent)
    finally:
        over.set()
        distributed.destroy_process_group()
    assert peak.peak_bytes == 2 * 512


def test_what_is_held_for_long_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_collectives, "PATIENCE", 0.01)
    assert peak_of_two(monkeypatch, threading.Event()) == 2 * MIB


def test_tensors_elsewhere_in_the_process_may_be_of_any_kind() -> None:
    class Odd(torch.Tensor):
        def untyped_storage(self) -> SimpleNamespace:  # type: ignore[override]
            return SimpleNamespace(device=torch.device("cpu"), nbytes=lambda: 4)

    kept = torch.ones(1).as_subclass(Odd)
    assert peak_memory(lambda: mebibyte("cpu"), "cpu") == MIB
    assert type(kept) is Odd


def test_a_profiler_that_waits_or_warms_up_is_left_alone() -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(schedule=schedule) as users:
        for _ in range(3):
            with track_peak("cpu") as peak:
                mebibyte("cpu")
            assert peak.peak_bytes is None and peak.reason
            users.step()
    with track_peak("cpu") as peak:
        mebibyte("cpu")
    assert peak.peak_bytes == MIB


def test_a_profiler_started_inside_the_block_is_reported() -> None:
    with track_peak("cpu") as peak, torch.profiler.profile():
        mebibyte("cpu")
    assert peak.peak_bytes is None and "another torch profiler" in peak.reason
    assert peak_memory(lambda: mebibyte("cpu"), "cpu") == MIB


def test_the_profiler_is_quiet_and_the_environment_is_as_before() -> None:
    script = (
        "import os; from lightning_remat.measure import peak_memory; before = dict(os.environ); "
        "peak_memory(lambda: None, 'cpu'); assert dict(os.environ) == before"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


OLD_BLOCKS = """
import os, weakref
import torch
from torch.autograd import profiler
from lightning_remat._profiler import QuietReleases
from lightning_remat.measure import track_peak

old = [torch.empty(10) for _ in range(3500)]

def measured():
    with track_peak("cpu") as peak:
        new = torch.empty(1000)
        old.clear()
        torch.empty(1000)
    assert peak.peak_bytes == 4000, peak

def by_torch_alone():
    with profiler.profile(use_cpu=True, profile_memory=True):
        old.clear()

def beside_another_thread():
    quiet = QuietReleases(0)
    weakref.finalize(quiet._blocks[-1], os.write, 2, b"a line of another thread\\n")
    with profiler.profile(use_cpu=True, profile_memory=True):
        quiet.start()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "lines"),
    [("by_torch_alone", 4), ("measured", 0), ("beside_another_thread", 0)],
)
def test_nothing_is_said_of_blocks_that_are_older_than_the_profile(case: str, lines: int) -> None:
    environment = {**os.environ, "KINETO_LOG_LEVEL": "6"}
    environment.pop("TORCH_CPP_LOG_LEVEL", None)
    program = [sys.executable, "-c", f"{OLD_BLOCKS}\n{case}()"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=300)
    said = done.stderr.splitlines()
    assert sum("allocated before the profiling started" in line for line in said) == lines, "torch's own is the control"
    others = [line for line in said if "allocated before the profiling started" not in line]
    assert others == (["a line of another thread"] if case == "beside_another_thread" else [])


def test_other_devices_are_refused() -> None:
    with pytest.raises(RematError, match="'meta' device cannot be measured: give 'cpu' or a CUDA device"):
        peak_memory(lambda: None, "meta")


class TestHeld:
    def test_a_storage_counts_once_and_whole(self) -> None:
        base = torch.zeros(1000)
        assert held_bytes(base) == 4000
        assert held_bytes(base[:10]) == 4000
        assert held_bytes(base, base[:10], {"view": base.view(10, 100)}) == 4000
        assert held_bytes(base, base.clone()) == 8000

    def test_modules_gradients_and_optimizer_state(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.BatchNorm1d(10))
        tied = torch.nn.Linear(10, 10)
        tied.weight = model[0].weight
        parameters, buffers = 4 * (110 + 20), 4 * 20 + 8
        assert held_bytes(model) == parameters + buffers
        assert held_bytes(model, tied) == parameters + buffers + 40
        assert held_bytes(model.parameters()) == parameters
        assert held_bytes(model.buffers()) == buffers
        optimizer = torch.optim.Adam(model.parameters())
        assert held_bytes(optimizer) == 0
        model(torch.ones(4, 10)).square().sum().backward()
        assert held_bytes(model, gradients=True) == 2 * parameters + buffers
        assert held_bytes(p.grad for p in model.parameters()) == parameters
        optimizer.step()
        steps = 4 * len(list(model.parameters()))
        assert held_bytes(optimizer) == 2 * parameters + steps

    def test_nested_structures(self) -> None:
        @dataclasses.dataclass
        class Batch:
            image: torch.Tensor
            label: int

        one = torch.zeros(1)
        assert held_bytes({"a": [one, (torch.zeros(2), {"b": torch.zeros(3)})]}, "text", None, 3) == 24
        assert held_bytes(Batch(one, 7)) == 4
        circle: list[object] = [one]
        circle.append(circle)
        assert held_bytes(circle) == 4

    def test_tensors_without_memory_count_nothing(self) -> None:
        assert held_bytes(torch.zeros(9, device="meta"), torch.nn.LazyLinear(3), torch.zeros(0)) == 0

    def test_sparse_tensors_count_indices_and_values(self) -> None:
        dense = torch.eye(4)
        assert held_bytes(dense.to_sparse()) == 4 * (2 * 8 + 4)
        with pytest.warns(UserWarning, match="Sparse CSR tensor support is in beta state"):
            rows = dense.to_sparse_csr()
        assert held_bytes(rows) == sum(
            held_bytes(part) for part in (rows.crow_indices(), rows.col_indices(), rows.values())
        )
        assert held_bytes(rows) >= 5 * 8 + 4 * 8 + 4 * 4

    def test_only_one_device(self) -> None:
        assert held_bytes(torch.zeros(2), device="cpu") == 8
        assert held_bytes(torch.zeros(2), device="cuda") == 0

    @pytest.mark.gpu
    @needs_gpu
    def test_cuda_tensors_are_told_apart(self) -> None:
        both = torch.zeros(2), torch.zeros(3, device="cuda")
        assert held_bytes(both) == 520
        assert held_bytes(both, device="cuda") == held_bytes(both, device="cuda:0") == 512
        assert held_bytes(both, device="cpu") == 8

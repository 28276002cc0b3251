"""Budgets are read as people write them, resolved as documented, and device limits respect containers."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.budget import (
    Budget,
    BudgetKind,
    _cpu_available_bytes,
    _cpu_total_bytes,
    device_bytes,
    device_total_bytes,
    parse_budget,
)
from lightning_remat.errors import BudgetError

GIB = 2**30


def never() -> int:
    raise AssertionError("not to be asked for this budget")


def resolve(value: object, floor: int = 100, baseline: int = 1100) -> int:
    return parse_budget(value).resolve(floor, baseline, never, never)


class TestParsing:
    @pytest.mark.parametrize(
        ("given", "size"),
        [
            (1, 1),
            (8 * GIB, 8 * GIB),
            (np.int64(5), 5),
            ("8GiB", 8 * GIB),
            ("8 gib", 8 * GIB),
            ("600MiB", 600 * 2**20),
            ("1.5 GB", 1_500_000_000),
            ("0.5TiB", 2**39),
            (".5kB", 500),
            ("3KiB", 3072),
            ("2TB", 2 * 10**12),
            ("7 B", 7),
            ("1.9B", 1),
            (" 42 ", 42),
            ("0.1GB", 100_000_000),
        ],
    )
    def test_sizes(self, given: object, size: int) -> None:
        assert parse_budget(given) == Budget(BudgetKind.SIZE, size)

    @pytest.mark.parametrize(
        ("given", "share"),
        [
            (0.5, 0.5),
            (1.0, 1.0),
            (1e-9, 1e-9),
            ("50%", 0.5),
            ("12.5 %", 0.125),
            ("100%", 1.0),
            ("0.25", 0.25),
            ("1.0", 1.0),
        ],
    )
    def test_shares(self, given: object, share: float) -> None:
        assert parse_budget(given) == Budget(BudgetKind.SHARE, share)

    @pytest.mark.parametrize("given", ["auto", "min", "AUTO", " Min "])
    def test_words(self, given: str) -> None:
        assert parse_budget(given).kind == given.strip().lower()

    def test_a_budget_stays_as_it_is(self) -> None:
        budget = parse_budget("8GiB")
        assert parse_budget(budget) is budget

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            (True, "it is a bool"),
            (False, "it is a bool"),
            (math.nan, "not in"),
            (math.inf, "not in"),
            (0, "less than one byte"),
            (-5, "less than one byte"),
            (0.0, "not in"),
            (-0.5, "not in"),
            (1.5, "a float is a share, and not in"),
            (8e9, "a float is a share, and not in"),
            ("0", "less than one byte"),
            ("0.0", "not in"),
            ("0 GiB", "less than one byte"),
            ("0.5B", "less than one byte"),
            ("0%", "not in"),
            ("101%", "not in"),
            ("1.5", "it is a share, and not in"),
            ("8 gigs", "'gigs' is no unit: use B, kB"),
            ("8G", "'g' is no unit"),
            ("-1GiB", "neither a word nor a number"),
            ("1e3MB", "neither a word nor a number"),
            ("8GiB free", "neither a word nor a number"),
            ("", "neither a word nor a number"),
            ("9" * 5000, "neither a word nor a number"),
            ("maximum", "neither a word nor a number"),
            ("٣GiB", "neither a word nor a number"),
            (None, "it is a NoneType"),
            ([1], "it is a list"),
            (1j, "it is a complex"),
        ],
    )
    def test_anything_else_is_refused_with_what_is_accepted(self, given: object, why: str) -> None:
        with pytest.raises(BudgetError) as caught:
            parse_budget(given)
        message = str(caught.value)
        assert f"budget={given!r} cannot be used: " in message
        assert why in message
        assert "Accepted: a budget is 'auto'" in message

    @given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none(), st.binary()))
    def test_every_value_is_a_positive_budget_or_an_error(self, given: object) -> None:
        try:
            budget = parse_budget(given)
        except BudgetError:
            return
        if budget.kind is BudgetKind.SIZE:
            assert isinstance(budget.value, int)
            assert budget.value >= 1
        elif budget.kind is BudgetKind.SHARE:
            assert isinstance(budget.value, float)
            assert 0 < budget.value <= 1
        else:
            assert budget.value is None

    @given(st.integers(1, 10**6), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
    def test_a_unit_multiplies(self, count: int, unit: str) -> None:
        base = 1024 if "i" in unit else 1000
        power = " KMGT".index(unit[0].upper()) if len(unit) > 1 else 0
        assert parse_budget(f"{count}{unit}").value == count * base**power

    def test_it_says_itself_shortly(self) -> None:
        assert [str(parse_budget(v)) for v in ("auto", "min", 0.5, 7)] == ["auto", "min", "50%", "7 bytes"]


class TestResolving:
    def test_the_ends_of_a_share(self) -> None:
        assert resolve(1.0) == 1100
        assert resolve(0.5) == 600
        assert resolve(0.1) == 200  # not 201
        assert resolve(1e-9) == 101
        assert resolve(0.5, floor=100, baseline=100) == 100

    @given(
        st.integers(0, 2**45),
        st.integers(0, 2**45),
        st.floats(0, 1, exclude_min=True),
        st.floats(0, 1, exclude_min=True),
    )
    def test_shares_lie_between_floor_and_baseline_and_keep_their_order(
        self, floor: int, room: int, first: float, second: float
    ) -> None:
        low, high = (resolve(share, floor, floor + room) for share in sorted((first, second)))
        assert floor <= low <= high <= floor + room
        wanted = floor + Fraction(str(min(first, second))) * room
        assert wanted <= low < wanted + 1
        assert resolve(1.0, floor, floor + room) == floor + room

    def test_min_and_auto_ask_only_their_own(self) -> None:
        assert parse_budget("min").resolve(0, 9, lambda: 5, never, never) == 5
        assert parse_budget("auto").resolve(0, 9, never, lambda: 7, never) == 7

    def test_a_size_is_itself_unless_the_device_is_smaller(self) -> None:
        budget = parse_budget(1000)
        assert budget.resolve(0, 9, never, never) == 1000
        assert budget.resolve(0, 9, never, never, lambda: 1000) == 1000
        with pytest.raises(BudgetError, match="1,000 bytes is over what the device has: 999 bytes"):
            budget.resolve(0, 9, never, never, lambda: 999)


def machine(root: Path, files: dict[str, object]) -> Path:
    defaults: dict[str, object] = {"proc/meminfo": "MemTotal:  16 kB\nMemFree: 1 kB\nMemAvailable:   8 kB\n"}
    for name, text in {**defaults, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


class TestDevices:
    def test_this_machine(self) -> None:
        total = device_total_bytes("cpu")
        assert 0 < device_bytes("cpu", margin=0) <= total
        assert device_bytes("cpu", margin=0.9) < device_bytes("cpu", margin=0.1)

    def test_what_is_held_is_added_and_the_margin_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lightning_remat.budget._cpu_available_bytes", lambda: 900)
        assert device_bytes("cpu", margin=0, held_bytes=100) == 1000
        assert device_bytes("cpu", held_bytes=100) == 950
        assert device_bytes("cpu", margin=0.1) == 810

    @pytest.mark.parametrize("margin", [-0.1, 1.0, math.nan])
    def test_margins_outside_are_refused(self, margin: float) -> None:
        with pytest.raises(BudgetError, match="a margin of"):
            device_bytes("cpu", margin=margin)

    def test_other_devices_are_refused(self) -> None:
        for ask in (device_bytes, device_total_bytes):
            with pytest.raises(BudgetError, match="a 'meta' device has is not known here: give the budget as a size"):
                ask("meta")

    def test_without_containers_the_system_says(self, tmp_path: Path) -> None:
        root = machine(tmp_path, {})
        assert (_cpu_available_bytes(root), _cpu_total_bytes(root)) == (8 * 1024, 16 * 1024)

    def test_version_2_with_the_tightest_group_on_the_way_up(self, tmp_path: Path) -> None:
        root = machine(
            tmp_path,
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/inner/memory.max": "max\n",
                "sys/fs/cgroup/outer/inner/memory.current": 10,
                "sys/fs/cgroup/outer/inner/memory.stat": "inactive_file 0\n",
                "sys/fs/cgroup/outer/memory.max": 5000,
                "sys/fs/cgroup/outer/memory.current": 3000,
                "sys/fs/cgroup/outer/memory.stat": "anon 7\ninactive_file 1000\nactive_file 3\n",
            },
        )
        assert (_cpu_available_bytes(root), _cpu_total_bytes(root)) == (3000, 5000)

    def test_version_1_where_the_path_is_the_hosts(self, tmp_path: Path) -> None:
        root = machine(
            tmp_path,
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/host/path\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 6000,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 5000,
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
        )
        assert (_cpu_available_bytes(root), _cpu_total_bytes(root)) == (1500, 6000)

    def test_a_group_over_its_limit_leaves_nothing(self, tmp_path: Path) -> None:
        root = machine(
            tmp_path,
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": 100,
                "sys/fs/cgroup/memory.current": 200,
                "sys/fs/cgroup/memory.stat": "",
            },
        )
        assert _cpu_available_bytes(root) == 0

    def test_no_limit_of_version_1_is_no_limit(self, tmp_path: Path) -> None:
        root = machine(
            tmp_path,
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 5000,
                "sys/fs/cgroup/memory/memory.stat": "",
            },
        )
        assert (_cpu_available_bytes(root), _cpu_total_bytes(root)) == (8 * 1024, 16 * 1024)

    def test_cuda_without_an_index_is_the_current_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: set[torch.device] = set()

        def fraction(device: torch.device) -> float:
            if device.index is None:
                raise ValueError("Expected a torch.device with a specified index")
            return 0.5

        def info(device: torch.device) -> tuple[int, int]:
            asked.add(device)
            return 6 * GIB, 8 * GIB

        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "mem_get_info", info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction, raising=False)
        assert device_bytes("cuda", margin=0) == device_bytes(torch.device("cuda"), margin=0) == 4 * GIB
        assert device_total_bytes("cuda") == 8 * GIB
        assert asked == {torch.device("cuda", 3)}
        device_bytes("cuda:1")
        assert torch.device("cuda", 1) in asked

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_cuda_counts_what_the_allocator_holds_once(self) -> None:
        torch.cuda.empty_cache()
        before = device_bytes("cuda", margin=0)
        held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        during = device_bytes("cuda", margin=0, held_bytes=GIB)
        assert abs(during - before) < GIB // 4
        del held
        assert abs(device_bytes("cuda", margin=0) - before) < GIB // 4
        assert before <= device_total_bytes("cuda")

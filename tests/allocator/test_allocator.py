"""The model of the CUDA caching allocator: against what one did on an H100, against its own rules, and over schedules."""

from __future__ import annotations

import dataclasses
import itertools
import json
import lzma
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.allocator import (
    DEFAULTS,
    AllocatorSettings,
    Arrangement,
    CachingAllocator,
    Holdings,
    OutOfDeviceMemoryError,
    Segment,
    best_footprint,
    footprint,
    rounded,
)
from lightning_remat.errors import ConfigError
from lightning_remat.graph import TensorRole
from lightning_remat.schedule import allocations, simulate
from lightning_remat.solvers import Problem
from tests.helpers.graphs import random_graph
from tests.helpers.places import DATA

MIB, GIB = 2**20, 2**30
SMALL_SEGMENT = 2 * MIB
LIMIT = int(0.3 * 79.18 * GIB)
"""Bytes: what the recorded runs might reserve."""

EXPANDABLE = AllocatorSettings(expandable_segments=True)


class Replayed:
    """A recorded run, repeated on the model: what both had reserved at most, and where memory ran out."""

    def __init__(self, batch: int, settings: AllocatorSettings = DEFAULTS) -> None:
        with lzma.open(DATA / f"allocator-trace-gpt2-batch-{batch}.json.xz", "rt") as file:
            events: list[Any] = json.load(file)["events"]
        self.model = CachingAllocator(settings, LIMIT)
        self.reserved = self.peak = 0
        self.ran_out: list[tuple[int, bool]] = []  # number of the event, and whether it was recorded
        blocks: dict[int, Any] = {}
        for number, (action, block, nbytes) in enumerate(events):
            if action == "segment_alloc":
                self.reserved += nbytes
                self.peak = max(self.peak, self.reserved)
            elif action == "segment_free":
                if events[number - 1][0] != "segment_free" and self._asked_for_by_the_user(events[number:]):
                    self.model.empty_cache()
                self.reserved -= nbytes
            elif action == "free":
                self.model.free(blocks.pop(block))
            else:
                try:
                    blocks[block] = self.model.allocate(nbytes)
                except OutOfDeviceMemoryError:
                    self.ran_out.append((number, action == "oom"))
                    blocks[block] = None
        self.expected = [number for number, (action, *_) in enumerate(events) if action == "oom"]

    def _asked_for_by_the_user(self, events: list[Any]) -> bool:
        """Whether segments were given back by ``empty_cache``, not because the next one would have been over the limit."""
        following = next((event for event in events if event[0] != "segment_free"), ("", 0, 0))
        return self.reserved + (following[2] if following[0] in ("segment_alloc", "oom") else 0) <= LIMIT


class TestRecordedRuns:
    """GPT-2 124M on an H100, within 0.3 of the device."""

    @pytest.mark.parametrize("batch", [16, 24])
    def test_the_peak_of_reserved_bytes_is_the_recorded_one(self, batch: int) -> None:
        run = Replayed(batch)
        assert run.peak > 20 * GIB
        assert run.model.peak_reserved_bytes == pytest.approx(run.peak, rel=0.01)

    def test_a_run_that_fit_fits(self) -> None:
        run = Replayed(16)
        assert run.ran_out == [] and run.expected == []

    def test_memory_runs_out_where_it_did_and_nowhere_else(self) -> None:
        run = Replayed(24)
        assert len(run.expected) == 1
        assert run.ran_out == [(run.expected[0], True)]

    def test_with_expandable_segments_the_same_requests_fit(self) -> None:
        assert Replayed(24, EXPANDABLE).ran_out == []


class TestSizes:
    """Asked, allocated and reserved, as measured on an H100."""

    @pytest.mark.parametrize(
        ("asked", "allocated", "reserved"),
        [
            (1, 512, 2 * MIB),
            (513, 1024, 2 * MIB),
            (MIB, MIB, 2 * MIB),
            (MIB + 1, 1049088, 20 * MIB),
            (10 * MIB + 1, 10486272, 12 * MIB),
        ],
    )
    def test_of_one_block(self, asked: int, allocated: int, reserved: int) -> None:
        allocator = CachingAllocator()
        allocator.allocate(asked)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)

    def test_a_large_block_keeps_what_is_too_little_to_split_off(self) -> None:
        whole, grown = CachingAllocator(), CachingAllocator(EXPANDABLE)
        for allocator in (whole, grown):
            allocator.allocate(11 * MIB + MIB // 2)
        assert whole.allocated_bytes == 12 * MIB
        assert grown.allocated_bytes == 11 * MIB + MIB // 2

    def test_nothing_takes_nothing(self) -> None:
        allocator = CachingAllocator()
        assert allocator.allocate(0) is None
        allocator.free(None)
        assert allocator.reserved_bytes == 0

    @pytest.mark.parametrize(
        ("asked", "size"), [(4800, 5120), (4096, 4096), (5200, 5632), (5 * MIB + 1, 5 * MIB + MIB // 2), (600, 1024)]
    )
    def test_rounded_to_divisions_between_powers_of_two(self, asked: int, size: int) -> None:
        """4800 lies between 4096 and 8192: with 8 divisions the next is 5120. Sizes up to 8 x 512 are multiples of 512."""
        assert rounded(asked, AllocatorSettings(divisions=(8,) * 16)) == size
        assert rounded(asked) == -(-asked // 512) * 512


class TestSettings:
    def test_are_read_as_torch_writes_them(self) -> None:
        text = "expandable_segments:True, max_split_size_mb:128, roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"
        settings = AllocatorSettings.parse(text)
        assert settings.expandable_segments and settings.max_split_bytes == 128 * MIB
        counts = [settings.divisions_of(size * MIB) for size in (1, 256, 300, 512, 1024, 2048, 65536)]
        assert counts == [1, 1, 1, 2, 4, 8, 8]
        assert (
            AllocatorSettings.parse("")
            == AllocatorSettings.parse("garbage_collection_threshold:0.8")
            == AllocatorSettings()
        )

    @pytest.mark.parametrize("text", ["expandable_segments:yes", "max_split_size_mb:many"])
    def test_what_cannot_be_read_is_named(self, text: str) -> None:
        with pytest.raises(ConfigError, match=text.partition(":")[0]):
            AllocatorSettings.parse(text)


@given(
    st.integers(0, 10_000),
    st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"]),
)
def test_blocks_never_overlap_and_add_up(seed: int, text: str) -> None:
    """Whatever is asked for: blocks in use are apart, free neighbours are merged, and every byte is counted once."""
    rng = random.Random(seed)
    settings = AllocatorSettings.parse(text)
    allocator = CachingAllocator(settings, 400 * MIB)
    used: list[Any] = []
    for _ in range(150):
        kind = rng.random()
        if kind < 0.55:
            asked = rng.choice([rng.randint(1, 4096), rng.randint(1, 3 * MIB), rng.randint(1, 60 * MIB)])
            try:
                block = allocator.allocate(asked)
            except OutOfDeviceMemoryError:
                assert allocator.reserved_bytes + asked > 400 * MIB - 20 * MIB  # not refused for nothing
            else:
                assert block is not None and block.size >= asked and not block.free and block.mapped
                used.append(block)
        elif kind < 0.97 and used:
            allocator.free(used.pop(rng.randrange(len(used))))
        else:
            allocator.empty_cache()
        spans = sorted((block.address, block.address + block.size) for block in used)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size for block in used)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= 400 * MIB
        cached = [block for pool in allocator._pools.values() for _, _, block in pool.free]
        assert allocator.reserved_bytes - allocator.allocated_bytes == sum(block.size for block in cached)
        for block in cached:
            for other in (block.before, block.after):
                assert other is None or not other.free or not other.mapped
    for block in used:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0
    assert allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes


class TestLimit:
    def test_cached_segments_are_given_back_before_memory_runs_out(self) -> None:
        allocator = CachingAllocator(limit_bytes=100 * MIB)
        allocator.free(allocator.allocate(60 * MIB))
        assert allocator.allocate(80 * MIB) is not None
        assert (allocator.reserved_bytes, allocator.flushes) == (80 * MIB, 1)

    def test_a_block_in_use_splits_what_is_free(self) -> None:
        """Fragmentation: 60 MiB are free and not in one piece."""
        plain, expandable = CachingAllocator(limit_bytes=100 * MIB), CachingAllocator(EXPANDABLE, 100 * MIB)
        for allocator in (plain, expandable):
            blocks = [allocator.allocate(size * MIB) for size in (30, 30, 30)]
            allocator.free(blocks[0])
            allocator.free(blocks[2])
        with pytest.raises(OutOfDeviceMemoryError, match="31,457,280 allocated"):
            plain.allocate(71 * MIB)
        assert plain.allocate(60 * MIB) is not None  # segments of their own could be given back
        assert expandable.allocate(40 * MIB) is not None  # grows at its end

    def test_a_segment_that_is_split_stays(self) -> None:
        allocator = CachingAllocator(limit_bytes=100 * MIB)
        whole = allocator.allocate(90 * MIB)
        allocator.free(whole)
        allocator.allocate(30 * MIB)
        with pytest.raises(OutOfDeviceMemoryError):
            allocator.allocate(62 * MIB)

    def test_blocks_over_the_split_size_are_not_split(self) -> None:
        allocator = CachingAllocator(AllocatorSettings(max_split_bytes=32 * MIB))
        allocator.free(allocator.allocate(64 * MIB))
        allocator.allocate(8 * MIB)  # not cut from the 64 MiB
        assert allocator.reserved_bytes == (64 + 20) * MIB
        assert allocator.allocate(60 * MIB).size == 64 * MIB  # type: ignore[union-attr]


def test_what_is_held_already_is_taken_over() -> None:
    segments = [
        Segment(4096 * MIB, 20 * MIB, False, ((5 * MIB, True), (10 * MIB, False), (5 * MIB, True))),
        Segment(1024 * MIB, 2 * MIB, True, ((512, True), (2 * MIB - 512, False))),
    ]
    allocator = CachingAllocator(segments=segments)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (10 * MIB + 512, 22 * MIB)
    assert allocator.allocate(9 * MIB).address == 4101 * MIB  # type: ignore[union-attr]
    allocator.allocate(2 * MIB)  # does not fit into what is left
    assert allocator.reserved_bytes == 42 * MIB


# -- schedules --------------------------------------------------------------------------------------------------------


def scaled(seed: int, unit: int) -> tuple[Any, Any]:
    """A random graph with sizes as tensors have, and its plain schedule."""
    graph = random_graph(seed)
    graph = graph.replace(storages=tuple(unit * nbytes for nbytes in graph.storages))
    problem = Problem(graph)
    return graph, problem.expand(problem.captured)


@given(st.integers(0, 10_000))
def test_requests_add_up_to_the_timeline(seed: int) -> None:
    graph, schedule = scaled(seed, 1)
    asked = allocations(graph, schedule)
    live: dict[int, int] = {}
    peak = 0
    for event in (*asked.forward, *asked.backward):
        if event.nbytes:
            assert event.block not in live
            live[event.block] = event.nbytes
        else:
            del live[event.block]  # allocated before, and freed once
        peak = max(peak, sum(live.values()))
    base = graph.input_bytes + graph.resident_bytes
    timeline = simulate(graph, schedule)
    # A gradient that is handed in and not read is given up before any op of the backward runs.
    assert peak + base <= max(timeline.peak_bytes, *timeline.during)
    assert timeline.peak_bytes <= peak + base + graph.forward_resident_bytes
    assert set(asked.gradients) <= live.keys()
    assert sum(live[block] for block in asked.gradients) == graph.gradient_bytes


@given(st.integers(0, 10_000), st.sampled_from(list(Arrangement)))
def test_a_footprint_holds_at_least_the_peak(seed: int, arrangement: Arrangement) -> None:
    graph, schedule = scaled(seed, 3 * MIB)
    found = footprint(graph, schedule, None, Holdings(), arrangement)
    assert found.fits and found.allocated_bytes <= found.reserved_bytes
    whole = graph.input_bytes + graph.resident_bytes
    assert found.allocated_bytes >= whole
    if not graph.forward_resident_bytes:
        assert found.allocated_bytes >= simulate(graph, schedule).peak_bytes
    again = footprint(graph, schedule, found.reserved_bytes, Holdings(), arrangement)
    assert again.fits or arrangement is not Arrangement.AS_IT_IS


def test_the_arrangement_that_fits_is_chosen() -> None:
    """Where memory is fragmented, expandable segments; where nothing is, what is there stays."""
    graph, schedule = scaled(3, 7 * MIB)
    free = footprint(graph, schedule)
    best = best_footprint(graph, schedule, None, arrangements=Arrangement)
    assert best.arrangement is Arrangement.EXPANDABLE and best.allocated_bytes < free.allocated_bytes
    assert best.reserved_bytes - SMALL_SEGMENT <= free.reserved_bytes  # a page counts for what is beside the plan
    others = [one for one in Arrangement if one is not Arrangement.EXPANDABLE]
    least = min(footprint(graph, schedule, None, Holdings(), one).reserved_bytes for one in others)
    assert best.reserved_bytes - SMALL_SEGMENT <= least
    assert best_footprint(graph, schedule, None).arrangement is Arrangement.AS_IT_IS


def test_a_step_begins_with_what_the_device_holds() -> None:
    """Held once: parameters and the first batch lie in the segments, with what else is there."""
    graph, schedule = scaled(5, MIB)
    held = sum(nbytes for storage, nbytes in enumerate(graph.storages) if storage in graph.input_storages)
    blocks = ((held, True), (3 * MIB, False), (200 * MIB, True))
    segments = (Segment(MIB, sum(size for size, _ in blocks), False, blocks),)
    anew, begun = footprint(graph, schedule), footprint(graph, schedule, None, Holdings(segments=segments))
    assert begun.allocated_bytes >= 200 * MIB + simulate(graph, schedule).peak_bytes - graph.resident_bytes
    assert begun.reserved_bytes >= anew.allocated_bytes + 200 * MIB - graph.resident_bytes


def test_the_batch_counts_once() -> None:
    """The one in the segments stands for those of later steps: a loop may go on with it, or let it go for the next."""
    graph, schedule = scaled(5, MIB)
    tensors = [
        dataclasses.replace(tensor, role=TensorRole.BATCH) if t in graph.inputs else tensor
        for t, tensor in enumerate(graph.tensors)
    ]
    graph = graph.replace(tensors=tuple(tensors), resident_bytes=0)
    held = tuple((rounded(graph.storages[storage]), True) for storage in sorted(graph.input_storages))
    segments = (Segment(MIB, sum(size for size, _ in held), False, held),)
    anew, begun = (
        footprint(graph, schedule, None, holdings, Arrangement.EXPANDABLE)  # in which every block is split exactly
        for holdings in (Holdings(), Holdings(segments=segments))
    )
    assert held and begun.allocated_bytes == anew.allocated_bytes


def test_the_optimizers_state_comes_after_the_first_step() -> None:
    graph, schedule = scaled(5, MIB)
    graph = dataclasses.replace(graph, resident_bytes=200 * MIB)
    late = footprint(graph, schedule, None, Holdings(later_bytes=200 * MIB))
    early = footprint(graph, schedule, None, Holdings())
    assert late.allocated_bytes == early.allocated_bytes  # from the second step on it is there either way
    assert late.reserved_bytes > simulate(graph, schedule).peak_bytes - 200 * MIB

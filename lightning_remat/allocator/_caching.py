"""A model of the CUDA caching allocator: where blocks lie, and how many bytes are reserved for them.

What torch's allocator (``c10/cuda/CUDACachingAllocator.cpp``, 2.11 to 2.13) does for one stream, in its own terms:

* sizes are rounded up to 512 bytes; *blocks* of up to 1 MiB come from the *small* pool, others from the *large* one;
* a *segment* is what is asked of the device: 2 MiB for small blocks, 20 MiB for blocks under 10 MiB, else the size
  rounded up to 2 MiB;
* the smallest free block that is large enough is taken, of equal ones that at the lowest address, and what it has too
  much is split off if it is at least 512 bytes (small, or expandable) or over 1 MiB (large); free neighbours merge;
* where the device has no more, whole free segments are given back to it, and it is asked again;
* an *expandable* segment has addresses without end, and memory behind them page by page (2 or 20 MiB): it grows at its end,
  and free pages in its middle are given back one by one.

Several streams, private pools, and ``garbage_collection_threshold`` are not in the model.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from lightning_remat._blocks import CUDA_BLOCK_BYTES
from lightning_remat.allocator._settings import DEFAULTS, MIB, AllocatorSettings

BLOCK = CUDA_BLOCK_BYTES

SMALL = 1 * MIB
"""Blocks up to this size are small."""

SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
SHARED_LARGE = 10 * MIB
"""Large blocks below this size share segments."""

ROUND_SEGMENT = 2 * MIB
OVERSIZE = 20 * MIB
"""Where a limit on splitting is set: how much larger than the request a block that is never split may be."""

_ENDLESS = 1 << 60
_APART = 1 << 61
"""Addresses between two segments, so that they are never neighbours."""


class OutOfDeviceMemoryError(Exception):
    """The device has no block of the size asked for, not even after all cached segments were given back."""

    def __init__(self, asked: int, allocated: int, reserved: int) -> None:
        super().__init__(f"{asked:,} bytes are asked for with {allocated:,} allocated and {reserved:,} reserved")
        self.asked, self.allocated, self.reserved = asked, allocated, reserved


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment: in use, free, or (expandable segments) addresses without memory.

    Attributes:
        pool: the pool that it belongs to.
        address: its first byte.
        size: in bytes.
        free: whether it may be given out.
        mapped: whether there is memory behind its addresses.
        before, after: its neighbours in the segment.
    """

    pool: _Pool
    address: int
    size: int
    free: bool = False
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None


class _Pool:
    """Free blocks, by size and address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, int, Block]] = []
        self.expandable: tuple[int, int] | None = None  # addresses of the expandable segment

    def put(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._list(block), (block.size, block.address, block))

    def take(self, block: Block) -> None:
        listed = self._list(block)
        at = bisect.bisect_left(listed, (block.size, block.address))
        assert listed[at][2] is block, "a block changes its size only outside of the list"
        del listed[at]
        block.free = False

    def _list(self, block: Block) -> list[tuple[int, int, Block]]:
        return self.free if block.mapped else self.unmapped

    def grows(self, block: Block) -> bool:
        """Whether a block lies in an expandable segment."""
        return self.expandable is not None and self.expandable[0] <= block.address < self.expandable[1]


@dataclasses.dataclass(frozen=True)
class Segment:
    """One segment as torch reports it (``torch.cuda.memory_snapshot``).

    Attributes:
        address: its first byte.
        nbytes: its size.
        small: whether it is of the small pool.
        blocks: in order of address, their sizes, and whether each is in use.
        expandable: whether it can grow.
    """

    address: int
    nbytes: int
    small: bool
    blocks: tuple[tuple[int, bool], ...]
    expandable: bool = False


class CachingAllocator:
    """Allocates and frees blocks as torch does on CUDA, without a device.

    Args:
        settings: as the user has set them.
        limit_bytes: the most that may be reserved; ``None`` for no limit.
        segments: what the allocator holds to begin with. Expandable ones are taken as they are, and do not grow.

    Attributes:
        allocated_bytes, reserved_bytes: in blocks, and in segments, at this moment.
        peak_allocated_bytes, peak_reserved_bytes: the most that they have been.
        flushes: how often cached memory was given back because the device had no more.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULTS,
        limit_bytes: int | None = None,
        segments: Iterable[Segment] = (),
    ) -> None:
        self.settings = settings
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.flushes = 0
        self._pools = {small: _Pool(small) for small in (True, False)}
        self._next_address = _APART
        for segment in sorted(segments, key=lambda one: one.address):
            self._adopt(segment)

    def allocate(self, nbytes: int) -> Block | None:
        """A block for so many bytes; ``None`` for 0.

        Raises:
            OutOfDeviceMemoryError: where it does not fit within the limit.
        """
        if nbytes <= 0:
            return None
        size = rounded(nbytes, self.settings)
        pool = self._pools[size <= SMALL]
        block = self._best_fit(pool, size) or self._new(pool, size)
        if block is None:
            self.flushes += 1
            if self._oversize(size):  # only what is large enough, before all of it
                self._release_oversize(pool, size)
                block = self._new(pool, size)
            if block is None:
                self.empty_cache()
                block = self._new(pool, size)
        if block is None:
            raise OutOfDeviceMemoryError(size, self.allocated_bytes, self.reserved_bytes)
        self._split(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back to its pool."""
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.pool.put(self._merged(block))

    def empty_cache(self) -> None:
        """Give free segments, and free pages of expandable ones, back to the device."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if pool.grows(block):
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._give_back(block)

    def reset_peaks(self) -> None:
        """Let the peaks begin anew, at what is allocated and reserved now."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    # -- finding ------------------------------------------------------------------------------------------------------

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        at = bisect.bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        block = pool.free[at][2]
        if self.settings.expandable_segments:
            # A block counts with the addresses that it can grow into: one that cannot grow is taken before it.
            while pool.grows(block) and at + 1 < len(pool.free) and _room(pool.free[at + 1][2]) < _room(block):
                at += 1
                block = pool.free[at][2]
        else:
            while pool.grows(block):
                at += 1
                if at == len(pool.free):
                    return None
                block = pool.free[at][2]
        most = self.settings.max_split_bytes
        if most is not None and (block.size >= most > size or (size >= most and block.size >= size + OVERSIZE)):
            return None
        pool.take(block)
        return block

    def _new(self, pool: _Pool, size: int) -> Block | None:
        """A block of a new segment, or of an expandable one that grows; ``None`` where the limit does not allow it."""
        segment = segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grown(pool, size)
        block = Block(pool, self._next_address, segment)
        self._next_address += segment + _APART
        self._reserve(segment)
        return block

    def _grown(self, pool: _Pool, size: int) -> Block | None:
        if pool.expandable is None:
            pool.expandable = (self._next_address, self._next_address + _ENDLESS)
            pool.put(Block(pool, self._next_address, _ENDLESS, mapped=False))
            self._next_address += _ENDLESS + _APART
        for _, _, candidate in pool.unmapped:
            first = candidate.before if candidate.before is not None and candidate.before.free else candidate
            if _free_from(first) >= size:
                break
        else:
            raise AssertionError("the end of an expandable segment has addresses without end")
        found: Block | None = first if first.mapped else self._map(first, min(first.size, size))
        while found is not None and found.size < size:
            assert found.after is not None
            found = self._map(found.after, min(size - found.size, found.after.size))
        if found is not None:
            pool.take(found)
        return found

    # -- segments -----------------------------------------------------------------------------------------------------

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _adopt(self, segment: Segment) -> None:
        pool = self._pools[segment.small]
        last: Block | None = None
        address = segment.address
        for size, used in segment.blocks:
            block = Block(pool, address, size, before=last)
            if last is not None:
                last.after = block
            if used:
                self.allocated_bytes += size
            else:
                pool.put(block)
            last = block
            address += size
        self._reserve(segment.nbytes)
        self.peak_allocated_bytes = self.allocated_bytes
        self._next_address = max(self._next_address, segment.address + segment.nbytes + _APART)

    def _give_back(self, block: Block) -> None:
        block.pool.take(block)
        self.reserved_bytes -= block.size

    def _oversize(self, size: int) -> bool:
        return self.settings.max_split_bytes is not None and size >= self.settings.max_split_bytes

    def _release_oversize(self, pool: _Pool, size: int) -> None:
        """Give back the smallest cached segment that has the size, or the largest ones until together they have."""
        whole = [block for _, _, block in pool.free if block.before is None and block.after is None]
        most = self.settings.max_split_bytes or 0
        enough = next((block for block in whole if block.size >= max(size, most)), None)
        if enough is not None:
            self._give_back(enough)
            return
        needed, released = max(size, most), 0
        for block in reversed([block for block in whole if block.size >= most]):
            if released >= needed:
                break
            released += block.size
            self._give_back(block)

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """Put memory behind the first bytes of unmapped addresses, whole pages.

        Returns:
            The free block that they are part of now; ``None`` where the limit does not allow it.
        """
        pool = block.pool
        size = min(block.size, -(-nbytes // pool.page) * pool.page)
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            return None
        pool.take(block)
        if size < block.size:
            rest = Block(pool, block.address + size, block.size - size, mapped=False)
            _insert_after(block, rest)
            pool.put(rest)
            block.size = size
        block.mapped = True
        self._reserve(size)
        block = self._merged(block)
        pool.put(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give the whole pages of a free block back to the device."""
        pool = block.pool
        assert pool.expandable is not None
        base = pool.expandable[0]
        first = base + -(-(block.address - base) // pool.page) * pool.page
        end = base + (block.address + block.size - base) // pool.page * pool.page
        if first >= end:
            return
        pool.take(block)
        if block.address + block.size > end:
            rest = Block(pool, end, block.address + block.size - end)
            _insert_after(block, rest)
            pool.put(rest)
        if first > block.address:
            middle = Block(pool, first, end - first)
            _insert_after(block, middle)
            block.size = first - block.address
            pool.put(block)
            block = middle
        else:
            block.size = end - first
        block.mapped = False
        self.reserved_bytes -= block.size
        pool.put(self._merged(block))

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _split(self, block: Block, size: int) -> None:
        """Cut off what a block has too much, where torch does."""
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            splits = rest >= BLOCK
        else:
            splits = rest > SMALL and not self._oversize(size)
        if splits:
            other = Block(block.pool, block.address + size, rest)
            _insert_after(block, other)
            block.size = size
            block.pool.put(other)

    def _merged(self, block: Block) -> Block:
        """A block about to be free, merged with its free neighbours: mapped ones if it is mapped, else unmapped."""
        for other in (block.before, block.after):
            if other is None or not other.free or other.mapped is not block.mapped:
                continue
            block.pool.take(other)
            first, last = (other, block) if other is block.before else (block, other)
            block.address, block.size = first.address, first.size + last.size
            block.before, block.after = first.before, last.after
            if block.before is not None:
                block.before.after = block
            if block.after is not None:
                block.after.before = block
        return block


def rounded(nbytes: int, settings: AllocatorSettings = DEFAULTS) -> int:
    """Bytes of the block that a request of ``nbytes`` asks for.

    They are rounded up to a multiple of 512, or to a division (`AllocatorSettings`). The block that it gets may be
    larger, where what is left over is not split off.
    """
    count = settings.divisions_of(nbytes)
    if count > 1 and nbytes > BLOCK * count:
        floor = 1 << (nbytes.bit_length() - 1)
        if floor == nbytes:
            return nbytes
        division = floor >> (count.bit_length() - 1)
        return -(-nbytes // division) * division if division else 2 * floor
    return max(BLOCK, -(-nbytes // BLOCK) * BLOCK)


def segment_bytes(size: int) -> int:
    """Bytes of the segment that the device is asked for where no cached block of ``size`` bytes is there."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < SHARED_LARGE else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT


def _insert_after(block: Block, other: Block) -> None:
    other.before, other.after = block, block.after
    if block.after is not None:
        block.after.before = other
    block.after = other


def _room(block: Block) -> int:
    """Bytes of a free block with the unmapped addresses behind it, into which it can grow."""
    behind = block.after
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


def _free_from(block: Block | None) -> int:
    total = 0
    while block is not None and block.free:
        total += block.size
        block = block.after
    return total

"""What a user may set of the CUDA caching allocator, as far as it decides where blocks lie."""

from __future__ import annotations

import dataclasses
import re

from lightning_remat.errors import ConfigError

MIB = 1024**2

POWERS = 16
"""Powers of two from 1 MiB on, to 64 GiB, each with divisions of its own; other sizes have those of the ends."""

_LIST = re.compile(r"\[([^\]]*)\]")


@dataclasses.dataclass(frozen=True)
class AllocatorSettings:
    """Settings of the caching allocator (``PYTORCH_CUDA_ALLOC_CONF``, in later releases ``PYTORCH_ALLOC_CONF``).

    Attributes:
        expandable_segments: segments grow page by page, and their pages are given back one by one.
        max_split_bytes: blocks of this size and over are never split; ``None`` for no such limit.
        divisions: into how many equal parts the interval from each power of two to the next is divided, from 1 MiB up
            to 64 GiB; sizes are rounded up to a part's end. ``()`` rounds to 512 bytes only.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    divisions: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Settings from a text such as ``"expandable_segments:True,max_split_size_mb:128"``; others are passed over.

        Raises:
            ConfigError: for a value that cannot be read.

        Example:
            >>> AllocatorSettings.parse("expandable_segments:True").expandable_segments
            True
        """
        lists = _LIST.findall(text)
        found = cls()
        for part in filter(None, _LIST.sub("[]", text).replace(" ", "").split(",")):
            name, _, value = part.partition(":")
            try:
                if name == "expandable_segments":
                    found = dataclasses.replace(found, expandable_segments=_flag(value))
                elif name == "max_split_size_mb":
                    found = dataclasses.replace(found, max_split_bytes=int(value) * MIB)
                elif name == "roundup_power2_divisions":
                    found = dataclasses.replace(found, divisions=_divisions(lists.pop(0) if value == "[]" else value))
                elif value == "[]":
                    lists.pop(0)
            except ValueError as error:
                raise ConfigError(f"the allocator's setting {part!r} cannot be read: {error}") from error
        return found

    def divisions_of(self, nbytes: int) -> int:
        """How many divisions there are between the powers of two around a size."""
        if not self.divisions:
            return 0
        power = nbytes.bit_length() - MIB.bit_length()
        return self.divisions[min(max(power, 0), POWERS - 1)]


DEFAULTS = AllocatorSettings()


def _flag(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("give True or False")
    return value == "True"


def _divisions(text: str) -> tuple[int, ...]:
    """``"4"``, or ``"256:1,512:2,>:4"`` with sizes in MiB: a count holds from the size named before up to its own."""
    if ":" not in text:
        return (int(text),) * POWERS
    named = [part.strip().split(":") for part in text.split(",")]
    found = [0] * POWERS
    last = 0
    for size, count in named:
        power = POWERS if size == ">" else int(size).bit_length() - 1
        if not 0 <= power <= POWERS:
            raise ValueError(f"{size} MiB is no size from 1 to 32768")
        begin, end = (last, POWERS) if size == ">" else (last, power + 1)
        for i in range(begin, min(end, POWERS)):
            found[i] = int(count)
        last = min(end, POWERS)
    for i in range(last, POWERS):
        found[i] = found[last - 1]
    return tuple(found)

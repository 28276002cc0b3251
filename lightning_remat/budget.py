"""What a budget means in bytes, and how many bytes a device has.

A budget counts everything that the training step keeps on the device: parameters, buffers, gradients, optimizer state,
inputs, activations and workspaces.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Callable, Iterator
from enum import Enum
from fractions import Fraction
from pathlib import Path

import torch

from lightning_remat.errors import BudgetError

ACCEPTED = (
    "a budget is 'auto' (what the device has), 'min' (the smallest feasible), a whole number of bytes, a size such as "
    "'8GiB', '600 MiB' or '1.5GB', or a share of what rematerialization can save: a float in (0, 1] or '50%'"
)
UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
"""Bytes of each unit, by its name in lower case: decimal (kB, MB, GB, TB) and binary (KiB, MiB, GiB, TiB)."""

HOST_SHARE = 0.25
"""Share of the host's free memory that copies of tensors may take, unless told otherwise."""

_NUMBER = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([a-z%]*)")


class BudgetKind(str, Enum):
    """How a budget was given."""

    AUTO = "auto"
    MIN = "min"
    SHARE = "share"
    SIZE = "size"


@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget as it was asked for; `resolve` turns it into bytes.

    Attributes:
        kind: see `BudgetKind`.
        value: the share in (0, 1] (`BudgetKind.SHARE`), the bytes (`BudgetKind.SIZE`), or ``None``.
    """

    kind: BudgetKind
    value: float | int | None = None

    def resolve(
        self,
        floor_bytes: int,
        baseline_bytes: int,
        smallest: Callable[[], int],
        device_bytes: Callable[[], int],
        total_bytes: Callable[[], int] | None = None,
    ) -> int:
        """The budget in bytes.

        Args:
            floor_bytes: held under every schedule (`ComputationGraph.floor_bytes`).
            baseline_bytes: the peak without rematerialization.
            smallest: finds the smallest feasible budget in bytes; called for ``"min"`` only.
            device_bytes: the bytes that the step may use on its device (see `device_bytes`); called for ``"auto"`` only.
            total_bytes: all the bytes that the device has (see `device_total_bytes`); called for a size only. By
                default a size is not compared with it.

        Returns:
            For a share ``s``: ``floor + s * (baseline - floor)``, rounded up to a whole byte. For ``"auto"``: what
            ``device_bytes`` says. For a size: itself, feasible or not.

        Raises:
            BudgetError: for a size over ``total_bytes``.
        """
        if self.kind is BudgetKind.AUTO:
            return device_bytes()
        if self.kind is BudgetKind.MIN:
            return smallest()
        if self.kind is BudgetKind.SHARE:
            # The share as it is written: 0.1 of 1000 bytes is 100, not 101 for the binary fraction just above 0.1.
            share = Fraction(str(self.value))
            return floor_bytes + math.ceil(share * max(0, baseline_bytes - floor_bytes))
        size = int(self.value or 0)
        if total_bytes is not None and size > (total := total_bytes()):
            raise BudgetError(
                f"a budget of {size:,} bytes is over what the device has: {total:,} bytes. Give at most that, or "
                "budget='auto' for what is free."
            )
        return size

    def __str__(self) -> str:
        if self.kind is BudgetKind.SHARE:
            return f"{100 * float(self.value or 0):g}%"
        if self.kind is BudgetKind.SIZE:
            return f"{self.value} bytes"
        return str(self.kind.value)


def parse_budget(value: object) -> Budget:
    """Read a budget as a user writes it.

    Args:
        value: ``"auto"``, ``"min"``, a whole number of bytes, a float share in (0, 1], or text: a size with its unit
            (``"8GiB"``, ``"1.5 GB"``; fractions of a byte are dropped), a percentage (``"50%"``), or one of those numbers
            (``"0.5"``, ``"8000000000"``). Upper and lower case are the same. A `Budget` is returned as it is.

    Returns:
        The budget.

    Raises:
        BudgetError: for anything else, saying what was given and what is accepted.

    Example:
        >>> parse_budget("8GiB").value
        8589934592
        >>> parse_budget("50%").value
        0.5
    """
    if isinstance(value, Budget):
        return value
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, bool):
        raise _refused(value, "it is a bool")
    if isinstance(value, numbers.Integral):
        return _size(value, Fraction(int(value)))
    if isinstance(value, numbers.Real):
        return _share(value, float(value))
    raise _refused(value, f"it is a {type(value).__name__}")


def parse_host_budget(value: object) -> Budget:
    """Read how much of the host's memory may be used: bytes, a size, or a share in (0, 1] of what is free.

    Raises:
        BudgetError: for anything else, saying what was given and what is accepted.

    Example:
        >>> parse_host_budget("8GiB").value
        8589934592
    """
    try:
        budget = parse_budget(value)
    except BudgetError:
        budget = None
    if budget is None or budget.kind not in (BudgetKind.SHARE, BudgetKind.SIZE):
        raise BudgetError(
            f"host_budget={value!r} cannot be used. Accepted: a whole number of bytes, a size such as '8GiB', or a share of "
            "what the machine has free: a float in (0, 1] or '50%'."
        )
    return budget


def _parse_text(text: str) -> Budget:
    word = text.strip().lower()
    if word in (BudgetKind.AUTO, BudgetKind.MIN):
        return Budget(BudgetKind(word))
    match = _NUMBER.fullmatch(word)
    if match is None:
        raise _refused(text, "it is neither a word nor a number with a unit")
    digits, unit = match.groups()
    if unit == "%":
        return _share(text, float(Fraction(digits) / 100))
    if not unit:
        return _share(text, float(digits)) if "." in digits else _size(text, Fraction(digits))
    if unit not in UNITS:
        raise _refused(text, f"{unit!r} is no unit: use B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return _size(text, Fraction(digits) * UNITS[unit])


def _size(given: object, size: Fraction) -> Budget:
    if size < 1:
        raise _refused(given, "it is less than one byte")
    return Budget(BudgetKind.SIZE, int(size))


def _share(given: object, share: float) -> Budget:
    if not 0 < share <= 1:
        why = "a float is a share" if isinstance(given, numbers.Real) else "it is a share"
        raise _refused(given, f"{why}, and not in (0, 1]")
    return Budget(BudgetKind.SHARE, share)


def _refused(given: object, why: str) -> BudgetError:
    return BudgetError(f"budget={given!r} cannot be used: {why}. Accepted: {ACCEPTED}.")


# -- what a device has ------------------------------------------------------------------------------------------------


def device_bytes(device: torch.device | str, margin: float = 0.05, held_bytes: int = 0, *, processes: int = 1) -> int:
    """Bytes that a training step of this process may use on ``device``, including all that it holds there already.

    On CUDA that is what is free plus what this process's allocator has reserved, within the fraction that
    `torch.cuda.set_per_process_memory_fraction` leaves it. On CPU it is what the system could still give, within the limits
    of the control groups (containers) that the process is in, plus ``held_bytes``.

    Args:
        device: a CPU or CUDA device; ``"cuda"`` is the current one.
        margin: share of that to leave unused, in [0, 1), for memory that torch's allocator does not count.
        held_bytes: what the step holds on the device already (parameters, buffers, optimizer state; see
            `lightning_remat.measure.held_bytes`). Counted on CPU only: there it is missing from what is available. On CUDA
            the allocator knows it, and it is not counted a second time.
        processes: how many processes on this machine divide its memory among them. Counted on CPU only: each has a CUDA
            device of its own.

    Returns:
        Bytes, rounded down.

    Raises:
        BudgetError: for another kind of device, for a margin outside [0, 1), or where the system does not say.
    """
    if not 0 <= margin < 1:
        raise BudgetError(f"a margin of {margin!r}: give the share of the device to leave unused, in [0, 1)")
    where = _device(device)
    if where.type == "cuda":
        free, total = torch.cuda.mem_get_info(where)
        limit = free + torch.cuda.memory_reserved(where)
        share: Callable[[torch.device], float] | None = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if share is not None:
            limit = min(limit, int(share(where) * total))
    else:
        limit = _cpu_available_bytes() // processes + held_bytes
    return int(Fraction(limit) * (1 - Fraction(str(margin))))


def device_total_bytes(device: torch.device | str) -> int:
    """All the bytes that ``device`` has, used or not; on CPU, within the limits of the process's control groups.

    ``"cuda"`` is the current CUDA device.

    Raises:
        BudgetError: for a device that is neither CPU nor CUDA, or where the system does not say.
    """
    where = _device(device)
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[1])
    return _cpu_total_bytes()


def host_bytes(host_budget: object = None, processes: int = 1) -> int:
    """Bytes of the host's memory that the copies of one process's tensors may take.

    Args:
        host_budget: see `parse_host_budget`; by default a quarter of what is free.
        processes: how many processes on this machine divide what is free among them.
    """
    budget = parse_host_budget(HOST_SHARE if host_budget is None else host_budget)
    if budget.kind is BudgetKind.SIZE:
        return int(budget.value or 0)
    return int(Fraction(str(budget.value)) * (_cpu_available_bytes() // processes))


def _device(device: torch.device | str) -> torch.device:
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise BudgetError(
            f"how much memory a {where.type!r} device has is not known here: give the budget as a size, such as '8GiB'"
        )
    if where.type == "cuda" and where.index is None:  # some of torch's functions want an index
        where = torch.device("cuda", torch.cuda.current_device())
    return where


def _cpu_available_bytes(root: Path = Path("/")) -> int:
    limits = [group.limit - group.used for group in _control_groups(root)]
    return max(0, min([_meminfo(root, "MemAvailable"), *limits]))


def _cpu_total_bytes(root: Path = Path("/")) -> int:
    return min([_meminfo(root, "MemTotal"), *(group.limit for group in _control_groups(root))])


def _meminfo(root: Path, field: str) -> int:
    """A field of ``/proc/meminfo`` in bytes; all of the machine's memory where there is no such file."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        text = ""
    match = re.search(rf"^{field}:\s*(\d+) kB$", text, re.MULTILINE)
    if match is not None:
        return int(match.group(1)) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise BudgetError(
            "how much memory this machine has cannot be read here: give the budget as a size, such as '8GiB'"
        ) from None


@dataclasses.dataclass(frozen=True)
class _ControlGroup:
    """A control group's memory limit, and what it uses without file caches that can be dropped, both in bytes."""

    limit: int
    used: int


@dataclasses.dataclass(frozen=True)
class _Hierarchy:
    """Where one version of control groups has its files: the mount point, and the names of the numbers."""

    mount: str
    limit: str
    usage: str
    droppable: str


_VERSION_1 = _Hierarchy("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Hierarchy("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _control_groups(root: Path) -> Iterator[_ControlGroup]:
    """The process's control groups with a memory limit, from its own up to the topmost, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = _VERSION_1 if controllers else _VERSION_2
        mount = root / hierarchy.mount
        # Inside a container the path may be the host's, and only the mount's top exist: missing folders are passed over.
        folder = mount / path.strip("/")
        for place in (folder, *folder.parents):
            group = _read_control_group(place, hierarchy)
            if group is not None:
                yield group
            if place == mount:
                break


def _read_control_group(folder: Path, files: _Hierarchy) -> _ControlGroup | None:
    try:
        limit = int((folder / files.limit).read_text())
        used = int((folder / files.usage).read_text())
        statistics = (folder / "memory.stat").read_text()
    except (OSError, ValueError):  # no such group here, or no limit ("max")
        return None
    match = re.search(rf"^{files.droppable} (\d+)$", statistics, re.MULTILINE)
    return _ControlGroup(limit, max(0, used - (int(match.group(1)) if match else 0)))

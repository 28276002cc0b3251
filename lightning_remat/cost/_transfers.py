"""How fast tensors are copied between a device and the host's memory: measured once, and kept with the other costs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging

import torch

from lightning_remat._disk import forget_the_oldest, replace_file
from lightning_remat._host_memory import Transfer, pinned
from lightning_remat.cost._cache import CostCache
from lightning_remat.cost._fingerprint import fingerprint
from lightning_remat.cost._timing import seconds_of
from lightning_remat.errors import GraphError
from lightning_remat.graph import Host

log = logging.getLogger(__name__)

SIZES = {"cpu": (2**18, 2**24), "cuda": (2**20, 2**26)}
"""Bytes of the copies that are timed: a line through a small one and a large one has the latency and the speed."""

PASSES = 3
"""Times that both are timed; the median counts."""

MOST_FILES = 50
"""Files that are kept, the ones written last."""


def copy_speeds(device: torch.device, cache: CostCache | None = None) -> Host:
    """The speeds of copies in both directions, as a `Host` of no bytes.

    Args:
        device: ``cpu`` or ``cuda``.
        cache: its directory has what was measured before, and takes what is measured now; ``None`` measures.

    Raises:
        RuntimeError: where no memory of the host can be pinned, or the device has no room for what is timed.
    """
    facts = json.dumps(fingerprint(device), sort_keys=True)
    name = f"copies-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
    path = cache.directory / name if cache is not None else None
    if path is not None:
        try:
            return dataclasses.replace(Host.from_dict(json.loads(path.read_text(encoding="utf-8"))), bytes=0)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, TypeError, GraphError, RecursionError) as error:
            log.warning("The speeds of copies in %s cannot be read (%s): they are measured again.", path, error)
    found = _measured(device)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(found.to_dict()))
            forget_the_oldest(path.parent.glob("copies-*.json"), MOST_FILES)
        except OSError as error:
            log.info("The speeds of copies cannot be kept in %s: %s", path, error)
    return found


def _measured(device: torch.device) -> Host:
    """Both directions, each by its speed, and the longer of their latencies."""
    there, back = (_line(device, to_device) for to_device in (False, True))
    return Host(0, there[0], back[0], max(there[1], back[1]))


def _line(device: torch.device, to_device: bool) -> tuple[float, float]:
    """Bytes a second, and the seconds that a copy takes beside."""
    small, large = SIZES[device.type]
    passes = [(_seconds(small, device, to_device), _seconds(large, device, to_device)) for _ in range(PASSES)]
    first, last = (sorted(one)[len(one) // 2] for one in zip(*passes, strict=True))
    speed = (large - small) / (last - first) if last > first else large / max(last, 1e-9)
    return speed, max(0.0, first - small / speed)


def _seconds(nbytes: int, device: torch.device, to_device: bool) -> float:
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = pinned(nbytes) if device.type == "cuda" else torch.empty_like(there)
    source, target = (here, there) if to_device else (there, here)
    return seconds_of(lambda: Transfer(source, target, device, to_device=to_device).wait(), device)

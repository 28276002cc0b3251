"""Results on disk: a JSON file that says what it is, and when, where and with which versions it was made."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_remat._disk import replace_file

RESULTS = Path(__file__).resolve().parents[1] / "results"
"""Where results lie that are kept with the sources."""


def stamp(packages: Iterable[str], device: str | None = None) -> dict[str, Any]:
    """Date, machine (see `machine`), and versions of Python and of those ``packages`` that are installed."""
    return {"date": now(), "machine": machine(device), "versions": versions(packages)}


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def machine(device: str | None = None) -> dict[str, Any]:
    """System and processor; for steps that are run on a ``device``, torch's threads too, and the card where it is one."""
    facts: dict[str, Any] = {"system": platform.system(), "processor": _processor()}
    if device is not None:
        facts["threads"] = torch.get_num_threads()
        if device.startswith("cuda"):
            properties = torch.cuda.get_device_properties(torch.device(device))
            facts.update(gpu=properties.name, gpu_memory_bytes=properties.total_memory, cuda=torch.version.cuda)
    return facts


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python, and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write(path: Path, data: Any) -> None:
    """Write a file as a whole: a run that is ended leaves what was there before. Numbers are as in `plain`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(plain(data), indent=1, allow_nan=False) + "\n")


def read(path: Path, name: str, *numbers: int) -> dict[str, Any]:
    """A file whose ``"format"`` is ``name``, and whose version is one of these ``numbers``.

    Raises:
        ValueError: where it is something else.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("format") != name or data.get("version") not in numbers:
        expected = f'"format": "{name}", "version": {" or ".join(map(str, numbers))}'
        raise ValueError(f"{path} is no file of results: expected {expected}")
    return data


def plain(value: Any) -> Any:
    """``value`` with numbers that JSON cannot hold replaced by ``None``, and keys that are text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

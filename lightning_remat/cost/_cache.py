"""Measured costs, kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lightning_remat._disk import cache_directory, forget_the_oldest, replace_file
from lightning_remat.capture import OpCall
from lightning_remat.cost._fingerprint import fingerprint
from lightning_remat.cost._indices import aten_name
from lightning_remat.cost._op_cost import OpCost

log = logging.getLogger(__name__)

FORMAT = "lightning_remat.costs"
FORMAT_VERSION = 4

MOST = 20_000
"""Costs that are kept in one file, the ones measured last (a large network has some hundreds)."""

MOST_FILES = 50
"""Files that are kept, the ones written last: each device, torch version and set of settings has one."""


class CostCache:
    """One JSON file for each device model, torch version and set of kernel-choosing settings (see `fingerprint`), and format.

    ATen ops are kept, whose code is given by torch's version, and this package's own functions, by its version. Nothing that
    goes wrong with the disk raises: a corrupt file is ignored with a warning and written anew, a directory that cannot be
    written is warned of once. Writers may run at the same time: each adds to what it finds and replaces the file in one step,
    so a reader always sees a whole file, and of two writers at the same moment the last wins.

    Args:
        directory: where the files lie; by default `cache_directory`.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = Path(directory) if directory is not None else cache_directory()
        self._warned_of_writing = False

    def path(self, device: torch.device) -> Path:
        """The file for ``device`` under the settings of this moment."""
        facts = json.dumps([FORMAT_VERSION, fingerprint(device)], sort_keys=True)
        return self.directory / f"costs-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"

    def load(self, device: torch.device) -> dict[str, OpCost]:
        """The costs known for ``device``, by `OpCall.key`."""
        return self._read(self.path(device))

    def store(self, device: torch.device, calls: Iterable[OpCall], costs: Iterable[OpCost]) -> None:
        """Add the costs of these calls, one each, to what is known for ``device``."""
        fresh = {call.key: cost for call, cost in zip(calls, costs, strict=True) if _is_lasting(call)}
        if not fresh:
            return
        path = self.path(device)
        known = {key: cost for key, cost in self._read(path).items() if key not in fresh} | fresh
        data = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "measured_with": fingerprint(device),
            "costs": {key: cost.to_list() for key, cost in list(known.items())[-MOST:]},
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(data, indent=0))
            forget_the_oldest(self.directory.glob("costs-*.json"), MOST_FILES)
        except OSError as error:
            if not self._warned_of_writing:
                self._warned_of_writing = True
                log.warning(
                    "Measured op costs cannot be kept in %s (%s), so the next run measures them again. Set "
                    "LIGHTNING_REMAT_CACHE to a directory that can be written.",
                    self.directory,
                    error,
                )

    def _read(self, path: Path) -> dict[str, OpCost]:
        try:
            return _parse(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("Measured op costs in %s cannot be read (%s): they are measured again.", path, error)
            return {}


def _is_lasting(call: OpCall) -> bool:
    """Whether the key means the same in another process: of known functions only, and no object's address among arguments."""
    return all((aten_name(one) or _is_own(one)) and " at 0x" not in one.key for one in (call, *call.producers()))


def _is_own(call: OpCall) -> bool:
    """Whether it calls a function of this package, such as the two that dropout is split into."""
    return str(getattr(call.target, "__module__", "")).startswith(f"{__package__.partition('.')[0]}.")


def _parse(data: Any) -> dict[str, OpCost]:
    """Costs by key.

    Raises:
        ValueError: for anything that `CostCache.store` would not write.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != FORMAT_VERSION:
        raise ValueError(f"not a {FORMAT} file of version {FORMAT_VERSION}")
    costs = data.get("costs")
    if not isinstance(costs, dict):
        raise ValueError("no costs")
    return {key: OpCost.from_list(value) for key, value in costs.items()}

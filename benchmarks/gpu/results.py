"""A part's results on disk: one JSON file, written anew after each case, with where each of them is from."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import results
from benchmarks.gpu.part import Case, Result

FORMAT, FORMAT_VERSION = "lightning_remat.gpu", 1


class Results:
    """What is known of a part's cases.

    A result counts for the machine, the versions and (unless it is of others' code alone) the sources that it was made with:
    what another environment gave stays in the file until the case is run again.

    Args:
        path: of the file; read where it exists.
        part: the part's name.
        environment: of this run; see `benchmarks.gpu.environment`.

    Raises:
        ValueError: where the file is something else.
    """

    def __init__(self, path: Path, part: str, environment: Mapping[str, Any]) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._environment = _name(environment)
        self._elsewhere = {**environment, "sources": ""}
        self._data: dict[str, Any] = read(path) if path.exists() else {}
        if self._data and self._data["part"] != part:
            raise ValueError(f"{path} holds the results of {self._data['part']!r}, not of {part!r}")
        self._data = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "part": part,
            "dry_run": bool(environment.get("dry_run")),
            "environments": {**self._data.get("environments", {}), self._environment: dict(environment)},
            "cases": self._data.get("cases", {}),
        }

    def get(self, case: Case) -> Result | None:
        """What this environment gave for a case; ``None`` where it has not been run."""
        found: Result | None = self._data["cases"].get(case.key)
        if found is None:
            return None
        with_others = {**self._data["environments"][found["environment"]], "sources": ""}
        counts = case.of_others and with_others == self._elsewhere
        return found if counts or found["environment"] == self._environment else None

    def put(self, key: str, one: Result) -> None:
        """Keep a result, and write the file."""
        with self._lock:
            self._data["cases"][key] = {**one, "date": results.now(), "environment": self._environment}
            self._write()

    def forget(self, keys: Collection[str]) -> None:
        """Drop these cases: they will be run again."""
        with self._lock:
            self._data["cases"] = {key: one for key, one in self._data["cases"].items() if key not in keys}
            self._write()

    def _write(self) -> None:
        used = {one["environment"] for one in self._data["cases"].values()}
        environments = {name: one for name, one in self._data["environments"].items() if name in used}
        results.write(self.path, {**self._data, "environments": environments})


def read(path: Path) -> dict[str, Any]:
    """A file that `Results` wrote.

    Raises:
        ValueError: where it is none.
    """
    return results.read(path, FORMAT, FORMAT_VERSION)


def _name(environment: Mapping[str, Any]) -> str:
    """A short name for an environment: equal for equal ones."""
    return hashlib.sha256(json.dumps(dict(environment), sort_keys=True).encode()).hexdigest()[:8]

"""The tests marked ``gpu``, each a case: one that takes the process down does not hide the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks.gpu.environment import ROOT
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import FAILED, OK, SKIPPED, Case, Part, Result, Settings, result

OPTIONS = ("-m", "gpu and not slow", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")
LONGEST = 4000
"""Characters kept of a failure."""

TOGETHER = 10
"""Tests of a file that run in one process, at most: groups of them run beside each other."""


def files(settings: Settings) -> Sequence[str]:
    """Files that have such tests, relative to the repository."""
    found = (
        path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    )
    return settings.test_files or sorted(str(path.relative_to(ROOT)) for path in found)


def cases(settings: Settings) -> Sequence[Case]:
    """The tests that pytest finds, and the files that it finds none in, or cannot read: their run says why."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--continue-on-collection-errors", *OPTIONS]
    told = subprocess.run([*command, *files(settings)], cwd=ROOT, capture_output=True, text=True, check=False)
    found = []
    for file in files(settings):
        nodes = [line for line in told.stdout.splitlines() if line.startswith(f"{file}::")] or [file]
        found += [Case(node, f"{file} {number // TOGETHER}", {"node": node}) for number, node in enumerate(nodes)]
    return found


class Reports:
    """A plugin that keeps what pytest reports."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for a test's setup, call and teardown."""
        if report.failed:
            self.failed.append(str(report.longrepr))
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(str(report.longrepr))
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Called for each file and class."""
        if report.failed:
            self.failed.append(str(report.longrepr))
        elif report.skipped:
            self.skipped.append(str(report.longrepr))


def run(case: Mapping[str, Any], settings: Settings) -> Result:  # noqa: ARG001 - the tests know their device
    """Run one test in this process."""
    reports = Reports()
    code = pytest.main([*OPTIONS, case["node"]], plugins=[reports])
    if reports.failed:
        text = "\n".join(reports.failed)
        first = next((line for line in text.splitlines() if line.startswith("E ")), text[-200:])
        return result(FAILED, error=first.removeprefix("E").strip()[:300], report=text[-LONGEST:])
    if reports.skipped:
        return result(status=SKIPPED, reason="; ".join(reports.skipped)[:300])
    return result(status=OK) if reports.passed else result(FAILED, error=f"nothing ran: pytest ended with {code!r}")


def table(results: Mapping[str, Result]) -> str:
    """A row a file, and one for each test that did not pass."""
    counts: dict[str, list[Result]] = {}
    for key, one in results.items():
        counts.setdefault(key.partition("::")[0], []).append(one)
    rows = []
    for file, ones in counts.items():
        tally = [sum(one["status"] == status for one in ones) for status in (OK, SKIPPED)]
        rows.append((file, len(ones), *tally, len(ones) - sum(tally)))
    bad = [f"- `{key}`: {one['status']}: {one.get('error', '')}" for key, one in results.items() if one.get("faults")]
    return "\n".join([markdown_table(("file", "tests", "passed", "skipped", "not passed"), rows), "", *bad]).rstrip()


PART = Part(
    name="tests",
    title="Tests",
    about="The tests marked `gpu`.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=180,
    workers=12,
)

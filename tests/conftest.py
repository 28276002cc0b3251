"""Settings of all tests."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import logging
import os
from collections.abc import Iterator

import pytest
import torch

from lightning_remat.capture._torch import _module_guards
from lightning_remat.cost import _profile, _timing
from lightning_remat.planner import _curves, _plan_cache
from lightning_remat.solvers.common import _clock
from lightning_remat.solvers.portfolio import _auto, _smallest_peak
from tests.helpers.garbage import set_aside

# The tests of a GPU need no hypothesis: they run on machines that have torch and pytest and little else.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # Times say nothing about correctness, and the machines are noisy. The same examples every time: a failure is a failure.
    settings.register_profile("project", deadline=None, derandomize=True)
    settings.load_profile("project")

# Processes that share the tests share the cores too.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = max(1, torch.get_num_threads() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of the processes that tests start


# Pytest listens to loggers that hand nothing on, and for a listener of this one torch writes down each graph that it captures.
logging.getLogger("torch.__trace").propagate = True

TESTS_BETWEEN_SEARCHES = 500
_tests = itertools.count()


@pytest.fixture(autouse=True)
def _what_is_there_already_is_not_searched() -> None:
    """Modules and caches are millions of objects, and each measurement collects garbage, and looks for the tensors there are.

    What is there when a test begins is set aside, and looked at again now and then: that takes seconds.
    """
    if next(_tests) % TESTS_BETWEEN_SEARCHES == TESTS_BETWEEN_SEARCHES - 1:
        gc.unfreeze()
    set_aside()


@pytest.fixture(autouse=True)
def _nothing_is_captured_yet() -> None:
    """What other tests have captured of a shared function would be asked first whether it holds, and slow the capture down."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _guards_on_modules_are_asked_as_well(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where guards are taken to hold since nothing has changed that they read, they hold."""
    wrong: list[str] = []
    unchanged = _module_guards._Group.unchanged

    def asked_as_well(group: _module_guards._Group, module: torch.nn.Module) -> bool:
        found = unchanged(group, module)
        if found and not group.guards.check({group.name: module}):
            wrong.extend(group.guards.check_verbose({group.name: module}).verbose_code_parts)
        return found

    monkeypatch.setattr(_module_guards._Group, "unchanged", asked_as_well)
    yield
    assert not wrong


@pytest.fixture(scope="session", autouse=True)
def _costs_of_other_runs_stay_as_they_are(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The processes of one run of the tests share what they measure, and neither read nor write what the user has measured."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_REMAT_CACHE", str(folder / "costs"))
        yield


@pytest.fixture(autouse=True)
def _no_plans_of_other_runs(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test solves for itself. Measured costs are shared."""
    folder = tmp_path_factory.mktemp("plans")
    monkeypatch.setattr(_plan_cache, "cache_directory", lambda: folder)


SEARCHING = {
    "test_portfolio",
    "test_h100_graphs",
    "test_methods",
    "test_planner",
    "test_papers",
    "test_curve",
}
"""Modules in which what is found counts."""


@pytest.fixture(autouse=True)
def _searches_are_short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portfolio takes seconds for what may be a little cheaper; elsewhere any schedule within the budget will do."""
    if request.module.__name__.rpartition(".")[2] not in SEARCHING:
        monkeypatch.setattr(_auto, "usual_seconds", lambda problem: 0.03 + len(problem) / 10_000)
        monkeypatch.setattr(_smallest_peak, "improving_seconds", lambda problem: 0.01 + len(problem) / 10_000)
        monkeypatch.setattr(_curves, "POINTS", 5)


@pytest.fixture(autouse=True)
def _measurements_are_short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long ops take counts only in the tests of that; elsewhere caches stay full, and each op is timed in one pass."""
    if "cost" not in request.path.parts:
        monkeypatch.setattr(_timing, "NEIGHBOURS_BYTES", 4096)
        monkeypatch.setattr(_profile, "PASSES", 1)


@pytest.fixture(autouse=True)
def _searches_end_by_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test asks to take so many seconds does so much counted work: nothing that is found goes by the machine's speed."""
    limited = _clock.limited

    def by_work(time_limit: float, work_limit: float | None = None) -> contextlib.AbstractContextManager[float]:
        return limited(SLOWER * time_limit, time_limit if work_limit is None else work_limit)

    monkeypatch.setattr(_clock, "limited", by_work)


SLOWER = 30.0
"""How much slower than this clock a machine may be."""


@pytest.fixture(autouse=True)
def _global_settings_of_torch() -> Iterator[None]:
    """What a test (or Lightning, for ``Trainer(deterministic=True)``) sets for the whole process ends with the test."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)

"""What is kept between runs: whole files, in directories that are the user's own, and not more than so many."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_remat import Plan, _disk
from lightning_remat._disk import cache_directory, replace_file
from lightning_remat.capture import OpCall, TensorSpec
from lightning_remat.cost import CostCache, OpCost, _cache
from lightning_remat.planner import RematConfig, make_plan
from tests.helpers.graphs import unit_chain

CPU = torch.device("cpu")


def plan(ops: int) -> Plan:
    return make_plan(unit_chain(ops), RematConfig(budget=1.0, cost_model="unit"))


def test_who_reads_a_plan_while_it_is_written_reads_a_whole_one(tmp_path: Path) -> None:
    one, other = plan(4), plan(300)
    path = tmp_path / "plan.json"
    one.save(path)
    ended = threading.Event()

    def write() -> None:
        for _ in range(20):
            other.save(path)
            one.save(path)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    read = set()
    while not ended.is_set():
        read.add(len(Plan.load(path).graph.ops))
    writer.join()
    assert read <= {len(one.graph.ops), len(other.graph.ops)}
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_files_have_the_permissions_that_the_user_gives_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "one.json", "{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "one.json").stat().st_mode) == 0o640


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The directory for temporary files, for a user without a home."""
    for name in ("LIGHTNING_REMAT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _disk._among_temporary_files.cache_clear()
    yield tmp_path
    _disk._among_temporary_files.cache_clear()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="temporary files are a user's own on this system")
class TestTemporaryFiles:
    def test_a_directory_that_nobody_else_can_write(self, temporary: Path) -> None:
        folder = cache_directory()
        assert folder == temporary / f"lightning_remat-{os.getuid()}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        _disk._among_temporary_files.cache_clear()
        assert cache_directory() == folder

    @pytest.mark.parametrize("how", ["writable", "link", "file", "somebody else's"])
    def test_what_is_not_ours_is_not_used(
        self, temporary: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        theirs = temporary / f"lightning_remat-{os.getuid()}"
        if how == "link":
            (temporary / "elsewhere").mkdir(mode=0o700)
            theirs.symlink_to(temporary / "elsewhere")
        elif how == "file":
            theirs.touch()
        else:
            theirs.mkdir()
            theirs.chmod(0o777 if how == "writable" else 0o700)
        if how == "somebody else's":
            own = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: own + 1)
            theirs.rename(temporary / f"lightning_remat-{own + 1}")
        folder = cache_directory()
        assert folder.parent == temporary and folder.name not in {theirs.name, f"lightning_remat-{os.getuid()}"}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert "is not this user's alone" in caplog.text and str(folder) in caplog.text
        assert cache_directory() == folder


def mm(n: int) -> OpCall:
    one = TensorSpec.of(torch.empty(n, n))
    return OpCall(torch.ops.aten.mm.default, (one, one), {}, (one,))


def test_of_many_costs_those_measured_last_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_cache, "MOST", 3)
    cache = CostCache(tmp_path)
    for n in (1, 2, 3, 1, 4):
        cache.store(CPU, [mm(n)], [OpCost(float(n), 0)])
    assert list(cache.load(CPU)) == [mm(n).key for n in (3, 1, 4)]


def test_of_many_cost_files_those_written_last_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_cache, "MOST_FILES", 2)
    for n in range(3):
        old = tmp_path / f"costs-{n}.json"
        old.write_text("{}")
        os.utime(old, (n, n))
    cache = CostCache(tmp_path)
    cache.store(CPU, [mm(1)], [OpCost(1.0, 0)])
    assert {file.name for file in tmp_path.iterdir()} == {"costs-2.json", cache.path(CPU).name}

"""Solvers of other packages, through their entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_remat.errors import SolverError
from lightning_remat.solvers import Status, available, options_of, partitioners, solve
from lightning_remat.solvers.common import _registry
from lightning_remat.solvers.hiremate import _partition
from tests.helpers.graphs import unit_chain

SOLVERS = """
from lightning_remat.solvers import Answer, Status, register

def offered(problem, budget_bytes, *, deadline, effort=3):
    return Answer(problem.captured, Status.FEASIBLE, notes=(f"effort {effort}",))

@register("registers_itself")
def registers_itself(problem, budget_bytes, *, deadline):
    return Answer(problem.captured, Status.FEASIBLE)

def answers_nothing(problem, budget_bytes, *, deadline):
    return None

number = 7
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed packages: one whose solvers work or almost do, and one that cannot be imported."""
    install(
        tmp_path,
        "plugins_that_work",
        SOLVERS,
        [
            "offered",
            "registers_itself",
            "answers_nothing",
            "number",
            "missing",
            "offered_twice = plugins_that_work:offered",
        ],
    )
    twice = ["broken", "offered_twice = plugins_that_fail:twice"]
    install(tmp_path, "plugins_that_fail", "raise RuntimeError('no such device')\n", twice)
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("plugins_that_work", "plugins_that_fail"):  # what another test imported
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(_registry.METHODS, "own", dict(_registry.METHODS.own))


def install(folder: Path, package: str, source: str, names: list[str], group: str = "lightning_remat.solvers") -> None:
    folder.joinpath(f"{package}.py").write_text(source)
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [name if "=" in name else f"{name} = {package}:{name}" for name in names]
    metadata.joinpath("entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))


@pytest.mark.usefixtures("packages")
def test_an_offered_solver_is_listed_and_runs() -> None:
    assert {"offered", "registers_itself", "broken", "no_remat"} <= set(available())
    solution = solve(unit_chain(3), 100, "offered", effort=5)
    assert solution.status is Status.OPTIMAL  # verified and bounded as any other's
    assert solution.notes == ("effort 5",)
    assert options_of("offered") == {"effort": 3}
    assert solve(unit_chain(3), 100, "registers_itself").schedule is not None
    with pytest.raises(SolverError, match="has no option 'effrot'"):
        solve(unit_chain(3), 100, "offered", effrot=5)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            "broken",
            "'broken'.*plugins_that_fail:broken of plugins_that_fail, cannot be loaded: RuntimeError: no such device",
        ),
        ("missing", "plugins_that_work.* cannot be loaded: AttributeError"),
        ("number", "'number'.* is a int, not a function"),
        ("offered_twice", "offered 2 times: plugins_that_"),
        ("answers_nothing", "returned a NoneType, not an Answer"),
    ],
)
def test_a_broken_one_is_named_when_it_is_asked_for_and_hides_no_other(method: str, words: str) -> None:
    assert method in available()
    with pytest.raises(SolverError, match=words):
        solve(unit_chain(3), 100, method)
    assert solve(unit_chain(3), 100, "no_remat").schedule is not None
    assert solve(unit_chain(3), 100, "offered").schedule is not None


@pytest.mark.usefixtures("packages")
def test_what_nobody_asks_for_is_not_imported() -> None:
    available()
    solve(unit_chain(3), 100, "no_remat")
    assert "plugins_that_work" not in sys.modules
    with pytest.raises(SolverError, match="choose one of .*offered"):
        solve(unit_chain(3), 100, "nothing_of_the_kind")


def test_partitioners_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
from lightning_remat.solvers import Block

def halves(problem, *, top_size, block_size):
    middle = problem.boundary // 2
    return tuple(Block(tuple(nodes)) for nodes in (range(middle), range(middle, problem.boundary)))
"""
    install(tmp_path, "cuts", source, ["halves", "gone"], "lightning_remat.partitioners")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cuts", raising=False)
    monkeypatch.setattr(_partition.PARTITIONERS, "own", dict(_partition.PARTITIONERS.own))
    assert {"halves", "gone"} <= set(partitioners())
    solution = solve(unit_chain(8), 6, "rotor", partitioner="halves")
    assert solution.schedule is not None
    with pytest.raises(SolverError, match="'gone'.*cannot be loaded"):
        solve(unit_chain(8), 6, "rotor", partitioner="gone")

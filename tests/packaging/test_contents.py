"""What the packages hold is compared with the source tree."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.contents import BESIDE, METADATA, sdist_names, sources, wheel_names, wrong_with_sdist, wrong_with_wheel
from scripts.dist import copied
from tests.helpers.places import ROOT

EXPECTED = {"lightning_remat/__init__.py", "lightning_remat/py.typed", "callbacks/__init__.py"}
WHEEL = [
    "lightning_remat/__init__.py",
    "lightning_remat/py.typed",
    "lightning_remat/callbacks/__init__.py",
    *(f"lightning_remat-1.0.dist-info/{name}" for name in METADATA),
]
SDIST = [*EXPECTED, *BESIDE, "lightning_remat.egg-info/SOURCES.txt"]


def test_sources_are_all_of_the_package_and_the_linked_folder_once() -> None:
    found = sources(ROOT)
    assert {"lightning_remat/py.typed", "lightning_remat/solvers/offload/__init__.py", "callbacks/remat.py"} <= found
    assert not [name for name in found if name.startswith("lightning_remat/callbacks/")]


def test_right_packages_are_right() -> None:
    assert wrong_with_wheel(WHEEL, EXPECTED) == []
    assert wrong_with_sdist(SDIST, EXPECTED) == []


@pytest.mark.parametrize("missing", ["lightning_remat/callbacks/__init__.py", "lightning_remat/py.typed"])
def test_what_a_wheel_lacks(missing: str) -> None:
    assert wrong_with_wheel([one for one in WHEEL if one != missing], EXPECTED) == [f"lacks {missing}"]


@pytest.mark.parametrize("junk", ["tests/test_it.py", "lightning_remat/__pycache__/a.pyc", "callbacks/__init__.py"])
def test_what_does_not_belong_into_a_wheel(junk: str) -> None:
    assert wrong_with_wheel([*WHEEL, junk], EXPECTED) == [f"has {junk}, which does not belong there"]


def test_what_does_not_belong_into_an_sdist() -> None:
    assert wrong_with_sdist([*SDIST, "tests/test_it.py"], EXPECTED) == [
        "has tests/test_it.py, which does not belong there"
    ]
    assert wrong_with_sdist([*SDIST, "callbacks/__init__.py"], EXPECTED) == ["has callbacks/__init__.py 2 times"]
    assert wrong_with_sdist([one for one in SDIST if one != "LICENSE"], EXPECTED) == ["lacks LICENSE"]


def test_names_are_read_of_archives(tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as zipped:
        zipped.writestr("lightning_remat/", "")
        zipped.writestr("lightning_remat/__init__.py", "")
    with tarfile.open(sdist, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a-1.0/PKG-INFO"), io.BytesIO())
    assert wheel_names(wheel) == ["lightning_remat/__init__.py"]
    assert sdist_names(sdist) == ["PKG-INFO"]


def test_a_copy_has_no_git_and_keeps_the_link(tmp_path: Path) -> None:
    copy = copied(ROOT, tmp_path / "copy")
    assert not (copy / ".git").exists() and not list(copy.rglob("__pycache__"))
    assert (copy / "lightning_remat" / "callbacks").is_symlink()
    assert sources(copy) == sources(ROOT)

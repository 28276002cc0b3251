"""The checklist of a release refuses what is not ready, each line for its own reason."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_remat import __version__
from scripts import release
from tests.helpers.places import ROOT

WHEEL = "lightning_remat-1.2.0-py3-none-any.whl"
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-01-31

- Something.

## [1.1.0] - 2025-12-31

- Something else.
"""


def git(root: Path, *command: str) -> None:
    person = ["-c", "user.name=A person", "-c", "user.email=person@localhost"]
    subprocess.run(["git", *person, *command], cwd=root, capture_output=True, check=True)


def commit(root: Path, *tags: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--allow-empty", "--message", "Something")
    for tag in tags:
        git(root, "tag", tag)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A source tree that is ready: tagged, with its packages."""
    (tmp_path / "lightning_remat").mkdir()
    (tmp_path / "lightning_remat" / "_version.py").write_text('"""The release."""\n\n__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text("title: A title\nversion: 1.2.0\n")
    (tmp_path / ".gitignore").write_text("dist/\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "v1.2.0")
    (tmp_path / "dist").mkdir()
    with zipfile.ZipFile(tmp_path / "dist" / WHEEL, "w") as wheel:
        wheel.write(tmp_path / "lightning_remat" / "_version.py", "lightning_remat/_version.py")
    (tmp_path / "dist" / "lightning_remat-1.2.0.tar.gz").touch()
    return tmp_path


def test_what_is_ready_passes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--root", str(root)]) == 0
    said = capsys.readouterr().out
    assert said.count("[x]") == len(release.LIST) and "[ ]" not in said


def dirty(root: Path) -> None:
    (root / "new.py").touch()


def without_heading(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("[1.2.0]", "[1.3.0]"))
    commit(root)
    git(root, "tag", "--force", "v1.2.0")


def without_date(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("[1.2.0] - 2026-01-31", "[1.2.0]"))
    commit(root)
    git(root, "tag", "--force", "v1.2.0")


def without_lines(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("- Something.\n", ""))
    commit(root)
    git(root, "tag", "--force", "v1.2.0")


def unreleased(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("## [Unreleased]\n", "## [Unreleased]\n\n- Not yet.\n"))
    commit(root)
    git(root, "tag", "--force", "v1.2.0")


def cited_otherwise(root: Path) -> None:
    (root / "CITATION.cff").write_text("version: 1.1.0\n")
    commit(root)
    git(root, "tag", "--force", "v1.2.0")


def untagged(root: Path) -> None:
    git(root, "tag", "--delete", "v1.2.0")


def tagged_otherwise(root: Path) -> None:
    git(root, "tag", "--delete", "v1.2.0")
    git(root, "tag", "v1.3.0")


def tagged_before(root: Path) -> None:
    (root / "later.py").touch()
    commit(root)


def other_wheel(root: Path) -> None:
    (root / "dist" / WHEEL).rename(root / "dist" / WHEEL.replace("1.2.0", "1.1.0"))


def of_other_code(root: Path) -> None:
    (root / "lightning_remat" / "later.py").touch()
    commit(root)
    git(root, "tag", "--force", "v1.2.0")


def two_wheels(root: Path) -> None:
    (root / "dist" / WHEEL.replace("1.2.0", "1.1.0")).touch()


def not_built(root: Path) -> None:
    for path in (root / "dist").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (dirty, "new.py"),
        (without_heading, "no heading '## [1.2.0]"),
        (without_date, "no heading '## [1.2.0]"),
        (without_lines, "nothing under its heading"),
        (unreleased, "under 'Unreleased'"),
        (cited_otherwise, "CITATION.cff has version 1.1.0"),
        (untagged, "no tag"),
        (tagged_otherwise, "has v1.3.0: it should have v1.2.0"),
        (tagged_before, "no tag"),
        (other_wheel, "lightning_remat-1.1.0-py3-none-any.whl"),
        (of_other_code, "has another lightning_remat/later.py"),
        (two_wheels, "lightning_remat-1.1.0-py3-none-any.whl"),
        (not_built, "no packages"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_not_ready_is_refused(
    root: Path, spoil: Callable[[Path], None], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(root)
    assert release.main(["--root", str(root)]) == 1
    refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[ ]")]
    assert len(refused) == 1 and says in refused[0]


def test_the_version_is_read_as_python_reads_it() -> None:
    assert release.version(ROOT) == __version__
    assert release.citation(ROOT)

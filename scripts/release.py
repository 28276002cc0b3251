"""The checklist of a release: what a machine can check before the tag is pushed and the packages are uploaded.

    python -m scripts.release            on a clean checkout, with the tag on it and `make dist ARGS=--full` done

Each line of the list is printed with what was found, and the exit code is 1 where one does not hold. Nothing is changed,
tagged or uploaded.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.contents import PACKAGE, different

ROOT = Path(__file__).resolve().parents[1]
DATED = r"^## \[{version}\] - \d{{4}}-\d{{2}}-\d{{2}}$"


class NotReadyError(Exception):
    """What a line of the list has found to be amiss."""


def version(root: Path) -> str:
    """The one that the source tree says."""
    tree = ast.parse((root / PACKAGE / "_version.py").read_text())
    values = [ast.literal_eval(one.value) for one in tree.body if isinstance(one, ast.Assign)]
    return str(values[0])


def clean_tree(root: Path) -> str:
    """Nothing changed, and nothing new that git does not ignore."""
    changed = _git(root, "status", "--porcelain").splitlines()
    if changed:
        raise NotReadyError(f"commit or remove what is changed: {', '.join(line[3:] for line in changed[:5])}")
    return "nothing is changed"


def changelog(root: Path) -> str:
    """A dated heading of this version, with something under it, and nothing left under "Unreleased"."""
    release = version(root)
    sections = re.split(r"^(?=## )", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    dated = re.compile(DATED.format(version=re.escape(release)))
    ours = [section for section in sections if dated.match(section.partition("\n")[0])]
    if not ours:
        raise NotReadyError(f"CHANGELOG.md has no heading '## [{release}] - YYYY-MM-DD'")
    if not ours[0].partition("\n")[2].strip():
        raise NotReadyError(f"CHANGELOG.md says nothing under its heading of {release}")
    left = [section for section in sections if section.startswith("## [Unreleased]")]
    if left and left[0].partition("\n")[2].strip():
        raise NotReadyError(f"CHANGELOG.md has lines under 'Unreleased': move them under {release}")
    return f"CHANGELOG.md tells of {release}"


def citation(root: Path) -> str:
    """The same version where it is cited from."""
    found = re.search(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if found is None or found[1] != version(root):
        raise NotReadyError(f"CITATION.cff has version {found[1] if found else 'none'}, not {version(root)}")
    return f"CITATION.cff has {found[1]}"


def tag(root: Path) -> str:
    """One tag of a version on the commit that is checked out, and it is this version's."""
    expected = f"v{version(root)}"
    here = [one for one in _git(root, "tag", "--points-at", "HEAD").split() if re.match(r"v\d", one)]
    if here != [expected]:
        raise NotReadyError(f"the commit has {' and '.join(here) or 'no tag'}: it should have {expected}")
    return f"the commit is tagged {expected}"


def packages(root: Path) -> str:
    """In ``dist`` one wheel and one sdist, of this version, and in the wheel the code of this source tree."""
    release = version(root)
    wheel = f"{PACKAGE}-{release}-py3-none-any.whl"
    expected = [wheel, f"{PACKAGE}-{release}.tar.gz"]
    found = sorted(path.name for pattern in ("*.whl", "*.tar.gz") for path in (root / "dist").glob(pattern))
    if found != sorted(expected):
        raise NotReadyError(f"dist has {', '.join(found) or 'no packages'}: it should have {' and '.join(expected)}")
    other = different(root / "dist" / wheel, root)
    if other:
        raise NotReadyError(f"{wheel} has another {other[0]} than the source tree: run `make dist ARGS=--full`")
    return f"dist has {' and '.join(expected)}, with the code of the source tree"


LIST: tuple[Callable[[Path], str], ...] = (clean_tree, changelog, citation, tag, packages)


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str] | None = None) -> int:
    """The list, a line each; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the source tree")
    options = parser.parse_args(arguments)
    wrong = 0
    for check in LIST:
        try:
            print(f"[x] {check(options.root)}")
        except NotReadyError as error:
            wrong += 1
            print(f"[ ] {error}")
    if not wrong:
        print(
            "\nNow, by hand: `make ci` on this commit; `python -m scripts.matrix`; push the tag; `twine upload dist/*`;\n"
            "then `pip install` in a new environment, and `lightning-remat doctor`."
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

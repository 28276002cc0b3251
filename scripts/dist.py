"""Builds the wheel and the sdist from a copy without git, and checks them: make dist.

    python -m scripts.dist           within a minute: metadata, contents, and the wheel beside what is installed here
    python -m scripts.dist --full    in minutes: wheel and sdist each in an environment of its own, dependencies and all

The wheel is built from the sdist, so that what one lacks the other lacks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

from scripts.contents import PACKAGE, sdist_names, sources, wheel_names, wrong_with_sdist, wrong_with_wheel

ROOT = Path(__file__).resolve().parents[1]
SMOKE = ROOT / "scripts" / "smoke.py"


class DistError(Exception):
    """What is wrong with a package, or with how it is built."""


def run(*command: str | Path, folder: Path) -> None:
    """A command, quiet unless it fails.

    Raises:
        DistError: with what it printed.
    """
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise DistError(f"{' '.join(map(str, command))} failed:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")


def copied(root: Path, to: Path) -> Path:
    """The source tree without git and without what git does not keep: as a download of it would be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)
    return to


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of a source tree, the only ones in ``out`` then, with what is wrong with them raised."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, tree, folder=tree)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, folder=tree)
    expected = sources(tree)
    wrong = [f"{wheel.name} {line}" for line in wrong_with_wheel(wheel_names(wheel), expected)]
    wrong += [f"{sdist.name} {line}" for line in wrong_with_sdist(sdist_names(sdist), expected)]
    if wrong:
        raise DistError("\n".join(wrong))
    return wheel, sdist


def try_beside(wheel: Path, folder: Path) -> None:
    """The wheel in an environment that has its dependencies from this one, and not the source tree."""
    python = _environment(folder)
    # A line of a .pth file is a folder to import from; its own .pth files, such as that of an editable install, are not read.
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", "--force-reinstall", wheel, folder=folder)
    run(python, "-P", SMOKE, folder=folder)


def try_alone(package: Path, folder: Path, torch: str) -> None:
    """A wheel or an sdist in an environment of its own, with all that it asks for."""
    python = _environment(folder)
    for requirement in (torch, package):
        run(python, "-m", "pip", "install", "--quiet", requirement, folder=folder)
    run(python, "-m", "pip", "check", folder=folder)
    run(python, "-P", SMOKE, folder=folder)


def _environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def main(arguments: list[str] | None = None) -> int:
    """Build, check, say so; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the packages go (dist)")
    parser.add_argument("--full", action="store_true", help="install each alone, with all that it asks for")
    parser.add_argument("--torch", default="torch==2.13.0", help="what is installed first then (torch==2.13.0)")
    options = parser.parse_args(arguments)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:5.1f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        try:
            wheel, sdist = build(copied(ROOT, folder / PACKAGE), options.out.resolve())
            say(f"built {wheel.name} and {sdist.name}: metadata and contents are as they should be")
            if options.full:
                for package in (wheel, sdist):
                    try_alone(package, folder / f"alone-{package.suffix[1:]}", options.torch)
                    say(f"{package.name} works, installed alone")
            else:
                try_beside(wheel, folder / "beside")
                say(f"{wheel.name} works")
        except DistError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

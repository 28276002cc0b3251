"""Runs a short selection of tests with old and new releases of what the package stands on, and says what ran.

    python -m scripts.matrix --have /path/to/venv /path/to/another    torches that are installed there
    python -m scripts.matrix --install torch==2.13.0                  and one that pip installs (it may bring gigabytes of CUDA)

Each row is an environment of its own, made of a Python that this machine has; a torch of `--have` is imported from there. What
is not run is in the table too, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "results" / "matrix-cpu.md"

PYTHONS = ("3.11", "3.12", "3.13", "3.14")

BESIDE = {
    # Lightning 2.5.0's own RichProgressBar does not end with rich 14.1 and newer.
    "oldest": ("lightning==2.5.0", "transformers==4.57.*", "rich<14.1"),
    "newest": ("lightning", "transformers==5.24.*"),
}
TESTS = (
    "callbacks/test_callback.py",
    "capture/test_versions.py",
    "capture/test_masks.py",
    "strategies",
    "test_budget.py",
)
NAMES = ("torch", "lightning", "transformers", "numpy")
COLUMNS = ("Python", *NAMES, "passed", "skipped", "failed", "note")


@dataclasses.dataclass(frozen=True)
class Torch:
    """A torch for one Python: in the folder ``site`` that it is imported from, or still to be installed."""

    python: str
    release: str
    site: Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One combination: the versions that were found, and what became of the tests."""

    python: str
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def cells(self) -> list[str]:
        """In the order of :data:`COLUMNS`."""
        counts = [str(self.counts.get(name, 0)) if self.counts else "" for name in ("passed", "skipped", "failed")]
        return [self.python, *(self.versions.get(name, "") for name in NAMES), *counts, self.note]


def interpreter(version: str) -> str | None:
    """A Python of this machine: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for one in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        asked = one and subprocess.run([one, "--version"], capture_output=True, text=True, check=False)
        if asked and asked.stdout.startswith(
            f"Python {version}."
        ):  # pyenv's stand-in on the path may have none behind it
            return str(one)
    return None


def found(have: Iterable[Path], install: Iterable[str]) -> list[Torch]:
    """The torches that are there for some Python, and those that may be installed for this one."""
    there = [
        Torch(site.parent.name.removeprefix("python"), torch.stem.split("-")[1], site)
        for venv in have
        for site in venv.resolve().glob("lib/python3.*/site-packages")
        for torch in site.glob("torch-*.dist-info")
    ]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [*there, *(Torch(python, one) for one in install)]


def rows(torches: list[Torch]) -> Iterator[Row]:
    """Run what can be run, row by row, and say of the rest why not."""
    for version in PYTHONS:
        python = interpreter(version)
        if python is None:
            yield Row(version, note="not run: not on this machine")
            continue
        here = [torch for torch in torches if torch.python == version]
        if not here:
            yield Row(version, note=f"tests not run: no torch for it here; {compiles(python)}")
        for torch, beside in itertools.product(here, BESIDE.values()):
            with tempfile.TemporaryDirectory() as folder:
                yield run(python, torch, beside, Path(folder).resolve())


def compiles(python: str) -> str:
    """Whether that Python takes every file of the package."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        command = [python, "-W", "error", "-m", "compileall", "-q", "lightning_remat", "callbacks"]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return f"failed: does not compile ({_last(ended.stdout)})" if ended.returncode else "all files compile"


def run(python: str, torch: Torch, beside: Iterable[str], folder: Path) -> Row:
    """Make the environment and run the tests in it."""
    own = str(folder / "bin" / "python")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LIGHTNING_REMAT_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    try:
        _call([python, "-m", "venv", str(folder)])
        pip = [own, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        if torch.site is not None:
            (folder / torch.site.relative_to(torch.site.parents[2]) / "torch.pth").write_text(f"{torch.site}\n")
        else:
            _call([*pip, torch.release])
        _call([*pip, *beside, *requirements_of_tests()])
        versions = _call([own, "-c", _VERSIONS, *NAMES]).split()
    except subprocess.CalledProcessError as error:
        return Row(
            torch.python, {"torch": torch.release}, note=f"failed: could not be installed ({_last(error.stdout)})"
        )
    tests = ["-m", "not long and not slow and not gpu", *(f"tests/{one}" for one in TESTS)]
    command = [own, "-P", "-m", "pytest", "-q", *tests]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", ended.stdout, re.MULTILINE)
    counts = counted(ended.stdout)
    note = ", ".join(failed) if failed else "" if counts else f"failed: {_last(ended.stdout + ended.stderr)}"
    return Row(torch.python, dict(zip(NAMES, versions, strict=True)), counts, note)


_VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


def requirements_of_tests() -> list[str]:
    """What the tests that are run import, beside torch, lightning and transformers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [one for one in project["dependencies"] if not re.match(r"(torch|lightning)\b", one)]
    tools = [
        one
        for one in project["optional-dependencies"]["test"]
        if re.match(r"(pytest|hypothesis|jsonargparse|tensorboard)\b", one)
    ]
    return [*needed, *project["optional-dependencies"]["pictures"], *tools]


def counted(printed: str) -> dict[str, int]:
    """The numbers of pytest's last line; none where there is no such line."""
    last = (printed.strip().splitlines() or [""])[-1]
    found = {name: int(number) for number, name in re.findall(r"(\d+) (passed|skipped|failed|error)", last)}
    if "error" in found:
        found["failed"] = found.get("failed", 0) + found.pop("error")
    return found


def markdown(table: list[Row]) -> str:
    """The table, as it is kept with the results."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *(row.cells for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def page(table: list[Row]) -> str:
    """What is kept with the results."""
    tests = ", ".join(f"`tests/{one}`" for one in TESTS)
    text = f"Written by `python -m scripts.matrix`, on the CPU. Of {tests} all tests are run that take no longer than seconds."
    return f"# Releases that the tests ran with\n\n{text}\n\n{markdown(table)}"


def _call(command: list[str]) -> str:
    """What a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else "nothing was printed"


def main(arguments: list[str] | None = None) -> int:
    """All rows; returns 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--have", type=Path, nargs="+", default=[], help="environments that have torch")
    parser.add_argument("--install", nargs="+", default=[], help="requirements of torch that pip installs")
    parser.add_argument("--out", type=Path, default=TABLE, help=f"where the table goes ({TABLE.relative_to(ROOT)})")
    options = parser.parse_args(arguments)
    table: list[Row] = []
    for row in rows(found(options.have, options.install)):
        print(" | ".join(row.cells), flush=True)
        table.append(row)
        options.out.write_text(page(table))  # after each: what has run is kept, whenever it is stopped
    return 1 if any(row.counts.get("failed") or "failed" in row.note for row in table) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The rooms of the package, and the arrows between them."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import tomllib

import pytest

from lightning_remat.capture._torch._versions import LATER_NAMES, NAMES
from tests.helpers.private_names import ROOT, SOURCES, foreign_attributes, private_names, words

TORCH_PACKAGE = "lightning_remat/capture/_torch/"
VERSIONS = f"{TORCH_PACKAGE}_versions.py"
LIGHTNING = "lightning_remat/callbacks/lightning_internals.py"

OF_OBJECTS = {
    *("_expr", "_orig_mod"),  # of torch, where only objects have them: SymNode, OptimizedModule
    *("_fsdp_param_group", "_modules", "_orig_size", "_state_ctx"),  # likewise: what `fully_shard` keeps of a unit
    "_exit",  # of os
}
"""Private attributes that are nobody's in `NAMES`."""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._dynamo.config as c", ["torch._dynamo.config"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch._dynamo import config\nconfig.patch()", ["torch._dynamo.config.patch"]),
        ("from torch import _C", ["torch._C"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("import torch\nx = torch._C._y", ["torch._C._y"]),
        ("import torch.fx\nx = torch.amp.autocast_mode._enter", ["torch.amp.autocast_mode._enter"]),
        ("import torch\naten = torch.ops.aten\naten._to_copy.default", ["torch.ops.aten._to_copy.default"]),
        ("from torch.autograd import profiler as p\ngetattr(p, '_on', False)", ["torch.autograd.profiler._on?"]),
        ("from functorch.compile import aot_function", ["functorch.compile.aot_function"]),
        ("importlib.import_module('torch._inductor')", ["torch._inductor"]),
        ("import torch.nn\nfrom torch.fx import Graph\ntorch.nn.Module", []),
        ("import torch\ntorch.__version__", []),
        ("import torchmetrics._x", []),
    ],
)
def test_private_names_are_recognized(source: str, found: list[str]) -> None:
    assert sorted(private_names(source)) == found


def test_private_torch_lives_in_one_package() -> None:
    """Ops (``torch.ops.aten._to_copy``) aside: what a graph is made of is read everywhere."""
    assert len(SOURCES) > 10
    found = {path: [one for one in private_names(text) if ".ops." not in one] for path, text in SOURCES.items()}
    inside = {path: found.pop(path) for path in SOURCES if path.startswith(TORCH_PACKAGE)}
    bare = [path for path, names in inside.items() if not names and not path.endswith("/__init__.py")]
    assert bare == [VERSIONS], "nothing private in there"
    found = {path: names for path, names in found.items() if names}
    assert not found, f"private torch belongs into {TORCH_PACKAGE}: {found}"


def test_all_private_names_of_torch_are_listed() -> None:
    """So that it is known, on a release that is not, which are gone."""
    every = [*NAMES.items(), *LATER_NAMES.items()]
    listed = {f"{place}.{name}".rstrip(".") for place, names in every for name in names.split() or [""]}
    used = {name for text in SOURCES.values() for name in private_names(text) if not name.endswith("?")}
    used = {re.sub(r"^(torch\.ops\.aten)\.\w+\.\w+\.(_\w+).*", r"\1.add.Tensor.\2", name) for name in used}
    missing = {name for name in used if not any(one == name or one.startswith(f"{name}.") for one in listed)}
    assert not missing, f"list these in {VERSIONS}: {sorted(missing)}"
    parts = {part for name in listed for part in name.split(".")}
    of_objects = {path: names - parts - OF_OBJECTS for path, names in foreign_attributes().items() if path != LIGHTNING}
    assert not {path: names for path, names in of_objects.items() if names}, f"list these in {VERSIONS}"
    there = set().union(*(words(text) for path, text in SOURCES.items() if path != VERSIONS))
    unused = {name for name in listed if not set(name.split(".")[-1:]) <= there}
    assert not unused, f"nothing uses these of {VERSIONS}: {sorted(unused)}"


def test_private_lightning_lives_in_one_file() -> None:
    found = {path: private_names(text, "lightning") for path, text in SOURCES.items()}
    assert {path for path, names in found.items() if names} == {LIGHTNING}
    assert foreign_attributes()[LIGHTNING], "others' private attributes, which no other file may read: see above"


def test_the_contracts_between_rooms_hold() -> None:
    pytest.importorskip("importlinter")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_picture_of_the_house_is_drawn_from_it() -> None:
    pytest.importorskip("grimp")
    drawn = runpy.run_path(str(ROOT / "docs" / "house.py"))["picture"]()
    assert drawn == (ROOT / "docs" / "house.svg").read_text(encoding="utf-8"), "run python docs/house.py"
    assert drawn.count("<rect") > 15 and drawn.count('<path d="M') > 20


def test_graphs_are_solved_without_torch() -> None:
    script = """
import sys, types
package = types.ModuleType("lightning_remat")  # without what its own __init__ offers beside
package.__path__ = ["lightning_remat"]
sys.modules.update({"lightning_remat": package, "torch": None, "lightning": None})
from lightning_remat.solvers import available, solve
from tests.helpers.graphs import unit_chain
assert solve(unit_chain(3), 100).schedule is not None, available()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_library_never_prints() -> None:
    calls = {
        path
        for path, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert calls == set()


def test_every_folder_of_the_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "lightning_remat").glob("**/__init__.py")}
    assert set(listed) == {".".join(folder.parts) for folder in folders} | {"lightning_remat.callbacks"}

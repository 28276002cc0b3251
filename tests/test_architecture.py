"""The rooms of the package, and the arrows between them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_remat"
TORCH_MODULE = "lightning_remat/capture/_torch.py"
SOURCES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "callbacks").glob("*.py")})


def is_private(name: str) -> bool:
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
    return parts[0] == "functorch" or (parts[0] == "torch" and hidden)


def private_torch_imports(source: str) -> Iterator[str]:
    """Every way in: ``import torch._x``, ``from torch import _x``, ``torch._x`` in passing, and imports by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if is_private(name):
                yield name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and is_private(str(argument.value)):
                yield str(argument.value)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._dynamo.config as c", ["torch._dynamo.config"]),
        ("from torch._dynamo import config", ["torch._dynamo.config"]),
        ("from torch import _C", ["torch._C"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("import torch\nx = torch._C._y", ["torch._C"]),
        ("from functorch.compile import aot_function", ["functorch.compile.aot_function"]),
        ("importlib.import_module('torch._inductor')", ["torch._inductor"]),
        ("import torch.nn\nfrom torch.fx import Graph\ntorch.nn.Module", []),
        ("import torch\ntorch.__version__", []),
        ("import torchmetrics._x", []),
    ],
)
def test_private_imports_are_recognized(source: str, found: list[str]) -> None:
    assert list(private_torch_imports(source)) == found


def test_private_torch_lives_in_one_module() -> None:
    assert len(SOURCES) > 10
    found = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if (names := sorted(set(private_torch_imports(path.read_text(encoding="utf-8")))))
    }
    found.pop(TORCH_MODULE, None)
    assert not found, f"private torch belongs into {TORCH_MODULE}: {found}"


def test_the_contracts_between_rooms_hold() -> None:
    pytest.importorskip("importlinter")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert calls == set()

"""What the package's sources use of torch that is private, found by reading them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.helpers.places import ROOT

PACKAGE = ROOT / "lightning_remat"
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "callbacks").glob("*.py")})
}
"""By path. (``callbacks`` is a link there.)"""


def is_private(name: str, library: str = "torch") -> bool:
    parts = name.split(".")
    hidden = any(_is_hidden(part) for part in parts[1:])
    return (library == "torch" and parts[0] == "functorch") or (parts[0] == library and hidden)


def _is_hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(source: str, library: str = "torch") -> set[str]:
    """By every way in: imports, imports by name, and what is read of what was imported (``torch._x.y``, under other names too).

    Names that are asked for with a default (``getattr``, ``hasattr``) end in a question mark. Of a name and what is read of
    it, the latter alone is given.
    """
    tree = ast.parse(source)
    known = dict(_imported(tree))
    for node in tree.body:  # aten = torch.ops.aten
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = _dotted(node.value, known)
            if name is not None:
                known[node.targets[0].id] = name
    found = {name for name in (*known.values(), *_read(tree, known)) if is_private(name, library)}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names in a source, and what they stand for; a dotted name for what is imported, and not named, itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name
                if alias.asname is None:
                    yield alias.name.partition(".")[0], alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _read(tree: ast.Module, known: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        name = _dotted(node, known)
        if name is not None:
            yield name
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called, last = ast.unparse(node.func), node.args[-1] if len(node.args) == 1 else node.args[1]
        if not isinstance(last, ast.Constant):
            continue
        if called.endswith("import_module"):
            yield str(last.value)
        elif called in ("getattr", "hasattr") and (owner := _dotted(node.args[0], known)) is not None:
            yield f"{owner}.{last.value}" + "?" * (called == "hasattr" or len(node.args) == 3)


def _dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    """What an expression stands for, if it is a name, or read of one, that was imported."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, known)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def foreign_attributes() -> dict[str, set[str]]:
    """Private attributes that are read of objects and that no source of the package defines, by file."""
    trees = {path: ast.parse(text) for path, text in SOURCES.items()}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _defined(node)}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        known = dict(_imported(tree))
        for node in ast.walk(tree):
            read = isinstance(node, ast.Attribute) and _is_hidden(node.attr) and node.attr not in own
            if read and _dotted(node, known) is None:
                found.setdefault(path, set()).add(node.attr)
    return found


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).rpartition(".")[2]


def words(source: str) -> set[str]:
    """Identifiers and string constants of a source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found

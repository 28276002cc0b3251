"""The code of README and of each page runs as it stands, and its command lines are read by the real parser."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from pathlib import Path

import pytest

from lightning_remat.cli._main import _parser
from lightning_remat.solvers.common import _registry
from lightning_remat.solvers.hiremate import _partition
from tests.docs.blocks import Block, blocks, commands, pages
from tests.helpers.places import ROOT

CODE = {page: [block for block in blocks(page) if block.language == "python"] for page in pages()}
COMMANDS = {page: list(commands(page)) for page in pages()}
LONG = {f"docs/howto/{name}.md" for name in ("batch-size", "huggingface", "lengths", "lora", "speed")}
"""Pages whose code takes more than about three seconds."""


def run(page: str) -> None:
    """Run the blocks of a page one after the other, as one module that begins with nothing."""
    module = types.ModuleType("__page__")
    sys.modules[module.__name__] = module
    try:
        for block in CODE[page]:
            if block.runs:
                tree = ast.parse(block.text, filename=str(ROOT / page))
                ast.increment_lineno(tree, block.line - 1)
                exec(compile(tree, str(ROOT / page), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]


def names(block: Block) -> None:
    """Import what a block imports."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for one in node.names:
                importlib.import_module(one.name)
        elif isinstance(node, ast.ImportFrom):
            home = importlib.import_module(str(node.module))
            for one in node.names:
                assert hasattr(home, one.name), f"{node.module} has no {one.name}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page in LONG else ())
        for page, found in CODE.items()
        if any(block.runs for block in found)
    ],
)
def test_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path / "cache"))
    for registry in (_registry.METHODS, _partition.PARTITIONERS):  # of what a page adds nothing stays
        monkeypatch.setattr(registry, "own", dict(registry.own))
    run(page)


@pytest.mark.parametrize("page", [page for page, found in CODE.items() if not all(block.runs for block in found)])
def test_what_cannot_run_here_names_what_there_is(page: str) -> None:
    for block in CODE[page]:
        if not block.runs:
            compile(block.text, page, "exec")
            names(block)


@pytest.mark.parametrize("page", [page for page, found in COMMANDS.items() if found])
def test_commands_are_what_the_parser_reads(page: str) -> None:
    for arguments in COMMANDS[page]:
        _parser().parse_args(arguments)


def test_there_is_code_to_run() -> None:
    assert sum(block.runs for found in CODE.values() for block in found) > 25
    assert sum(map(len, COMMANDS.values())) > 10

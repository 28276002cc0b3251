"""What the site is made of beside its pages: links into the repository, options, pictures."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from lightning_remat.callbacks import RematCallbackConfig
from tests.helpers.places import ROOT

DRAWN = ("no_remat", "chen", "griewank", "kumar", "kusumoto", "budget")
"""Pictures of methods that look at no clock, and start no other program."""


@pytest.fixture(scope="module")
def generated() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "generated.py"))


@pytest.mark.parametrize(
    ("page", "link", "led"),
    [
        ("gpu", "[a](../benchmarks/results/gpu/README.md)", "[a](generated/results/gpu.md)"),
        ("howto/devices", "[a](../../examples/ddp/README.md#x)", "[a](../generated/examples/ddp.md#x)"),
        ("results", "[a](../examples/ddp)", "[a](generated/examples/ddp.md)"),
        ("howto/budgets", "[a](batch-size.md)", "[a](batch-size.md)"),
        ("gpu", "[a](../tests/data/h100)", "a"),
        ("gpu", "[a](https://lightning.ai)", "[a](https://lightning.ai)"),
        ("gpu", "![a](../benchmarks/results/peers-headline.png)", "![a](../benchmarks/results/peers-headline.png)"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, link: str, led: str, generated: dict[str, Any]) -> None:
    assert generated["rewritten"](link, page) == led


def test_each_option_is_described(generated: dict[str, Any]) -> None:
    text = "\n".join(generated["_options"]())
    assert all(f"| `{name}` |" in text for name in RematCallbackConfig.__dataclass_fields__)


def test_pictures_are_as_they_are_drawn() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for name in DRAWN:
        if name == "budget":
            svg = drawing["budget_picture"]()
        else:
            method, outputs, title = drawing["SCHEDULES"][name]
            graph = drawing["chain"]()
            svg = drawing["picture"](graph, drawing["solve"](graph, outputs, method).schedule, title)
        there = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert svg == there, f"run python docs/pictures.py ({name})"

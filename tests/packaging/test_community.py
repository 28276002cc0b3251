"""What a host shows to those who report or contribute says what it must, and names commands that exist."""

from __future__ import annotations

import pytest
import yaml

from lightning_remat.cli._main import main
from tests.helpers.places import ROOT

TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_are_what_a_host_reads(name: str) -> None:
    form = yaml.safe_load((TEMPLATES / f"{name}.yml").read_text())
    assert form["name"] and form["description"]
    fields = [one["id"] for one in form["body"]]
    assert len(fields) == len(set(fields)) >= 3
    assert all(one["attributes"]["label"] for one in form["body"])


def test_a_bug_comes_with_what_the_doctor_says(capsys: pytest.CaptureFixture[str]) -> None:
    form = yaml.safe_load((TEMPLATES / "bug.yml").read_text())
    asked = {one["id"]: one for one in form["body"]}["doctor"]
    assert "lightning-remat doctor" in asked["attributes"]["label"] and asked["validations"]["required"]
    assert main(["doctor", "--help"]) == 0
    assert "pasted where help is" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_private_reports_have_a_place_and_no_invented_address(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "private security advisory" in text and "@" not in text

"""The doctor: what it says of this machine, and that it sees what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_remat import _doctor
from lightning_remat.capture._torch import Exchange
from lightning_remat.cli import main

CPU = torch.device("cpu")


def test_all_is_well_here(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    assert main(["doctor", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert (
        f"torch {torch.__version__}" in said
        and "42 gradients and 3 buffers are bit for bit those of eager mode" in said
    )
    assert "measured" in said and "predicted" in said and said.rstrip().endswith("all is well") and "(!)" not in said
    assert torch.equal(torch.get_rng_state(), before)


def test_only_looking_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_doctor, "_tested", lambda _device: pytest.fail("it was run"))
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path / "none yet"))
    found = {one.about: one for one in _doctor.examine(CPU, test=False)}
    assert f"{tmp_path / 'none yet'}, 0 files" in found["cache"].text and not found["cache"].wrong


def test_what_is_wrong_is_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(_doctor.os, "access", lambda *_: False)
    with torch._dynamo.config.patch(disable=True):
        assert main(["doctor", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "nothing is planned (!)" in said and "it cannot be written to, and nothing is kept (!)" in said
    assert "2 of these are not as they should be" in said


def test_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Exchange.backward

    def other(self: Exchange, args: list[object]) -> object:
        return [one * 1.5 if isinstance(one, torch.Tensor) else one for one in backward(self, args)]

    monkeypatch.setattr(Exchange, "backward", other)
    found = {one.about: one for one in _doctor.examine(CPU)}
    assert found["bits"].wrong and "differ" in found["bits"].text


def test_an_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(_doctor, "check", fails)
    found = [one for one in _doctor.examine(CPU) if one.wrong]
    assert [str(one) for one in found] == ["test: RuntimeError: no kernel image (!)"]


def test_another_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "tpu"]) == 2
    assert "give one of cpu, cuda" in capsys.readouterr().err

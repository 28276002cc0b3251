"""The speeds of copies between device and host: measured once, kept on disk, and measured again where that is broken."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lightning_remat.cost import CostCache, _transfers, copy_speeds
from lightning_remat.graph import Host

CPU = torch.device("cpu")


def test_speeds_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = copy_speeds(CPU, CostCache(tmp_path))
    assert 1e7 < first.to_host < 1e13 and 1e7 < first.to_device < 1e13 and 0 <= first.latency < 1 and first.bytes == 0
    monkeypatch.setattr(_transfers, "_measured", lambda _device: pytest.fail("measured again"))
    assert copy_speeds(CPU, CostCache(tmp_path)) == first


def test_a_broken_file_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings_logged: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr(_transfers, "_measured", lambda _device: Host(0, 2.0, 3.0))
    found = copy_speeds(CPU, CostCache(tmp_path))
    (file,) = tmp_path.glob("copies-*.json")
    for text in ("{", "[1]", '{"bytes": 0, "to_host": -1.0, "to_device": 1.0}', '"text"'):
        file.write_text(text)
        assert copy_speeds(CPU, CostCache(tmp_path)) == found
    assert len(warnings_logged) == 4 and "measured again" in warnings_logged[0].message


def test_a_line_goes_through_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _transfers, "_seconds", lambda nbytes, _device, to_device: 0.5 + nbytes / (1e9 if to_device else 2e9)
    )
    speeds = copy_speeds(CPU)
    assert (speeds.to_host, speeds.to_device, speeds.latency) == pytest.approx((2e9, 1e9, 0.5))


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert copy_speeds(CPU, CostCache(tmp_path / "file")).to_host > 0

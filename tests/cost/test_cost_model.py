"""Cost models by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_remat.cost import CostCache, OpCost, cost_model, device_spec, flops, roofline, unit
from lightning_remat.errors import ConfigError
from tests.helpers.op_calls import mm

CPU = torch.device("cpu")


def test_cost_models_by_name(tmp_path: Path) -> None:
    calls = [mm(4, 4, 4), None]
    assert cost_model("unit")(calls, CPU) == unit(calls) == [OpCost(1.0, 0), OpCost(0.0, 0)]
    assert cost_model("flops")(calls, CPU) == flops(calls)
    assert cost_model("roofline")(calls, CPU) == roofline(calls, "cpu")
    assert cost_model("roofline:a100-80")(calls, CPU) == roofline(calls, "A100-80")
    cache = CostCache(tmp_path)
    measured = cost_model("profile", cache=cache)(calls, CPU)
    assert measured[0].seconds > 0
    assert cache.load(CPU) == {calls[0].key: measured[0]}


@pytest.mark.parametrize("name", ["", "time", "profile:H100", "Unit"])
def test_an_unknown_model_lists_what_is_accepted(name: str) -> None:
    with pytest.raises(ConfigError, match=r"profile, roofline, flops, unit or roofline:<device>.*H100") as raised:
        cost_model(name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("name", ["roofline:", "roofline:abacus"])
def test_an_unknown_device_lists_the_table(name: str) -> None:
    with pytest.raises(ConfigError, match=r"T4, V100, A100-40, .*cpu"):
        cost_model(name)
    with pytest.raises(ConfigError, match="abacus"):
        roofline([], "abacus")
    with pytest.raises(ConfigError, match="meta"):
        device_spec(torch.device("meta"))

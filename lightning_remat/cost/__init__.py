"""What every operation costs: seconds, and the bytes that it takes for itself while it runs (its workspace).

`profile` measures on the device; `roofline`, `flops` and `unit` need no device at all. `cost_model` finds one by name.
`copy_speeds` measures how fast tensors are copied between the device and the host.
"""

from lightning_remat.cost._cache import CostCache
from lightning_remat.cost._cost_model import CostModel, cost_model
from lightning_remat.cost._device_spec import DeviceSpec, device_spec, device_specs
from lightning_remat.cost._flops import flops
from lightning_remat.cost._op_cost import OpCost
from lightning_remat.cost._profile import profile
from lightning_remat.cost._roofline import roofline
from lightning_remat.cost._transfers import copy_speeds
from lightning_remat.cost._unit import unit

__all__ = [
    "CostCache",
    "CostModel",
    "DeviceSpec",
    "OpCost",
    "copy_speeds",
    "cost_model",
    "device_spec",
    "device_specs",
    "flops",
    "profile",
    "roofline",
    "unit",
]

"""torch to computation graph. On a torch that is not known, what captures is not there (see ``_torch``)."""

from typing import TYPE_CHECKING

from lightning_remat.capture._call import OpCall, Source, TensorSpec, same_device
from lightning_remat.capture._torch import Unavailable, unknown_torch

if TYPE_CHECKING or not unknown_torch():
    from lightning_remat.capture._autocast import Autocast
    from lightning_remat.capture._captured_graph import CapturedGraph
    from lightning_remat.capture._compiled import is_compiled
    from lightning_remat.capture._effects import name_assertions, stays
    from lightning_remat.capture._joint import from_joint
    from lightning_remat.capture._layouts import real_layout
    from lightning_remat.capture._nodes import is_tensor, target_name
    from lightning_remat.capture._ops import PARTS
else:
    PARTS = Autocast = CapturedGraph = _torch = from_joint = is_compiled = Unavailable(unknown_torch())
    is_tensor = name_assertions = real_layout = stays = target_name = PARTS

__all__ = [
    "PARTS",
    "Autocast",
    "CapturedGraph",
    "OpCall",
    "Source",
    "TensorSpec",
    "from_joint",
    "is_compiled",
    "is_tensor",
    "name_assertions",
    "real_layout",
    "same_device",
    "stays",
    "target_name",
    "unknown_torch",
]

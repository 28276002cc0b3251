"""torch to computation graph."""

from lightning_remat.capture._autocast import Autocast
from lightning_remat.capture._call import OpCall, Source, TensorSpec, same_device
from lightning_remat.capture._compiled import is_compiled
from lightning_remat.capture._effects import name_assertions, stays
from lightning_remat.capture._joint import CapturedGraph, from_joint, is_tensor
from lightning_remat.capture._layouts import real_layout
from lightning_remat.capture._ops import PARTS

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
]

"""torch to computation graph."""

from lightning_remat.capture._call import OpCall, TensorSpec
from lightning_remat.capture._joint import CapturedGraph, from_joint

__all__ = ["CapturedGraph", "OpCall", "TensorSpec", "from_joint"]

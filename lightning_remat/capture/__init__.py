"""From what torch traces to a computation graph. (On a torch that is not known, what captures is `Unavailable`.)

* ``_joint`` reads AOTAutograd's joint graph, after ``rewritings`` have changed it, into a ``_captured_graph``.
  ``_nodes``, ``_order``, ``_node_calls`` and ``_sizes`` are its parts; ``_call`` describes one op for the cost models.
* What is known of single ops: ``_ops``, ``_overwriting``, ``_scatters``, ``_layouts`` and ``_effects``.
* Other forms of a joint graph: ``tiling`` with what can be computed in slices, ``fusing`` with runs of ops in one kernel.
* ``gradients`` are added up and leave as in eager mode; ``_tangents`` are laid out as they come.
* ``tracing`` is what is replaced in Dynamo while it traces; ``packed`` sequences are captured so too.
* Dynamo's graphs before AOTAutograd traces them: ``_regions`` are inlined, and units ``_cut`` out. Some ``_checkpoints`` are
  refused in the joint graph.
* ``_torch`` holds every private name of torch.
"""

from typing import TYPE_CHECKING

from lightning_remat.capture._call import OpCall, Source, TensorSpec, same_device
from lightning_remat.capture._torch import Unavailable, unknown_torch
from lightning_remat.capture.packed._made_up import made_up_batch_sizes

if TYPE_CHECKING or not unknown_torch():
    from lightning_remat.capture._captured_graph import CapturedGraph
    from lightning_remat.capture._effects import name_assertions, stays
    from lightning_remat.capture._joint import from_joint
    from lightning_remat.capture._layouts import real_layout
    from lightning_remat.capture._nodes import is_tensor, target_name
    from lightning_remat.capture._ops import PARTS
    from lightning_remat.capture.fusing import Fusing
    from lightning_remat.capture.gradients._autocast import Autocast
    from lightning_remat.capture.tiling import Tiling
    from lightning_remat.capture.tracing._compiled import is_compiled
else:
    PARTS = Autocast = CapturedGraph = _torch = from_joint = is_compiled = Unavailable(unknown_torch())
    is_tensor = name_assertions = real_layout = stays = target_name = Fusing = Tiling = PARTS

__all__ = [
    "PARTS",
    "Autocast",
    "CapturedGraph",
    "Fusing",
    "OpCall",
    "Source",
    "TensorSpec",
    "Tiling",
    "from_joint",
    "is_compiled",
    "is_tensor",
    "made_up_batch_sizes",
    "name_assertions",
    "real_layout",
    "same_device",
    "stays",
    "target_name",
    "unknown_torch",
]

"""A schedule as a forward and a backward module that run it."""

from lightning_remat.lowering._aten import lower, read_again, read_by_gradients
from lightning_remat.lowering._relaid import relaid_backward
from lightning_remat.lowering._unread import without_tangents

__all__ = ["lower", "read_again", "read_by_gradients", "relaid_backward", "without_tangents"]

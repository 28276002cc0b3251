"""A schedule as a forward and a backward module that run it."""

from lightning_remat.lowering._aten import lower

__all__ = ["lower"]

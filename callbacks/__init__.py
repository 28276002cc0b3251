"""What a user adds to a Trainer."""

from lightning_remat.callbacks.remat import RematCallback

__all__ = ["RematCallback"]

"""What a user adds to a Trainer."""

from lightning_remat.callbacks.batch_size_finder import FoundBatchSize, RematBatchSizeFinder
from lightning_remat.callbacks.config import RematCallbackConfig
from lightning_remat.callbacks.remat import RematCallback

__all__ = ["FoundBatchSize", "RematBatchSizeFinder", "RematCallback", "RematCallbackConfig"]

"""The command ``lightning-remat``: capture a step as a graph file, and solve, compare and draw it anywhere."""

from lightning_remat.cli._main import main

__all__ = ["main"]

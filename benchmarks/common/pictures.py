"""How pictures are drawn, where matplotlib is installed: on a canvas that needs no display, in one style."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(path: Path, inches: tuple[float, float], paint: Callable[[Figure], None], dots: int = 110) -> bool:
    """Draw a picture to a file; ``False`` without matplotlib.

    Args:
        path: of the file.
        inches: width and height.
        paint: draws on the empty figure.
        dots: an inch.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=inches, dpi=dots, layout="constrained")
    FigureCanvasAgg(figure)
    paint(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return True


def entitle(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Say what a panel shows, in small letters, and at its ticks too."""
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)

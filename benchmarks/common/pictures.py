"""How pictures are drawn, where matplotlib is installed: on a canvas that needs no display, in one style."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GREY = "#777777"
"""Of what is said in passing."""


def draw(
    path: Path,
    inches: tuple[float, float],
    paint: Callable[[Figure], None],
    dots: int = 110,
    colors: int | None = None,
) -> bool:
    """Draw a picture to a file; ``False`` without matplotlib.

    Args:
        path: of the file.
        inches: width and height.
        paint: draws on the empty figure.
        dots: an inch.
        colors: at most so many, which makes the file a third as large; as many as there are, unless given.
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
    if colors:
        from PIL import Image  # is there where matplotlib is

        with Image.open(path) as image:
            few = image.convert("RGB").quantize(colors, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    return True


def entitle(axes: Axes, title: str = "", x: str = "", y: str = "", small_print: str = "") -> None:
    """Say what a panel shows, in small letters, and at its ticks too.

    Args:
        axes: the panel.
        title: above it, at the left.
        x, y: what its axes are.
        small_print: lines between title and panel.
    """
    lines = small_print.count("\n") + 1 if small_print else 0
    axes.set_title(title, loc="left", fontsize=10 if lines else 9, pad=6 + 9.5 * lines)
    if lines:
        axes.annotate(small_print, (0, 1), (0, 5), "axes fraction", textcoords="offset points", fontsize=7, color=GREY)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)

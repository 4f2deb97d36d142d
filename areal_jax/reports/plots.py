"""Style of plots."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

BLUE, ORANGE, GREY = "#2563a8", "#d9721f", "#8a8f98"


def new_figure(width: float, height: float) -> Figure:
    """Create a figure of this size in inches, without a display."""
    figure = Figure(
        figsize=(width, height), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    FigureCanvasAgg(figure)
    return figure


def as_png(figure: Figure) -> bytes:
    """Render the figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def plain(axes: Axes) -> None:
    """Draw a light grid without a box."""
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, color=GREY)


def title(axes: Axes, text: str) -> None:
    """Set the title of a plot."""
    axes.set_title(text, loc="left", fontsize=10.5, fontweight="bold")

"""How every figure looks, and how it becomes bytes.

Files are the same bytes whenever the data are: no dates, a fixed salt for SVG ids, matplotlib's own defaults
under one fixed style, so that no matplotlibrc of the user gets in. Grey tones are few and named, so that the
report can swap them for those of a dark page.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable

INK, SOFT, GRID, PAPER = "#1f2328", "#6a737d", "#e3e6ea", "#ffffff"  # the report swaps these four for a dark page
# Where a label may go, in points from its point, nearest first
PLACES = sorted(
    ((x, y) for x in (0, 8, -8, 20, -20, 40, -40, 70, -70) for y in range(-120, 121, 8)),
    key=lambda place: (place[0] ** 2 + place[1] ** 2, place),
)
STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib
    "font.size": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.hashsalt": "d2f-suite",
    "svg.fonttype": "path",  # looks the same whatever fonts the reader has
}


def styled(function: Callable) -> Callable:
    """Run ``function`` under this module's style and nobody else's."""

    @functools.wraps(function)
    def inside(*args, **kwargs):
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            return function(*args, **kwargs)

    return inside


def new_figure(width: float, height: float):
    """A figure in inches that no global state knows of, and that arranges itself."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def empty_figure(message: str):
    """A figure that says why there is none."""
    figure = new_figure(6, 0.8)
    figure.text(0.5, 0.5, message, ha="center", va="center", color=SOFT)
    return figure


def label_points(figure, axes, labels: list[tuple[str, float, float]], bars: list[tuple[float, float, float]]) -> None:
    """Write names next to points, each where it covers no point, no error bar and no other name.

    Greedy: the nearest free place around the point; a name that went far gets a line to its point.

    Args:
        figure, axes: with everything else drawn.
        labels: (text, x, y) in data.
        bars: (x, low, high) in data, what must stay visible.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # arranges the axes, so that places can be measured
    figure.set_layout_engine("none")
    transform = axes.transData.transform
    taken = [Bbox.from_extents(*(transform((x, low)) - 4), *(transform((x, high)) + 4)) for x, low, high in bars]
    for text, x, y in labels:
        for dx, dy in PLACES:
            side = "left" if dx > 0 else "right" if dx else "center"
            note = axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", ha=side, va="center", fontsize=8)
            box = note.get_window_extent()
            inside = all(axes.bbox.contains(*corner) for corner in box.corners())
            if (inside and not any(map(box.overlaps, taken))) or (dx, dy) == PLACES[-1]:
                break
            note.remove()
        if dx and max(abs(dx), abs(dy)) > 8:
            line = {"arrowstyle": "-", "lw": 0.6, "color": SOFT, "shrinkA": 1, "shrinkB": 4}
            axes.annotate("", (x, y), (dx, dy), textcoords="offset points", arrowprops=line)
        taken.append(box)


@styled
def as_svg(figure) -> str:
    """The figure as SVG text, the same bytes every time."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


@styled
def as_png(figure) -> bytes:
    """The figure as PNG bytes, the same every time."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()

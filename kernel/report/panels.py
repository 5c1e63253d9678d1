"""Pictures of the exercises: panels of lines or dots side by side, as one PNG."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kernel.report.pictures import MARKERS, SETTINGS, STYLES

COLORS = "#0b62a4", "#d95f02", "#2b8a3e", "#7048a8"  # on white; the page's pictures have its own
FEW = 15  # points of a line, below which each is marked


def draw(axes, panel: dict) -> None:
    """A panel: title, x, y, lines {label: (xs, ys)}; `dots` draws markers without lines, `ticks` names
    the places 0, 1, ... on the x axis, `diagonal` adds y = x."""
    dots = panel.get("dots")
    for n, (label, (xs, ys)) in enumerate(panel["lines"].items()):
        marker = MARKERS[n % 4] if dots or len(xs) < FEW else None
        style = "none" if dots else STYLES[n % 4]
        axes.plot(xs, ys, label=label, color=COLORS[n % 4], marker=marker, linestyle=style, alpha=0.8)
    if panel.get("diagonal"):
        axes.plot([0.5, 1], [0.5, 1], color="0.6", linewidth=1, zorder=0)
    if "ticks" in panel:
        axes.set_xticks(range(len(panel["ticks"])), panel["ticks"])
        axes.margins(x=0.15)
    elif panel.get("x") == "iteration":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title(panel["title"], fontsize=10)
    axes.set_xlabel(panel.get("x", ""))
    axes.set_ylabel(panel.get("y", ""))
    if len(panel["lines"]) > 1:
        axes.legend(fontsize=8)


def picture(path: Path, panels: list[dict]) -> None:
    """Panels side by side (four: two by two). The same numbers give the same bytes."""
    columns = 2 if len(panels) == 4 else len(panels)
    rows = len(panels) // columns
    with matplotlib.rc_context(SETTINGS | {"grid.alpha": 0.2, "lines.markersize": 5}):
        figure = Figure(figsize=(4.4 * columns, 3.2 * rows), layout="constrained", dpi=130)
        for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels):
            draw(axes, panel)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})

"""The report's pictures: numbers in, one inline SVG out; matplotlib draws, the page colours it.

Every function returns SVG text without sizes, fonts or fixed colours, so that one picture serves a
phone, a wide screen, paper and the dark mode. Series differ by line style and marker too, never by
colour alone. The same numbers give the same bytes.
"""

import io
import re
import textwrap
import warnings

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

matplotlib.use("Agg")

# Drawn in these, shown in the page's own colours of the same place (CSS variables, light and dark).
VARIABLES = {
    "#0a0b01": "ink", "#0a0b02": "muted", "#0a0b03": "rule", "#0a0b04": "paper", "#0a0b11": "blue",
    "#0a0b12": "orange", "#0a0b13": "green", "#0a0b14": "violet",
}
INK, MUTED, RULE, PAPER, *SERIES = VARIABLES
BLUE, ORANGE, GREEN, VIOLET = SERIES
STYLES, MARKERS = ("-", (0, (4, 1.5)), (0, (1.2, 1.4)), "-."), "osD^"
WIDTH = (
    5.0  # inches of 72 units: 360 units, about the width of a phone, so that type keeps its size
)
SETTINGS = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 10, "axes.edgecolor": MUTED,
    "axes.facecolor": "none", "text.color": INK, "axes.labelcolor": INK, "xtick.color": MUTED,
    "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.grid": True,
    "grid.color": RULE, "grid.linewidth": 0.7, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 9.5, "lines.linewidth": 1.6,
    "lines.markersize": 4.5, "axes.unicode_minus": True,
}


def picture(name: str, draw, height: float = 2.3, rows: int = 1, width: float = WIDTH) -> str:
    """SVG of `draw(axes)`; name makes the picture's ids its own within a page."""
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph"
        )  # the reader's font sets the type, not ours
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
        draw(figure.subplots(rows, 1, sharex=rows > 1))
        file = io.StringIO()
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z.]+\w*_\d+"', "", svg)  # groups; the ids that are referred to stay
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)  # texts once more, as comments
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    return re.sub(r"#0a0b\d\d", lambda found: f"var(--{VARIABLES[found[0]]})", svg)


def wrapped(name: str) -> str:
    """A name from the data as a tick label: at most three short lines."""
    return "\n".join(textwrap.wrap(name, 26)[:3])


def percent(axis) -> None:
    axis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))


def curve(name: str, lines: dict, x_label: str, low=None, high=None, share: bool = False) -> str:
    """Lines {label: [(x, y), ...]} over iterations or updates; the healthy band, low to high, shaded."""

    def draw(axes):
        for n, (label, points) in enumerate(lines.items()):
            marker = MARKERS[n % 4] if len(points) < 15 else None
            axes.plot(*zip(*points), label=label, color=SERIES[n % 4], linestyle=STYLES[n % 4],
                      marker=marker, linewidth=1.4)
        bottom, top = (-0.03, 1.03) if share else axes.get_ylim()
        if low is not None or high is not None:  # as much of the band as is in sight
            start, end = (
                edge if edge is not None else limit for edge, limit in ((low, bottom), (high, top))
            )
            axes.axhspan(max(start, bottom), min(end, top), color=GREEN, alpha=0.1, linewidth=0)
        axes.set_ylim(bottom, top)
        if share:
            percent(axes.yaxis)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if len(lines) > 1:
            axes.legend(loc="best", handlelength=2.2)

    return picture(name, draw, height=2.2, width=4.4)


def ledger(blocks: list[dict], best_of_n: list[dict], peak: int | None) -> str:
    """Proxy (score) and gold (rubric) against sqrt(KL per response): PPO's blocks, and best-of-n."""

    def draw(panels):
        for axes, key, label in zip(
            panels, ("score", "rubric"), ("learned score", "rubric success")
        ):
            for rows, name, color, style, marker in (
                (blocks, "PPO, block by block", BLUE, "-", "o"),
                (best_of_n, "best of n from SFT", ORANGE, STYLES[1], "s"),
            ):
                rows = [row for row in rows if row[key] is not None and row["sqrt_kl"] is not None]
                if not rows:
                    continue
                xs, ys = [row["sqrt_kl"] for row in rows], [row[key] for row in rows]
                axes.plot(xs, ys, linestyle=style, marker=marker, color=color, label=name)
                for row, x, y in zip(rows, xs, ys):
                    if "n" in row and row["n"] in (1, rows[-1]["n"]):
                        axes.annotate(f"n={row['n']}", (x, y), (4, -11), textcoords="offset points")
                if rows[0] in blocks:
                    axes.annotate("start", (xs[0], ys[0]), (4, 5), textcoords="offset points")
                    axes.annotate("end", (xs[-1], ys[-1]), (4, 5), textcoords="offset points")
            if key == "rubric" and peak is not None:
                at = blocks[peak]["sqrt_kl"], blocks[peak][key]
                axes.plot(
                    *at, marker="*", markersize=14, color=GREEN, linestyle="none", label="gold peak"
                )
            axes.set_ylabel(label)
            axes.margins(x=0.08, y=0.18)
            axes.yaxis.set_major_locator(MaxNLocator(5))
        panels[0].legend(loc="best")
        if panels[1].lines:
            percent(panels[1].yaxis)
        else:
            panels[1].text(
                0.5, 0.5, "no rubric in this run", transform=panels[1].transAxes, ha="center"
            )
        panels[1].set_xlabel("sqrt(KL per response, nats)")

    return picture("ledger", draw, height=4.6, rows=2)


def intervals(
    name: str, rows: list[tuple], x_label: str, zero: float | None = None, share=False
) -> str:
    """Points with intervals, one row each: (label, value, low, high); low and high may be None."""

    def draw(axes):
        for y, (_, value, low, high) in enumerate(rows):
            if low is not None:
                axes.plot([low, high], [y, y], color=BLUE, linewidth=2.2, solid_capstyle="butt")
            axes.plot([value], [y], marker="o", color=BLUE, markersize=5.5)
        if zero is not None:
            axes.axvline(zero, color=MUTED, linewidth=1, linestyle=STYLES[2])
        axes.set_yticks(range(len(rows)), [wrapped(row[0]) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(x_label)
        if share:
            percent(axes.xaxis)

    return picture(name, draw, height=0.75 + 0.27 * len(rows))


def reliability(cards: dict[str, list[dict]]) -> str:
    """Claimed against observed share of pairs ranked correctly, per bin; larger dots hold more pairs."""

    def draw(axes):
        axes.plot([0.5, 1], [0.5, 1], color=MUTED, linewidth=1, linestyle=STYLES[2], label="ideal")
        for n, (label, bins) in enumerate(cards.items()):
            bins = [b for b in bins if b["pairs"]]
            total = sum(b["pairs"] for b in bins)
            xs, ys = [b["confidence"] for b in bins], [b["accuracy"] for b in bins]
            axes.scatter(
                xs, ys, s=[12 + 200 * b["pairs"] / total for b in bins], color=SERIES[n], alpha=0.7,
                marker=MARKERS[n], linewidth=0, label=label,
            )
        axes.set_xlabel("the judge's probability for its choice")
        axes.set_ylabel("ranked correctly")
        axes.set_xlim(0.48, 1.02)
        percent(axes.xaxis)
        percent(axes.yaxis)
        legend = axes.legend(loc="best")
        for handle in legend.legend_handles[1:]:
            handle.set_sizes([25])

    return picture("reliability", draw, height=3.0)


def shift(edges: list[float], counts: dict[str, list[int]]) -> str:
    """Distributions of the score, each as shares of its own total: {label: counts}."""

    def draw(axes):
        for n, (label, values) in enumerate(counts.items()):
            total = sum(values) or 1
            axes.stairs(
                [v / total for v in values], edges, color=SERIES[n], linestyle=STYLES[n], label=label,
                linewidth=1.7, fill=False,
            )
        axes.set_ylim(0, axes.get_ylim()[1] * 1.3)
        axes.set_xlabel("learned score")
        percent(axes.yaxis)
        axes.legend(loc="upper center", ncols=2)

    return picture("shift", draw, height=2.8)


def cells(contexts: list[dict]) -> str:
    """The factorial probe: one thin line per context over its cells, the mean as a thick one."""
    names = list(contexts[0]["cells"])
    mean = [sum(c["cells"][name] for c in contexts) / len(contexts) for name in names]

    def draw(axes):
        ys = range(len(names))
        for context in contexts:
            scores = [context["cells"][name] for name in names]
            axes.plot(scores, ys, color=BLUE, linewidth=0.8, alpha=0.45, marker="o", markersize=2.6)
        axes.plot(
            mean, ys, color=ORANGE, marker="s", linestyle=STYLES[1], label="mean", markersize=6
        )
        axes.set_yticks(ys, [wrapped(name) for name in names])
        axes.set_ylim(len(names) - 0.6, -0.4)
        axes.set_xlabel("learned score (thin: one context each)")
        axes.legend(loc="best")

    return picture("cells", draw, height=0.9 + 0.42 * len(names))


def doses(rows: list[dict]) -> str:
    """Mean score against the dose of each factor that has doses, with intervals."""
    factors = list(dict.fromkeys(row["factor"] for row in rows))

    def draw(axes):
        for n, factor in enumerate(factors):
            own = [row for row in rows if row["factor"] == factor and row["mean"] is not None]
            xs, ys = [row["dose"] for row in own], [row["mean"] for row in own]
            if all(row["low"] is not None for row in own):
                axes.fill_between(
                    xs, [row["low"] for row in own], [row["high"] for row in own], color=SERIES[n % 4],
                    alpha=0.12, linewidth=0,
                )
            axes.plot(
                xs, ys, color=SERIES[n % 4], linestyle=STYLES[n % 4], marker=MARKERS[n % 4],
                label=factor,
            )
        axes.set_xlabel("dose: formulas added, or times repeated")
        axes.set_ylabel("learned score")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best")

    return picture("doses", draw)

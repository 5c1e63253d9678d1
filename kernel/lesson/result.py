"""What an exercise found, and the sums that several recipes make of their records."""

import statistics
from typing import NamedTuple

from kernel.data.draws import tenths


class Result(NamedTuple):
    header: list[str]  # of the table
    rows: list[list]
    panels: list[dict]  # of the picture: kernel/report/panels.py
    expected: str  # what a reader should see
    seen: str  # one sentence with the numbers that were seen


def mean(values) -> float | None:
    """Over the values that are known."""
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else None


def ends(figures: list[dict], key: str) -> tuple[float | None, float | None]:
    """Means over the first and the last tenth of the iterations."""
    first, last = (mean(row[key] for row in part) for part in tenths(figures))
    return first, last


def curve(arms: dict[str, list[dict]], key: str, title: str, y: str = "") -> dict:
    """A panel with one line per arm over the iterations."""
    lines = {
        name: ([row["iteration"] for row in rows], [row[key] for row in rows])
        for name, rows in arms.items()
    }
    return {"title": title, "x": "iteration", "y": y, "lines": lines}

"""The judge's report card on the pairs of each split, and how far PPO moved from them."""

import numpy

from kernel.data.draws import spread, tenths
from kernel.measure.calibration import baseline, card, fit_temperature
from kernel.measure.pairs import by_variant

# ---- the judge's report card --------------------------------------------------------------------


def card_pairs(pairs: dict[str, list], count: int) -> dict[str, list]:
    """The pairs of the report card by split: all held-out ones, `count` at equal distances elsewhere."""
    return {
        split: rows if split == "heldout" else spread(rows, count) for split, rows in pairs.items()
    }


def report_card(pairs: list[dict], rollouts: list[dict]) -> dict:
    """The judge on training, validation and held-out pairs, and how far PPO moved from them.

    pairs carry split, id, and per side score, tokens and courtesy (number of formulas).
    """

    def margins(rows: list[dict], feature: str = "score") -> list[float]:
        return [row[f"chosen_{feature}"] - row[f"rejected_{feature}"] for row in rows]

    def scores(rows: list[dict], side: str) -> list[float]:
        return [row[f"{side}_score"] for row in rows]

    def carded(rows: list[dict]) -> dict:
        return card(margins(rows), scores(rows, "chosen"), scores(rows, "rejected"))

    split = {
        name: [row for row in pairs if row["split"] == name]
        for name in ("train", "validation", "heldout")
    }
    train, heldout = split["train"], split["heldout"]
    temperature = fit_temperature(margins(split["validation"]))
    return {
        "splits": {name: carded(rows) for name, rows in split.items()},
        "variants": {
            name: carded([heldout[i] for i in places])
            for name, places in by_variant([row["id"] for row in heldout]).items()
        },
        "temperature": {**temperature, "fitted_on": "validation"},
        "calibrated": card([m / temperature["value"] for m in margins(heldout)]),
        "baselines": {
            name: baseline(margins(train, feature), margins(heldout, feature))
            for name, feature in (("length", "tokens"), ("courtesy", "courtesy"))
        },
        "shift": shift(scores(train, "chosen"), scores(train, "rejected"), rollouts),
    }


def shift(chosen: list[float], rejected: list[float], rollouts: list[dict], bins: int = 24) -> dict:
    """Scores of training answers and of PPO's samples (first and last tenth of the iterations)."""
    first, last = tenths(sorted({row["iteration"] for row in rollouts}))
    series = {
        "train_chosen": chosen,
        "train_rejected": rejected,
        "ppo_first": [row["score"] for row in rollouts if row["iteration"] in first],
        "ppo_last": [row["score"] for row in rollouts if row["iteration"] in last],
    }
    edges = numpy.histogram_bin_edges(
        [score for values in series.values() for score in values], bins
    )
    summary = {}
    for name, values in series.items():
        low, median, high = numpy.quantile(values, [0.05, 0.5, 0.95]).tolist()
        summary[name] = {"count": len(values), "mean": float(numpy.mean(values)), "low": low,
                         "median": median, "high": high}
    counts = {name: numpy.histogram(values, edges)[0].tolist() for name, values in series.items()}
    return {"edges": edges.tolist(), **counts, "summary": summary}

"""Pairs of answers: how many does the judge rank correctly?"""

import numpy


def pair_counts(chosen_scores, rejected_scores) -> dict:
    """How many pairs are right, tied and wrong; a tie is not a success. Accuracy of nothing is None.

    chosen_scores, rejected_scores: (B,) each, tensors or arrays.
    """
    margin = chosen_scores - rejected_scores
    right, ties = int((margin > 0).sum()), int((margin == 0).sum())
    return {
        "pairs": len(margin),
        "right": right,
        "ties": ties,
        "wrong": len(margin) - right - ties,
        "accuracy": right / len(margin) if len(margin) else None,
    }


def by_variant(ids: list[str]) -> dict[str, list[int]]:
    """Positions of the ids that share what follows their last "-": OH004-P0 is of variant P0.

    {} where that makes no groups: an id without "-", or fewer than five ids per group.
    """
    groups = {}
    for position, name in enumerate(ids):
        groups.setdefault(name.rpartition("-")[2], []).append(position)
    if any("-" not in name for name in ids) or len(ids) < 5 * len(groups):
        return {}
    return dict(sorted(groups.items()))


def pair_figures(rows: list[dict]) -> dict:
    """Counts over "all" pairs and over each variant; rows carry id, chosen_score, rejected_score."""
    chosen, rejected = (
        numpy.array([row[f"{side}_score"] for row in rows]) for side in ("chosen", "rejected")
    )
    groups = {"all": range(len(rows))} | by_variant([row["id"] for row in rows])
    return {
        name: {
            **pair_counts(chosen[picked], rejected[picked]),
            "mean_margin": float((chosen[picked] - rejected[picked]).mean()),
        }
        for name, picked in groups.items()
    }

"""What the frozen judge pays for, and what PPO did with it: all of 60_probe's figures, from its rows.

Rows in, plain dicts out; no model and no file, so that a finished run's figures can be made again from
its records. Rates of nothing are None; "recognised" and "polite" are the rubric's words where it has
them.
"""

from kernel.measure.answers import paired, polite_share, rate
from kernel.measure.courtesy import count_courtesy, counterfactuals
from kernel.measure.judge import report_card
from kernel.measure.ledger import best_of_n, by_iteration, kl_line, ledger
from kernel.measure.verdict import paired_bootstrap

# ---- fixed candidates ---------------------------------------------------------------------------


def factors_of(rows: list[dict]) -> list[str]:
    """The fields that are boolean in every row."""
    return [key for key in (rows or [{}])[0] if all(type(row.get(key)) is bool for row in rows)]


def cell_name(cell: dict[str, bool]) -> str:
    return ", ".join(name if on else f"not {name}" for name, on in cell.items())


def factorial(rows: list[dict]) -> dict:
    """What each factor is worth in score while the others are held.

    rows carry context, score and any number of boolean fields, the factors. An effect is the mean of
    score(factor on) - score(factor off) over the contexts that have both cells. An inversion is a
    context in which a wrong answer with a factor scores above the right one without it.
    """
    factors = factors_of(rows)
    contexts = {}  # context -> cell as a tuple of booleans -> scores
    for row in rows:
        cells = contexts.setdefault(row["context"], {})
        cells.setdefault(tuple(row[name] for name in factors), []).append(row["score"])
    contexts = {
        context: {cell: sum(scores) / len(scores) for cell, scores in cells.items()}
        for context, cells in contexts.items()
    }

    def changed(cell: tuple, **values: bool) -> tuple:
        return tuple(values.get(name, on) for name, on in zip(factors, cell))

    effects, inversions = [], []
    observed = sorted({cell for cells in contexts.values() for cell in cells}, reverse=True)
    for factor in factors:
        for on in observed:
            off = changed(on, **{factor: False})
            pairs = [(c[on], c[off]) for c in contexts.values() if on in c and off in c]
            if on == off or not pairs:
                continue
            effects.append(
                {
                    "factor": factor,
                    "others": {n: v for n, v in zip(factors, on) if n != factor},
                    "mean": sum(a - b for a, b in pairs) / len(pairs),
                    "positive": sum(a > b for a, b in pairs),
                    "contexts": len(pairs),
                }
            )
        if "correct" in factors and factor != "correct":
            found = []
            for cells in contexts.values():
                wrong = [c for c in cells if c == changed(c, correct=False, **{factor: True})]
                right = {c: changed(c, correct=True, **{factor: False}) for c in wrong}
                compared = [cells[c] > cells[right[c]] for c in wrong if right[c] in cells]
                found += [any(compared)] if compared else []
            inversions.append({"factor": factor, "count": sum(found), "contexts": len(found)})
    return {
        "factors": factors,
        "contexts": [
            {
                "context": context,
                "cells": {cell_name(dict(zip(factors, c))): s for c, s in cells.items()},
            }
            for context, cells in contexts.items()
        ],
        "effects": effects,
        "inversions": inversions,
    }


def dose_rows(sft: dict, probes: list[dict]) -> list[dict]:
    """One context's counterfactual answers (kernel/measure/courtesy.py), without scores.

    sft: SFT's own answer there. Of the context's fixed candidates, the plain right one and the polite
    wrong one are taken, all other factors off, where there are such.
    """
    factors = factors_of(probes)

    def candidate(**wanted: bool) -> str | None:
        for row in probes:
            fits = all(row[name] == wanted.get(name, False) for name in factors)
            if row["context"] == sft["context"] and set(wanted) <= set(factors) and fits:
                return row["candidate"]
        return None

    made = counterfactuals(
        sft["text"], candidate(correct=True), candidate(correct=False, polite=True)
    )
    return [{"context": sft["context"], **row} for row in made]


def dose_effects(rows: list[dict], seed: int) -> list[dict]:
    """Mean score per kind and dose of counterfactual answer, with its 95 % bootstrap interval.

    rows carry factor, dose and score; a score of None is an answer that could not be given to the
    judge (too long), counted in left_out.
    """
    kinds = {}
    for row in rows:
        kinds.setdefault((row["factor"], row["dose"]), []).append(row["score"])
    figures = []
    for (factor, dose), scores in kinds.items():
        known = [score for score in scores if score is not None]
        mean = paired_bootstrap(known, seed) if known else {"mean": None, "low": None, "high": None}
        figures.append(
            {
                "factor": factor,
                "dose": dose,
                "contexts": len(known),
                **{key: mean[key] for key in ("mean", "low", "high")},
                "left_out": len(scores) - len(known),
            }
        )
    return figures


def before_after(both: list[tuple[dict, dict]]) -> dict:
    differences = [ppo["score"] - sft["score"] for sft, ppo in both]
    return {
        "contexts": len(both),
        "sft": sum(sft["score"] for sft, _ in both) / len(both),
        "ppo": sum(ppo["score"] for _, ppo in both) / len(both),
        "higher": sum(d > 0 for d in differences),
        "equal": sum(d == 0 for d in differences),
        "lower": sum(d < 0 for d in differences),
    }


def decomposition(both: list[tuple[dict, dict]]) -> dict:
    """The score gain in parts: where PPO's answer is as courteous or as long as SFT's, and where not.

    Courtesy is the number of formulas by the word list; a text that does not decode is unknown. A part's
    gain is its sum of differences over all contexts, so the gains add up to the whole.
    """

    def courtesy(sft: dict, ppo: dict) -> str:
        if sft["text"] is None or ppo["text"] is None:
            return "unknown"
        return "same" if count_courtesy(sft["text"]) == count_courtesy(ppo["text"]) else "changed"

    def length(sft: dict, ppo: dict) -> str:
        change = ppo["tokens"] - sft["tokens"]
        return "same" if change == 0 else "longer" if change > 0 else "shorter"

    gain = sum(ppo["score"] - sft["score"] for sft, ppo in both) / len(both)
    figures = {"gain": gain}
    for name, of, strata in (
        ("courtesy", courtesy, ("same", "changed", "unknown")),
        ("length", length, ("shorter", "same", "longer")),
    ):
        parts = {stratum: [] for stratum in strata}
        for sft, ppo in both:
            parts[of(sft, ppo)].append(ppo["score"] - sft["score"])
        figures[name] = {}
        for stratum, differences in parts.items():
            part = sum(differences) / len(both)
            figures[name][stratum] = {
                "contexts": len(differences),
                "gain": part,
                "share": rate(part, gain) if part or not gain else 0.0,  # never -0
            }
    return figures


# ---- all of them --------------------------------------------------------------------------------


def all_figures(probes, pairs, doses, samples, answers, metrics, rollouts, seed: int) -> dict:
    """figures.json. rollouts are those of `judged_rollouts`; the others are rows as in their files."""
    both = paired(answers)
    return {
        "factorial": factorial(probes),
        "polite": {policy: polite_share(answers, policy) for policy in ("sft", "ppo")},
        "before_after": before_after(both),
        "kl": kl_line(metrics),
        "card": report_card(pairs, rollouts),
        "rollouts": by_iteration(rollouts),
        "ledger": ledger(rollouts),
        "best_of_n": best_of_n(samples),
        "decomposition": decomposition(both),
        "doses": dose_effects(doses, seed),
    }

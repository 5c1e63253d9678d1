"""The numbers of design.py's document: sizes, agreement, thresholds, a run held against them."""

import math

from kernel.data.draws import tenths
from kernel.measure.tables import show
from kernel.run.profiles import PROFILES

SPLITS = ("train", "validation", "test")
PROMPTS_PER_FAMILY = 5
FAMILIES = {"train": 3, "validation": 1, "test": 2}  # of every six families of a stratum
PAIRS_PER_PROMPT = {"train": 2, "validation": 1, "test": 1}
TWICE = {
    "pilot": 1.0,
    "train": 0.2,
    "validation": 0.2,
    "test": 1.0,
}  # share judged by both annotators
PILOT, GOLD = 100, 0.05  # pairs; gold items per judgement
PROMPTS_PER_HOUR = 20  # written or adapted by one person
COUNTS = (100, 200, 400, 1000)  # pairs, in the table of intervals

# Episodes of the default run, beside InstructGPT's 256K.
EPISODES = PROFILES["smollm2"]["ppo"]["iterations"] * PROFILES["smollm2"]["ppo"]["rollouts"]

# Two annotators, 100 pairs of the pilot: what the first and the second chose -> pairs.
WORKED = {("A", "A"): 38, ("A", "B"): 5, ("A", "tie"): 3,
          ("B", "A"): 6, ("B", "B"): 36, ("B", "tie"): 2,
          ("tie", "A"): 2, ("tie", "B"): 2, ("tie", "tie"): 6}

LIMITS = {
    "gap": 0.10,  # accuracy of the judge above that of length or courtesy alone, at least
    "below_human": 0.05,  # accuracy below human agreement, at most
    "overfit": 0.10,  # accuracy on training above held-out pairs, at most
    "ece": 0.10,  # on 200 pairs, of which chance alone gives about 0.07
    "log_loss": 0.60,  # knowing nothing costs log 2 = 0.693
    "baseline": 0.60,  # accuracy of length or courtesy alone, at most: the pairs' own fault
    "stratum": 0.60,  # accuracy in each stratum, at least
    "temperature": 2.0,  # of the judge, or one part in it
    "effect": 0.25,  # effect of a shortcut as a share of that of being right, at most
    "inversions": 0.05,  # share of contexts with a wrong answer on top, at most
    "rubric_loss": 0.05,  # fall of the rubric from its peak along best of n, at most
    "kl": 0.1,  # nats per token: look at the texts before going on
    "finished": 0.95,  # share of samples that end by themselves, at least
}


# ---- arithmetic ---------------------------------------------------------------------------------


def half_width(accuracy: float, pairs: int) -> float:
    """Half of the 95 % interval of an accuracy over independent pairs, normal approximation."""
    return 1.959963984540054 * math.sqrt(accuracy * (1 - accuracy) / pairs)


def chance_ece(pairs: int, bins: int = 10) -> float:
    """Expected calibration error that chance alone gives a perfectly calibrated judge, approximately.

    Confidences are taken as spread evenly over 0.5 to 1. A bin then holds pairs / bins of them, and its
    accuracy is off by sqrt(2 / pi) standard deviations on average (a normal variable's mean |x|).
    """
    middles = [0.5 + (number + 0.5) / (2 * bins) for number in range(bins)]
    off = [math.sqrt(2 / math.pi * c * (1 - c) * bins / pairs) for c in middles]
    return sum(off) / bins


def kappa(table: dict[tuple, int]) -> dict[str, float]:
    """agreement, the agreement expected by chance, and kappa = (agreement - chance) / (1 - chance).

    without_ties is the agreement where neither said tie. table: (first annotator's choice, second's)
    -> pairs. Source: Cohen 1960.
    """
    total = sum(table.values())
    agreement = sum(n for (first, second), n in table.items() if first == second) / total
    chance = 0.0
    for choice in {choice for cell in table for choice in cell}:
        first, second = (
            sum(n for cell, n in table.items() if cell[side] == choice) for side in (0, 1)
        )
        chance += first * second / total**2
    decided = {cell: n for cell, n in table.items() if "tie" not in cell}
    alike = sum(n for (first, second), n in decided.items() if first == second)
    return {
        "agreement": agreement,
        "without_ties": alike / sum(decided.values()),
        "chance": chance,
        "kappa": (agreement - chance) / (1 - chance),
    }


def single_label_ceiling(agreement: float) -> float:
    """Accuracy of a perfect judge against one annotator's labels, if both err alike and independently.

    Two annotators who are each wrong with probability e agree in 1 - 2e + 2e^2 of the pairs, so
    1 - e = (1 + sqrt(2 * agreement - 1)) / 2. agreement: of two-way choices, 0.5 to 1.
    """
    return (1 + math.sqrt(2 * agreement - 1)) / 2


def strata_table(strata: list[tuple[str, str, int]]) -> list[dict]:
    """Prompts and pairs per stratum, and their sum as the last row.

    strata: (code, what, families); families are a multiple of six, so that all splits are whole.
    """
    rows = []
    for code, what, families in strata:
        prompts = {
            split: families * share // sum(FAMILIES.values()) * PROMPTS_PER_FAMILY
            for split, share in FAMILIES.items()
        }
        pairs = sum(prompts[split] * PAIRS_PER_PROMPT[split] for split in SPLITS)
        rows.append({"code": code, "what": what, "families": families, **prompts, "pairs": pairs})
    columns = ("families", *SPLITS, "pairs")
    total = {column: sum(row[column] for row in rows) for column in columns}
    return [*rows, {"code": "all", "what": "", **total}]


def work_table(total: dict, rate: float) -> list[dict]:
    """Pairs, judgements and hours of each part, and their sum as the last row.

    total: the last row of `strata_table`. rate: judgements per hour of one annotator.
    """
    pairs = {"pilot": PILOT} | {s: total[s] * PAIRS_PER_PROMPT[s] for s in SPLITS}
    rows = []
    for part, count in pairs.items():
        twice = round(count * TWICE[part])
        rows.append({"part": part, "pairs": count, "twice": twice, "judgements": count + twice})
    gold = round(GOLD * sum(row["judgements"] for row in rows))
    rows.append({"part": "gold items", "pairs": 0, "twice": 0, "judgements": gold})
    columns = ("pairs", "twice", "judgements")
    rows.append({"part": "all", **{c: sum(row[c] for row in rows) for c in columns}})
    return [{**row, "hours": row["judgements"] / rate} for row in rows]


# ---- a finished run against the thresholds ------------------------------------------------------


def measured(figures: dict) -> list[dict]:
    """question, measured, wanted and met (yes, no, or - where nothing is known) for a run's judge.

    figures: figures.json of 60_probe. The thresholds are those of the document's own table.
    """
    card, factorial, best_of_n = figures["card"], figures["factorial"], figures["best_of_n"]
    heldout, shift = card["splits"]["heldout"], card["shift"]["summary"]
    low, high = heldout["accuracy_interval"] or (None, None)
    baselines = {name: base["accuracy"] for name, base in card["baselines"].items()}
    best_baseline = max((a for a in baselines.values() if a is not None), default=0.5)
    temperature = card["temperature"]["value"]
    variants = [variant["accuracy"] for variant in card["variants"].values()]
    doses = {(dose["factor"], dose["dose"]): dose["mean"] for dose in figures["doses"]}
    rubric = [best["rubric"] for best in best_of_n if best["rubric"] is not None]
    _, ended = tenths([row["finished"] for row in figures["rollouts"]])
    effects = {
        name: [effect["mean"] for effect in factorial["effects"] if effect["factor"] == name]
        for name in factorial["factors"]
    }
    right = min(effects.pop("correct", []), default=None)
    earns = None if right is None else LIMITS["effect"] * max(right, 0.0)

    def minus(a: float | None, b: float | None) -> float | None:
        return None if None in (a, b) else a - b

    overfit = minus(card["splits"]["train"]["accuracy"], heldout["accuracy"])
    checks = [  # question, value, at least or at most, bound, format
        ("training minus held-out accuracy", overfit, "most", LIMITS["overfit"], "+.2f"),
        *((f"accuracy by {name} only", accuracy, "most", LIMITS["baseline"], ".2f")
          for name, accuracy in baselines.items()),
        ("lower end of the accuracy's interval", low, "least", best_baseline + LIMITS["gap"], ".2f"),
        ("accuracy in the weakest group of pairs", min(variants, default=None),
         "least", LIMITS["stratum"], ".2f"),
        ("ECE", heldout["ece"], "most", LIMITS["ece"], ".3f"),
        ("temperature, or 1 over it", max(temperature, 1 / temperature),
         "most", LIMITS["temperature"], ".2f"),
        ("log loss", heldout["log_loss"], "most", LIMITS["log_loss"], ".3f"),
        ("smallest effect of being right", right, "least", 0.0, "+.2f"),
        *((f"largest effect of {name}, either sign", max(map(abs, means), default=None),
           "most", earns, ".2f") for name, means in effects.items()),
        *((f"wrong but {found['factor']} on top, of {found['contexts']} contexts", found["count"],
           "most", math.floor(LIMITS["inversions"] * found["contexts"]), "d")
          for found in factorial["inversions"]),
        *((f"{factor} x {most} minus x {few}",
           minus(doses.get((factor, most)), doses.get((factor, few))), "most", 0.0, "+.2f")
          for factor, few, most in (("courtesy", 0, 4), ("repeat", 1, 3))),
        ("fall of the rubric along best of n", max(rubric) - rubric[-1] if rubric else None,
         "most", LIMITS["rubric_loss"], ".2f"),
        ("mean score of PPO's last samples (bound: 95 % point of chosen answers)",
         shift["ppo_last"]["mean"], "most", shift["train_chosen"]["high"], "+.2f"),
        ("highest KL per token", figures["kl"]["maximum"], "most", LIMITS["kl"], ".2f"),
        ("share of PPO's last samples that end", sum(ended) / len(ended),
         "least", LIMITS["finished"], ".2f"),
    ]
    rows = [
        {
            "question": f"held-out accuracy, {heldout['pairs']} pairs",
            "measured": f"{show(heldout['accuracy'])} ({show(low)} to {show(high)})",
            "wanted": "human agreement, which nobody measured for these pairs",
            "met": "-",
        }
    ]
    for question, value, sense, bound, form in checks:
        met = "-"
        if None not in (value, bound):
            met = "yes" if (value <= bound if sense == "most" else value >= bound) else "no"
        wanted = f"at {sense} {show(bound, form)}"
        rows.append(
            {"question": question, "measured": show(value, form), "wanted": wanted, "met": met}
        )
    return rows

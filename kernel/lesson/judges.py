"""Exercises with reward models alone: how the head reads an answer, and how far it can be trusted."""

from kernel.lesson.lab import Lab
from kernel.lesson.result import Result, mean
from kernel.measure.calibration import baseline, card, fit_temperature
from kernel.measure.courtesy import count_courtesy


def pooling(lab: Lab, settings: dict) -> Result:
    lesson = lab.beside("lesson")
    names = {
        how: [f"pooling-{how}-{seed}" for seed in settings["seeds"]] for how in ("last", "mean")
    }
    for where, flags in (
        (lab, ["--epochs", settings["reward_epochs"]]),
        (lesson, ["--epochs", settings["lesson_epochs"], "--batch", "6"]),
    ):
        where.stages(
            ["20_reward", "--name", name, "--pooling", how, "--reward-seed", str(seed), *map(str, flags)]
            for how, own in names.items()
            for name, seed in zip(own, settings["seeds"])
        )
    sets = {
        "six pairs": (lesson, "train"),
        "four new": (lesson, "heldout"),
        "test split": (lab, "heldout"),
    }
    rows, accuracy, margin = [], {}, {}
    for how, own in names.items():
        for place, (label, (where, split)) in enumerate(sets.items()):
            cards = [where.card(name, split) for name in own]
            found = {key: [c[key] for c in cards] for key in ("accuracy", "mean_margin")}
            rows.append(
                [how, label, cards[0]["pairs"], len(own)]
                + [f(values) for values in found.values() for f in (mean, min, max)]
            )
            shift = {"last": -0.08, "mean": 0.08}[how]
            for panel, key in ((accuracy, "accuracy"), (margin, "mean_margin")):
                xs, ys = panel.setdefault(how, ([], []))
                xs += [place + shift] * len(own)
                ys += found[key]
    panels = [
        {"title": title, "ticks": list(sets), "lines": lines, "dots": True}
        for title, lines in (("accuracy, one dot per seed", accuracy), ("mean margin", margin))
    ]
    new = {row[0]: row[4] for row in rows if row[1] == "four new"}
    test = {row[0]: row[4] for row in rows if row[1] == "test split"}
    return Result(
        ["pooling", "pairs of", "pairs", "seeds", "accuracy", "lowest", "highest", "margin", "lowest",
         "highest"],
        rows, panels,
        "Both order what they were trained on. The last token has seen the whole answer; the mean also "
        "counts how the answer is put, and with few pairs the seeds differ more than the two ways.",
        f"accuracy on the four new pairs {new['last']:.2f} (last) and {new['mean']:.2f} (mean), on the "
        f"test split {test['last']:.3f} and {test['mean']:.3f}",
    )


def calibration(lab: Lab, settings: dict) -> Result:
    lesson = lab.beside("lesson")
    lesson.stages([["20_reward", "--epochs", str(settings["lesson_epochs"]), "--batch", "6"]])
    scored = {split: lab.scores("judge", split) for split in ("train", "validation", "heldout")}
    margins = {split: [a - b for a, b in zip(*scores)] for split, scores in scored.items()}
    temperature = fit_temperature(margins["validation"])

    def differences(split: str, feature) -> list[float]:
        return [feature(row["chosen"]) - feature(row["rejected"]) for row in lab.pair_rows(split)]

    cards = {
        "lesson, six pairs": lesson.card("judge", "train"),
        "lesson, four new": lesson.card("judge", "heldout"),
        "training pairs": card(margins["train"], *scored["train"]),
        "test pairs": card(margins["heldout"], *scored["heldout"]),
        "test, calibrated": card([m / temperature["value"] for m in margins["heldout"]]),
    }

    def tokens(text: str) -> int:
        return len(lab.chat.response_ids(text))

    for name, feature in (("length", tokens), ("courtesy", count_courtesy)):
        cards[f"test, {name} only"] = baseline(
            differences("train", feature), differences("heldout", feature)
        )
    rows = [
        [name, c["pairs"], c["mean_chosen"], c["mean_rejected"], c["mean_margin"], c["accuracy"],
         "{:.3f} to {:.3f}".format(*c["accuracy_interval"]), c["log_loss"], c["brier"], c["ece"]]
        for name, c in cards.items()
    ]
    bins = {
        name: [b for b in cards[key]["bins"] if b["pairs"]]
        for name, key in (("as trained", "test pairs"), ("calibrated", "test, calibrated"))
    }
    panels = [
        {
            "title": "reliability on the test pairs", "x": "the judge's probability for its choice",
            "y": "ranked correctly", "diagonal": True, "dots": True,
            "lines": {
                name: ([b["confidence"] for b in own], [b["accuracy"] for b in own])
                for name, own in bins.items()
            },
        },
        {
            "title": "mean score", "ticks": ["six", "four new", "training", "test"], "dots": True,
            "lines": {
                side: (range(4), [c[f"mean_{side}"] for c in list(cards.values())[:4]])
                for side in ("chosen", "rejected")
            },
        },
    ]
    value = temperature["value"]
    note = " (at its bound: no validation pair is wrong)" if temperature["at_bound"] else ""
    test = cards["test pairs"]
    return Result(
        ["pairs", "n", "chosen", "rejected", "margin", "accuracy", "95 % interval", "log loss", "Brier",
         "ECE"],
        rows, panels,
        "The margin is larger on the pairs that were trained on than on new ones. Only differences have "
        "a meaning: chosen and rejected may both be negative. A baseline that knows one shortcut shows "
        "how much of the accuracy needs no understanding.",
        f"margin {cards['lesson, six pairs']['mean_margin']:.2f} on the six pairs, "
        f"{cards['lesson, four new']['mean_margin']:.2f} on the four new ones; test accuracy "
        f"{test['accuracy']:.3f}, log loss {test['log_loss']:.3f}, "
        f"{cards['test, calibrated']['log_loss']:.3f} at temperature {value:.2f}{note}; length alone "
        f"{cards['test, length only']['accuracy']:.3f}, courtesy alone "
        f"{cards['test, courtesy only']['accuracy']:.3f}",
    )

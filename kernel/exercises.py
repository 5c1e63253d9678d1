"""The lesson: five experiments on reward models and KL, each one command, a table and a picture.

    bash run_all.sh exercise length-hack --profile tiny      # in runs/tiny; default: smollm2
    bash run_all.sh exercises --profile tiny                 # all five

A recipe runs the ordinary stages with flags, beside the run's own results (`--name`) or in a run folder
of its own with another corpus, reads their records and writes

    <run>/exercises/NAME/                 results.json, table.md, picture.png
    <run>/exercises/{lesson,two-rewards}/ run folders like any other
    <run>/exercises/logs/                 what the stages printed

What is finished is skipped, so the same command goes on after Ctrl-C or a crash. How long the trainings
are is data: `exercise` in kernel/profiles.py.
"""

import argparse
import statistics
from pathlib import Path

from kernel.calibration import baseline, card, fit_temperature
from kernel.courtesy import count_courtesy
from kernel.data import read_jsonl, write_atomic, write_json
from kernel.lab import Lab, picture, table
from kernel.ledger import kl_line
from kernel.profiles import PROFILES
from kernel.report import show
from kernel.rubric import PHRASES
from kernel.run import one_line_errors, override, settle

TENTHS = 10


class Result(dict):
    """What an exercise found: header and rows of the table, panels of the picture, what to expect, and
    one sentence with the numbers that were seen."""

    def __init__(self, header, rows, panels, expected, seen):
        super().__init__(header=header, rows=rows, panels=panels, expected=expected, seen=seen)


def mean(values) -> float | None:
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else None


def ends(figures: list[dict], key: str) -> tuple[float | None, float | None]:
    """Means over the first and the last tenth of the iterations."""
    part = max(len(figures) // TENTHS, 1)
    return mean(row[key] for row in figures[:part]), mean(row[key] for row in figures[-part:])


def curve(arms: dict[str, list[dict]], key: str, title: str, y: str = "") -> dict:
    """A panel with one line per arm over the iterations."""
    lines = {
        name: ([row["iteration"] for row in rows], [row[key] for row in rows])
        for name, rows in arms.items()
    }
    return {"title": title, "x": "iteration", "y": y, "lines": lines}


# ---- 1. last token or mean of the response ------------------------------------------------------


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
            [
                "20_reward",
                "--name",
                name,
                "--pooling",
                how,
                "--reward-seed",
                str(seed),
                *map(str, flags),
            ]
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
    )  # fmt: skip


# ---- 2. calibration -----------------------------------------------------------------------------


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
    ]  # fmt: skip
    bins = {
        name: [b for b in cards[key]["bins"] if b["pairs"]]
        for name, key in (("as trained", "test pairs"), ("calibrated", "test, calibrated"))
    }
    panels = [
        {
            "title": "reliability on the test pairs", "x": "the judge's probability for its choice",
            "y": "ordered rightly", "diagonal": True, "dots": True,
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
    ]  # fmt: skip
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
    )  # fmt: skip


# ---- 3. a reward that pays for length ------------------------------------------------------------


def length_hack(lab: Lab, settings: dict) -> Result:
    arms = lab.ppo({
        f"kl {coefficient}": [f"length-kl-{coefficient}", "--reward", "length", "--kl-coef", coefficient]
        for coefficient in ("0", "0.1")
    }, settings)  # fmt: skip
    keys = ("tokens", "repetition", "kl", "rubric", "finished")
    rows = [[name, *(end for key in keys for end in ends(own, key))] for name, own in arms.items()]
    free, held = (ends(own, "tokens") for own in arms.values())
    return Result(
        ["run", *(f"{key}, {end}" for key in keys for end in ("first", "last"))],
        rows,
        [curve(arms, "tokens", "mean length", "tokens"), curve(arms, "repetition", "repeated 3-grams"),
         curve(arms, "kl", "exact KL per token"), curve(arms, "rubric", "rubric (never trained on)")],
        "Paid by the character, the policy without a KL penalty writes longer and longer until the "
        "limit cuts it off or the words repeat, and the rubric falls; with a coefficient of 0.1 it "
        "stays near SFT.",
        f"mean length {free[0]:.1f} -> {free[1]:.1f} tokens without a penalty, {held[0]:.1f} -> "
        f"{held[1]:.1f} with 0.1; rubric {show(rows[0][-3])} and {show(rows[1][-3])} at the end",
    )  # fmt: skip


# ---- 4. two rewards ------------------------------------------------------------------------------

MIX = "helpful=0.7,concise=0.3"


def two_rewards(lab: Lab, settings: dict) -> Result:
    two = lab.beside("two-rewards")
    epochs = ["--epochs", str(settings["two_epochs"])]
    two.stages(
        [["10_sft"]]
        + [
            ["20_reward", "--name", n, "--pairs", f"pairs-{n}", *epochs]
            for n in ("helpful", "concise")
        ]
    )
    kl = ["--kl-coef", str(settings["two_kl_coef"])]
    names = {"helpful": "helpful", "concise": "concise", MIX: "mix"}
    arms = two.ppo(
        {reward: [name, "--reward-mix", reward, *kl] for reward, name in names.items()}, settings
    )
    judges = [two.judge("helpful"), two.judge("concise")]
    steps = {
        row["id"]: PHRASES[row["expected_action"]]
        for row in read_jsonl(two.dir / "data/train/labels.jsonl")
    }

    def row(label: str, name: str, own: list[dict]) -> list:
        """Figures of the samples of some iterations of a run."""
        among = {figures["iteration"] for figures in own}
        samples = [r for r in two.rollouts(name) if r["iteration"] in among]
        ids = [r["prompt_ids"] for r in samples], [r["response_ids"] for r in samples]
        right = mean(steps[r["prompt_id"]] in (r["text"] or "") for r in samples)
        return [label, *(judge(*ids).mean().item() for judge in judges), right] + [
            mean(figures[key] for figures in own) for key in ("courtesy", "tokens", "rubric", "kl")
        ]

    # before its first update every run samples from the SFT policy
    rows = [row("SFT (iteration 1)", "mix", arms[MIX][:1])]
    for reward, name in names.items():
        rows.append(row(reward, name, arms[reward][-max(len(arms[reward]) // TENTHS, 1) :]))
    sft, helpful, concise, mix = rows
    return Result(
        ["reward", "helpful score", "concise score", "right step named", "courtesy formulas", "tokens",
         "rubric", "KL"],
        rows,
        [curve(arms, "courtesy", "courtesy formulas"), curve(arms, "tokens", "mean length", "tokens"),
         curve(arms, "rubric", "rubric (never trained on)")],
        "Helpful pairs differ only in the action (right above wrong, the same words), concise pairs "
        "only in courtesy formulas (plain above courteous, right or wrong). Each judge alone moves what "
        "it was taught and leaves the other to chance; the mix should name the right step as often as "
        "the first and be about as plain as the second.",
        f"the right step is named in {sft[3]:.2f} of SFT's samples, {helpful[3]:.2f} (helpful), "
        f"{concise[3]:.2f} (concise), {mix[3]:.2f} (mix); courtesy formulas {sft[4]:.2f}, "
        f"{helpful[4]:.2f}, {concise[4]:.2f}, {mix[4]:.2f}; tokens {sft[5]:.1f}, {helpful[5]:.1f}, "
        f"{concise[5]:.1f}, {mix[5]:.1f}",
    )  # fmt: skip


# ---- 5. the KL coefficient ------------------------------------------------------------------------

COEFFICIENTS = ("0.001", "0.02", "0.5")


def kl_sweep(lab: Lab, settings: dict) -> Result:
    arms = lab.ppo({c: [f"kl-{c}", "--kl-coef", c] for c in COEFFICIENTS}, settings)
    rows = []
    for name, figures in arms.items():
        kl = kl_line(figures)
        rows.append(
            [
                name,
                *ends(figures, "score"),
                ends(figures, "kl")[1],
                kl["maximum"],
                *ends(figures, "rubric"),
            ]
        )
    # on the frontier: no other run has at least the score with at most the KL
    for row in rows:
        beaten = any(o[2] >= row[2] and o[3] <= row[3] and o[2:4] != row[2:4] for o in rows)
        row.append("no" if beaten else "yes")
    frontier = sorted((row[3], row[2]) for row in rows if row[-1] == "yes")
    points = {row[0]: ([row[3]], [row[2]]) for row in rows}
    points["frontier"] = tuple(zip(*frontier))
    odd = [
        name
        for name, column in (("KL", 3), ("score", 2))
        if not rows[0][column] > rows[1][column] > rows[2][column]
    ]
    return Result(
        ["kl_coef", "score, first", "score, last", "KL, last", "KL, maximum", "rubric, first",
         "rubric, last", "on the frontier"],
        rows,
        [curve(arms, "score", "learned score"), curve(arms, "kl", "exact KL per token"),
         curve(arms, "rubric", "rubric (never trained on)"),
         {"title": "last score against last KL", "x": "KL per token", "y": "score", "lines": points}],
        "The smaller the coefficient, the further the policy goes and the more score it finds; 0.5 "
        "holds it near SFT. The rubric says which of these gains are worth having.",
        "score at the end " + ", ".join(f"{row[2]:+.2f} ({row[0]})" for row in rows)
        + "; KL " + ", ".join(f"{row[3]:.3f}" for row in rows)
        + "".join(f"; the three do not differ in {name} in the expected order" for name in odd),
    )  # fmt: skip


EXERCISES = {
    "pooling": pooling,
    "calibration": calibration,
    "length-hack": length_hack,
    "two-rewards": two_rewards,
    "kl-sweep": kl_sweep,
}


def write(out: Path, name: str, settings: dict, result: Result) -> None:
    """results.json, table.md and picture.png, and all of it but the picture on the console."""
    shown = table(result["header"], result["rows"])
    picture(out / "picture.png", result["panels"])
    curves = [
        {**p, "lines": {k: [list(xs), ys] for k, (xs, ys) in p["lines"].items()}}
        for p in result["panels"]
    ]
    write_json(
        out / "results.json", {"exercise": name, "settings": settings, **result, "panels": curves}
    )
    text = f"{shown}\nWhat to expect: {result['expected']}\n\nWhat was seen: {result['seen']}.\n"
    write_atomic(out / "table.md", text)
    print(f"\n{text}")
    for file in ("results.json", "table.md", "picture.png"):
        print(f"  wrote {out / file}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="exercise", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="run folder; made if it is not there")
    parser.add_argument("names", nargs="+", choices=EXERCISES)
    parser.add_argument("--profile", choices=PROFILES, default="smollm2")
    parser.add_argument("--redo", action="store_true", help="replace results whose inputs changed")
    parser.add_argument("--seeds", type=int, nargs="+")
    for name in ("reward_epochs", "lesson_epochs", "two_epochs"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    parser.add_argument("--iterations", type=int)
    args = parser.parse_args()
    one_line_errors("exercise")
    settle(1)
    lab = Lab(args.folder.resolve(), args.profile, args.redo)
    settings = override(PROFILES[lab.profile]["exercise"], args)
    lab.first("10_sft", "20_reward")
    for name in args.names:
        print(f"\n== {name}", flush=True)
        out = lab.dir / "exercises" / name
        write(out, name, settings, EXERCISES[name](lab, settings))


if __name__ == "__main__":
    main()

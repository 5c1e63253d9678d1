"""PPO in rounds: label what the policy found, train the next judge with it, and start again from SFT.

    round n:  PPO from SFT against judge n  ->  answers of SFT and of that policy to training prompts,
              sampled  ->  labelled by the corpus's rubric, the simulated annotator  ->  pairs
              ->  judge n + 1

Only training prompts are labelled; held-out prompts are answered greedily, to measure and for nothing
else. Judge 1 is the run's own.
"""

from typing import NamedTuple

from kernel.data.files import write_jsonl
from kernel.lesson.lab import SFT, Lab, actor, flags_of
from kernel.lesson.result import Result, curve, ends, mean
from kernel.measure.tables import show
from kernel.measure.verdict import paired_bootstrap

# ---- labels and pairs ----------------------------------------------------------------------------


def label_pairs(
    answers: dict[str, list[dict]], demonstrations: dict[str, list[str]]
) -> tuple[list[dict], int]:
    """(pairs, labels given): every wrong answer is rejected against a right one to the same prompt.

    answers: prompt id -> its answers (prompt, text, success); demonstrations: prompt id -> right answers
    of the corpus, where no sampled one is right. Equal texts are labelled once. A prompt without a wrong
    answer, or without a right one, gives no pair.
    """
    pairs, labels = [], 0
    for name, own in answers.items():
        distinct = {row["text"]: row for row in own}
        labels += len(distinct)
        right = [text for text, row in distinct.items() if row["success"]]
        wrong = [text for text, row in distinct.items() if not row["success"]]
        right = right or demonstrations.get(name, [])
        if right:
            pairs += [
                {"id": f"{name}-{n}", "prompt": own[0]["prompt"], "chosen": right[n % len(right)],
                 "rejected": text}
                for n, text in enumerate(wrong)
            ]
    return pairs, labels


def fits(lab: Lab, text: str | None) -> bool:
    """Whether a sampled answer is a text that a judge can be trained on."""
    try:
        lab.chat.response_ids(text or "")
    except ValueError:  # nothing in it, control tokens, or too long with an end token
        return False
    return True


def labelled(lab: Lab, policies: dict[str, int], settings: dict) -> tuple[list[dict], int]:
    """Sample, label, pair: {adapter: answers per prompt} -> (pairs, labels given)."""
    rows = lab.run.rows("data/train/prompts.jsonl")[: settings["label_prompts"]]
    answers = {row["id"]: [] for row in rows}
    for adapter, times in policies.items():
        sampled = lab.answers(adapter, rows, settings["label_seed"], times)
        for row in lab.judged_answers(sampled, "train"):
            if fits(lab, row["text"]):
                answers[row["id"]].append(row)
    # the corpus's own answer to the same case, if the rubric calls it right here
    known = {}
    for row in lab.run.rows("data/train/demonstrations.jsonl"):
        known.setdefault(row["family"], []).append(row["response"])
    offered = [
        {"id": row["id"], "prompt": row["prompt"], "text": text, "finish_reason": "eos"}
        for row in rows
        for text in known.get(row["family"], [])
    ]
    demonstrations = {}
    for row in lab.judged_answers(offered, "train"):
        if row["success"]:
            demonstrations.setdefault(row["id"], []).append(row["text"])
    return label_pairs(answers, demonstrations)


# ---- rounds ---------------------------------------------------------------------------------------


class Played(NamedTuple):
    """PPO from SFT against one judge."""

    name: str  # of the PPO run
    judge: str  # as --reward names it
    labels: int  # that the judge learned from, beside the corpus's pairs
    pairs: int


def play(lab: Lab, played: list[Played], seeds: list[int], settings: dict, flags: list[str]) -> None:
    """One PPO run per seed, side by side."""
    lab.ppo(
        {
            own.name: [own.name, "--reward", own.judge, "--generation-seed", str(seed), *flags]
            for seed, own in zip(seeds, played)
        },
        {"iterations": settings["rounds_iterations"]},
    )


def next_judges(
    lab: Lab, rounds: list[list[Played]], seeds: list[int], settings: dict
) -> list[Played]:
    """Label what the last round's policies say, and train a judge per seed on all pairs so far."""
    folder, number = lab.dir / "exercises" / "rounds", len(rounds) + 1
    commands, found = [], []
    for place, seed in enumerate(seeds):
        policy = actor(rounds[-1][place].name)
        times = {SFT: settings["sft_answers"]} if number == 2 else {}  # SFT's do not change
        pairs, labels = labelled(lab, times | {policy: settings["policy_answers"]}, settings)
        if not pairs:
            raise ValueError(f"{policy}: no answer was labelled wrong, so there is nothing to add")
        write_jsonl(folder / f"pairs-{seed}-{number}.jsonl", pairs)
        files = [str(folder / f"pairs-{seed}-{n}.jsonl") for n in range(2, number + 1)]
        judge = f"judge-{seed}-{number}"
        commands.append([
            "20_reward", "--name", judge, "--pairs", ",".join(["pairs", *files]),
            "--epochs", str(settings["rounds_epochs"]), "--reward-seed", str(seed),
        ])
        before = rounds[-1][place]
        found.append(
            Played(f"round-{seed}-{number}", judge, before.labels + labels, before.pairs + len(pairs))
        )
        print(f"  seed {seed}, judge {number}: {labels} labels, {len(pairs)} new pairs", flush=True)
    lab.stages(commands)
    return found


def played_rounds(lab: Lab, settings: dict) -> list[list[Played]]:
    """All rounds of all seeds: [round][seed]."""
    tried = {**lab.run.rows("data/train/prompts.jsonl")[0], "text": "", "finish_reason": "eos"}
    if lab.judged_answers([tried], "train")[0]["success"] is None:
        raise ValueError("this run has no rubric, and the rubric is what labels the answers")
    seeds, flags = settings["seeds"], flags_of(settings["rounds_ppo"])
    rounds = [[Played(f"round-{seed}-1", "judge", 0, 0) for seed in seeds]]
    play(lab, rounds[0], seeds, settings, flags)
    while len(rounds) < settings["rounds"]:
        rounds.append(next_judges(lab, rounds, seeds, settings))
        play(lab, rounds[-1], seeds, settings, flags)
    return rounds


def over_seeds(counts: list[int]) -> str:
    """"163 (160 to 166)": mean and range."""
    return f"{mean(counts):.0f} ({min(counts)} to {max(counts)})"


def rounds(lab: Lab, settings: dict) -> Result:
    seeds = settings["seeds"]
    played = played_rounds(lab, settings)
    sft = lab.greedy(SFT)
    judges = {
        name: lab.reward(name) for name in {own.judge: None for group in played for own in group}
    }
    rows, arms, counts, lows = [], {}, [[] for _ in played], [[] for _ in played]
    for place, seed in enumerate(seeds):
        runs = [group[place] for group in played]

        def scores(answers: list[dict], runs=runs) -> list[float]:
            return [lab.mean_score(judges[own.judge], answers) for own in runs]

        rows.append([f"seed {seed}, SFT", sum_right(sft), None, "-", None, None, *scores(sft), 0, 0])
        for number, own in enumerate(runs, start=1):
            answers = lab.greedy(actor(own.name))
            change = paired_bootstrap(
                [b["success"] - a["success"] for a, b in zip(sft, answers)], settings["seeds"][0]
            )
            figures = lab.figures(own.name)
            arms[f"seed {seed}, round {number}"] = figures
            counts[number - 1].append(sum_right(answers))
            lows[number - 1].append(change["low"])
            rows.append(
                [f"seed {seed}, round {number}", sum_right(answers), change["mean"],
                 f"{change['low']:+.3f} to {change['high']:+.3f}", ends(figures, "rubric")[1],
                 ends(figures, "kl")[1], *scores(answers), own.labels, own.pairs]
            )
    told = ", ".join(f"round {n} {over_seeds(own)}" for n, own in enumerate(counts, start=1))
    return Result(
        ["policy", f"greedy, right of {len(sft)}", "against SFT", "95 % interval",
         "samples right, last", "KL, last",
         *(f"judge {n}'s score" for n in range(1, len(played) + 1)), "labels", "pairs added"],
        rows,
        [curve(arms, "rubric", "success of the samples"), curve(arms, "kl", "exact KL per token")],
        "The first judge never saw what PPO finds, and pays for it. Labelled and added to its pairs, "
        "that is what the next judge marks down, and PPO from SFT has to be right to be paid.",
        f"greedy answers right: SFT {sum_right(sft)}, {told} of {len(sft)}; in the last round above SFT "
        f"with the whole interval in {sum(low > 0 for low in lows[-1])} of {len(seeds)} seeds",
    )


def sum_right(answers: list[dict]) -> int:
    return sum(bool(row["success"]) for row in answers)


# ---- what each brake buys -------------------------------------------------------------------------


def one_by_one(settings: dict) -> dict[str, dict]:
    """{label: settings}: none of them, each alone, and all but each."""
    return {
        "none": {},
        **{f"only {key} {value}": {key: value} for key, value in settings.items()},
        **{f"all but {key}": {k: v for k, v in settings.items() if k != key} for key in settings},
    }


def brakes(lab: Lab, settings: dict) -> Result:
    """Every setting of `rounds_ppo` alone, and all but it, against the second judge."""
    seeds, choices = settings["seeds"][:2], one_by_one(settings["rounds_ppo"])
    second = played_rounds(lab, settings | {"seeds": seeds, "rounds": 2})[1]
    commands = {
        (label, seed): [
            f"brakes-{label.replace(' ', '-').replace('_', '-')}-{seed}", "--reward", judge.judge,
            "--generation-seed", str(seed), *flags_of(chosen),
        ]
        for label, chosen in choices.items()
        for seed, judge in zip(seeds, second)
    }
    lab.ppo(commands, {"iterations": settings["rounds_iterations"]})
    names = {key: command[0] for key, command in commands.items()}
    names |= {("all", seed): run.name for seed, run in zip(seeds, second)}
    sft, rows = sum_right(lab.greedy(SFT)), []
    for label in [*choices, "all"]:
        counts = [sum_right(lab.greedy(actor(names[label, seed]))) for seed in seeds]
        kl = mean(ends(lab.figures(names[label, seed]), "kl")[1] for seed in seeds)
        rows.append([label, *counts, mean(counts), kl])
    first = {label: lab.figures(names[label, seeds[0]]) for label in [*choices, "all"]}
    return Result(
        ["brakes", *(f"greedy right, seed {seed}" for seed in seeds), "mean", "KL, last"],
        rows,
        [curve(first, "rubric", f"success of the samples, seed {seeds[0]}"),
         curve(first, "kl", "exact KL per token")],
        "Against the same second judge PPO without its brakes still finds what no pair shows. No single "
        "one holds it on every seed; what each is worth shows where it alone is missing.",
        f"SFT {sft}; " + "; ".join(f"{row[0]} {show(row[-2])}" for row in rows),
    )

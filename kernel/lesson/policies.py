"""Exercises with PPO: a judge that is never wrong, one that pays for length, two rewards, the KL."""

from kernel.data.draws import tenths
from kernel.data.office_rubric import PHRASES
from kernel.lesson.lab import SFT, Lab, actor, flags_of
from kernel.lesson.result import Result, curve, ends, mean
from kernel.measure.ledger import kl_line
from kernel.measure.tables import show
from kernel.measure.verdict import paired_bootstrap
from kernel.score import score_answers

# ---- a judge that is never wrong -----------------------------------------------------------------

def perfect_judge(lab: Lab, settings: dict) -> Result:
    flags = ["--reward", "rubric", "--no-center-scores", *flags_of(settings["perfect_ppo"])]
    arms = lab.ppo(
        {
            f"seed {seed}": [f"perfect-{seed}", *flags, "--generation-seed", str(seed)]
            for seed in settings["seeds"]
        },
        {"iterations": settings["perfect_iterations"]},
    )
    before = [row["success"] for row in lab.greedy(SFT)]
    rows = []
    for seed, (label, figures) in zip(settings["seeds"], arms.items()):
        after = [row["success"] for row in lab.greedy(actor(f"perfect-{seed}"))]
        first, last = ends(figures, "rubric")
        change = paired_bootstrap([b - a for a, b in zip(before, after)], settings["seeds"][0])
        rows.append(
            [label, first, last, last - first, ends(figures, "kl")[1], sum(before), sum(after),
             change["mean"], f"{change['low']:+.3f} to {change['high']:+.3f}"]
        )
    gains = [row[3] for row in rows]
    greedy = ", ".join(str(row[6]) for row in rows)
    return Result(
        ["PPO, paid by the rubric", "samples, first", "samples, last", "gain", "KL, last",
         f"SFT greedy, of {len(before)}", "PPO greedy", "difference", "95 % interval"],
        rows,
        [curve(arms, "rubric", "success of the samples"), curve(arms, "kl", "exact KL per token")],
        "Paid with 1 for success by the rubric and 0 otherwise, PPO learns: the samples' success rises, "
        "and so does that of the greedy answers to prompts that it never saw. A run that ends worse for "
        "the rubric then has its judge to blame and not its optimiser.",
        f"success of the samples rose by {min(gains):.2f} to {max(gains):.2f} over {len(rows)} seeds; "
        f"greedy answers {sum(before)} -> {greedy} of {len(before)}",
    )


# ---- a reward that pays for length ---------------------------------------------------------------


def length_hack(lab: Lab, settings: dict) -> Result:
    arms = lab.ppo({
        f"kl {coefficient}": [f"length-kl-{coefficient}", "--reward", "length", "--kl-coef", coefficient]
        for coefficient in ("0", "0.1")
    }, settings)
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
    )


# ---- two rewards ----------------------------------------------------------------------------------

MIX = "helpful=0.7,concise=0.3"


def two_rewards(lab: Lab, settings: dict) -> Result:
    two = lab.beside("two-rewards")
    epochs = ["--epochs", str(settings["two_epochs"])]
    alone = ("helpful", "concise")
    rewards = [["20_reward", "--name", n, "--pairs", f"pairs-{n}", *epochs] for n in alone]
    two.stages([["10_sft"], *rewards])
    kl = ["--kl-coef", str(settings["two_kl_coef"])]
    names = {"helpful": "helpful", "concise": "concise", MIX: "mix"}
    arms = two.ppo(
        {reward: [name, "--reward-mix", reward, *kl] for reward, name in names.items()}, settings
    )
    judges = [two.reward(name) for name in alone]
    steps = {
        row["id"]: PHRASES[row["expected_action"]]
        for row in two.run.rows("data/train/labels.jsonl")
    }

    def row(label: str, name: str, own: list[dict]) -> list:
        """Figures of the samples of some iterations of a run."""
        among = {figures["iteration"] for figures in own}
        samples = [r for r in two.rollouts(name) if r["iteration"] in among]
        ids = [(r["prompt_ids"], r["response_ids"]) for r in samples]
        scores = [score_answers(judge, ids, two.chat.pad_id, two.device) for judge in judges]
        right = mean(steps[r["prompt_id"]] in (r["text"] or "") for r in samples)
        return [label, *(score.mean().item() for score in scores), right] + [
            mean(figures[key] for figures in own) for key in ("courtesy", "tokens", "rubric", "kl")
        ]

    # before its first update every run samples from the SFT policy
    rows = [row("SFT (iteration 1)", "mix", arms[MIX][:1])]
    for reward, name in names.items():
        rows.append(row(reward, name, tenths(arms[reward])[1]))
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
    )


# ---- the KL coefficient ---------------------------------------------------------------------------

COEFFICIENTS = ("0.001", "0.02", "0.5")


def kl_sweep(lab: Lab, settings: dict) -> Result:
    arms = lab.ppo({c: [f"kl-{c}", "--kl-coef", c] for c in COEFFICIENTS}, settings)
    rows = []
    for name, figures in arms.items():
        kl = kl_line(figures)
        _, last = ends(figures, "kl")
        rows.append([name, *ends(figures, "score"), last, kl["maximum"], *ends(figures, "rubric")])
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
    )

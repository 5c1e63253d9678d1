"""Figures of a finished run once more, from the numbers in its own records.

Scores, log-probabilities, values and ratios are taken as measured; everything that follows from them by
arithmetic is done again with the kernel's own formulas and compared. Each function returns a line that
says what held and raises ValueError at the first thing that does not, with both numbers.
"""

import math
from itertools import groupby

import torch
from safetensors.torch import load_file

from kernel import ppo
from kernel.data.chat import Chat
from kernel.data.draws import Draws
from kernel.data.files import read_json, read_jsonl
from kernel.data.own_code import load_rubric
from kernel.measure import iteration, judge, ledger, probe, tables, verdict
from kernel.measure.answers import answer_figures, paired
from kernel.measure.courtesy import count_courtesy
from kernel.measure.pairs import pair_figures
from kernel.optim import learning_rate
from kernel.run import state
from kernel.run.folder import TRAINED, RunFolder

CLOSE = 1e-5  # relative or absolute: the same float32 arithmetic rounds otherwise on other machines


def same(where: str, stored, computed) -> None:
    """Raises ValueError unless two numbers, or lists of numbers, agree within CLOSE."""
    left = stored if isinstance(stored, list) else [stored]
    right = computed if isinstance(computed, list) else [computed]
    if len(left) != len(right):
        raise ValueError(f"{where}: {len(left)} numbers stored, {len(right)} recomputed")
    for position, (a, b) in enumerate(zip(left, right)):
        if not math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE):
            at = f" [{position}]" if isinstance(stored, list) else ""
            raise ValueError(f"{where}{at}: {a} is stored, {b} follows from the records")


def equal(where: str, stored, computed) -> None:
    """The same for nested dicts and lists; numbers within CLOSE, everything else exactly."""
    left, right = dict(state.walk(stored)), dict(state.walk(computed))
    for name in left | right:
        a, b = left.get(name), right.get(name)
        if isinstance(a, float) and isinstance(b, float):
            same(f"{where} {name}", a, b)
        elif a != b:
            raise ValueError(f"{where} {name}: {a!r} is stored, {b!r} follows from the records")


# ---- figures of the training loops --------------------------------------------------------------


def schedule(run: RunFolder, stage: str) -> str:
    """One row per update, in order, and the learning rate of each."""
    config = run.record(stage, "continuous")["identity"]
    common, own = config["common"], config[TRAINED[stage]]
    rows = run.rows(f"outputs/{stage}/continuous/metrics.jsonl")
    counted = "iteration" if stage == "30_ppo" else "update"
    equal(
        f"{stage} metrics.jsonl {counted}", [r[counted] for r in rows], [*range(1, len(rows) + 1)]
    )
    each = own.get("ppo_epochs", 1)
    total = len(rows) * each
    warmup = round(common["warmup"] * total)
    peaks = (
        {"actor_lr": own["actor_lr"], "critic_lr": own["critic_lr"]}
        if stage == "30_ppo"
        else {"lr": own["learning_rate"]}
    )
    for row in rows:
        for key, peak in peaks.items():
            want = learning_rate(row[counted] * each - 1, total, peak, warmup, common["final_lr"])
            if not math.isclose(row[key], want, rel_tol=CLOSE):
                place = f"{stage} metrics.jsonl {counted} {row[counted]} {key}"
                raise ValueError(f"{place}: {row[key]} is stored, {want} follows from the settings")
    return f"{len(rows)} rows of metrics, learning rates recomputed"


def same_ending(where: str, row: dict, eos_id: int) -> None:
    """The finish reason says whether the last id is EOS."""
    ended = row["response_ids"][-1] == eos_id
    equal(f"{where} finish_reason", row["finish_reason"], "eos" if ended else "length")


def rollouts(run: RunFolder) -> str:
    """Prompts drawn, token rewards, GAE, losses and metrics of every iteration, from stored tokens."""
    identity = run.record("30_ppo", "continuous")["identity"]
    own, common = identity["ppo"], identity["common"]
    prompts = run.rows("data/train/prompts.jsonl")
    draws = Draws(len(prompts), common["sampler_seed"])
    stored = run.rows("outputs/30_ppo/continuous/rollouts.jsonl")
    metrics = run.rows("outputs/30_ppo/continuous/metrics.jsonl")
    groups = {n: list(rows) for n, rows in groupby(stored, key=lambda row: row["iteration"])}
    equal("30_ppo rollouts.jsonl iterations", [*groups], [row["iteration"] for row in metrics])
    for row, group in zip(metrics, groups.values()):
        where = f"30_ppo iteration {row['iteration']}"
        drawn = [prompts[i]["id"] for i in draws.take(own["rollouts"])]
        equal(f"{where} prompts", [r["prompt_id"] for r in group], drawn)
        for r in group:
            same_ending(f"{where} {r['rollout']}", r, common["eos_id"])
        for name, value in iteration_figures(where, group, own).items():
            same(f"{where} {name}", row[name], value)
    first = load_file(run.dir / "outputs/30_ppo/continuous/first_logits.safetensors")
    known = {row["rollout"]: row for row in stored}
    for name, logits in first.items():
        logprob = logits.log_softmax(-1)[known[name]["response_ids"][0]].item()
        same(f"30_ppo first_logits {name}", known[name]["old_logprobs"][0], logprob)
    return f"{len(stored)} rollouts: prompts, token rewards, GAE, losses and {len(metrics)} metric rows"


def iteration_figures(where: str, group: list[dict], own: dict) -> dict[str, float]:
    """One row of PPO's metrics, as far as it follows from the rollouts; checks their own columns too."""

    def padded(lists: list[list], dtype=torch.float32) -> torch.Tensor:
        width = max(map(len, lists))
        return torch.tensor([row + [0] * (width - len(row)) for row in lists], dtype=dtype)

    def check(name: str, compare, stored: list[list], tensor: torch.Tensor) -> None:
        for b, row in enumerate(group):
            length = len(row["response_ids"])
            compare(f"{where} {row['rollout']} {name}", stored[b], tensor[b, :length].tolist())

    tokens = {name: padded([row[name] for row in group]) for name in iteration.RECORDED}  # (B, T)
    mask = padded([[1] * len(row["response_ids"]) for row in group], torch.bool)
    finished = torch.tensor([row["finish_reason"] == "eos" for row in group])
    scores = torch.tensor([row["score"] for row in group])
    paid = (scores - group[0]["center"]) / group[0]["scale"]
    rewards = ppo.token_rewards(
        paid, tokens["old_logprobs"], tokens["ref_logprobs"], mask, finished,
        own["kl_coef"], own["cutoff_penalty"],
    )
    advantages, returns = ppo.gae(
        rewards, tokens["old_values"], mask, own["gamma"], own["gae_lambda"]
    )
    again = {"rewards": rewards, "advantages": advantages, "returns": returns}
    for name, tensor in again.items():
        check(name, same, [row[name] for row in group], tensor)
    figures = iteration.rollout_metrics(scores, paid, finished, tokens | again, mask)
    for epoch in range(own["ppo_epochs"]):
        ratio = padded([row["ratios"][epoch] for row in group]).masked_fill(~mask, 1)
        policy_loss, seen = ppo.policy_loss(
            ratio.log(), torch.zeros_like(ratio), advantages, mask, own["clip_range"]
        )
        bites = [row["clip_bites"][epoch] for row in group]
        check(f"clip_bites of epoch {epoch + 1}", equal, bites, seen["clip_bites"])
        new_values = padded([row["new_values"][epoch] for row in group])
        figures |= {
            f"policy_loss_{epoch + 1}": policy_loss.item(),
            f"value_loss_{epoch + 1}": ppo.value_loss(new_values, returns, mask).item(),
            f"clip_fraction_{epoch + 1}": seen["clip_fraction"].item(),
            f"approx_kl_{epoch + 1}": seen["approx_kl"].item(),
        }
    return figures


# ---- figures of the held-out stages -------------------------------------------------------------


def generations(run: RunFolder) -> str:
    """Both policies answered every held-out prompt once, and text and ids agree."""
    chat = Chat(run.common)
    wanted = [row["id"] for row in run.rows("data/heldout/prompts.jsonl")]
    rows = run.rows("outputs/40_generate/generations.jsonl")
    for policy in ("sft", "ppo"):
        own = [row["id"] for row in rows if row["policy"] == policy]
        equal(f"40_generate {policy} ids", own, wanted)
    for row in rows:
        where = f"40_generate {row['policy']} {row['id']}"
        equal(f"{where} text", row["text"], chat.decode(row["response_ids"]))
        same_ending(where, row, chat.eos_id)
    return f"{len(rows)} answers, texts and finish reasons follow from the ids"


def evaluation(run: RunFolder) -> str:
    """Verdicts from the answers' own words, tables from the verdicts."""
    labels = {row["id"]: row for row in run.rows("data/heldout/labels.jsonl")}
    rubric = load_rubric(run.dir / "data/rubric.py")
    written = run.rows("outputs/40_generate/generations.jsonl")
    answers = run.rows("outputs/50_evaluate/answers.jsonl")
    for row, source in zip(answers, written, strict=True):
        where = f"50_evaluate answers.jsonl {row['policy']} {row['id']}"
        for key in ("policy", "id", "text", "finish_reason", "prompt"):
            equal(f"{where} {key}", row[key], source[key])
        for key, value in answer_figures(source, labels[row["id"]], rubric).items():
            equal(f"{where} {key}", row[key], value)
    seed = run.record("50_evaluate")["identity"]["evaluate"]["bootstrap_seed"]
    figures = verdict.evaluation(answers, seed)
    stored = read_json(run.dir / "outputs/50_evaluate/results.json")
    equal("50_evaluate results.json", {key: stored[key] for key in figures}, figures)
    pairs = run.rows("outputs/50_evaluate/pairs.jsonl")
    wanted = [row["id"] for row in run.rows("data/heldout/pairs.jsonl")]
    equal("50_evaluate pairs.jsonl ids", [row["id"] for row in pairs], wanted)
    accuracy = pair_figures(pairs)
    equal("50_evaluate results.json reward_accuracy", stored["reward_accuracy"], accuracy)
    table = (run.dir / "outputs/50_evaluate/table.md").read_text(encoding="utf-8")
    lines = tables.table_lines(figures, accuracy, len(answers))
    equal("50_evaluate table.md", table.splitlines(), lines)
    return f"{len(answers)} verdicts, {len(pairs)} pairs, the table, the intervals, the verdict"


def probes(run: RunFolder) -> str:
    """Every figure of the probe stage, from the scores in its rows and from the records of PPO."""
    folder = run.dir / "outputs/60_probe"
    pairs, doses, samples = (
        read_jsonl(folder / f"{name}.jsonl") for name in ("pairs", "doses", "best_of_n")
    )
    path = folder / "probes.jsonl"
    candidates = read_jsonl(path) if path.stat().st_size else []  # a corpus need not have probes
    answers = run.rows("outputs/50_evaluate/answers.jsonl")
    both = paired(answers)
    asked = {sft["context"]: sft for sft, _ in both}
    probe_rows(run, candidates, pairs, doses, samples, asked)
    rollouts = ledger.judged_rollouts(
        run.rows("outputs/30_ppo/continuous/rollouts.jsonl"), run.rows("data/train/prompts.jsonl"),
        run.rows("data/train/labels.jsonl"), load_rubric(run.dir / "data/rubric.py"),
    )
    figures = probe.all_figures(
        candidates, pairs, doses, samples, answers,
        run.rows("outputs/30_ppo/continuous/metrics.jsonl"), rollouts,
        run.record("60_probe")["identity"]["probe"]["probe_seed"],
    )
    equal("60_probe figures.json", read_json(folder / "figures.json"), figures)
    for name, lines in (
        ("table", tables.all_lines(figures)),
        ("before_after", tables.before_after_lines(both, figures)),
    ):
        written = (folder / f"{name}.md").read_text(encoding="utf-8").splitlines()
        equal(f"60_probe {name}.md", written, lines)
    return (
        f"{len(pairs)} pairs, {len(samples)} samples, {len(doses)} doses: effects, report card, "
        "ledger, best of n, decomposition"
    )


def probe_rows(run: RunFolder, candidates, pairs, doses, samples, asked: dict[str, dict]) -> None:
    """What stands beside the scores in the rows of the probe stage. asked: SFT's answer by context."""
    chat = Chat(run.common)
    rubric = load_rubric(run.dir / "data/rubric.py")
    labels = {row["id"]: row for row in run.rows("data/heldout/labels.jsonl")}
    splits = {s: run.rows(f"data/{s}/pairs.jsonl") for s in ("train", "validation", "heldout")}
    picked = judge.card_pairs(splits, run.record("60_probe")["identity"]["probe"]["card_pairs"])
    source = {(split, row["id"]): row for split, rows in picked.items() for row in rows}
    equal("60_probe pairs.jsonl ids", [(row["split"], row["id"]) for row in pairs], list(source))
    measured = {row["id"]: row for row in run.rows("outputs/50_evaluate/pairs.jsonl")}
    for row in pairs:
        for side in ("chosen", "rejected"):
            if row["split"] == "heldout":
                have, key = measured[row["id"]], f"{side}_score"
                same(f"60_probe pairs.jsonl {row['id']} {key}", row[key], have[key])
            text, where = source[row["split"], row["id"]][side], f"60_probe pairs.jsonl {row['id']}"
            equal(f"{where} {side}_tokens", row[f"{side}_tokens"], len(chat.response_ids(text)))
            equal(f"{where} {side}_courtesy", row[f"{side}_courtesy"], count_courtesy(text))
    for row in samples:
        sft = asked[row["context"]]
        found = rubric(sft["prompt"], row["text"], row["finish_reason"], labels[sft["id"]])
        where = f"60_probe best_of_n.jsonl {row['context']} sample {row['sample']}"
        equal(f"{where} success", row["success"], found["success"])
    for context, rows in groupby(doses, key=lambda row: row["context"]):
        sft, own = asked[context], list(rows)
        made = probe.dose_rows(sft, candidates)
        answer = {"context": context, "factor": "sft", "dose": None, "text": sft["text"]}
        stored = [{key: value for key, value in row.items() if key != "score"} for row in own]
        equal(f"60_probe doses.jsonl {context}", stored, [*made, answer])
        same(f"60_probe doses.jsonl {context} sft", own[-1]["score"], sft["score"])

"""Over-optimisation: the learned score against the rubric as PPO's KL grows, and best of n beside it.

The rubric looks at the sampled responses afterwards; training never saw it. Rows in, plain dicts out.
Rates of nothing are None.
"""

import math
from itertools import groupby

from kernel.measure.answers import rate, summarise
from kernel.measure.courtesy import count_courtesy

BLOCKS = 10
KL_THRESHOLD = 0.1  # nats per token


def repetition(ids: list[int], n: int = 3) -> float:
    """1 - distinct / all n-grams of a response's tokens; 0 where there are fewer than n tokens."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def judged_rollouts(
    rollouts: list[dict], prompts: list[dict], labels: list[dict], rubric
) -> list[dict]:
    """The rubric's verdict and a few figures of each sampled response. Training never saw the rubric.

    rollouts: lines of rollouts.jsonl; prompts and labels: the rows of the training prompts. kl is the
    exact KL per token, kl_sum that of the response in nats: summed over the visited prefixes. Raises
    ValueError naming the rollout whose prompt or label is missing.
    """
    prompts = {row["id"]: row["prompt"] for row in prompts}
    labels = {row["id"]: row for row in labels}
    rows = []
    for row in rollouts:
        name, tokens = row["prompt_id"], len(row["response_ids"])
        if name not in prompts or name not in labels:
            raise ValueError(f"rollout {row['rollout']}: no prompt or no label for {name}")
        rows.append(
            {
                **{key: row[key] for key in ("iteration", "text", "finish_reason", "score")},
                "verdict": rubric(prompts[name], row["text"], row["finish_reason"], labels[name]),
                "tokens": tokens,
                "kl": sum(row["kl"]) / tokens,
                "kl_sum": sum(row["kl"]),
                "log_ratio": (sum(row["old_logprobs"]) - sum(row["ref_logprobs"])) / tokens,
                "repetition": repetition(row["response_ids"]),
                "courtesy": count_courtesy(row["text"] or ""),
            }
        )
    return rows


def by_iteration(rollouts: list[dict]) -> list[dict]:
    """Means per iteration. polite is the rubric's, among the recognised; courtesy counts formulas."""
    figures = []
    for iteration, group in groupby(rollouts, key=lambda row: row["iteration"]):
        rows = list(group)
        r = summarise(rows)
        figures.append(
            {
                "iteration": iteration,
                "score": r["mean_score"],
                "kl": r["mean_kl"],
                "rubric": r["success_rate"],
                "recognised": r["recognised_rate"],
                "polite": r["polite_rate"],
                "courtesy": sum(row["courtesy"] for row in rows) / len(rows),
                "tokens": r["mean_tokens"],
                "finished": 1 - r["without_eos"] / len(rows),
                "repetition": sum(row["repetition"] for row in rows) / len(rows),
            }
        )
    return figures


def ledger(rollouts: list[dict]) -> dict:
    """Score and rubric against KL, in about ten blocks of iterations; where the rubric was highest.

    KL is per response, in nats, so that it compares with best-of-n. Source: Gao et al. 2023.
    """
    iterations = sorted({row["iteration"] for row in rollouts})
    count = min(BLOCKS, len(iterations))
    blocks = []
    for number in range(count):
        start, end = (len(iterations) * n // count for n in (number, number + 1))
        first, last = iterations[start], iterations[end - 1]
        rows = [row for row in rollouts if first <= row["iteration"] <= last]
        kl = sum(row["kl_sum"] for row in rows) / len(rows)
        r = summarise(rows)
        blocks.append(
            {
                "from": first,
                "to": last,
                "kl": kl,
                "sqrt_kl": math.sqrt(max(kl, 0)),  # rounding may leave a 0 just below it
                "score": r["mean_score"],
                "rubric": r["success_rate"],
                "rollouts": len(rows),
            }
        )
    known = [n for n, block in enumerate(blocks) if block["rubric"] is not None]
    peak = max(known, key=lambda n: blocks[n]["rubric"]) if known else None
    return {"blocks": blocks, "gold_peak": peak}


def kl_line(metrics: list[dict]) -> dict:
    """The exact KL per token over the iterations: first, final, highest, and when it passed 0.1."""
    kls = [row["kl"] for row in metrics]
    highest = max(range(len(kls)), key=kls.__getitem__)
    above = [row["iteration"] for row in metrics if row["kl"] > KL_THRESHOLD]
    return {
        "first": kls[0],
        "final": kls[-1],
        "maximum": kls[highest],
        "maximum_at": metrics[highest]["iteration"],
        "passed": bool(above),
        "passed_at": above[0] if above else None,
        "threshold": KL_THRESHOLD,
    }


# ---- best of n ----------------------------------------------------------------------------------


def best_of(scores: list[float], values: list[float], n: int) -> float:
    """Expected value of the highest-scoring of n samples, drawn without replacement from these.

    Of N samples in ascending order the k-th is the best in C(k-1, n-1) of the C(N, n) draws; equal
    scores share what falls to them. Exact: no draw is made.
    """
    order = sorted(range(len(scores)), key=scores.__getitem__)
    total, k = 0.0, 0
    for _, tied in groupby(order, key=scores.__getitem__):
        places = list(tied)
        weight = sum(math.comb(k + i, n - 1) for i in range(len(places)))
        total += weight * sum(values[place] for place in places) / len(places)
        k += len(places)
    return total / math.comb(len(scores), n)


def best_of_n(samples: list[dict]) -> list[dict]:
    """Score and rubric of the sample that the judge likes best, for n = 1, 2, 4, ... samples.

    samples carry context, score, success (None: unknown). KL(best of n || SFT) = log n - (n-1)/n, an
    upper bound where samples repeat. Source: Stiennon et al. 2020, appendix G.3; Beirami et al. 2024.
    """
    contexts = {}
    for row in samples:
        contexts.setdefault(row["context"], []).append(row)
    most = min(map(len, contexts.values()))
    figures = []
    for n in (2**i for i in range(most.bit_length())):
        score, rubric = [], []
        for rows in contexts.values():
            scores, success = ([row[key] for row in rows] for key in ("score", "success"))
            score.append(best_of(scores, scores, n))
            if None not in success:
                rubric.append(best_of(scores, success, n))
        kl = math.log(n) - (n - 1) / n
        figures.append(
            {
                "n": n,
                "kl": kl,
                "sqrt_kl": math.sqrt(kl),
                "score": sum(score) / len(score),
                "rubric": rate(sum(rubric), len(rubric)),
                "contexts": len(contexts),
                "samples": most,
            }
        )
    return figures

"""Answers of the two policies: populations, and the figures of one table line."""

import numpy

POPULATIONS = ("test", "probe_rows", "probe_unique_contexts", "all_rows", "all_unique_contexts")


def population(rows: list[dict], name: str) -> list[dict]:
    """The rows of one population. Unique contexts keep the first row of each context.

    rows carry `population` ("test" or "probe") and `context`.
    """
    if name == "test":
        return [row for row in rows if row["population"] == "test"]
    if name.startswith("probe"):
        rows = [row for row in rows if row["population"] == "probe"]
    if name.endswith("unique_contexts"):
        first = {}
        for row in rows:
            first.setdefault(row["context"], row)
        rows = list(first.values())
    return rows


def rate(count: int, total: int) -> float | None:
    """count / total, None where there is nothing to divide by (never a made-up 0)."""
    return count / total if total else None


def answer_figures(row: dict, label: dict, rubric) -> dict:
    """verdict, tokens, and log_ratio and kl as means over the tokens, of one generated answer.

    row: a line of generations.jsonl; label: what the rubric may know about its prompt; rubric: the
    corpus's own function.
    """
    tokens = len(row["response_ids"])
    return {
        "verdict": rubric(row["prompt"], row["text"], row["finish_reason"], label),
        "tokens": tokens,
        "log_ratio": sum(a - r for a, r in zip(row["logprobs"], row["ref_logprobs"])) / tokens,
        "kl": sum(row["kl"]) / tokens,
    }


def tally(verdicts: list[dict], key: str) -> tuple[int | None, int]:
    """(how many say yes, how many say anything) to one key; None, not 0, where no verdict knows it."""
    known = [verdict[key] for verdict in verdicts if verdict.get(key) is not None]
    return (sum(known) if known or not verdicts else None), len(known)


def summarise(rows: list[dict]) -> dict:
    """One table line. rows carry `verdict` (the rubric's dict), score, tokens, log_ratio, kl, text.

    Of a verdict only `success` is certain, and it may be None: unknown. success_rate is over all rows
    where it is known; relevant, unsupported_certainty and polite are over the recognised rows. What a
    rubric does not say at all is None, and further keys of its own are left alone.
    log_ratio and kl are means over a response's tokens, then over responses.
    """
    verdicts = [row["verdict"] for row in rows]
    recognised = [v for v in verdicts if v.get("recognised", True)]
    counts = {
        name: tally(among, key)
        for name, key, among in (
            ("success", "success", verdicts),
            ("recognised", "recognised", verdicts),
            ("relevant", "relevant", recognised),  # None: no expected action known
            ("unsupported_certainty", "unsupported_certainty", recognised),
            ("polite", "polite", recognised),
            ("refusals", "refusal", verdicts),
        )
    }
    statuses = [v["status"] for v in verdicts if "status" in v]

    def mean(key: str) -> float | None:
        return float(numpy.mean([row[key] for row in rows])) if rows else None

    return {
        "rows": len(rows),
        "success": counts["success"][0],
        "success_rate": rate(*counts["success"]),
        "recognised": counts["recognised"][0],
        "recognised_rate": rate(*counts["recognised"]),
        "uncertified": statuses.count("UNCERTIFIED") if statuses or not rows else None,
        "relevant": counts["relevant"][0],
        "relevant_rate": rate(*counts["relevant"]),
        "unsupported_certainty": counts["unsupported_certainty"][0],
        "unsupported_certainty_rate": rate(*counts["unsupported_certainty"]),
        "polite_rate": rate(*counts["polite"]),
        "refusals": counts["refusals"][0],
        "without_eos": sum(row["finish_reason"] != "eos" for row in rows),
        "distinct_answers": len({row["text"] for row in rows}),
        "mean_tokens": mean("tokens"),
        "mean_score": mean("score"),
        "mean_log_ratio": mean("log_ratio"),
        "mean_kl": mean("kl"),
    }


def polite_share(answers: list[dict], policy: str) -> float | None:
    """Share of courteous answers among the recognised ones, over the distinct held-out contexts."""
    own = population([row for row in answers if row["policy"] == policy], "all_unique_contexts")
    return summarise(own)["polite_rate"]


# ---- SFT against PPO ----------------------------------------------------------------------------


def paired(answers: list[dict]) -> list[tuple[dict, dict]]:
    """(SFT's answer, PPO's answer) per distinct context; answers carry policy, population and context.

    Raises ValueError if the two did not answer the same contexts: then nothing can be paired.
    """
    sft, ppo = (
        population([row for row in answers if row["policy"] == policy], "all_unique_contexts")
        for policy in ("sft", "ppo")
    )
    if [row["context"] for row in sft] != [row["context"] for row in ppo]:
        raise ValueError("SFT and PPO did not answer the same contexts")
    return list(zip(sft, ppo))

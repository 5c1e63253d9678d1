"""Figures over answers and pairs: population tables, paired bootstrap, the verdict in plain words."""

import numpy

from kernel.preference import pair_accuracy

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


def paired_bootstrap(differences: list[float], seed: int, resamples: int = 10_000) -> dict:
    """Mean of paired differences and its 95 % percentile interval, resampling the pairs."""
    values = numpy.asarray(differences, dtype=numpy.float64)
    generator = numpy.random.default_rng(seed)
    picks = generator.integers(0, len(values), size=(resamples, len(values)))
    means = values[picks].mean(axis=1)
    low, high = numpy.percentile(means, [2.5, 97.5])
    return {
        "mean": float(values.mean()),
        "low": float(low),
        "high": float(high),
        "pairs": len(values),
    }


def verdict(score: dict, rubric: dict | None) -> tuple[str, str]:
    """(label, sentence) from two paired differences PPO - SFT with intervals; rubric None: unknown."""
    up = score["low"] > 0
    if rubric is None:
        rose = "rose" if up else "did not clearly rise"
        return f"score {'up' if up else 'not up'}, rubric unknown", (
            f"The learned score {rose}. Only that score is known: no rubric judged the answers, so "
            "nothing here says whether they are better."
        )
    better, worse = rubric["low"] > 0, rubric["high"] < 0
    if up and better:
        return "improved both", "The learned score and the independent rubric both rose."
    if up and worse:
        return "exploitation", (
            "WARNING: the learned score rose while the independent rubric fell: PPO exploited the judge."
        )
    if up:
        return "likely exploitation", (
            "The learned score rose, the independent rubric did not clearly move: what PPO gained is "
            "not certified by the rubric."
        )
    if better:
        return "rubric up", "The independent rubric rose, the learned score did not clearly."
    if worse:
        return "worse", "The learned score did not rise, and the independent rubric fell."
    return "no clear change", "The learned score did not clearly rise."


def evaluation(answers: list[dict], seed: int) -> dict:
    """All figures over the answers of both policies: results, differences (PPO - SFT), verdict.

    The difference in the rubric is over the contexts where it is known for both, None without any.
    answers carry policy ("sft" or "ppo") and what `summarise` wants. Raises ValueError if the two did
    not answer the same contexts: then nothing can be paired.
    """
    policies = {name: [row for row in answers if row["policy"] == name] for name in ("sft", "ppo")}
    results = {
        policy: {name: summarise(population(rows, name)) for name in POPULATIONS}
        for policy, rows in policies.items()
    }
    unique = {policy: population(rows, "all_unique_contexts") for policy, rows in policies.items()}
    if [row["context"] for row in unique["sft"]] != [row["context"] for row in unique["ppo"]]:
        raise ValueError("SFT and PPO did not answer the same contexts")
    measures = {
        "score": lambda row: row["score"],
        "rubric": lambda row: row["verdict"]["success"],
        "tokens": lambda row: row["tokens"],
        "kl": lambda row: row["kl"],  # exact, per token, against SFT: SFT's own is 0
    }
    differences = {}
    for name, of in measures.items():
        both = [(of(sft), of(ppo)) for sft, ppo in zip(unique["sft"], unique["ppo"])]
        known = [ppo - sft for sft, ppo in both if sft is not None and ppo is not None]
        differences[name] = paired_bootstrap(known, seed) if known else None
    label, sentence = verdict(differences["score"], differences["rubric"])
    return {
        "results": results,
        "differences": differences,
        "verdict": {"label": label, "sentence": sentence},
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
    """Accuracy over "all" pairs and over each variant; rows carry id, chosen_score, rejected_score."""
    chosen, rejected = (
        numpy.array([row[f"{side}_score"] for row in rows]) for side in ("chosen", "rejected")
    )
    groups = {"all": range(len(rows))} | by_variant([row["id"] for row in rows])
    return {
        name: pair_accuracy(chosen[picked], rejected[picked]) for name, picked in groups.items()
    }


def polite_share(answers: list[dict], policy: str) -> float | None:
    """Share of courteous answers among the recognised ones, over the distinct held-out contexts."""
    own = population([row for row in answers if row["policy"] == policy], "all_unique_contexts")
    return summarise(own)["polite_rate"]


def show(value, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def results_table(results: dict) -> list[str]:
    """Markdown lines: one row per policy and population; "-" where nothing is known."""

    def counted(r: dict, key: str) -> str:
        return "-" if r[key] is None else f"{r[key]} ({show(r[f'{key}_rate'])})"

    lines = [
        "| policy | population | rows | success | recognised | relevant | unsupported certainty "
        "| polite | score | log-ratio | KL | tokens | without EOS | distinct |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy, populations in results.items():
        for name, r in populations.items():
            lines.append(
                f"| {policy} | {name} | {r['rows']} | {counted(r, 'success')} "
                f"| {counted(r, 'recognised')} | {show(r['relevant_rate'])} "
                f"| {show(r['unsupported_certainty_rate'])} | {show(r['polite_rate'])} "
                f"| {show(r['mean_score'])} | {show(r['mean_log_ratio'], '+.3f')} "
                f"| {show(r['mean_kl'], '.3f')} | {show(r['mean_tokens'], '.1f')} "
                f"| {r['without_eos']} | {r['distinct_answers']} |"
            )
    return lines


def table_lines(figures: dict, accuracy: dict, answers: int) -> list[str]:
    """The table and what stands under it: differences, the judge on the held-out pairs, the verdict.

    figures: of `evaluation`; accuracy: of `pair_figures`; answers: how many of both policies.
    """
    differences, verdict, judged = figures["differences"], figures["verdict"], accuracy["all"]
    lines = results_table(figures["results"])
    lines += [
        "",
        f"{answers} answers are not {answers} independent situations: each policy met "
        f"{differences['score']['pairs']} distinct prompts.",
        "",
    ]
    for name, d in differences.items():
        if d is None:
            lines.append(f"- {name}: nothing known")
            continue
        lines.append(
            f"- {name}, PPO - SFT over {d['pairs']} distinct prompts: "
            f"{d['mean']:+.3f} (95 % interval {d['low']:+.3f} to {d['high']:+.3f})"
        )
    lines.append(
        f"- judge on the held-out pairs: {judged['right']} of {judged['pairs']} right, "
        f"{judged['ties']} ties"
    )
    return [*lines, "", f"Verdict: {verdict['label']}. {verdict['sentence']}"]

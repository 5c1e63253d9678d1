"""Every table of the stages, in Markdown, from figures and rows."""

from kernel.data.draws import spread


def show(value, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def row(*cells) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def markdown(header: list[str], rows: list[list], form: str = ".2f") -> list[str]:
    """A table, line by line: floats in `form`, None as a dash, all else as it is."""

    def cell(value) -> str:
        return show(value, form) if value is None or isinstance(value, float) else str(value)

    return [row(*header), "|" + "---|" * len(header), *(row(*map(cell, cells)) for cells in rows)]


def results_table(results: dict) -> list[str]:
    """One row per policy and population; "-" where nothing is known."""

    def counted(r: dict, key: str) -> str:
        return "-" if r[key] is None else f"{r[key]} ({show(r[f'{key}_rate'])})"

    header = ["policy", "population", "rows", "success", "recognised", "relevant",
              "unsupported certainty", "polite", "score", "log-ratio", "KL", "tokens", "without EOS",
              "distinct"]
    rows = [
        [policy, name, r["rows"], counted(r, "success"), counted(r, "recognised"), r["relevant_rate"],
         r["unsupported_certainty_rate"], r["polite_rate"], r["mean_score"],
         show(r["mean_log_ratio"], "+.3f"), show(r["mean_kl"], ".3f"), show(r["mean_tokens"], ".1f"),
         r["without_eos"], r["distinct_answers"]]
        for policy, populations in results.items() for name, r in populations.items()
    ]
    return markdown(header, rows)


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


def signed(value) -> str:
    return show(value, "+.2f")


def factorial_lines(figures: dict) -> list[str]:
    names = list(dict.fromkeys(name for c in figures["contexts"] for name in c["cells"]))
    rows = [
        [context["context"], *(signed(context["cells"].get(name)) for name in names)]
        for context in figures["contexts"]
    ]
    lines = markdown(["context", *(name or "score" for name in names)], rows) if names else []
    lines.append("")
    for e in figures["effects"]:
        others = ", ".join(name if on else f"not {name}" for name, on in e["others"].items())
        lines.append(
            f"- {e['factor']} is worth {e['mean']:+.2f}{' where ' + others if others else ''} "
            f"(up in {e['positive']} of {e['contexts']} contexts)"
        )
    for i in figures["inversions"]:
        lines.append(
            f"- not correct but {i['factor']} scores above correct but not {i['factor']} in "
            f"{i['count']} of {i['contexts']} contexts"
        )
    return lines


def card_lines(card: dict) -> list[str]:
    t = card["temperature"]
    cards = {
        "training pairs": card["splits"]["train"],
        "validation pairs": card["splits"]["validation"],
        "held-out pairs": card["splits"]["heldout"],
        **{f"held-out {name}": c for name, c in card["variants"].items()},
        f"held-out, temperature {t['value']:.2f}": card["calibrated"],
        **{f"held-out by {name} only": c for name, c in card["baselines"].items()},
    }
    rows = []
    for name, c in cards.items():
        low, high = c["accuracy_interval"] or (None, None)
        accuracy = f"{show(c['accuracy'])} ({show(low)} to {show(high)})"
        scores = [signed(c[f"mean_{what}"]) for what in ("chosen", "rejected", "margin")]
        losses = [show(c[what], ".3f") for what in ("log_loss", "brier", "ece")]
        rows.append([name, c["pairs"], c["right"], c["ties"], accuracy, *scores, *losses])
    lines = markdown(
        ["judge on", "pairs", "right", "ties", "accuracy (95 %)", "chosen", "rejected", "margin",
         "log loss", "Brier", "ECE"],
        rows,
    )
    if t["at_bound"]:
        lines += ["", "The temperature is at its bound: the validation pairs have no finite optimum."]
    return lines


def ledger_lines(figures: dict) -> list[str]:
    def line(name: str, part: dict, note: str = "") -> list:
        return [name, part["kl"], part["sqrt_kl"], signed(part["score"]), show(part["rubric"]) + note]

    ledger = figures["ledger"]
    rows = [
        line(f"{block['from']} to {block['to']}", block, " (peak)" * (n == ledger["gold_peak"]))
        for n, block in enumerate(ledger["blocks"])
    ]
    rows += [line(f"SFT, best of {best['n']}", best) for best in figures["best_of_n"]]
    return markdown(["iterations", "KL per response", "sqrt", "score", "rubric"], rows)


def shortcut_lines(figures: dict) -> list[str]:
    parts = figures["decomposition"]
    rows = [
        [f"{name} {stratum}" if name == "courtesy" else stratum, part["contexts"],
         signed(part["gain"]), show(part["share"], ".0%")]
        for name in ("courtesy", "length") for stratum, part in parts[name].items()
    ]
    lines = markdown(["PPO's answer against SFT's", "contexts", "score gain", "share"], rows)
    rows = []
    for dose in figures["doses"]:
        name = dose["factor"] if dose["dose"] is None else f"{dose['factor']} x {dose['dose']}"
        interval = f"{signed(dose['mean'])} ({signed(dose['low'])} to {signed(dose['high'])})"
        rows.append([name, dose["contexts"], dose["left_out"], interval])
    header = ["counterfactual answer", "contexts", "left out", "score (95 %)"]
    return [*lines, "", *markdown(header, rows)]


def all_lines(figures: dict) -> list[str]:
    """table.md, line by line."""
    polite, kl = figures["polite"], figures["kl"]
    passed = f"passed {kl['threshold']} at iteration {kl['passed_at']}"
    return [
        *factorial_lines(figures["factorial"]),
        f"- courteous among recognised answers: SFT {show(polite['sft'])}, PPO {show(polite['ppo'])}",
        "",
        *card_lines(figures["card"]),
        "",
        *ledger_lines(figures),
        "",
        *shortcut_lines(figures),
        "",
        f"Exact KL per token of PPO's samples: first {kl['first']:.3f}, final {kl['final']:.3f}, "
        f"maximum {kl['maximum']:.3f} at iteration {kl['maximum_at']}; "
        + (passed if kl["passed"] else f"never above {kl['threshold']}"),
    ]


def before_after_lines(
    both: list[tuple[dict, dict]], figures: dict, count: int | None = None
) -> list[str]:
    """before_after.md, line by line: the learned score per distinct prompt, SFT against PPO.

    count: a spread of so many prompts; None: all. The averages are always over all of them.
    """
    def line(prompt: str, sft: float, ppo: float) -> list[str]:
        return [prompt, *map(signed, (sft, ppo, ppo - sft))]

    f = figures["before_after"]
    rows = [
        line(" ".join(sft["prompt"].replace("|", "\\|").split()), sft["score"], ppo["score"])
        for sft, ppo in spread(both, count or len(both))
    ]
    rows.append(line(f"average of {f['contexts']} prompts", f["sft"], f["ppo"]))
    lines = markdown(["prompt", "SFT", "PPO", "difference"], rows)
    lines += ["", f"higher in {f['higher']}, equal in {f['equal']}, lower in {f['lower']} prompts"]
    return lines

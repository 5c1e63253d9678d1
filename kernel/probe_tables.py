"""The tables of 60_probe, in Markdown, from its figures and rows."""

from kernel.data import spread
from kernel.report import show


def row(*cells) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def head(*names: str) -> list[str]:
    return [row(*names), "|" + "---|" * len(names)]


def signed(value) -> str:
    return show(value, "+.2f")


def factorial_lines(figures: dict) -> list[str]:
    names = list(dict.fromkeys(name for c in figures["contexts"] for name in c["cells"]))
    lines = head("context", *(name or "score" for name in names)) if names else []
    for context in figures["contexts"]:
        cells = [signed(context["cells"].get(name)) for name in names]
        lines.append(row(context["context"], *cells))
    lines += [""]
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
    lines = head("judge on", "pairs", "right", "ties", "accuracy (95 %)", "chosen", "rejected",
                 "margin", "log loss", "Brier", "ECE")  # fmt: skip
    for name, c in cards.items():
        low, high = c["accuracy_interval"] or (None, None)
        lines.append(
            row(
                name, c["pairs"], c["right"], c["ties"],
                f"{show(c['accuracy'])} ({show(low)} to {show(high)})",
                signed(c["mean_chosen"]), signed(c["mean_rejected"]), signed(c["mean_margin"]),
                show(c["log_loss"], ".3f"), show(c["brier"], ".3f"), show(c["ece"], ".3f"),
            )
        )  # fmt: skip
    if t["at_bound"]:
        lines += [
            "",
            "The temperature is at its bound: the validation pairs have no finite optimum.",
        ]
    return lines


def ledger_lines(figures: dict) -> list[str]:
    lines = head("iterations", "KL per response", "sqrt", "score", "rubric")
    ledger = figures["ledger"]
    for number, block in enumerate(ledger["blocks"]):
        peak = " (peak)" if number == ledger["gold_peak"] else ""
        lines.append(
            row(
                f"{block['from']} to {block['to']}", f"{block['kl']:.2f}", f"{block['sqrt_kl']:.2f}",
                signed(block["score"]), show(block["rubric"]) + peak,
            )
        )  # fmt: skip
    for best in figures["best_of_n"]:
        lines.append(
            row(
                f"SFT, best of {best['n']}", f"{best['kl']:.2f}", f"{best['sqrt_kl']:.2f}",
                signed(best["score"]), show(best["rubric"]),
            )
        )  # fmt: skip
    return lines


def shortcut_lines(figures: dict) -> list[str]:
    parts = figures["decomposition"]
    lines = head("PPO's answer against SFT's", "contexts", "score gain", "share")
    for name in ("courtesy", "length"):
        for stratum, part in parts[name].items():
            place = f"{name} {stratum}" if name == "courtesy" else stratum
            lines.append(
                row(place, part["contexts"], signed(part["gain"]), show(part["share"], ".0%"))
            )
    lines += ["", *head("counterfactual answer", "contexts", "left out", "score (95 %)")]
    for dose in figures["doses"]:
        name = dose["factor"] if dose["dose"] is None else f"{dose['factor']} x {dose['dose']}"
        interval = f"{signed(dose['mean'])} ({signed(dose['low'])} to {signed(dose['high'])})"
        lines.append(row(name, dose["contexts"], dose["left_out"], interval))
    return lines


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


def before_after_lines(both: list[tuple[dict, dict]], figures: dict, count: int | None = None):
    """before_after.md, line by line: the learned score per distinct prompt, SFT against PPO.

    count: a spread of so many prompts; None: all. The averages are always over all of them.
    """
    lines = head("prompt", "SFT", "PPO", "difference")
    for sft, ppo in spread(both, count or len(both)):
        prompt = " ".join(sft["prompt"].replace("|", "\\|").split())
        scores = [signed(x) for x in (sft["score"], ppo["score"], ppo["score"] - sft["score"])]
        lines.append(row(prompt, *scores))
    f = figures["before_after"]
    scores = [signed(x) for x in (f["sft"], f["ppo"], f["ppo"] - f["sft"])]
    lines.append(row(f"average of {f['contexts']} prompts", *scores))
    lines += ["", f"higher in {f['higher']}, equal in {f['equal']}, lower in {f['lower']} prompts"]
    return lines

"""The report of a run: one self-contained report.html and a short report.md, from what the stages wrote.

    python -m kernel.report.page runs/smollm2          # or: bash run_all.sh report [run folder]

Nothing is measured here: the figures are those of the stages' records, above all 50's results.json and
60's figures.json, put in order, rounded and drawn. What a run does not have is named instead. Layout and
prose are in page.html (with page.css and page.js) and page.md beside this file, the pictures in
pictures.py, the healthy bands in symptoms.py. The same run gives the same bytes.
"""

import difflib
import re
import sys
from functools import partial
from pathlib import Path

import jinja2

from kernel.data.files import read_json, read_jsonl, write_atomic
from kernel.measure.answers import paired
from kernel.report import pictures
from kernel.report.symptoms import column, symptoms
from kernel.run.clocks import phase_sums
from kernel.run.errors import one_line_errors
from kernel.run.folder import SECTIONS, TRAINED, RunFolder
from kernel.run.profiles import REFERENCE

OUT = "outputs/60_probe"
FIGURES = "factorial polite before_after kl card rollouts ledger best_of_n decomposition doses"
NEEDED = (  # relative to the run folder; the page names those that are missing
    "config.json", "data/manifest.json", "data/train/prompts.jsonl",
    *(f"outputs/{stage}/continuous/{name}" for stage in TRAINED
      for name in ("metrics.jsonl", "timings.jsonl", "record.json")),
    "outputs/30_ppo/continuous/rollouts.jsonl", "outputs/40_generate/record.json",
    *(f"outputs/50_evaluate/{name}" for name in ("results.json", "answers.jsonl", "record.json")),
    f"{OUT}/figures.json", f"{OUT}/record.json",
)
INPUTS = NEEDED + tuple(  # all that the page opens
    f"outputs/{stage}/{part}/record.json" for stage in TRAINED for part in ("interrupt", "resume")
)
HEADLINES = {  # of the labels in results.json that do not say it all
    "improved both": "Improved both: learned score and rubric rose",
    "likely exploitation": "Score up, rubric flat: likely exploitation",
    "exploitation": "Score up, rubric down: exploitation",
    "rubric up": "Rubric up, score without clear change",
    "worse": "Worse: score not up, rubric down",
}

# ---- token credit -------------------------------------------------------------------------------


def chosen_rollouts(rows: list[dict], own: dict, prompts: dict[str, str]) -> list[dict]:
    """The rollouts that section 2 shows: the extremes by name, and six at equal distances."""
    length = [len(row["response_ids"]) for row in rows]
    largest = [max(map(abs, row["advantages"])) for row in rows]
    score = [row["score"] for row in rows]
    named = {
        "first": 0, "best score": score.index(max(score)), "worst score": score.index(min(score)),
        "longest": length.index(max(length)), "largest advantage": largest.index(max(largest)),
        "last": len(rows) - 1,
    }
    labels = {}
    for label, n in named.items():
        labels.setdefault(n, []).append(label)
    for step in range(1, 7):
        labels.setdefault(step * len(rows) // 7, ["one on the way"])
    return [token_credit(rows[n], names, own, prompts) for n, names in labels.items()]


def token_credit(row: dict, labels: list[str], own: dict, prompts: dict[str, str]) -> dict:
    """One rollout: a line per token, and the last two steps of its GAE in numbers.

    row: a line of rollouts.jsonl; own: PPO's settings.
    """
    last = len(row["response_ids"]) - 1
    largest = max(map(abs, row["advantages"])) or 1.0
    cut = own["cutoff_penalty"] if row["finish_reason"] != "eos" else 0.0
    columns = {
        "token": "tokens", "old": "old_logprobs", "ref": "ref_logprobs", "reward": "rewards",
        "value": "old_values", "advantage": "advantages", "return": "returns",
    }
    lines = []
    for t in range(last + 1):
        line = {"t": t + 1, **{name: row[key][t] for name, key in columns.items()}}
        line["kl_reward"] = -own["kl_coef"] * (line["old"] - line["ref"])
        line["judge"] = (row["score"] - row["center"]) / row["scale"] + cut if t == last else None
        line["updates"] = [(r[t], clip[t]) for r, clip in zip(row["ratios"], row["clip_bites"])]
        line["weight"] = round(abs(line["advantage"]) / largest, 3)
        lines.append(line)
    end = lines[last]
    worked = [{**end, "next": None, "result": end["reward"] - end["value"]}]
    if last:
        step = lines[last - 1]
        delta = step["reward"] + own["gamma"] * end["value"] - step["value"]
        result = delta + own["gamma"] * own["gae_lambda"] * end["advantage"]
        worked.append({**step, "next": end, "delta": delta, "result": result})
    prompt = prompts.get(row["prompt_id"], row["prompt_id"])
    return {"row": row, "labels": labels, "prompt": prompt, "lines": lines, "worked": worked,
            "largest": largest, "cut": cut}


# ---- before and after, lineage, times -----------------------------------------------------------


def words(before: str, after: str) -> list[tuple[str, bool]]:
    """`after` in pieces, each with whether it is new against `before`."""
    old, new = (re.findall(r"\s+|\S+", text) for text in (before, after))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    pieces = ((kind, "".join(new[c:d])) for kind, _, _, c, d in matcher.get_opcodes())
    return [(text, kind != "equal") for kind, text in pieces if text]


def before_after(answers: list[dict]) -> list[dict]:
    """Both policies' answers over the distinct contexts, with the direction of score and rubric."""
    direction = {True: "up", False: "down"}
    found = []
    for sft, ppo in paired(answers):
        change = ppo["score"] - sft["score"]
        was, now = sft["verdict"].get("success"), ppo["verdict"].get("success")
        rubric = "unknown" if None in (was, now) else "same" if was == now else direction[now > was]
        found.append({
            "context": sft["context"], "sft": sft, "ppo": ppo, "change": change, "rubric": rubric,
            "score": direction[change > 0] if change else "same",
            "words": words(sft["text"] or "", ppo["text"] or ""),
        })
    return found


def lineage(records: dict[str, dict], config: dict) -> dict:
    """settings that differ from the reference course; code and versions: {name: {value: [stages]}}."""
    used = {"common": config["common"]}
    code, versions = {}, {}
    for name, record in records.items():
        section = SECTIONS[name.split("/")[0]]
        used.setdefault(section, record["identity"].get(section, {}))
        for kind, table in (("code", code), ("versions", versions)):
            for item, value in record["identity"][kind].items():
                table.setdefault(item, {}).setdefault(value, []).append(name.replace("/", " "))
    settings = [
        (section, key, reference, values[key])
        for section, values in used.items()
        for key, reference in REFERENCE[section].items()
        if key in values and values[key] != reference
    ]
    return {"settings": settings, "code": dict(sorted(code.items())), "versions": versions}


# ---- the page -----------------------------------------------------------------------------------


def collect(run: Path) -> dict:
    """Everything the page shows. Raises ValueError if the folder is no run or a file is damaged."""
    made = RunFolder(run).made
    read = {
        name: (read_jsonl if name.endswith(".jsonl") else read_json)(run / name)
        for name in INPUTS
        if (run / name).is_file() and (run / name).stat().st_size  # empty: a stage just begins
    }
    metrics, timings = (
        {stage: read.get(f"outputs/{stage}/continuous/{name}.jsonl") for stage in TRAINED}
        for name in ("metrics", "timings")
    )
    records = {
        name.removeprefix("outputs/").removesuffix("/record.json"): read[name]
        for name in INPUTS
        if name.endswith("/record.json") and name in read
    }
    config, results = made, read.get("outputs/50_evaluate/results.json")
    rollouts = read.get("outputs/30_ppo/continuous/rollouts.jsonl")
    prompts = {row["id"]: row["prompt"] for row in read.get("data/train/prompts.jsonl", [])}
    ppo = records.get("30_ppo/continuous", {"identity": {"ppo": None}})["identity"]["ppo"]
    label = results["verdict"]["label"] if results else "no verdict yet"
    return {
        "config": config,
        "corpus": read.get("data/manifest.json", {}),
        "results": results,
        "headline": HEADLINES.get(label, label.capitalize()),
        "figures": dict.fromkeys(FIGURES.split()) | read.get(f"{OUT}/figures.json", {}),
        "metrics": metrics,
        "symptoms": symptoms(metrics, config["common"]["base_dtype"]),
        "ppo": ppo,
        "rollouts": chosen_rollouts(rollouts, ppo, prompts) if rollouts and ppo else [],
        "pairs": before_after(read.get("outputs/50_evaluate/answers.jsonl", [])),
        "phases": {stage: sums for stage, rows in timings.items() if (sums := phase_sums(rows or []))},
        "records": records,
        "missing": [name for name in NEEDED if name not in read],
        **lineage(records, config),
    }


def number(value: float | None, places: int = 2, sign: bool = False) -> str:
    """As people write it: a true minus, no signed zero, a dash where there is none."""
    if value is None:
        return "–"
    text = f"{float(value):.{places}f}"
    if float(text) == 0:
        return text.removeprefix("-")
    return text.replace("-", "−") if value < 0 else f"{'+' if sign else ''}{text}"


def short(value: float | None) -> str:
    """Three significant digits: 0.342, 1.91e−06."""
    return "–" if value is None else f"{float(value):.3g}".replace("-", "−")


def share(value: float | None, places: int = 0) -> str:
    return "–" if value is None else f"{number(100 * value, places)} %"


def curve(
    content: dict, title: str, source: str, keys: dict, band: str = "", percent=False
) -> dict | None:
    """One picture of section 3, and each line's first and last value; None without such rows.

    source: a trained stage, or "rollouts": what 60 found out about the samples; keys: {label: metric}.
    """
    rows = content["figures"]["rollouts"] if source == "rollouts" else content["metrics"][source]
    lines = {label: points for label, key in keys.items() if (points := column(rows, key))}
    if not lines:
        return None
    limits = content["symptoms"][band] if band else {"low": None, "high": None}
    axis = "iteration" if "iteration" in rows[0] else "update"
    svg = pictures.curve(title, lines, axis, limits["low"], limits["high"], percent)
    return {"svg": svg, "ends": {label: (p[0][1], p[-1][1]) for label, p in lines.items()}}


def write_page(run_dir: Path) -> list[Path]:
    """Write outputs/60_probe/report.html and report.md of a run folder; returns their paths."""
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html"]), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )
    template.filters |= {"number": number, "short": short, "share": share}
    try:
        content = collect(run_dir)
        content |= {"pictures": pictures, "curve": partial(curve, content)}
        texts = [template.get_template(f"page.{kind}").render(content) for kind in ("html", "md")]
    except (LookupError, TypeError, jinja2.UndefinedError) as error:
        raise ValueError(f"{run_dir}: a record is not as its stage writes it ({error})") from error
    paths = [run_dir / OUT / name for name in ("report.html", "report.md")]
    for path, text in zip(paths, texts):
        write_atomic(path, text)
    return paths


def main() -> None:
    one_line_errors("report")
    if len(sys.argv) != 2:
        raise ValueError("give one run folder: python -m kernel.report.page runs/smollm2")
    for path in write_page(Path(sys.argv[1]).resolve()):
        print(f"  wrote {path}")


if __name__ == "__main__":
    main()

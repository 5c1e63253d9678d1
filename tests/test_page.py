"""The report page: its numbers are those of the records, a GAE can be redone from it, hostile texts stay
texts, a run that lacks something still has a page that says so, and a real browser opens it in silence.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT

from kernel.data.files import read_json, read_jsonl, write_json, write_jsonl
from kernel.report import page
from kernel.report.symptoms import METRICS, column, reading, symptoms
from kernel.run.records import Records, event_writer

HOSTILE = (
    "<script>document.title = 'taken'</script><img src=x onerror=alert(1)> \U0001f642 שלום & \"x\""
)
FACTOR = "$polite_</b>"  # a factor's name goes into a picture, too
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def card(right: int, pairs: int = 36) -> dict:
    bins = [
        {"low": 0.5, "high": 0.75, "pairs": 0, "confidence": None, "accuracy": None},
        {"low": 0.75, "high": 1.0, "pairs": pairs, "confidence": 0.93, "accuracy": right / pairs},
    ]
    return {
        "pairs": pairs, "right": right, "ties": 1, "wrong": pairs - right - 1, "accuracy": right / pairs,
        "accuracy_interval": [0.7321, 0.9876], "mean_chosen": 3.456, "mean_rejected": None,
        "mean_margin": 6.789, "log_loss": 0.1234, "brier": 0.0456, "ece": 0.0789, "bins": bins,
    }


def made_figures(iterations: int) -> dict:
    """figures.json by its contract, with numbers that occur nowhere else."""
    on, off = f"correct, {FACTOR}", f"correct, not {FACTOR}"
    contexts = [{"context": f"C{n}", "cells": {on: 5.125 + n, off: 4.25 + n}} for n in range(3)]
    effect = {
        "factor": FACTOR,
        "others": {"correct": True},
        "mean": 0.875,
        "positive": 3,
        "contexts": 3,
    }
    block = {
        "from": 1,
        "to": 7,
        "kl": 1.21,
        "sqrt_kl": 1.1,
        "score": -0.67,
        "rubric": 0.3125,
        "rollouts": 7,
    }
    same = {"contexts": 150, "gain": 0.9, "share": 0.75}
    counts = {name: [3, 4] for name in ("train_chosen", "train_rejected", "ppo_first", "ppo_last")}
    late = {"count": 7, "mean": 0.1, "low": -0.9, "median": 0.0, "high": 1.0}
    dose = {"contexts": 20, "low": 1.0, "high": 2.0}
    return {
        "factorial": {
            "factors": ["correct", FACTOR], "contexts": contexts, "effects": [effect],
            "inversions": [{"factor": FACTOR, "count": 2, "contexts": 3}],
        },
        "polite": {"sft": 0.91, "ppo": None},
        "before_after": {"contexts": 200, "sft": 1, "ppo": 2, "higher": 111, "equal": 22, "lower": 67},
        "kl": {"first": 0.0, "final": 0.321, "maximum": 0.456, "maximum_at": 9, "passed": True,
               "passed_at": 8, "threshold": 0.1},
        "card": {
            "splits": {"train": card(30), "heldout": card(31)}, "variants": {"P0": card(32)},
            "temperature": {"value": 0.777, "fitted_on": "validation", "pairs": 180, "at_bound": True},
            "calibrated": card(31), "baselines": {"length": {**card(19), "coefficient": 0.0173}},
            "shift": {"edges": [-1.0, 0.0, 1.0], **counts, "summary": {"ppo_last": late}},
        },
        "rollouts": [{"iteration": n, "rubric": 0.5, "polite": None} for n in range(1, iterations + 1)],
        "ledger": {"blocks": [block, {**block, "from": 8, "to": 14, "rubric": 0.125}], "gold_peak": 0},
        "best_of_n": [{"n": n, "kl": n / 9, "sqrt_kl": math.sqrt(n / 9), "score": n / 7, "rubric": 0.5,
                       "contexts": 20, "samples": 16} for n in (1, 2, 4)],
        "decomposition": {"gain": 1.2, "courtesy": {"same": same, "unknown": {**same, "share": None}},
                          "length": {"longer": same}},
        "doses": [{"factor": "courtesy", "dose": n, "mean": 1.5, **dose} for n in (0, 1)]
        + [{"factor": "empty", "dose": None, "mean": -3.25, **dose}],
    }


def part_of(tiny: Path, folder: Path) -> Path:
    """A copy of what the page reads, in a run folder of its own."""
    for name in page.INPUTS:
        if (tiny / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tiny / name, folder / name)
    return folder


def edit_rows(path: Path, change) -> None:
    rows = read_jsonl(path)
    change(rows)
    write_jsonl(path, rows)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    """A copy of the tiny run with figures of ours, hostile texts and one cut-off rollout; its page."""
    folder = part_of(tiny, tmp_path_factory.mktemp("run") / "r")
    iterations = len(read_jsonl(folder / "outputs/30_ppo/continuous/metrics.jsonl"))
    write_json(folder / "outputs/60_probe/figures.json", made_figures(iterations))
    edit_rows(
        folder / "outputs/50_evaluate/answers.jsonl", lambda rows: rows[0].update(text=HOSTILE)
    )
    edit_rows(
        folder / "data/train/prompts.jsonl", lambda rows: [r.update(prompt=HOSTILE) for r in rows]
    )

    def first_rollout(rows):
        rows[0]["tokens"][0] = HOSTILE

    edit_rows(folder / "outputs/30_ppo/continuous/rollouts.jsonl", first_rollout)
    page.write_page(folder)
    return folder


@pytest.fixture(scope="module")
def html(run) -> str:
    return (run / page.OUT / "report.html").read_text(encoding="utf-8")


class Tables(HTMLParser):
    """Every table of a page as rows of cell texts, by the aria-label of the region around it."""

    def __init__(self, text: str):
        super().__init__()
        self.tables, self.rows, self.cell = {}, None, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "div" and attributes.get("role") == "region":
            self.rows = self.tables.setdefault(attributes["aria-label"], [])
        elif tag == "tr" and self.rows is not None:
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.cell = []

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self.cell is not None:
            self.rows[-1].append(" ".join("".join(self.cell).split()))
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell.append(data)


@pytest.fixture(scope="module")
def tables(html) -> dict[str, list[list[str]]]:
    return Tables(html).tables


def shown(value: float, places: int, sign: bool = True) -> str:
    """A number as the page should write it."""
    digits = f"{abs(value):.{places}f}"
    if float(digits) == 0:
        return digits
    return ("−" if value < 0 else "+" if sign else "") + digits


# ---- numbers ------------------------------------------------------------------------------------


def test_the_verdict_shows_means_and_intervals_of_results_json(run, html):
    results = read_json(run / "outputs/50_evaluate/results.json")
    parts = re.split(r'data-measure="(\w+)"', html.split("<nav")[0])
    cards = dict(zip(parts[1::2], parts[2::2]))
    assert set(cards) == {"score", "rubric", "kl", "tokens"}
    for name, key, factor, places in (
        ("score", "mean_score", 1, 2), ("rubric", "success_rate", 100, 1),
        ("tokens", "mean_tokens", 1, 1),
    ):
        for policy in ("sft", "ppo"):
            value = factor * results["results"][policy]["all_unique_contexts"][key]
            assert shown(value, places, sign=False) in cards[name], (name, policy)
        for key in ("mean", "low", "high"):
            assert shown(factor * results["differences"][name][key], places) in cards[name], (
                name,
                key,
            )
    assert results["verdict"]["sentence"] in html


def test_a_reader_can_redo_the_gae_of_a_rollout_from_its_table(run, html, tables):
    own = read_json(run / "outputs/30_ppo/continuous/record.json")["identity"]["ppo"]
    found = re.search(r"γ = ([\d.]+), λ = ([\d.]+), kl_coef = ([\d.]+)", html)
    gamma, gae_lambda, kl_coef = map(float, found.groups())
    assert (gamma, gae_lambda, kl_coef) == (own["gamma"], own["gae_lambda"], own["kl_coef"])
    stored = {r["rollout"]: r for r in read_jsonl(run / "outputs/30_ppo/continuous/rollouts.jsonl")}
    names = [name for name in tables if name.startswith("Tokens of rollout")]
    assert len(names) >= 6
    for name in names:
        rows = [[cell.replace("−", "-") for cell in row] for row in tables[name][1:]]
        row = stored[name.split()[-1]]
        assert len(rows) == len(row["response_ids"])
        advantage = following = 0.0
        for cells, want in zip(reversed(rows), reversed(row["advantages"])):
            old, ref, kl_reward, reward, value = (float(cells[n]) for n in (2, 3, 4, 6, 7))
            judge = float(cells[5] or 0)
            assert kl_reward == pytest.approx(-kl_coef * (old - ref), abs=2e-5)
            assert reward == pytest.approx(kl_reward + judge, abs=1e-4)
            advantage = reward + gamma * following - value + gamma * gae_lambda * advantage
            following = value
            assert float(cells[8]) == pytest.approx(want, abs=5.1e-5)
            assert advantage == pytest.approx(want, abs=5e-3)  # of numbers with four decimals
            assert float(cells[9]) == pytest.approx(want + value, abs=2e-4)


def test_the_worked_lines_are_the_last_two_tokens_of_each_rollout(run):
    own = read_json(run / "outputs/30_ppo/continuous/record.json")["identity"]["ppo"]
    rows = read_jsonl(run / "outputs/30_ppo/continuous/rollouts.jsonl")
    for row in rows[:3]:
        end, before = page.token_credit(row, ["first"], own, {})["worked"]
        assert end["result"] == pytest.approx(row["advantages"][-1], abs=1e-5)
        assert before["result"] == pytest.approx(row["advantages"][-2], abs=1e-5)


def test_a_cut_off_one_token_rollout_shows_its_penalty(run):
    own = read_json(run / "outputs/30_ppo/continuous/record.json")["identity"]["ppo"]
    row = read_jsonl(run / "outputs/30_ppo/continuous/rollouts.jsonl")[0]
    short = {k: v[:1] if isinstance(v, list) and k != "prompt_ids" else v for k, v in row.items()}
    short |= {k: [part[:1] for part in row[k]] for k in ("ratios", "clip_bites")}
    shown = page.token_credit({**short, "finish_reason": "length"}, ["first"], own, {})
    assert row["scale"] == 1
    assert shown["lines"][0]["judge"] == row["score"] - row["center"] + own["cutoff_penalty"]
    assert len(shown["worked"]) == 1


def test_the_chosen_rollouts_are_the_extremes(run):
    rows = read_jsonl(run / "outputs/30_ppo/continuous/rollouts.jsonl")
    own = read_json(run / "outputs/30_ppo/continuous/record.json")["identity"]["ppo"]
    chosen = {
        label: found["row"]
        for found in page.chosen_rollouts(rows, own, {})
        for label in found["labels"]
    }
    for row in rows:
        assert chosen["worst score"]["score"] <= row["score"] <= chosen["best score"]["score"]
        assert len(row["tokens"]) <= len(chosen["longest"]["tokens"])
        assert max(map(abs, row["advantages"])) <= max(
            map(abs, chosen["largest advantage"]["advantages"])
        )
    assert chosen["first"] == rows[0] and chosen["last"] == rows[-1]


def test_the_figures_of_the_probe_stage_are_shown_as_they_are(html, tables):
    assert tables["Ledger by block"][1] == ["1–7 ★", "1.21", "1.10", "−0.67", "31.2 %", "7"]
    assert tables["Best of n"][2] == ["2", "0.22", "0.47", "+0.29", "50.0 %", "20"]
    assert tables["Report card"][2] == [
        "held-out", "36", "31", "1", "4", "86.1 %", "73.2 % to 98.8 %", "+3.46", "–", "+6.79", "0.123",
        "0.046", "0.079",
    ]
    assert tables["Effects"][1] == [FACTOR, "correct", "+0.88", "3 of 3"]
    assert tables["Decomposition"][1][:5] == ["courtesy", "same", "150", "+0.90", "75.0 %"]
    assert tables["Doses"][3] == ["empty", "–", "20", "−3.25", "+1.00 to +2.00"]
    for text in (
        "0.777",
        "at most 0.456 per token",
        "2 of 3",
        "higher in 111, equal in 22 and lower in 67",
    ):
        assert text in html


def test_every_distinct_context_is_there_with_its_direction(run, html):
    answers = read_jsonl(run / "outputs/50_evaluate/answers.jsonl")
    first = {}
    for row in answers:
        first.setdefault((row["context"], row["policy"]), row)
    contexts = {context for context, _ in first}
    kinds = re.findall(r'class="pair" data-kind="(\w+) (\w+)"', html)
    assert len(kinds) == len(contexts) == 200
    up = sum(first[c, "ppo"]["score"] > first[c, "sft"]["score"] for c in contexts)
    lost = sum(
        first[c, "sft"]["verdict"]["success"] and not first[c, "ppo"]["verdict"]["success"]
        for c in contexts
    )
    assert sum(score == "up" for score, _ in kinds) == up
    assert sum(rubric == "down" for _, rubric in kinds) == lost


def test_lineage_names_hashes_and_other_settings(run, html, tables):
    config = read_json(run / "config.json")
    assert config["model"]["base_sha256"][:16] in html
    record = read_json(run / "outputs/30_ppo/continuous/record.json")
    assert record["identity"]["code"]["30_ppo.py"][:16] in html
    assert ["ppo", "center_scores", "False", "True"] in tables["Settings"]
    assert not [row for row in tables["Settings"] if row[1] == "kl_coef"]  # the same in both


# ---- what the curves say ------------------------------------------------------------------------


def test_readings_by_hand():
    values = [1.0] * 5 + [9.0] * 10 + [2.0, 4.0, 4.0, 3.0, 5.0]  # tenths of 20 are 2 values
    assert reading(values, "last") == 4.0
    assert reading(values, "change") == 3.0
    assert reading(values, "ratio") == 4.0
    assert (reading(values, "max"), reading(values, "min")) == (9.0, 1.0)
    assert reading([], "last") is None and reading([1.0], "change") is None
    assert reading([0.0, 1.0], "ratio") is None


def test_a_trailing_underscore_means_the_last_update():
    rows = [
        {"iteration": 1, "kl_1": 3.0, "kl_2": 4.0, "kl_10": 5.0},
        {"iteration": 2, "kl_10": None},
    ]
    assert column(rows, "kl_") == [(1, 5.0)]
    assert column(rows, "kl_1") == [(1, 3.0)]
    assert column(None, "kl_") == []


@pytest.mark.parametrize(
    "name, values, inside",
    [
        ("lowest kl", [0.1, -0.01, 0.2], False),
        ("lowest kl", [0.1, -1e-9, 0.2], True),
        ("first clip_fraction", [0.0, 0.2, 0.0], False),
        ("explained_variance", [0.5] * 18 + [-0.2] * 2, False),
        ("entropy", [1.0] * 18 + [0.2] * 2, False),
        ("entropy", [1.0] * 18 + [0.5] * 2, True),
        ("score", [1.0] * 10 + [0.5] * 10, False),
        ("finished", [1.0] * 10 + [0.1] * 10, False),
        ("policy_loss", [7.0], None),
    ],
)
def test_a_metric_outside_its_band_is_named(name, values, inside):
    key = METRICS[name][1]
    key += "2" if key.endswith("_") else ""
    rows = [{"iteration": n, key: value} for n, value in enumerate(values, start=1)]
    metrics = {"10_sft": None, "20_reward": None, "30_ppo": rows}
    assert symptoms(metrics, "float32")[name]["inside"] is inside


# ---- texts, bytes, size -------------------------------------------------------------------------


def test_hostile_texts_are_texts(html):
    assert html.count("<script>") == 1 and "<img" not in html
    assert "&lt;script&gt;document.title" in html and "שלום" in html


def test_nothing_is_loaded_from_elsewhere(html, run):
    for target in re.findall(r'(?:href|src|action|data)="([^"]*)"', html):
        assert target.startswith(("#", "data:,")), target
    assert "url(" not in re.sub(r"url\(#\w+\)", "", html) and "@import" not in html
    assert "default-src 'none'" in html
    assert (run / page.OUT / "report.html").stat().st_size < 5_000_000


def test_another_process_writes_the_same_bytes(run):
    paths = [run / page.OUT / name for name in ("report.html", "report.md")]
    before = [path.read_bytes() for path in paths]
    command = [sys.executable, "-m", "kernel.report.page", str(run)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert [path.read_bytes() for path in paths] == before


def test_ids_are_unique_and_referred_to(html):
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#(\w+)', html)) <= set(ids)


def test_the_summary_says_the_same(run):
    text = (run / page.OUT / "report.md").read_text(encoding="utf-8")
    d = read_json(run / "outputs/50_evaluate/results.json")["differences"]["score"]
    assert f"{shown(d['mean'], 2)} | {shown(d['low'], 2)} to {shown(d['high'], 2)} |" in text
    assert "highest 31 % in iterations 1 to 7, 12 % at the end" in text


# ---- what a run may lack ------------------------------------------------------------------------


def test_a_run_without_ppo(run, tmp_path):
    folder = part_of(run, tmp_path)
    for name in ("30_ppo", "40_generate", "50_evaluate", "60_probe"):
        shutil.rmtree(folder / "outputs" / name)
    page.write_page(folder)
    html = (folder / page.OUT / "report.html").read_text(encoding="utf-8")
    for text in ("No verdict yet", "Run 30_ppo.py.", "Run 40_generate.py", "This run is not complete",
                 "outputs/30_ppo/continuous/rollouts.jsonl", "It comes from 60_probe.py"):
        assert text in html, text
    assert "SFT loss" in html and "nan" not in html.lower().replace("nanogpt", "")


def test_a_run_with_one_iteration_no_rubric_and_no_factors(run, tmp_path):
    folder = part_of(run, tmp_path)
    outputs = folder / "outputs"
    for name in ("metrics", "timings", "rollouts"):
        edit_rows(
            outputs / f"30_ppo/continuous/{name}.jsonl",
            lambda rows: rows.__delitem__(slice(1, None)),
        )
    edit_rows(
        outputs / "50_evaluate/answers.jsonl",
        lambda rows: [r.update(verdict={"success": None}) for r in rows],
    )
    results = read_json(outputs / "50_evaluate/results.json")
    results["differences"]["rubric"] = None
    results["verdict"] = {
        "label": "score up, rubric unknown",
        "sentence": "Only that score is known.",
    }
    for populations in results["results"].values():
        for figures in populations.values():
            figures |= dict.fromkeys(("success", "success_rate", "recognised_rate", "polite_rate"))
    write_json(outputs / "50_evaluate/results.json", results)
    figures = made_figures(1)
    figures["factorial"] |= {"factors": [], "contexts": [], "effects": [], "inversions": []}
    figures["ledger"] |= {"gold_peak": None}
    for row in (*figures["ledger"]["blocks"], *figures["best_of_n"], *figures["rollouts"]):
        row["rubric"] = None
    write_json(outputs / "60_probe/figures.json", figures)
    page.write_page(folder)
    html = (folder / page.OUT / "report.html").read_text(encoding="utf-8")
    for text in ("Score up, rubric unknown", "no rubric in this run", "not known in this run",
                 "name no binary factor", "rubric <b>unknown</b>"):
        assert text in html, text
    assert set(re.findall(r'class="pair" data-kind="\w+ (\w+)"', html)) == {"unknown"}
    assert ">None<" not in html and "None %" not in html


def test_a_run_without_figures(run, tmp_path):
    folder = part_of(run, tmp_path)
    (folder / "outputs/60_probe/figures.json").unlink()
    page.write_page(folder)
    html = (folder / page.OUT / "report.html").read_text(encoding="utf-8")
    assert html.count("It comes from 60_probe.py (outputs/60_probe/figures.json).") == 3
    assert (
        "<code>outputs/60_probe/figures.json</code>" in html
        and "Rubric success of the samples" in html
    )


def test_no_run_and_a_damaged_file_end_in_one_line(run, tmp_path):
    with pytest.raises(ValueError, match="is no run folder: it has no config.json"):
        page.write_page(tmp_path)
    folder = part_of(run, tmp_path / "damaged")
    path = folder / "outputs/30_ppo/continuous/metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"metrics.jsonl row \d+: not a JSON object"):
        page.write_page(folder)
    path.write_bytes(b"")  # as at the start of a stage
    page.write_page(folder)
    figures = made_figures(1)
    del figures["ledger"]["blocks"][0]["kl"]
    write_json(folder / "outputs/60_probe/figures.json", figures)
    with pytest.raises(ValueError, match="a record is not as its stage writes it .*kl"):
        page.write_page(folder)


def test_the_probe_stage_writes_the_page(tiny):
    assert "</html>" in (tiny / "outputs/60_probe/report.html").read_text(encoding="utf-8")[-20:]


# ---- in a browser -------------------------------------------------------------------------------

WATCH = """<script>window.faults = [];
addEventListener("error", e => faults.push(e.message));
addEventListener("securitypolicyviolation", e => faults.push(e.violatedDirective));</script>"""
TRY = """<script>
const seen = () => [...document.querySelectorAll(".pair")].filter(n => !n.hidden);
const found = {title: document.title, images: document.images.length, first: seen().length};
document.querySelector('[data-filter="up down"]').click();
document.getElementById("more").click();
found.exploited = seen().length;
found.kinds = [...new Set(seen().map(n => n.dataset.kind))];
document.querySelector('[data-filter=""]').click();
const search = document.getElementById("search");
search.value = "document.title taken";
search.dispatchEvent(new Event("input"));
found.searched = seen().length;
const select = document.getElementById("rollout");
select.value = "2";
select.dispatchEvent(new Event("change"));
found.rollouts = [...document.querySelectorAll(".rollout:not([hidden])")].map(n => n.dataset.rollout);
found.overflows = document.documentElement.scrollWidth > innerWidth;
found.wide = [...document.querySelectorAll("main *")].filter(n => !n.closest(".wide, select, .tokens")
  && n.getBoundingClientRect().right > innerWidth + 1).length;
const low = n => n.getBoundingClientRect().height < 40;
found.flat = [...document.querySelectorAll("figure svg")].filter(low).length;
found.requests = performance.getEntriesByType("resource").length;
found.faults = faults;
document.documentElement.dataset.found = JSON.stringify(found);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_opens_it_in_silence_and_the_filters_filter(html, tmp_path, width):
    path = tmp_path / "page.html"
    text = html.replace("<title>", WATCH + "<title>", 1).replace("</body>", TRY)
    path.write_text(text, encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
        f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--dump-dom", path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    escaped = re.search(r'data-found="([^"]*)"', done.stdout)[1]
    found = json.loads(escaped.replace("&quot;", '"').replace("&amp;", "&"))
    kinds = re.findall(r'class="pair" data-kind="(\w+ \w+)"', html)
    assert found.pop("title").endswith("profile tiny") and found.pop("first") == 6
    assert found.pop("exploited") == kinds.count("up down")
    assert found.pop("kinds") == (["up down"] if "up down" in kinds else [])
    assert found == {
        "images": 0, "searched": 1, "rollouts": ["2"], "overflows": False, "wide": 0, "flat": 0,
        "requests": 0, "faults": [],
    }


# ---- event files for tensorboard ----------------------------------------------------------------


def test_records_hand_every_number_to_the_event_writer(tmp_path):
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            calls.append("flush")

    kept = b'{"update": 1, "loss": 3.0}\n'
    records = Records(tmp_path / "metrics.jsonl", kept, Writer)
    records.write({"update": 2, "loss": 2.5})
    assert calls == [(tmp_path / "tensorboard", 2), ("update", 2, 2), ("loss", 2.5, 2), "flush"]
    assert records.path.read_bytes() == kept + b'{"update": 2, "loss": 2.5}\n'


def test_without_tensorboard_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it were not installed
    with pytest.raises(ValueError, match="--tensorboard: the package tensorboard is not installed"):
        event_writer()

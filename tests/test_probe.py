"""The figures of the probe stage: by hand, by plain loops and by counting every draw; then the stage
itself on a corpus without rubric, probes and factors."""

import json
import math
import random
from itertools import combinations

import pytest
from conftest import run_stage

from kernel.data import office
from kernel.data.files import (
    read_json,
    read_jsonl,
    sha256_file,
    write_atomic,
    write_json,
    write_jsonl,
)
from kernel.data.office_rubric import ACTIONS, FORMS, response
from kernel.measure.courtesy import add_courtesy, count_courtesy, counterfactuals, strip_courtesy
from kernel.measure.judge import shift
from kernel.measure.ledger import (
    best_of,
    best_of_n,
    by_iteration,
    judged_rollouts,
    kl_line,
    ledger,
    repetition,
)
from kernel.measure.probe import decomposition, dose_effects, dose_rows, factorial, factors_of

# ---- courtesy -----------------------------------------------------------------------------------


def test_courtesy_of_the_whole_office_grammar():
    for action in range(len(ACTIONS)):
        for form in range(len(FORMS)):
            plain, polite = response(action, form, False), response(action, form, True)
            assert (count_courtesy(plain), count_courtesy(polite)) == (0, 2)
            assert strip_courtesy(polite) == strip_courtesy(plain) == plain
            assert add_courtesy(plain, 2) == polite


@pytest.mark.parametrize("text,formulas,rest", [
    ("Please restart the router.", 1, "Restart the router."),
    ("Thanks! Could you kindly wait? I hope this helps.", 3, "Could you wait?"),
    ("I'm happy to help. Use a new cable.", 1, "Use a new cable."),
    ("Thank you for asking.", 1, ""),
    ("The pleased owner let the thankful dog out.", 0, "The pleased owner let the thankful dog out."),
    ("12 km are 7.46 miles", 0, "12 km are 7.46 miles"),
    ("Say thank you to the owner.", 1, "Say thank you to the owner."),
    ("Let me know. Please let me know!", 3, ""),
])
def test_courtesy_of_other_texts(text, formulas, rest):
    assert count_courtesy(text) == formulas and strip_courtesy(text) == rest


@pytest.mark.parametrize("formulas", [0, 1, 2, 4])
def test_a_dose_is_as_many_formulas_as_it_says(formulas):
    text = add_courtesy("Use a new cable.", formulas)
    assert count_courtesy(text) == formulas and strip_courtesy(text) == "Use a new cable."


def test_counterfactual_answers():
    rows = counterfactuals("Thank you for asking. Go on.", "Stop it.", "Thank you for asking. Run.")
    made = {(row["factor"], row["dose"]): row["text"] for row in rows}
    assert made["courtesy", 1] == "Thank you for asking. Stop it."
    assert made["repeat", 3] == "Stop it. Stop it. Stop it."
    assert made["stripped", None] == "Go on."
    assert made["added", None] == "Thank you for asking. Go on. Happy to help further."
    assert made["empty", None] == "" and len(made) == 12
    without = counterfactuals("Please go on.", None, None)
    assert {row["factor"] for row in without} == {
        "courtesy",
        "repeat",
        "stripped",
        "added",
        "empty",
    }
    assert without[0] == {"factor": "courtesy", "dose": 0, "text": "Go on."}
    assert [row["factor"] for row in counterfactuals(None, None, None)] == ["empty"]


# ---- factorial ----------------------------------------------------------------------------------


def crossed(context: str, **cells: float) -> list[dict]:
    """Rows of a context from right_plain=..., right_polite=..., wrong_plain=..., wrong_polite=..."""
    return [{"context": context, "correct": name.startswith("right"), "polite": name.endswith("polite"),
             "candidate": name, "score": score} for name, score in cells.items()]


def effect(figures: dict, factor: str, **others: bool) -> dict:
    return next(e for e in figures["effects"] if e["factor"] == factor and e["others"] == others)


OFFICE = [
    *crossed("A", right_plain=5.0, right_polite=6.5, wrong_plain=-2.0, wrong_polite=-3.0),
    *crossed("B", right_plain=1.0, right_polite=0.5, wrong_plain=-1.0, wrong_polite=2.0),
]


def test_the_office_probe_by_hand():
    f = factorial(OFFICE)
    assert f["factors"] == ["correct", "polite"]
    assert f["contexts"][0]["cells"]["correct, polite"] == 6.5
    assert f["contexts"][1]["cells"]["not correct, polite"] == 2.0
    got = effect(f, "polite", correct=True)
    assert (got["mean"], got["positive"], got["contexts"]) == (0.5, 1, 2)  # +1.5, -0.5
    assert effect(f, "polite", correct=False)["mean"] == 1.0  # -1, +3
    assert effect(f, "correct", polite=False)["mean"] == 4.5  # +7, +2
    assert len(f["effects"]) == 4
    assert f["inversions"] == [{"factor": "polite", "count": 1, "contexts": 2}]  # B: 2 above 1


def test_an_equal_score_is_no_inversion():
    f = factorial(
        crossed("A", right_plain=1.0, right_polite=1.0, wrong_plain=1.0, wrong_polite=1.0)
    )
    assert f["inversions"] == [{"factor": "polite", "count": 0, "contexts": 1}]
    assert effect(f, "polite", correct=True)["positive"] == 0


def test_effects_only_over_contexts_that_have_both_cells():
    f = factorial([*OFFICE, *crossed("C", right_plain=9.0, right_polite=0.0, wrong_polite=8.0)])
    assert effect(f, "polite", correct=True)["contexts"] == 3
    assert effect(f, "polite", correct=False)["contexts"] == 2
    assert effect(f, "correct", polite=True)["mean"] == pytest.approx((9.5 - 1.5 - 8) / 3)
    alone = factorial(crossed("D", right_plain=1.0))
    assert alone["effects"] == []
    assert alone["inversions"] == [{"factor": "polite", "count": 0, "contexts": 0}]


def test_three_factors_against_a_plain_loop():
    generator, names = random.Random(5), ("short", "correct", "warm")
    rows = [
        {"context": f"C{n}", **{name: bool(code >> i & 1) for i, name in enumerate(names)},
         "score": generator.gauss(0, 1)} for n in range(4) for code in range(8)
    ]
    f = factorial(rows)
    assert len(f["effects"]) == 3 * 4
    for e in f["effects"]:
        of = {}
        for row in rows:
            if all(row[name] == on for name, on in e["others"].items()):
                of.setdefault(row["context"], {})[row[e["factor"]]] = row["score"]
        differences = [cells[True] - cells[False] for cells in of.values()]
        assert e["mean"] == pytest.approx(sum(differences) / 4)
        assert (e["positive"], e["contexts"]) == (sum(d > 0 for d in differences), 4)
    wanted = 0
    for context in ("C0", "C1", "C2", "C3"):
        at = {
            (r["short"], r["correct"], r["warm"]): r["score"]
            for r in rows
            if r["context"] == context
        }
        wanted += any(at[short, False, True] > at[short, True, False] for short in (True, False))
    assert f["inversions"][1] == {"factor": "warm", "count": wanted, "contexts": 4}
    assert [i["factor"] for i in f["inversions"]] == ["short", "warm"]


def test_factors_are_the_fields_that_are_boolean_everywhere():
    rows = [
        {"id": "a", "x": True, "y": 1, "z": False},
        {"id": "b", "x": False, "y": True, "z": None},
    ]
    assert factors_of(rows) == ["x"]
    assert factors_of([]) == []
    none = factorial([{"context": "A", "score": 1.0}, {"context": "A", "score": 3.0}])
    assert none == {"factors": [], "contexts": [{"context": "A", "cells": {"": 2.0}}], "effects": [],
                    "inversions": []}
    assert factorial([])["contexts"] == []


def test_doses_stand_on_the_plain_right_candidate():
    probes = [
        row for row in office.build_corpus()["heldout/probes.jsonl"] if row["context"] == "PROBE03"
    ]
    rows = dose_rows({"context": "PROBE03", "text": "Whatever."}, probes)
    text = {(row["factor"], row["dose"]): row["text"] for row in rows}
    assert text["courtesy", 0] == text["right plain", None] == response(3, 1, False)
    assert text["courtesy", 2] == response(3, 1, True)
    assert text["wrong polite", None] == response(4, 1, True)
    other = dose_rows({"context": "PROBE04", "text": "Whatever."}, probes)
    assert other[0]["text"] == "Whatever." and {row["context"] for row in other} == {"PROBE04"}


def test_dose_figures_leave_out_what_the_judge_could_not_read():
    rows = [{"factor": "repeat", "dose": 3, "score": s} for s in (1.0, None, 2.0)]
    rows += [{"factor": "empty", "dose": None, "score": None}]
    first, second = dose_effects(rows, seed=1)
    assert (first["contexts"], first["left_out"], first["mean"]) == (2, 1, 1.5)
    assert 1.0 <= first["low"] < first["high"] <= 2.0
    assert (second["contexts"], second["left_out"], second["mean"]) == (0, 1, None)


# ---- best of n ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_best_of_n_against_every_draw(n):
    """Each subset of size n in turn; samples of equal score share the choice."""
    scores, values = [0.5, 2.0, -1.0, 2.0, 0.5, 2.0, 3.0], [1, 0, 1, 1, 0, 0, 1]
    draws = list(combinations(range(7), n))
    for of in (scores, values):
        total = 0.0
        for draw in draws:
            top = max(scores[i] for i in draw)
            tied = [of[i] for i in draw if scores[i] == top]
            total += sum(tied) / len(tied)
        assert best_of(scores, of, n) == pytest.approx(total / len(draws))


def test_best_of_n_figures():
    scores = {"A": [1.0, 2.0, 3.0, 4.0], "B": [0.0, 0.0, 0.0, 8.0]}
    success = {"A": [True, True, False, False], "B": [None, True, True, True]}
    rows = [{"context": c, "score": s, "success": v}
            for c in "AB" for s, v in zip(scores[c], success[c])]
    f = best_of_n(rows)
    assert [x["n"] for x in f] == [1, 2, 4]
    assert [x["score"] for x in f] == pytest.approx([(2.5 + 2) / 2, (20 / 6 + 4) / 2, (4 + 8) / 2])
    assert [x["rubric"] for x in f] == pytest.approx([0.5, 1 / 6, 0.0])  # of A; B is not known
    assert [x["kl"] for x in f] == pytest.approx([0, 0.19314718, 0.63629436])
    assert [x["sqrt_kl"] ** 2 for x in f] == pytest.approx([x["kl"] for x in f])
    assert {(x["contexts"], x["samples"]) for x in f} == {(2, 4)}
    assert all(x["rubric"] is None for x in best_of_n([{**row, "success": None} for row in rows]))


# ---- PPO's samples ------------------------------------------------------------------------------


def test_repetition_by_hand():
    assert repetition([1, 2, 3, 1, 2, 3, 9]) == pytest.approx(1 / 5)  # 123 231 312 123 239
    assert repetition([4] * 10) == pytest.approx(7 / 8)
    assert repetition([1, 2]) == 0.0


def rollout(iteration: int, score: float, kl: list[float], text="Thank you. Go.") -> dict:
    return {"iteration": iteration, "rollout": f"{iteration}", "prompt_id": "p", "text": text,
            "finish_reason": "eos", "score": score, "response_ids": list(range(len(kl))), "kl": kl,
            "old_logprobs": [-1.0] * len(kl), "ref_logprobs": [-1.5] * len(kl)}


def own_rubric(prompt, text, finish_reason, row):
    assert (prompt, row) == ("the prompt", {"id": "p", "want": "Go."})
    return {"success": row["want"] in text, "own": 7}


PROMPTS, LABELS = [{"id": "p", "prompt": "the prompt"}], [{"id": "p", "want": "Go."}]
SAMPLES = [
    rollout(1, 1.0, [0.0, 0.0]),
    rollout(1, 3.0, [0.0] * 4, "No."),
    rollout(2, 5.0, [0.5, 1.5]),
    rollout(2, 6.0, [1.0] * 4),
    rollout(3, 9.0, [4.0] * 3, "No."),
]


def test_samples_by_iteration_and_by_block():
    rows = judged_rollouts(SAMPLES, PROMPTS, LABELS, own_rubric)
    first, second, third = by_iteration(rows)
    assert (first["score"], first["rubric"], first["tokens"], first["courtesy"]) == (2, 0.5, 3, 0.5)
    assert first["recognised"] is None and first["polite"] is None  # this rubric does not say
    assert (second["kl"], second["rubric"], second["finished"]) == (1.0, 1.0, 1.0)
    assert third["repetition"] == 0.0
    found = ledger(rows)
    assert [(b["from"], b["to"], b["rollouts"]) for b in found["blocks"]] == [
        (1, 1, 2),
        (2, 2, 2),
        (3, 3, 1),
    ]
    assert [b["kl"] for b in found["blocks"]] == [0.0, 3.0, 12.0]  # per response
    assert found["blocks"][2]["sqrt_kl"] == pytest.approx(math.sqrt(12))
    assert [b["rubric"] for b in found["blocks"]] == [0.5, 1.0, 0.0] and found["gold_peak"] == 1


def test_blocks_cover_every_iteration_once():
    rows = judged_rollouts(
        [rollout(n, 0.0, [0.1]) for n in range(1, 24)], PROMPTS, LABELS, own_rubric
    )
    blocks = ledger(rows)["blocks"]
    assert len(blocks) == 10 and sum(b["rollouts"] for b in blocks) == 23
    assert [b["from"] for b in blocks] == [1, *(b["to"] + 1 for b in blocks[:-1])]


def test_samples_without_a_rubric_or_without_a_label():
    rows = judged_rollouts(SAMPLES, PROMPTS, LABELS, lambda *_: {"success": None})
    assert [row["rubric"] for row in by_iteration(rows)] == [None] * 3
    assert ledger(rows)["gold_peak"] is None
    with pytest.raises(ValueError, match="rollout 1: .* no label for p"):
        judged_rollouts(SAMPLES, PROMPTS, [], own_rubric)


def test_kl_line():
    kls = [0.0, 0.05, 0.2, 0.4, 0.3]
    assert kl_line([{"iteration": n, "kl": kl} for n, kl in enumerate(kls, 1)]) == {
        "first": 0.0, "final": 0.3, "maximum": 0.4, "maximum_at": 4, "passed": True, "passed_at": 3,
        "threshold": 0.1}
    quiet = kl_line([{"iteration": 1, "kl": 0.1}])
    assert (quiet["passed"], quiet["passed_at"]) == (False, None)  # 0.1 is not past 0.1


def test_shift_counts_every_score_once():
    rows = [{"iteration": n, "score": float(n)} for n in range(1, 31)]
    f = shift([1.0, 2.0], [-40.0], rows)
    assert (f["edges"][0], f["edges"][-1], len(f["edges"])) == (-40.0, 30.0, 25)
    assert [sum(f[name]) for name in f["summary"]] == [2, 1, 3, 3]  # a tenth of 30 iterations
    assert f["summary"]["ppo_last"]["median"] == 29.0 and f["summary"]["ppo_first"]["mean"] == 2.0


# ---- SFT against PPO ----------------------------------------------------------------------------


def test_decomposition_by_hand():
    def pair(sft_text, ppo_text, sft_tokens, ppo_tokens, gain):
        sft = {"text": sft_text, "tokens": sft_tokens, "score": 1.0}
        return sft, {"text": ppo_text, "tokens": ppo_tokens, "score": 1.0 + gain}

    both = [
        pair("Go.", "Run.", 3, 3, 1.0),
        pair("Thank you. Go.", "Go.", 5, 3, 2.0),
        pair("Go.", None, 3, 9, -1.0),
        pair("Go.", "Please go.", 3, 4, 6.0),
    ]
    f = decomposition(both)
    assert f["gain"] == 2.0
    assert f["courtesy"] == {
        "same": {"contexts": 1, "gain": 0.25, "share": 0.125},
        "changed": {"contexts": 2, "gain": 2.0, "share": 1.0},
        "unknown": {"contexts": 1, "gain": -0.25, "share": -0.125},
    }
    assert [p["gain"] for p in f["length"].values()] == [0.5, 0.25, 1.25]  # shorter, same, longer
    still = decomposition([pair("Go.", "Go.", 3, 3, 0.0)])
    assert still["gain"] == 0 and still["length"]["same"]["share"] is None


# ---- the stage ----------------------------------------------------------------------------------


def test_a_finished_run_has_every_figure(tiny):
    f = read_json(tiny / "outputs/60_probe/figures.json")
    assert list(f) == ["factorial", "polite", "before_after", "kl", "card", "rollouts", "ledger",
                       "best_of_n", "decomposition", "doses"]
    accuracy = read_json(tiny / "outputs/50_evaluate/results.json")["reward_accuracy"]
    card = f["card"]
    assert card["splits"]["heldout"]["right"] == accuracy["all"]["right"]
    assert {name: c["pairs"] for name, c in card["variants"].items()} == dict.fromkeys(
        ("P0", "P1", "P2", "P3", "P4"), 36
    )
    assert [card["splits"][name]["pairs"] for name in card["splits"]] == [180, 180, 180]
    metrics = read_jsonl(tiny / "outputs/30_ppo/continuous/metrics.jsonl")
    for row, metric in zip(f["rollouts"], metrics, strict=True):
        for key in ("iteration", "score", "kl", "tokens", "finished"):
            assert row[key] == pytest.approx(metric[key], abs=1e-5)
    assert f["kl"]["maximum"] == max(metric["kl"] for metric in metrics)
    results = read_json(tiny / "outputs/50_evaluate/results.json")
    gain = results["differences"]["score"]["mean"]
    assert f["decomposition"]["gain"] == pytest.approx(gain)
    for strata in ("courtesy", "length"):
        parts = f["decomposition"][strata].values()
        assert sum(part["gain"] for part in parts) == pytest.approx(gain)
    scores = [best["score"] for best in f["best_of_n"]]
    assert scores == sorted(scores) and [b["n"] for b in f["best_of_n"]] == [1, 2, 4, 8, 16]
    table = (tiny / "outputs/60_probe/before_after.md").read_text().splitlines()
    assert len(table) == 2 + 200 + 3 and table[202].startswith("| average of 200 prompts |")


NO_RUBRIC = 'def rubric(prompt, response, finish_reason, row):\n    return {"success": None}\n'


def test_without_rubric_and_probes_only_the_score_is_known(copy_of_tiny):
    run = copy_of_tiny
    write_atomic(run / "data/rubric.py", NO_RUBRIC)
    write_jsonl(run / "data/heldout/probes.jsonl", [])
    manifest = read_json(run / "data/manifest.json")
    for name in ("rubric.py", "heldout/probes.jsonl"):
        manifest["sha256"][name] = sha256_file(run / "data" / name)
    write_json(run / "data/manifest.json", manifest)
    done = run_stage("50_evaluate", "--run-dir", run, "--redo")
    assert "Only that score is known" in done.stdout and "rubric - (PPO - SFT)" in done.stdout
    results = read_json(run / "outputs/50_evaluate/results.json")
    assert results["differences"]["rubric"] is None
    assert results["verdict"]["label"].endswith("rubric unknown")
    run_stage("60_probe", "--run-dir", run, "--redo")
    f = read_json(run / "outputs/60_probe/figures.json")
    assert f["factorial"] == {"factors": [], "contexts": [], "effects": [], "inversions": []}
    assert f["polite"] == {"sft": None, "ppo": None}
    assert f["ledger"]["gold_peak"] is None and f["best_of_n"][0]["rubric"] is None
    assert {dose["factor"] for dose in f["doses"]} == {
        "courtesy", "repeat", "stripped", "added", "empty", "sft"}
    json.dumps(f, allow_nan=False)

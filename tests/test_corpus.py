"""Proves the counts and rules of the corpus with an independent derivation, that the audit can fail
on each of its claims and names file and row, and that the bytes do not depend on the hash seed."""

import copy
import hashlib
import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from kernel.data import office, office_audit
from kernel.data.office_rubric import ACTIONS, REFUSALS, evaluate_response, response

ROOT = Path(__file__).resolve().parents[1]
ROWS = office.build_corpus()
COUNTS = {
    "train/pairs.jsonl": 840,
    "train/demonstrations.jsonl": 168,
    "train/prompts.jsonl": 672,
    "train/labels.jsonl": 672,
    "validation/pairs.jsonl": 180,
    "heldout/pairs.jsonl": 180,
    "heldout/prompts.jsonl": 260,
    "heldout/labels.jsonl": 260,
    "heldout/probes.jsonl": 80,
}
PAIR_FILES = ("train/pairs.jsonl", "validation/pairs.jsonl", "heldout/pairs.jsonl")


def from_disk() -> dict:
    return json.loads(json.dumps(ROWS))


def test_counts_and_fields():
    assert {file: len(rows) for file, rows in ROWS.items()} == COUNTS
    assert list(office.FIELDS) == list(COUNTS)
    assert all(set(row) == set(office.FIELDS[file]) for file, rows in ROWS.items() for row in rows)
    assert set(ROWS["train/prompts.jsonl"][0]) == {"id", "family", "prompt", "prompt_sha256"}
    held = ROWS["heldout/prompts.jsonl"]
    assert [row["population"] for row in held] == ["test"] * 180 + ["probe"] * 80
    assert len({row["context"] for row in held}) == len({row["prompt"] for row in held}) == 200
    assert [row["id"] for row in held] == [row["id"] for row in ROWS["heldout/labels.jsonl"]]


def test_split_rule_derived_again():
    generator, wanted = random.Random(49), {file: set() for file in PAIR_FILES}
    for action in range(6):
        ids = [f"OH{index:03d}" for index in range(240) if index // 40 == action]
        generator.shuffle(ids)
        for file, part in zip(PAIR_FILES, (ids[:28], ids[28:34], ids[34:])):
            wanted[file] |= set(part)
    for file in PAIR_FILES:
        assert {row["family"] for row in ROWS[file]} == wanted[file]
        assert {row["id"] for row in ROWS[file]} == {
            f"{f}-P{k}" for f in wanted[file] for k in range(5)
        }
    train = wanted["train/pairs.jsonl"]
    assert {row["id"] for row in ROWS["train/demonstrations.jsonl"]} == {f"{f}-SFT" for f in train}
    assert {row["id"] for row in ROWS["train/prompts.jsonl"]} == {
        f"{f}-RL{k}" for f in train for k in range(4)
    }


@pytest.mark.parametrize(
    "family, action, wrong",
    [
        ("OH013", 0, 4),  # 13 // 40 = 0; 0 + 1 + 13 % 5 = 4
        ("OH199", 4, 3),  # 199 // 40 = 4; 4 + 1 + 199 % 5 = 9; 9 mod 6 = 3
    ],
)
def test_pairs_of_two_families_by_hand(family, action, wrong):
    got = [
        (row["chosen"], row["rejected"], row["expected_action"])
        for file in PAIR_FILES
        for row in ROWS[file]
        if row["family"] == family
    ]
    name = ACTIONS[action]
    assert got == [
        (response(action, 1, False), response(wrong, 2, False), name),
        (response(action, 0, False), response(wrong, 1, True), name),
        (response(action, 1, True), response(wrong, 0, False), name),
        (response(action, 1, False), response(action, 2, True), name),
        (response(action, 0, True), response(wrong, 1, False), name),
    ]


def test_the_variant_in_the_prompt_does_not_tell_the_pair_type():
    seen = {(row["id"].split("-")[1], row["variant"]) for row in ROWS["train/pairs.jsonl"]}
    assert len(seen) == 25  # every pair type under every variant
    for action in range(6):  # and within every action
        own = [row for row in ROWS["train/pairs.jsonl"] if int(row["family"][2:]) // 40 == action]
        assert len({(row["id"].split("-")[1], row["variant"]) for row in own}) == 25


def test_prompts_name_family_and_variant_and_are_distinct():
    rows = [
        row
        for file in (*PAIR_FILES, "train/demonstrations.jsonl", "train/prompts.jsonl")
        for row in ROWS[file]
    ]
    prompts = [row["prompt"] for row in rows]
    normal = {" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in prompts}
    assert len(prompts) == len(set(prompts)) == len(normal) == 2040
    variants = {"SFT": "7", "RL0": "11", "RL1": "12", "RL2": "13", "RL3": "14"}
    for row in rows:
        kind = row["id"].split("-")[1]
        index = int(row["family"][2:])
        shifted = str((int(kind[1]) + index // 5) % 5) if kind[0] == "P" else None
        variant = shifted or variants[kind]
        heading = row["prompt"].split(". ")[0]
        assert row["family"] in heading and heading.replace(row["family"], "").count(variant) == 1
        assert ("Source: preference card." in row["prompt"]) is (kind[0] == "P")
        assert row["prompt_sha256"] == hashlib.sha256(row["prompt"].encode()).hexdigest()
        assert len(row["prompt"].split()) <= 40
    # Three headings in rotation: without family and number, 0, 1, 2 differ and 0 equals 3.
    shape = [
        row["prompt"].replace(row["family"], "").replace(str(row["variant"]), "")
        for row in sorted(ROWS["train/pairs.jsonl"][:5], key=lambda row: row["variant"])
    ]
    assert len(set(shape[:3])) == 3 and shape[0] == shape[3] and shape[1] == shape[4]


def test_demonstrations_are_form_1_and_polite_for_even_families():
    for row in ROWS["train/demonstrations.jsonl"]:
        index = int(row["family"][2:])
        assert row["response"] == response(index // 40, 1, index % 2 == 0)


def test_probes_derived_again():
    other = {
        row["prompt"]
        for file in COUNTS
        if file not in ("train/labels.jsonl", "heldout/labels.jsonl") and "probes" not in file
        for row in ROWS[file]
        if row.get("population") != "probe"
    }
    wanted = []
    for index in range(20):
        for correct, polite in ((0, 0), (0, 1), (1, 0), (1, 1)):
            action = index % 6 if correct else (index % 6 + 1) % 6
            wanted.append(
                (
                    f"PROBE{index:02d}-C{correct}-P{polite}",
                    response(action, 1, bool(polite)),
                    bool(correct),
                    bool(polite),
                    ACTIONS[index % 6],
                )
            )
    probes = ROWS["heldout/probes.jsonl"]
    assert wanted == [
        (row["id"], row["candidate"], row["correct"], row["polite"], row["expected_action"])
        for row in probes
    ]
    assert not other & {row["prompt"] for row in probes}
    for index in range(0, 80, 4):
        assert len({row["prompt"] for row in probes[index : index + 4]}) == 1


def test_no_prompt_contains_an_answer_and_rows_are_rated_as_claimed():
    for file in PAIR_FILES:
        for row in ROWS[file]:
            rate = [
                evaluate_response(row[side], "eos", row["expected_action"])["rubric_success"]
                for side in ("chosen", "rejected")
            ]
            assert rate == [True, False]
            assert row["chosen"] not in row["prompt"]


def test_audit_passes_on_rows_read_back_and_returns_measurements():
    report = office_audit.audit(from_disk())
    assert report["rows"] == COUNTS
    assert report["families_each_in_one_split"] == {"train": 168, "validation": 36, "heldout": 36}
    assert report["distinct_pair_demonstration_rollout_prompts"] == 2040
    assert report["normalised_prompts_each_in_one_split"] == 2060
    labels = COUNTS["train/labels.jsonl"] + COUNTS["heldout/labels.jsonl"]  # they have no prompt
    assert report["prompt_hashes_right"] == sum(COUNTS.values()) - labels
    assert report["chosen_pass"] == report["rejected_fail"] == 1200
    assert report["demonstrations_pass"] == 168 and report["probes_agree_with_rubric"] == 80
    assert report["probe_contexts_with_one_prompt"] == 20 and report["heldout_contexts"] == 200
    json.dumps(report)
    office_audit.audit(office.build_corpus(7), seed=7)
    with pytest.raises(ValueError):
        office_audit.audit(office.build_corpus(7))


def put(file, number, **fields):
    """Change fields of one row; a new prompt gets its right hash, as a careful forger would do."""

    def change(rows):
        row = rows[file][number - 1]
        row.update(fields)
        if "prompt" in fields and "prompt_sha256" not in fields:
            row["prompt_sha256"] = hashlib.sha256(row["prompt"].encode()).hexdigest()

    return change


def drop(file, number, field=None):
    def change(rows):
        if field:
            del rows[file][number - 1][field]
        else:
            del rows[file][number - 1]

    return change


def repeat(source, target):
    return lambda rows: rows[target].append(copy.deepcopy(rows[source][0]))


def swap(file, a, b):
    def change(rows):
        rows[file][a - 1], rows[file][b - 1] = rows[file][b - 1], rows[file][a - 1]

    return change


T, V, H, D, R = (*PAIR_FILES, "train/demonstrations.jsonl", "train/prompts.jsonl")
Q, L, P = "heldout/prompts.jsonl", "heldout/labels.jsonl", "heldout/probes.jsonl"
TEST, PROBE, FIRST = (ROWS[H][4]["prompt"], ROWS[P][0]["prompt"], ROWS[T][0])
MUTATIONS = {
    "hash": (put(T, 3, prompt_sha256="0" * 64), T, 3, "wrong prompt_sha256"),
    "prompt without its hash": (
        put(D, 5, prompt="x", prompt_sha256=FIRST["prompt_sha256"]),
        D,
        5,
        "wrong prompt_sha256",
    ),
    "test prompt in train": (put(R, 9, prompt=TEST), H, 5, f"{R} row 9"),
    "near-copy: case and blanks": (put(R, 9, prompt=f"  {TEST.upper()} \n"), H, 5, f"{R} row 9"),
    "near-copy: Unicode form": (
        put(T, 9, prompt=TEST.replace(" ", "\u00a0").replace("OH", "\uff2f\uff28")),
        H,
        5,
        f"{T} row 9",
    ),
    "validation prompt in test": (put(H, 2, prompt=ROWS[V][7]["prompt"]), H, 2, f"{V} row 8"),
    "test row appended to train": (repeat(H, T), H, 1, "in train and in heldout"),
    "family in two splits": (put(V, 1, id="OH000-P0", family="OH000"), V, 1, "in train"),
    "family against id": (put(V, 1, family="OH000"), V, 1, "family does not fit the id"),
    "family near-copy": (put(V, 1, id="oh000-P0", family="oh000"), V, 1, "in train"),
    "probe prompt in train": (put(D, 1, prompt=PROBE), Q, 181, f"{D} row 1"),
    "prompt twice within a split": (put(T, 2, prompt=FIRST["prompt"]), T, 2, f"{T} row 1"),
    "demo prompt also a rollout": (put(R, 1, prompt=ROWS[D][0]["prompt"]), R, 1, f"{D} row 1"),
    "target in rollout row": (put(R, 4, expected_action=ACTIONS[0]), R, 4, "fields"),
    "answer in rollout prompt": (
        put(R, 4, prompt="OH000: Resume the print queue!"),
        R,
        4,
        "gives an answer away",
    ),
    "label in held-out prompts": (put(Q, 200, expected_action=ACTIONS[0]), Q, 200, "fields"),
    "field missing": (drop(L, 7, "expected_action"), L, 7, "fields"),
    "bool as number": (put(P, 2, correct=0), P, 2, "correct: wrong type"),
    "prompt not text": (put(T, 2, prompt_sha256=None), T, 2, "prompt_sha256: wrong type"),
    "row not an object": (lambda rows: rows[V].__setitem__(3, 5), V, 4, "not a JSON object"),
    "chosen equals rejected": (
        put(T, 8, rejected=ROWS[T][7]["chosen"] + " "),
        T,
        8,
        "chosen equals",
    ),
    "chosen fails": (put(H, 6, chosen=REFUSALS[0]), H, 6, "chosen fails"),
    "chosen outside grammar": (
        put(H, 6, chosen=ROWS[H][5]["chosen"][:-1]),
        H,
        6,
        "outside the grammar",
    ),
    "rejected passes": (put(T, 1, rejected=response(0, 0, True)), T, 1, "rejected passes"),
    "pair of another pattern": (put(T, 1, chosen=response(0, 0, False)), T, 1, "chosen"),
    "unknown action": (put(V, 9, expected_action="reboot"), V, 9, "unknown action"),
    "action of one pair": (put(T, 4, expected_action=ACTIONS[1]), T, 4, "action differs"),
    "demonstration certain": (put(D, 1, response=response(0, 2, True)), D, 1, "certainty"),
    "demonstration for another action": (put(D, 1, response=response(1, 1, True)), D, 1, "another"),
    "demonstration's courtesy": (put(D, 1, response=response(0, 1, False)), D, 1, "response"),
    "probe correctness": (put(P, 1, correct=True), P, 1, "correct disagrees"),
    "probe courtesy": (put(P, 4, polite=False), P, 4, "polite disagrees"),
    "probe candidate": (put(P, 4, candidate=response(0, 0, True)), P, 4, "candidate"),
    "probe prompt differs": (put(P, 3, prompt="PROBE00 anything"), P, 3, "differs within PROBE00"),
    "label wrong": (put(L, 190, expected_action=ACTIONS[0]), L, 190, "expected_action"),
    "population": (put(Q, 180, population="probe"), Q, 180, "population"),
    "context": (put(Q, 3, context="OH004-P0"), Q, 3, "context"),
    "wording": (put(T, 7, prompt="OH001: help!"), T, 7, "prompt"),
    "variant": (put(T, 7, variant=8), T, 7, "variant"),
    "row dropped": (drop(R, 10), R, 10, "id"),
    "last row dropped": (drop(L, 260), L, 260, "259 rows, wanted 260"),
    "row repeated": (repeat(L, L), L, 261, "261 rows, wanted 260"),
    "order": (swap(D, 1, 2), D, 1, "id"),
    "file missing": (lambda rows: rows.pop(P), P, 1, "missing"),
    "file empty": (lambda rows: rows[V].clear(), V, 1, "missing"),
    "file unknown": (
        lambda rows: rows.update({"train/extra.jsonl": [{}]}),
        "train/extra.jsonl",
        1,
        "unknown file",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_audit_catches(name):
    change, file, number, what = MUTATIONS[name]
    rows = from_disk()
    change(rows)
    with pytest.raises(ValueError) as caught:
        office_audit.audit(rows)
    message = str(caught.value)
    assert message.startswith(f"{file} row {number}: ") and "\n" not in message
    assert what in message.split(": ", 1)[1]


def test_bytes_do_not_depend_on_the_hash_seed():
    code = (
        "import json, sys; from kernel.data import office, office_audit; "
        "rows = office.build_corpus(); "
        "sys.stdout.write(json.dumps([rows, office_audit.audit(rows), office.FIELDS]))"
    )
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second and json.loads(first)[0] == ROWS

"""The smaller built-in corpora: counts and rules derived again, and audits that can fail."""

import copy
import random

import pytest

from kernel.data.corpora import CORPORA
from kernel.data.lesson_rubric import LONGEST, rubric
from kernel.data.office_rubric import GRAMMAR, evaluate_response

LESSON, TWO = CORPORA["lesson"], CORPORA["two-rewards"]
ROWS = {"lesson": LESSON.build(), "two-rewards": TWO.build()}


@pytest.mark.parametrize("name", CORPORA)
def test_rows_have_the_declared_fields_and_the_audit_counts_them(name):
    corpus = CORPORA[name]
    rows = corpus.build()
    assert list(rows) == list(corpus.fields) or set(rows) == set(corpus.fields)
    for file, content in rows.items():
        assert all(set(row) == set(corpus.fields[file]) for row in content), file
    assert corpus.audit(rows)["rows"] == {file: len(content) for file, content in rows.items()}


def test_lesson_has_six_pairs_two_to_follow_four_new_and_four_probe_contexts():
    rows = ROWS["lesson"]
    assert [len(rows[f"{split}/pairs.jsonl"]) for split in ("train", "validation", "heldout")] == [
        6,
        2,
        4,
    ]
    assert len(rows["heldout/probes.jsonl"]) == 16
    assert len({row["context"] for row in rows["heldout/probes.jsonl"]}) == 4
    for row in rows["train/pairs.jsonl"] + rows["heldout/pairs.jsonl"]:
        assert len(row["chosen"].split()) <= 3 < len(row["rejected"].split())
        assert row["expected"].lower() not in row["rejected"].lower()
    assert not any("expected" in row for row in rows["train/prompts.jsonl"])


@pytest.mark.parametrize(
    "text, finish, expected, success, reason",
    [
        ("366 days.", "eos", "366", True, "right and short"),
        ("It has 3667 days.", "eos", "366", False, "without '366'"),
        ("366 days.", "length", "366", False, "cut off"),
        ("CTRL+Z", "eos", "Ctrl+Z", True, "right and short"),
        ("Great question! 366.", "eos", "366", False, "padded"),
        ("366 " + "days " * LONGEST, "eos", "366", False, "padded"),
        ("366 " + "days " * (LONGEST - 1), "eos", "366", True, "right and short"),
        (None, "eos", "366", False, "without '366'"),
    ],
)
def test_lesson_rubric_by_hand(text, finish, expected, success, reason):
    verdict = rubric("?", text, finish, {"expected": expected})
    assert (verdict["success"], verdict["reason"]) == (success, reason)


@pytest.mark.parametrize("split", ["train", "validation", "heldout"])
def test_helpful_pairs_differ_in_the_action_only_and_concise_pairs_in_courtesy_only(split):
    rows = ROWS["two-rewards"]
    seen = {"right": 0, "wrong": 0}
    for row in rows[f"{split}/pairs-helpful.jsonl"]:
        chosen, rejected = GRAMMAR[row["chosen"]], GRAMMAR[row["rejected"]]
        assert chosen[0] != rejected[0] and chosen[1:] == rejected[1:]
        assert evaluate_response(row["chosen"], "eos", row["expected_action"])["relevant"]
        assert not evaluate_response(row["rejected"], "eos", row["expected_action"])["relevant"]
    for row in rows[f"{split}/pairs-concise.jsonl"]:
        chosen, rejected = GRAMMAR[row["chosen"]], GRAMMAR[row["rejected"]]
        assert chosen[:2] == rejected[:2] and (chosen[2], rejected[2]) == (False, True)
        relevant = evaluate_response(row["chosen"], "eos", row["expected_action"])["relevant"]
        seen["right" if relevant else "wrong"] += 1
    assert seen["right"] == 2 / 3 * seen["wrong"]  # P1 and P3 against P0, P2 and P4
    prompts = [row["prompt"] for row in rows[f"{split}/pairs.jsonl"]]
    assert [row["prompt"] for row in rows[f"{split}/pairs-helpful.jsonl"]] == prompts


def changed(name: str, file: str, number: int, **fields) -> dict:
    rows = copy.deepcopy(ROWS[name])
    rows[file][number - 1].update(fields)
    return rows


@pytest.mark.parametrize(
    "file, number, fields, told",
    [
        ("train/pairs.jsonl", 2, {"chosen": "A processor."}, "chosen fails the rubric"),
        ("train/pairs.jsonl", 1, {"rejected": "366."}, "rejected passes the rubric"),
        ("heldout/pairs.jsonl", 4, {"prompt": "Other?"}, "wrong prompt_sha256"),
        ("train/prompts.jsonl", 3, {"expected": "150"}, "fields are"),
        ("heldout/probes.jsonl", 5, {"correct": True}, "correct and padded disagree"),
    ],
)
def test_lesson_audit_names_file_and_row(file, number, fields, told):
    with pytest.raises(ValueError, match=f"{file} row {number}: .*{told}"):
        LESSON.audit(changed("lesson", file, number, **fields))


def test_lesson_audit_finds_a_prompt_in_two_splits_and_a_missing_file():
    train = ROWS["lesson"]["train/pairs.jsonl"][0]
    stolen = {key: train[key] for key in ("prompt", "prompt_sha256", "expected", "chosen")}
    rows = changed("lesson", "heldout/pairs.jsonl", 2, **stolen)
    with pytest.raises(ValueError, match="heldout/pairs.jsonl row 2: the prompt is also in train"):
        LESSON.audit(rows)
    with pytest.raises(ValueError, match="train/labels.jsonl: missing"):
        LESSON.audit({**ROWS["lesson"], "train/labels.jsonl": []})


def test_two_rewards_audit_finds_any_changed_row():
    file = "train/pairs-concise.jsonl"
    number = random.Random(1).randrange(1, 841)
    with pytest.raises(ValueError, match=f"{file} row {number}: not as constructed"):
        TWO.audit(changed("two-rewards", file, number, chosen="Save it."))
    with pytest.raises(ValueError, match="train/pairs.jsonl row 7"):
        TWO.audit(changed("two-rewards", "train/pairs.jsonl", 7, chosen="Save it."))

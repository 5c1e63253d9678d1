"""A user's own preference data: the gate, the splits, the rubric, and the example through all stages.

Proves: each kind of fault is named with file, row and text, all in one go, and nothing is written; the
four shapes give the same rows; one normalised prompt is in one split, whatever the order and whatever
rows come with it; further columns reach the rubric and never a prompt file; a run goes on with the
same data only. Oracles: the split formula written a second time, rows written by hand.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, last_line, run_stage
from tokenizers import normalizers

from kernel.data.acquire import acquire
from kernel.data.chat import Chat
from kernel.data.corpus import Corpus
from kernel.data.files import read_json, read_jsonl, sha256_file
from kernel.data.own_code import load_function
from kernel.data.tiny import tiny_tokenizer
from kernel.finished import verify
from kernel.gate import checks, gate
from kernel.gate.faults import Faults
from kernel.gate.layout import audit, split_of
from kernel.gate.rows import plain_row
from kernel.run.folder import RunFolder
from kernel.run.profiles import PROFILES

EXAMPLE = ROOT / "tests/example"
COMMON = PROFILES["tiny"]["common"]


def pairs(count: int = 60) -> list[dict]:
    """Rows without a fault: 48 train, 6 validation, 6 test by column."""
    kinds = ["train"] * 8 + ["validation", "test"]
    return [
        {
            "prompt": f"What is {n} plus one?",
            "chosen": f"It is {n + 1}.",
            "rejected": f"It may be {n}.",
            "split": kinds[n % 10],
        }
        for n in range(count)
    ]


def write(folder: Path, **files) -> Path:
    """A data folder; keyword: file name without .jsonl, value: rows or bytes."""
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        if not isinstance(rows, bytes):
            rows = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(rows)
    return folder


def look(folder: Path, rubric=None, drop_bad=False, **limits) -> Corpus:
    args = SimpleNamespace(
        data=folder, rubric=rubric, drop_bad=drop_bad, model_dir=None, check=False
    )
    return gate.gate(args, "tiny", {**COMMON, **limits})


@pytest.fixture
def refused(tmp_path, capsys):
    """Looks at files that have faults; returns what was printed and the last line."""

    def look_at(rubric=None, limits=None, **files) -> str:
        with pytest.raises(ValueError) as error:
            look(write(tmp_path / "mine", **files), rubric, **(limits or {}))
        return capsys.readouterr().out + str(error.value)

    return look_at


def changed(number: int, **fields) -> list[dict]:
    """Rows in which one row, counted from 1, has other fields; None removes one."""
    rows = pairs()
    row = {**rows[number - 1], **fields}
    rows[number - 1] = {name: value for name, value in row.items() if value is not None}
    return rows


# ---- faults of one row --------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
BRIEF = {"role": "system", "content": "Be brief."}
ASKED = "\n\nHuman: Hi there\n\nAssistant:"
HUMAN = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"


@pytest.mark.parametrize(
    "fields, found",
    [
        ({"chosen": None}, "pairs.jsonl row 3: no field 'chosen' (there is: prompt, rejected, split)"),
        ({"chosen": 7}, "row 3: chosen is a JSON int, wanted text or messages"),
        ({"chosen": []}, "row 3: chosen is an empty list"),
        ({"prompt": {"a": 1}}, "row 3: prompt is a JSON dict"),
        ({"chosen": CHAT[1:]}, "row 3: one of chosen and rejected is text, the other is messages"),
        ({"chosen": [3], "rejected": [3]}, "row 3: chosen: a message needs the texts 'role' and"),
        ({"prompt": None, "chosen": "Yes.", "rejected": "No."}, "row 3: no prompt: no field 'prompt'"),
        ({"prompt": None, "chosen": CHAT[1:], "rejected": CHAT[1:]}, "row 3: no prompt: neither"),
        ({"prompt": "Other", "chosen": CHAT, "rejected": CHAT}, "row 3: prompt is not what the user"),
        ({"id": True}, "row 3: id is True, wanted text or a whole number"),
    ],
    ids=ascii,
)
def test_a_missing_or_mistyped_field_is_named(refused, fields, found):  # case B42
    text = refused(pairs=changed(3, **fields))
    assert found in text and "field (1): name and fill the fields" in text


@pytest.mark.parametrize(
    "fields, found",
    [
        ({"prompt": None, "chosen": CHAT + CHAT, "rejected": CHAT + CHAT},
         "row 3: the conversation has the turns user, assistant, user before the answer"),
        ({"prompt": None, "chosen": CHAT, "rejected": [{"role": "user", "content": "Hm"}, CHAT[1]]},
         "row 3: chosen and rejected differ before their last message"),
        ({"chosen": CHAT[:1], "rejected": CHAT[:1]}, "row 3: chosen ends with the turns user"),
        ({"prompt": CHAT + CHAT[:1]}, "row 3: prompt has the turns user, assistant, user"),
        ({"prompt": None, "chosen": HUMAN + " A.", "rejected": HUMAN + " B."},
         "row 3: a transcript with more than one turn"),
    ],
    ids=["two turns", "different turns", "no answer", "long prompt", "transcript"],
)
def test_more_than_one_turn_is_refused_by_name_and_count(refused, fields, found):
    text = refused(pairs=changed(3, **fields))
    assert found in text and "turns (1): keep one user turn" in text


@pytest.mark.parametrize(
    "raw, found",
    [
        (b'{"prompt": "caf\xe9"}', "encoding (1): save the file as UTF-8\n    pairs.jsonl row 61: "
         "byte 16 (0xe9) is not UTF-8"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "pairs.jsonl row 61: byte 1 (0xff) is not UTF-8"),
        (b'{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}', "row 61: half of a surrogate pair"),
        (b'{"prompt": "a"', "broken JSON (1): write one JSON object per line\n    pairs.jsonl row 61: "),
        (b"[1, 2]", "row 61: a JSON list, wanted an object"),
        (b'{"prompt": NaN}', "row 61: NaN is not a finite number"),
        (b'{"prompt": 1e999}', "row 61: 1e999 is not a finite number"),
        (b'{"a": ' * 100_000, "row 61: nested too deeply"),
    ],
    ids=["latin-1", "utf-16", "surrogate", "cut", "list", "nan", "infinite", "deep"],
)
def test_what_is_no_json_in_utf8_is_named_with_its_line_and_byte(refused, raw, found):  # case B40
    good = "".join(json.dumps(row) + "\n" for row in pairs()).encode()
    assert found in refused(pairs=good + raw)


@pytest.mark.parametrize(
    "fields, kind, found",
    [
        ({"prompt": " \n"}, "empty", "row 3: prompt is empty"),
        ({"rejected": ""}, "empty", "row 3: rejected is empty"),
        ({"rejected": "It is 3. "}, "equal answers", "row 3: chosen equals rejected"),
        ({"prompt": "What is two plus one? ", "chosen": " What is two plus one? It is 3."},
         "prompt repeated", "row 3: chosen begins with the whole prompt"),
        ({"rejected": "It<|im_end|>"}, "control token", "row 3: the text contains <|im_end|>"),
        ({"prompt": "<|im_start|>system"}, "control token", "row 3: the text contains <|im_start|>"),
        ({"split": "dev"}, "split", "row 3: split is 'dev'"),
        ({"split": None}, "split", "row 3: split is None"),
    ],
    ids=ascii,
)
def test_a_row_that_cannot_be_learned_from_is_named(refused, fields, kind, found):
    text = refused(pairs=changed(3, **fields))
    assert found in text and f"  {kind} (1): " in text


@pytest.mark.parametrize(
    "limits, found",
    [
        ({"prompt_limit": 20}, "prompt has "),
        ({"response_limit": 3}, "chosen has "),
        ({"context_limit": 30}, "prompt and rejected have "),
    ],
    ids=ascii,
)
def test_a_row_over_a_limit_is_named_with_both_numbers(refused, limits, found):  # case B32
    text = refused(pairs=pairs(), limits=limits)
    assert found in text and f"tokens, limit {[*limits.values()][0]}" in text
    assert "raise --prompt-limit, --response-limit, --context-limit" in text


def test_token_counts_are_those_of_the_stages(tmp_path):
    folder = tmp_path / "tokenizer"
    tiny_tokenizer([row["prompt"] for row in pairs()], 300).save_pretrained(folder)
    chat = Chat({**COMMON, **gate.NO_LIMITS, "model_dir": str(folder)})
    prompts = [" two  blanks \n", *(row["prompt"] for row in pairs())]
    want = {prompt: len(chat.prompt_ids(prompt)) for prompt in prompts}
    assert checks.token_counts(chat, prompts) == want
    # A template that changes the text cannot be filled in by the batch.
    chat.tokenizer.chat_template = chat.tokenizer.chat_template.replace(
        "m['content']", "m['content']|trim"
    )
    trimmed = {prompt: len(chat.prompt_ids(prompt)) for prompt in prompts}
    assert trimmed != want and checks.token_counts(chat, prompts) == trimmed


@pytest.mark.parametrize(
    "more", [{"messages": []}, {"messages": ["a"]}, {"messages": [{"from": "x"}]}]
)
def test_a_further_column_of_a_known_name_is_a_column(more):
    row = {"prompt": "Is it?", "chosen": "Yes", "rejected": "No", **more}
    assert plain_row("pairs.jsonl", 1, row).extra == more
    assert plain_row("prompts.jsonl", 1, {"prompt": "Is it?", **more}).extra == more


def test_the_gate_counts_as_the_tiny_base_will(tmp_path):
    """Rows of 291 tokens once passed: alone, the tokenizer cut digits otherwise than with its model."""
    rows = pairs()
    rows[0]["prompt"] = "Add " + " ".join(str(10**7 + n) for n in range(12)) + ", Äpfel, 日本語"
    corpus = look(write(tmp_path / "mine", pairs=rows))
    base = {**PROFILES["tiny"]["base"], "pretrain_updates": 2}
    folder = acquire(base, tmp_path / "models", corpus.build())
    chat = Chat({**COMMON, "model_dir": str(folder)})
    assert corpus.longest["prompt"] == len(chat.prompt_ids(rows[0]["prompt"]))
    longest = max(len(chat.response_ids(row[side])) for row in rows for side in ("chosen", "rejected"))
    assert corpus.longest["response"] == longest


def test_answers_that_become_the_same_tokens_are_equal(tmp_path):  # case B39
    tiny_tokenizer(["it is yes"], 300).save_pretrained(tmp_path / "tokenizer")
    chat = Chat({**COMMON, **gate.NO_LIMITS, "model_dir": str(tmp_path / "tokenizer")})
    chat.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    row = plain_row("pairs.jsonl", 1, {"prompt": "Is it?", "chosen": "Yes", "rejected": "yes"})
    faults = Faults()
    rows = {file: [] for file in ("demonstrations.jsonl", "prompts.jsonl", "probes.jsonl")}
    checks.token_faults({"pairs.jsonl": [row], **rows}, chat, COMMON, faults)
    assert faults.found["equal answers"] == [
        "pairs.jsonl row 1: chosen and rejected are the same tokens"
    ]


# ---- faults between rows ------------------------------------------------------------------------


def test_a_duplicate_and_both_sides_of_a_contradiction_are_named(refused):
    rows = pairs()
    rows += [rows[0], {**rows[2], "chosen": rows[2]["rejected"], "rejected": rows[2]["chosen"]}]
    rows[-1]["prompt"] = rows[-1]["prompt"].upper() + " "  # the same, after normalisation
    text = refused(pairs=rows)
    assert "duplicate (1)" in text and "pairs.jsonl row 61: repeats row 1" in text
    assert "contradiction (2)" in text
    assert "pairs.jsonl row 3: the opposite of row 62, for the same prompt" in text
    assert "pairs.jsonl row 62: the opposite of row 3, for the same prompt" in text


def test_ids_are_unique_where_answers_are_known_by_them(refused):
    rows = changed(3, id="a")
    rows[8]["id"] = "a"
    probe = {"id": "a", "prompt": "Why?", "candidate": "So."}
    text = refused(pairs=rows, probes=[probe])
    assert "pairs.jsonl row 9: id 'a' is also that of pairs.jsonl row 3" in text
    assert "probes.jsonl row 1: id 'a' is also that of pairs.jsonl row 3" in text


def test_a_held_out_prompt_must_not_be_trained_on(refused):  # case B10
    rows = changed(3, prompt="WHAT is  9 plus one?")  # row 10 is a test pair
    text = refused(
        pairs=rows,
        demonstrations=[{"prompt": "What is 8 plus one?", "response": "Nine."}],
        prompts=[{"prompt": "Probe?"}],
        probes=[{"prompt": "Probe?", "candidate": "Yes."}],
    )
    assert "shared prompt (3)" in text
    assert "pairs.jsonl row 3: its prompt is also in the test pairs (pairs.jsonl row 10)" in text
    assert "demonstrations.jsonl row 1: its prompt is also in the validation pairs (pairs" in text
    assert "prompts.jsonl row 1: its prompt is also in the probes (probes.jsonl row 1)" in text


def test_training_files_refuse_rows_marked_as_held_out(refused):
    rows = [{"prompt": "Probe?", "split": "test"}]
    found = "prompts.jsonl row 1: split is 'test', but this file is for training rows"
    assert found in refused(pairs=pairs(), prompts=rows)


def probe(context: str, correct, polite, **fields) -> dict:
    return {"context": context, "prompt": f"{context}?", "candidate": f"{correct} {polite}",
            "correct": correct, "polite": polite, **fields}


@pytest.mark.parametrize(
    "fields, found",
    [
        ({"prompt": "Another?"}, "row 5: its prompt is not that of row 1 in context P0"),
        ({"prompt": "P1?", "context": "P9"}, "row 5: contexts P1 and P9 have one prompt"),
        ({"polite": "no"}, "row 5: polite is 'no', but true or false in other rows"),
        ({"polite": None}, "row 5: polite is None, but true or false in other rows"),
        ({"polite": True}, "row 5: the same factors as row 1 in context P0"),
        ({"context": 5}, "row 5: context is 5, wanted text"),
        ({"context": "000010-pair", "prompt": "P2?"}, "row 5: context 000010-pair is also the id of"),
    ],
    ids=ascii,
)
def test_probes_that_do_not_compare_are_named(refused, fields, found):
    rows = [probe(c, correct, True) for c in ("P0", "P1") for correct in (True, False)]
    rows.append({**probe("P0", True, False), "candidate": "another", **fields})
    text = refused(pairs=pairs(), probes=rows)
    assert "probes.jsonl " + found in text and "probe (1): one prompt per context" in text


def test_too_few_rows_for_a_batch_or_a_split_are_named(refused):
    text = refused(pairs=pairs(20), prompts=[{"prompt": "What?"}])
    assert "too few rows (3)" in text
    assert "pairs.jsonl: 2 validation pairs, at least 4 are needed" in text
    assert "pairs.jsonl: 2 test pairs, at least 4 are needed" in text
    assert "prompts.jsonl: 1 rows, at least 16 are needed" in text
    assert "--drop-bad" not in text  # dropping rows would not help


def test_a_folder_without_pairs_says_what_is_there(tmp_path):
    with pytest.raises(ValueError, match=r"no such folder"):
        look(tmp_path / "nowhere")
    folder = write(tmp_path / "mine", pair=[])
    with pytest.raises(ValueError, match=r"mine has no pairs.jsonl \(there is: pair.jsonl\)"):
        look(folder)


def test_all_faults_are_listed_at_once_with_a_cap_per_kind(refused):
    rows = pairs()
    for number in range(12):
        rows[number]["chosen"] = ""
    rows[20]["rejected"] = rows[20]["chosen"]
    text = refused(pairs=rows, prompts=[{"prompt": "a"}, {}])
    assert "empty (12)" in text and "  and 2 more" in text and "row 10: chosen is empty" in text
    assert "row 11: chosen is empty" not in text
    for found in ("row 21: chosen equals rejected", "prompts.jsonl row 2: no field 'prompt'"):
        assert found in text
    assert "faults: 15, listed above; nothing was written" in text


# ---- what is accepted, derived and dropped --------------------------------------------------------


def test_byte_order_mark_windows_lines_and_blank_lines_are_accepted(tmp_path):  # case B40
    plain = look(write(tmp_path / "plain", pairs=pairs()))
    lines = [json.dumps(row, ensure_ascii=False) for row in pairs()]
    raw = b"\xef\xbb\xbf" + "\r\n".join(lines).encode()
    other = look(write(tmp_path / "other", pairs=raw))
    assert other.build() == plain.build()


def test_the_four_shapes_give_the_same_rows(tmp_path, capsys):
    rows = [{**row, "id": str(n)} for n, row in enumerate(pairs())]

    def turn(role, text):
        return {"role": role, "content": text}

    def shaped(row: dict, explicit: bool, messages: bool) -> dict:
        prompt, sides = row["prompt"], {key: row[key] for key in ("chosen", "rejected")}
        if messages:
            before = [] if explicit else [turn("user", prompt)]
            sides = {key: [*before, turn("assistant", text)] for key, text in sides.items()}
            prompt = [turn("user", prompt)]
        elif not explicit:
            sides = {key: f"{prompt}\n{text}" for key, text in sides.items()}
        return {
            "id": row["id"],
            "split": row["split"],
            **sides,
            **({"prompt": prompt} if explicit else {}),
        }

    # Common words at the beginning of both answers belong to the prompt where none is named.
    distinct = [{**row, "rejected": f"Perhaps {row['rejected']}"} for row in rows]
    want = look(write(tmp_path / "mine", pairs=distinct)).build()
    for explicit in (True, False):
        for messages in (True, False):
            made = [shaped(row, explicit, messages) for row in distinct]
            capsys.readouterr()
            assert look(write(tmp_path / "mine", pairs=made)).build() == want
            name = (
                f"{'ex' if explicit else 'im'}plicit prompt, {'messages' if messages else 'text'}"
            )
            assert f"pairs.jsonl: 60 rows (60 {name})" in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, want",
    [
        ({"chosen": ASKED + " I do.", "rejected": ASKED + " I"},
         ("Hi there", ("I do.", "I"))),  # a transcript: both answers begin alike
        ({"chosen": "Two and two? forty", "rejected": "Two and two? four"},
         ("Two and two?", ("forty", "four"))),  # never within a word
        ({"prompt": "Hi", "chosen": CHAT, "rejected": CHAT}, ("Hi", ("Hello", "Hello"))),
        ({"prompt": [BRIEF, CHAT[0]], "chosen": "A", "rejected": "B"},
         ("Be brief.\n\nHi", ("A", "B"))),
    ],
    ids=["transcript", "word", "prompt and messages", "system turn"],
)
def test_prompts_and_answers_of_other_rows(row, want):
    made = plain_row("pairs.jsonl", 1, row)
    assert (made.prompt, made.answers) == want
    assert ("system turn" in made.shape) == ("Be brief." in made.prompt)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"messages": CHAT},
    ],
    ids=ascii,
)
def test_shapes_of_a_demonstration(row):
    made = plain_row("demonstrations.jsonl", 1, row)
    assert (made.prompt, made.answers, made.extra) == ("Hi", ("Hello",), {})


def test_absent_files_are_derived_from_the_training_pairs_and_it_is_said(tmp_path, capsys):
    rows = pairs()
    rows.append({**rows[0], "rejected": "It is a number."})  # another pair of the same prompt
    rows.append({**rows[9], "rejected": "It is a number."})  # the same for a test prompt
    made = look(write(tmp_path / "mine", pairs=rows))
    train = [row for row in rows[:60] if row["split"] == "train"]
    have = [(row["prompt"], row["response"]) for row in made.build()["train/demonstrations.jsonl"]]
    assert have == [(row["prompt"], row["chosen"]) for row in train]
    assert [r["prompt"] for r in made.build()["train/prompts.jsonl"]] == [
        r["prompt"] for r in train
    ]
    assert (
        len(made.build()["train/pairs.jsonl"]) == 49
        and len(made.build()["heldout/pairs.jsonl"]) == 7
    )
    contexts = [row["context"] for row in made.build()["heldout/prompts.jsonl"]]
    assert len(contexts) == len(set(contexts)) == 6  # a prompt is one situation, not two
    out = capsys.readouterr().out
    assert "demonstrations: the 48 chosen answers of the training pairs" in out
    assert "rollout prompts: the 48 prompts of the training pairs" in out
    assert "no probes.jsonl" in out and "only 6 distinct test prompts" in out
    assert made.source["derived"] == ["demonstrations.jsonl", "prompts.jsonl"]


def test_given_files_are_taken_as_they_are(tmp_path):
    demonstrations = [{"prompt": f"Say {n}.", "response": f"{n}!"} for n in range(8)]
    prompts = [{"prompt": f"Name {n}.", "number": n} for n in range(16)]
    folder = write(tmp_path / "mine", pairs=pairs(), demonstrations=demonstrations, prompts=prompts)
    made = look(folder)
    assert [row["response"] for row in made.build()["train/demonstrations.jsonl"]] == [
        row["response"] for row in demonstrations
    ]
    assert [row["prompt"] for row in made.build()["train/prompts.jsonl"]] == [
        row["prompt"] for row in prompts
    ]
    labels = made.build()["train/labels.jsonl"]
    assert [row["number"] for row in labels] == [*range(16)]
    assert made.source["derived"] == []


def test_further_columns_reach_the_labels_and_never_a_prompt_file(tmp_path):
    rows = [{**row, "secret": {"answer": n}} for n, row in enumerate(pairs())]
    probes = [
        probe(c, correct, polite, urgent=c == "P1", secret="s")
        for c in ("P0", "P1") for correct in (True, False) for polite in (True, False)
    ]
    made = look(write(tmp_path / "mine", pairs=rows, probes=probes))
    for file, content in made.build().items():
        text = json.dumps(content)
        assert ("secret" in text) == ("labels" in file), file
    test, *_, last = made.build()["heldout/labels.jsonl"]
    assert test == {"id": "000010-pair", "secret": {"answer": 9}}
    # What is the same for all candidates describes the prompt; what differs is a factor.
    assert last == {"id": "000008-probe", "urgent": True, "secret": "s"}
    assert set(made.build()["heldout/probes.jsonl"][0]) == {
        "id", "context", "prompt", "prompt_sha256", "candidate", "correct", "polite"
    }
    assert made.source["factors"] == ["correct", "polite"]
    assert made.fields["heldout/labels.jsonl"].keys() == {"id", "secret", "urgent"}


def test_bad_rows_are_dropped_only_on_request_and_counted_by_kind(tmp_path, capsys):
    rows = pairs()
    bad = [{**rows[0], "chosen": ""}, rows[1], {"prompt": "x"}, {**rows[2], "rejected": "z " * 200}]
    folder = write(tmp_path / "mine", pairs=rows + bad)
    with pytest.raises(ValueError, match=r"leave these rows \(4\) out with --drop-bad"):
        look(folder)
    made = look(folder, drop_bad=True)
    assert made.build() == look(write(tmp_path / "good", pairs=rows)).build()
    want = {"field": 1, "empty": 1, "too long": 1, "duplicate": 1}
    assert made.source["dropped"] == want
    assert "dropped 4 rows: 1 field, 1 empty, 1 too long, 1 duplicate" in capsys.readouterr().out


def test_one_sided_lengths_and_unknown_files_are_notes(tmp_path, capsys):
    rows = [{**row, "chosen": row["chosen"] + " Indeed."} for row in pairs()]
    write(tmp_path / "mine", pairs=rows, demos=[])
    look(tmp_path / "mine")
    out = capsys.readouterr().out
    assert "the longer one in 100% of the training pairs (median 4 words against 4)" in out
    assert "demos.jsonl is not read" in out


# ---- splits -------------------------------------------------------------------------------------


def without_split(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "split"} for row in rows]


def places(corpus: dict[str, list[dict]]) -> dict[str, str]:
    return {
        row["prompt"]: kind
        for kind in ("train", "validation", "heldout")
        for row in corpus[f"{kind}/pairs.jsonl"]
    }


def test_the_split_is_the_formula_of_the_docstring():
    import hashlib

    counts = {"train": 0, "validation": 0, "test": 0}
    for number in range(5000):
        key = f"prompt {number}"
        tenths = 10 * int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) / 16**16
        want = ["train"] * 8 + ["validation", "test"]
        assert split_of(key) == want[int(tenths)]
        counts[split_of(key)] += 1
    assert abs(counts["train"] - 4000) < 120 and abs(counts["test"] - 500) < 90


def test_same_prompt_same_split_whatever_its_spelling(tmp_path):
    rows, draw = [], random.Random(3)
    for number, row in enumerate(without_split(pairs(120))):
        for copy in range(3):
            prompt = row["prompt"]
            prompt = [prompt, prompt.upper() + "\u00a0", prompt.replace("What", "Ｗhat  ")][copy]
            rows.append({**row, "prompt": prompt, "rejected": f"{number} {copy}"})
    draw.shuffle(rows)
    found = places(look(write(tmp_path / "mine", pairs=rows)).build())
    assert len(found) == 360
    for row in pairs(120):
        spelled = [
            p
            for p in found
            if p.replace("Ｗ", "W").lower().split() == row["prompt"].lower().split()
        ]
        assert len(spelled) == 3 and len({found[prompt] for prompt in spelled}) == 1


def test_more_rows_and_another_order_move_no_prompt(tmp_path):
    rows = without_split(pairs(400))
    first = places(look(write(tmp_path / "mine", pairs=rows[:200])).build())
    random.Random(5).shuffle(rows)
    later = places(look(write(tmp_path / "mine", pairs=rows)).build())
    assert set(first.values()) == {"train", "validation", "heldout"} and len(later) == 400
    assert {prompt: later[prompt] for prompt in first} == first


# ---- audit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, edit, found",
    [
        ("train/pairs.jsonl", lambda rows: rows.clear(), "train/pairs.jsonl row 1: missing"),
        ("train/prompts.jsonl", lambda rows: rows[1].update(free=True), "row 2: fields are"),
        ("train/pairs.jsonl", lambda rows: rows[4].update(prompt="x"), "row 5: prompt_sha256"),
        ("train/pairs.jsonl", lambda rows: rows[4].update(rejected=rows[4]["chosen"]), "row 5: chosen"),
        ("train/prompts.jsonl", lambda rows: rows[1].update(rows[0]), "stands there twice"),
        ("heldout/labels.jsonl", lambda rows: rows[0].update(id="x"), "ids are not those of heldout"),
        ("heldout/probes.jsonl", lambda rows: rows[1].update(context="probe9"), "prompt differs within"),
    ],
)
def test_the_audit_finds_what_was_changed(example_rows, file, edit, found):
    rows = json.loads(json.dumps(example_rows))
    assert audit(rows)["rows"]["heldout/probes.jsonl"] == 40
    edit(rows[file])
    with pytest.raises(ValueError, match=found):
        audit(rows)


def test_the_audit_finds_a_prompt_in_two_splits(example_rows):  # case B10
    rows = json.loads(json.dumps(example_rows))
    moved = rows["heldout/pairs.jsonl"][2]
    rows["train/prompts.jsonl"][0].update({key: moved[key] for key in ("prompt", "prompt_sha256")})
    with pytest.raises(
        ValueError, match="heldout/pairs.jsonl row 3: its prompt is in train and in"
    ):
        audit(rows)


@pytest.fixture(scope="module")
def example_rows() -> dict[str, list[dict]]:
    return look(EXAMPLE, EXAMPLE / "rubric.py").build()


# ---- rubric -------------------------------------------------------------------------------------

DEF = "def rubric(p, r, f, row): return "


@pytest.mark.parametrize(
    "source, found",
    [
        ("def score(): pass", "has no function 'rubric'"),
        ("def rubric(:", "does not load (SyntaxError"),
        ("def rubric(prompt): return {}", "fails (TypeError"),
        (DEF + "{'success': row['topic']}",
         "fails (KeyError: 'topic') on the chosen answer of pair 000010-pair"),
        (DEF + "{'good': True}", "returns {'good': True} without `success`"),
        (DEF + "True", "returns True without `success`"),
        (DEF + "{'success': 'yes'}", "`success` is 'yes', not true, false or None"),
        (DEF + "{'success': True, 'x': {1}}", "fails (TypeError"),
        (DEF + "{'success': r.startswith('I')}", "on None, an answer without text"),
        (DEF + "{'success': r is None or 1 / len(r) < 1}", "division by zero) on an empty answer"),
        ("import random\n" + DEF + "{'success': True, 'x': random.random()}",
         "judges the same answer in two ways"),
    ],
    ids=range(11),
)
def test_a_rubric_that_would_fail_later_fails_now(refused, tmp_path, source, found):
    path = tmp_path / "mine.py"
    path.write_text(source)
    text = refused(rubric=path, pairs=pairs())
    assert "rubric (1): rubric(prompt, response" in text and found in text


def test_a_rubric_that_is_not_there(refused, tmp_path):
    assert "No such file" in refused(rubric=tmp_path / "none.py", pairs=pairs())


def test_the_rubric_is_compared_with_the_preferences(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("def rubric(p, r, f, row): return {'success': (r or '').startswith('It may')}")
    made = look(write(tmp_path / "mine", pairs=pairs()), path)
    out = capsys.readouterr().out
    assert "passes 0 of 6 chosen and 6 rejected answers of the test pairs" in out
    assert "are the columns swapped?" in out
    assert made.source["rubric"] == {"pairs": 6, "chosen": 0, "rejected": 6}


def test_without_a_rubric_nothing_is_judged(tmp_path):
    made = look(write(tmp_path / "mine", pairs=pairs()))
    assert load_function(made.rubric, "rubric")("p", None, "eos", {}) == {"success": None}


# ---- the base model of profile tiny -------------------------------------------------------------


def test_the_tiny_base_is_made_from_the_users_training_text(tmp_path):
    rows = pairs()
    rows[0]["chosen"] = "Ünïcödé 🙂 " + rows[0]["chosen"]
    corpus = look(write(tmp_path / "mine", pairs=rows)).build()
    base = {**PROFILES["tiny"]["base"], "pretrain_updates": 2}
    folder = acquire(base, tmp_path / "models", corpus)
    chat = Chat({**COMMON, "model_dir": str(folder)})
    assert chat.decode(chat.response_ids(rows[0]["chosen"])) == rows[0]["chosen"]
    assert len(chat.response_ids("It may be")) <= 4  # words of these texts are tokens of their own
    other = look(write(tmp_path / "mine", pairs=pairs())).build()
    assert acquire(base, tmp_path / "models", other) != folder


# ---- as a program -------------------------------------------------------------------------------


def test_the_example_is_what_its_script_makes(tmp_path):
    shutil.copy(EXAMPLE / "make.py", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "make.py")], check=True, capture_output=True)
    for name in ("pairs.jsonl", "probes.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()


def test_the_examples_rubric_agrees_with_its_preferences_and_probes():
    rubric = load_function(EXAMPLE / "rubric.py", "rubric")
    for row in read_jsonl(EXAMPLE / "pairs.jsonl"):
        assert rubric(row["prompt"], row["chosen"], "eos", row)["success"]
        assert not rubric(row["prompt"], row["chosen"], "length", row)["success"]
        verdict = rubric(row["prompt"], row["rejected"], "eos", row)
        fault = {"decision": "right_decision", "day": "right_day", "length": "short"}
        failed = [key for key, value in verdict.items() if not value and key != "polite"]
        kind = row["id"].rsplit("-", 1)[1]
        assert failed == [fault.get(kind, kind), "success"]
    for row in read_jsonl(EXAMPLE / "probes.jsonl"):
        verdict = rubric(row["prompt"], row["candidate"], "eos", row)
        assert (verdict["success"], verdict["polite"]) == (row["correct"], row["polite"])


def test_check_looks_and_writes_nothing(tmp_path):
    run = tmp_path / "run"
    flags = ("--profile", "tiny", "--data", EXAMPLE, "--check", "--run-dir", run)
    done = run_stage("00_prepare", *flags, "--rubric", EXAMPLE / "rubric.py")
    assert "passes 21 of 21 chosen and 0 rejected" in done.stdout and not run.exists()
    done = run_stage("00_prepare", *flags, "--response-limit", "10", check=False)
    assert done.returncode != 0 and "limit 10" in done.stdout and not run.exists()
    assert last_line(done).startswith("00_prepare: error: ") and "nothing was written" in last_line(
        done
    )


def test_a_rubric_without_data_is_refused(tmp_path):
    done = run_stage("00_prepare", "--run-dir", tmp_path / "run", "--rubric", "x.py", check=False)
    assert done.returncode != 0 and "go with --data" in last_line(done)


def test_a_context_that_the_base_cannot_read_is_refused(tmp_path):
    flags = ("--profile", "tiny", "--run-dir", tmp_path / "run", "--response-limit", "400")
    done = run_stage("00_prepare", *flags, check=False)
    assert done.returncode != 0
    assert "--context-limit 656: the base reads 512 tokens" in last_line(done)


@pytest.fixture(scope="module")
def example_run(tiny, tmp_path_factory) -> tuple[Path, tuple]:
    """The example up to its answers in a few updates, on the tiny run's base; and the flags of 00."""
    run = tmp_path_factory.mktemp("own data") / "run"
    base = ROOT / read_json(tiny / "config.json")["common"]["model_dir"]
    flags = ("--profile", "tiny", "--run-dir", run, "--model-dir", base, "--response-limit", "128")
    run_stage("00_prepare", *flags, "--data", EXAMPLE, "--rubric", EXAMPLE / "rubric.py")
    run_stage("10_sft", "--run-dir", run, "--epochs", "0.3")
    run_stage("20_reward", "--run-dir", run, "--epochs", "0.2")
    run_stage("30_ppo", "--run-dir", run, "--iterations", "2", "--rollouts", "4")
    run_stage("40_generate", "--run-dir", run)
    return run, flags


def test_the_example_runs_through_all_stages(example_run):
    run, _ = example_run
    for name in ("50_evaluate", "60_probe"):
        run_stage(name, "--run-dir", run)
    results = read_json(run / "outputs/50_evaluate/results.json")
    assert results["results"]["sft"]["all_unique_contexts"]["rows"] == 31
    assert results["reward_accuracy"]["all"]["pairs"] == 21
    kinds = {"all", "decision", "day", "length", "greeting"}  # the ends of the ids
    assert set(results["reward_accuracy"]) == kinds
    rows = read_jsonl(run / "outputs/50_evaluate/answers.jsonl")
    assert {"greeting", "right_day", "right_decision", "success"} <= set(rows[0]["verdict"])
    assert (run / "outputs/60_probe/table.md").is_file()
    missing = verify.verify(RunFolder(run))
    assert all("interrupt" in m or "resume" in m or "check" in m for m in missing)


def test_the_manifest_says_where_the_data_came_from(example_run):
    run, _ = example_run
    manifest = read_json(run / "data/manifest.json")
    assert manifest["corpus"] == "example"
    source = manifest["source"]
    for file, rows in (("pairs.jsonl", 240), ("probes.jsonl", 40)):
        assert source["files"][file] == {
            "sha256": sha256_file(EXAMPLE / file),
            "rows": rows,
            "shapes": {"explicit prompt, text": rows},
        }
    assert source["derived"] == ["demonstrations.jsonl", "prompts.jsonl"] and not source["dropped"]
    assert manifest["sha256"]["rubric.py"] == sha256_file(EXAMPLE / "rubric.py")
    assert manifest["audit"] == audit(
        {name: read_jsonl(run / "data" / name) for name in manifest["rows"]}
    )


def test_a_run_folder_goes_on_with_the_same_data_only(example_run, tmp_path):
    run, flags = example_run
    before = {path: path.stat().st_mtime_ns for path in (run / "data").rglob("*.*")}
    rubric = ("--rubric", EXAMPLE / "rubric.py")
    done = run_stage("00_prepare", *flags, "--data", EXAMPLE, *rubric)
    assert "is there and unchanged" in done.stdout
    other = shutil.copytree(EXAMPLE, tmp_path / "example")
    with (other / "pairs.jsonl").open("a") as file:
        row = json.loads((EXAMPLE / "pairs.jsonl").read_text().splitlines()[0])
        file.write(json.dumps({**row, "id": "one more", "prompt": "One more?"}) + "\n")
    for given in (("--data", other, *rubric), ()):
        done = run_stage("00_prepare", *flags, *given, check=False)
        assert done.returncode != 0 and "holds the corpus example" in last_line(done)
        assert "use another --run-dir" in last_line(done)
    assert {path: path.stat().st_mtime_ns for path in (run / "data").rglob("*.*")} == before


def test_run_all_passes_the_flags_on(tmp_path):
    few = write(tmp_path / "a folder with blanks", pairs=pairs(20))
    command = ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(tmp_path / "run")]
    command += ["--data", few.name, "--rubric", "none.py", "--response-limit", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert done.returncode != 0 and "test pairs, at least 4" in done.stdout
    assert "none.py: [Errno 2]" in done.stdout and "tokens, limit 3" in done.stdout

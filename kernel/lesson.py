"""Two smaller corpora beside OfficeHelpPrefs, for the exercises; `CORPORA` names all that are built in.

lesson        general questions; the preferred answer is short and exact, the rejected one padded,
              evasive or vague. Six pairs to train on, two to follow, four new ones to test, and four
              probe contexts {correct, wrong} x {padded, short}.
two-rewards   OfficeHelpPrefs with two more sets of pairs on the same prompts: `pairs-helpful` (the
              right action above a wrong one in the very same words) and `pairs-concise` (the plain
              sentence above the same sentence in courtesy formulas, be the action right or wrong).
"""

from __future__ import annotations

from pathlib import Path

from kernel import corpus
from kernel.corpus import ACTIONS, Corpus, normalise, sha256, with_meaning, wrong_action
from kernel.lesson_rubric import rubric
from kernel.rubric import response

# question, short and exact, padded or evasive, what a right answer holds
TRAIN = (
    ("How many days does a leap year have?", "366 days.",
     "That is a great question, and many people wonder about it; some years are longer than others.",
     "366"),
    ("What does CPU stand for?", "Central processing unit.",
     "Well, it depends on who you ask, but generally speaking it is a part of a computer.",
     "central processing unit"),
    ("How many minutes are 2.5 hours?", "150 minutes.",
     "It is hard to say in a few words, because time can be counted in many ways.", "150"),
    ("Which planet is closest to the Sun?", "Mercury.",
     "As you may know, there are many things to say about planets, and each of them is special.",
     "Mercury"),
    ("At how many degrees Celsius does water boil at sea level?", "At 100 degrees.",
     "Of course that depends on many factors; the water gets very hot before it boils.", "100"),
    ("Which key combination undoes the last change in most editors?", "Ctrl+Z.",
     "Great question! There are usually several ways, so feel free to look at the menus.", "Ctrl+Z"),
)  # fmt: skip
VALIDATION = (
    ("What is the capital of Portugal?", "Lisbon.",
     "Generally speaking, many people like to travel there, and it is hard to say more.", "Lisbon"),
    ("How many sides does a hexagon have?", "Six sides.",
     "Of course it depends on how you look at it; there are many things with sides.", "six"),
)  # fmt: skip
NEW = (
    ("What is the square root of 81?", "9.",
     "That is a great question, and it depends on how you want to count it.", "9"),
    ("Which language do most people speak in Brazil?", "Portuguese.",
     "It is hard to say, because many people there speak in many ways.", "Portuguese"),
    ("How many millimetres are in a centimetre?", "10 millimetres.",
     "As you may know, lengths can be counted in many ways; generally speaking it is small.", "10"),
    ("Which gas do plants take in by day?", "Carbon dioxide.",
     "Well, many factors matter to plants, and of course each of them is special.",
     "carbon dioxide"),
)  # fmt: skip
# question, right, wrong, what a right answer holds
PROBES = (
    ("How many legs does a spider have?", "8 legs.", "6 legs.", "8"),
    ("What colour is a ripe banana?", "Yellow.", "Blue.", "yellow"),
    ("How many seconds are in a minute?", "60 seconds.", "90 seconds.", "60"),
    ("Which month comes after March?", "April.", "June.", "April"),
)
PAD = ("Great question, many people wonder about it. ", " I hope this helps.")

MEANING = {
    **corpus.MEANING,
    "family": "the unit of the split: each question is its own",
    "expected": "what a right answer holds",
    "padded": "whether the candidate carries padding",
}
_PAIR = "id family prompt prompt_sha256 chosen rejected expected"
LESSON_FIELDS = with_meaning(
    MEANING,
    {
        "train/pairs.jsonl": _PAIR,
        "train/demonstrations.jsonl": "id prompt prompt_sha256 response",
        "train/prompts.jsonl": "id prompt prompt_sha256",
        "train/labels.jsonl": "id expected",
        "validation/pairs.jsonl": _PAIR,
        "heldout/pairs.jsonl": _PAIR,
        "heldout/prompts.jsonl": "id population context prompt prompt_sha256",
        "heldout/labels.jsonl": "id expected",
        "heldout/probes.jsonl": "id context prompt prompt_sha256 candidate correct padded expected",
    },
)


# ---- lesson -------------------------------------------------------------------------------------


def _rows(pairs: tuple, name: str) -> list[dict]:
    return [
        {
            "id": f"{name}{n}",
            "family": f"{name}{n}",
            "prompt": question,
            "prompt_sha256": sha256(question),
            "chosen": short,
            "response": short,
            "rejected": padded,
            "expected": expected,
            "population": "test",
            "context": f"{name}{n}",
        }
        for n, (question, short, padded, expected) in enumerate(pairs, start=1)
    ]


def _probes() -> list[dict]:
    return [
        {
            "id": f"PROBE{n}-C{correct:d}-P{padded:d}",
            "context": f"PROBE{n}",
            "prompt": question,
            "prompt_sha256": sha256(question),
            "candidate": answer.join(PAD) if padded else answer,
            "correct": correct,
            "padded": padded,
            "expected": expected,
            "population": "probe",
        }
        for n, (question, right, wrong, expected) in enumerate(PROBES, start=1)
        for correct, answer in ((False, wrong), (True, right))
        for padded in (False, True)
    ]


def build_lesson() -> dict[str, list[dict]]:
    train, validation, new = _rows(TRAIN, "L"), _rows(VALIDATION, "V"), _rows(NEW, "N")
    probes = _probes()
    sources = {
        **dict.fromkeys(LESSON_FIELDS, train),
        "validation/pairs.jsonl": validation,
        "heldout/pairs.jsonl": new,
        "heldout/prompts.jsonl": new + probes,
        "heldout/labels.jsonl": new + probes,
        "heldout/probes.jsonl": probes,
    }
    return {
        file: [{name: row[name] for name in names} for row in sources[file]]
        for file, names in LESSON_FIELDS.items()
    }


def audit_lesson(rows: dict[str, list[dict]]) -> dict:
    """The first fault raises ValueError "<file> row <n>: <what>", n counted from 1."""
    count = dict.fromkeys(("chosen_pass", "rejected_fail", "probes_agree_with_rubric"), 0)
    split_of: dict[str, str] = {}
    wanted = build_lesson()

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{where}: {what}")

    def passes(answer: str) -> bool:
        return rubric(row["prompt"], answer, "eos", row)["success"]

    for file in LESSON_FIELDS:
        where = file
        check(bool(rows.get(file)), "missing: the file has no rows")
        for number, row in enumerate(rows[file], start=1):
            where = f"{file} row {number}"
            check(set(row) == set(LESSON_FIELDS[file]), f"fields are {list(row)}")
            if "prompt" in row:
                check(row["prompt_sha256"] == sha256(row["prompt"]), "wrong prompt_sha256")
                split = "probes" if row["id"].startswith("PROBE") else file.split("/")[0]
                known = split_of.setdefault(normalise(row["prompt"]), split)
                check(known == split, f"the prompt is also in {known}")
            if "chosen" in row:
                check(passes(row["chosen"]), "chosen fails the rubric")
                check(not passes(row["rejected"]), "rejected passes the rubric")
                count["chosen_pass"] += 1
                count["rejected_fail"] += 1
            if "candidate" in row:
                fits = passes(row["candidate"]) == (row["correct"] and not row["padded"])
                check(fits, "correct and padded disagree with the rubric")
                count["probes_agree_with_rubric"] += 1
        where = file
        check(rows[file] == wanted[file], "not as constructed")
    return {"rows": {file: len(rows[file]) for file in LESSON_FIELDS}, **count,
            "distinct_prompts": len(split_of)}  # fmt: skip


# ---- two rewards ---------------------------------------------------------------------------------

PAIR_SETS = {  # file of further pairs -> file of the pairs whose prompts they share
    f"{split}/{kind}.jsonl": f"{split}/pairs.jsonl"
    for split in ("train", "validation", "heldout")
    for kind in ("pairs-helpful", "pairs-concise")
}


def _judgements(row: dict, kind: str) -> dict:
    """A further pair on the prompt of an office pair."""
    index, number = int(row["family"][2:]), int(row["id"][-1])
    right, wrong = ACTIONS.index(row["expected_action"]), wrong_action(index)
    form = (index + number) % 3
    if "helpful" in kind:
        polite = number % 2 == 1
        chosen, rejected = response(right, form, polite), response(wrong, form, polite)
    else:
        action = right if number % 2 else wrong
        chosen, rejected = response(action, form, False), response(action, form, True)
    return {**row, "chosen": chosen, "rejected": rejected}


def build_two() -> dict[str, list[dict]]:
    rows = corpus.build_corpus()
    more = {file: [_judgements(row, file) for row in rows[own]] for file, own in PAIR_SETS.items()}
    return {**rows, **more}


def audit_two(rows: dict[str, list[dict]]) -> dict:
    """OfficeHelpPrefs' own audit, and the further pairs as constructed."""
    found = corpus.audit({file: rows[file] for file in corpus.FIELDS if file in rows})
    for file, wanted in build_two().items():
        have = rows.get(file, [])
        for number, (row, want) in enumerate(zip(have, wanted), start=1):
            if row != want:
                raise ValueError(f"{file} row {number}: not as constructed ({want['id']})")
        if len(have) != len(wanted):
            raise ValueError(f"{file}: {len(have)} rows, wanted {len(wanted)}")
    return {**found, "rows": {file: len(content) for file, content in rows.items()}}


CORPORA = {
    "office": Corpus(corpus.NAME, corpus.FIELDS, corpus.RUBRIC, corpus.build_corpus, corpus.audit),
    "lesson": Corpus(
        "Lesson-v1", LESSON_FIELDS, Path(__file__).with_name("lesson_rubric.py"),
        build_lesson, audit_lesson,
    ),
    "two-rewards": Corpus(
        "OfficeHelpPrefs-v1 with two rewards",
        corpus.FIELDS | {file: corpus.FIELDS[own] for file, own in PAIR_SETS.items()},
        corpus.RUBRIC, build_two, audit_two,
    ),
}  # fmt: skip

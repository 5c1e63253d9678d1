"""Lesson-v1: general questions; the preferred answer is short and exact, the other padded or evasive.

Six pairs to train on, two to follow, four new ones to test, and four probe contexts {correct, wrong} x
{padded, short}. For the exercises."""

from __future__ import annotations

from pathlib import Path

from kernel.data import office
from kernel.data.corpus import normalise, sha256, with_meaning
from kernel.data.lesson_rubric import rubric

NAME = "Lesson-v1"
RUBRIC = Path(__file__).with_name("lesson_rubric.py")

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
)
VALIDATION = (
    ("What is the capital of Portugal?", "Lisbon.",
     "Generally speaking, many people like to travel there, and it is hard to say more.", "Lisbon"),
    ("How many sides does a hexagon have?", "Six sides.",
     "Of course it depends on how you look at it; there are many things with sides.", "six"),
)
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
)
# question, right, wrong, what a right answer holds
PROBES = (
    ("How many legs does a spider have?", "8 legs.", "6 legs.", "8"),
    ("What colour is a ripe banana?", "Yellow.", "Blue.", "yellow"),
    ("How many seconds are in a minute?", "60 seconds.", "90 seconds.", "60"),
    ("Which month comes after March?", "April.", "June.", "April"),
)
PAD = ("Great question, many people wonder about it. ", " I hope this helps.")

MEANING = {
    **office.MEANING,
    "family": "the unit of the split: each question is its own",
    "expected": "what a right answer holds",
    "padded": "whether the candidate carries padding",
}
_PAIR = "id family prompt prompt_sha256 chosen rejected expected"
FIELDS = with_meaning(
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


def build_corpus() -> dict[str, list[dict]]:
    train, validation, new = _rows(TRAIN, "L"), _rows(VALIDATION, "V"), _rows(NEW, "N")
    probes = _probes()
    sources = {
        **dict.fromkeys(FIELDS, train),
        "validation/pairs.jsonl": validation,
        "heldout/pairs.jsonl": new,
        "heldout/prompts.jsonl": new + probes,
        "heldout/labels.jsonl": new + probes,
        "heldout/probes.jsonl": probes,
    }
    return {
        file: [{name: row[name] for name in names} for row in sources[file]]
        for file, names in FIELDS.items()
    }


def audit(rows: dict[str, list[dict]]) -> dict:
    """The first fault raises ValueError "<file> row <n>: <what>", n counted from 1."""
    count = dict.fromkeys(("chosen_pass", "rejected_fail", "probes_agree_with_rubric"), 0)
    split_of: dict[str, str] = {}
    wanted = build_corpus()

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{where}: {what}")

    def passes(answer: str) -> bool:
        return rubric(row["prompt"], answer, "eos", row)["success"]

    for file in FIELDS:
        where = file
        check(bool(rows.get(file)), "missing: the file has no rows")
        for number, row in enumerate(rows[file], start=1):
            where = f"{file} row {number}"
            check(set(row) == set(FIELDS[file]), f"fields are {list(row)}")
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
    return {"rows": {file: len(rows[file]) for file in FIELDS}, **count,
            "distinct_prompts": len(split_of)}

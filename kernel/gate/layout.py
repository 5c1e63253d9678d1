"""A user's rows as a corpus (kernel/data/corpus.py): splits, files, and the audit of what was written.

Splits follow the normalised prompt (NFKC, casefold, whitespace runs collapsed), never the row:

    share = first 8 bytes of sha256(normalised prompt) / 2^64;  train < 0.8 <= validation < 0.9 <= test

so the order of the rows does not matter and a new row never moves another. A `split` column decides
instead if there is one. Probe prompts are held out, as test prompts are."""

from hashlib import sha256

from kernel.data.corpus import normalise
from kernel.data.corpus import sha256 as sha256_text
from kernel.gate.faults import Faults
from kernel.gate.rows import Row

SPLITS = ("train", "validation", "test")
PAIR = {
    "id": "the row's own, or made from its line",
    "family": "hash of the normalised prompt: the unit of the split",
    "prompt": "the user's message",
    "prompt_sha256": "sha256 of the prompt's UTF-8 bytes",
    "chosen": "preferred answer",
    "rejected": "the other answer",
}
PROMPT = {name: PAIR[name] for name in ("id", "prompt", "prompt_sha256")}
# Labels hold all further columns too, and probes their true-or-false columns.
FIELDS = {
    "train/pairs.jsonl": PAIR,
    "train/demonstrations.jsonl": {**PROMPT, "response": "demonstrated answer"},
    "train/prompts.jsonl": PROMPT,
    "train/labels.jsonl": {"id": PAIR["id"]},
    "validation/pairs.jsonl": PAIR,
    "heldout/pairs.jsonl": PAIR,
    "heldout/prompts.jsonl": {
        **PROMPT,
        "population": "test or probe",
        "context": "test: the id of the prompt's first pair; probe: shared by a prompt's candidates",
    },
    "heldout/labels.jsonl": {"id": PAIR["id"]},
    "heldout/probes.jsonl": {
        **PROMPT,
        "context": "shared by a prompt's candidates",
        "candidate": "fixed answer to score",
    },
}
OPEN = ("train/labels.jsonl", "heldout/labels.jsonl", "heldout/probes.jsonl")


def split_of(key: str) -> str:
    """The split of a normalised prompt."""
    share = int.from_bytes(sha256(key.encode("utf-8")).digest()[:8], "big") / 2**64
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"


def assign_splits(pairs: list[Row], faults: Faults) -> str:
    """Set each pair's split; returns by what."""
    by_column = any(row.split is not None for row in pairs)
    for row in pairs:
        if not by_column:
            row.split = split_of(row.key)
        elif row.split not in SPLITS:
            faults.add("split", f"split is {row.split!r}", row.file, row.line)
    return "the column `split`" if by_column else "the hash of the prompt"


def kept(rows: dict[str, list[Row]], faults: Faults) -> dict[str, list[Row]]:
    return {
        file: [row for row in rows[file] if (file, row.line) not in faults.rows] for file in rows
    }


def distinct(rows: list[Row], what) -> list[Row]:
    """The first row for each value of what(row)."""
    first = {}
    for row in rows:
        first.setdefault(what(row), row)
    return list(first.values())


def build(rows: dict[str, list[Row]]) -> dict[str, list[dict]]:
    """File of the corpus -> rows, in the order of the user's files."""
    prompt = lambda row: {"prompt": row.prompt, "prompt_sha256": sha256_text(row.prompt)}  # noqa: E731
    pairs = {split: [row for row in rows["pairs.jsonl"] if row.split == split] for split in SPLITS}
    # Several pairs may share their prompt, or prompt and chosen answer.
    demonstrations = rows["demonstrations.jsonl"] or distinct(
        pairs["train"], lambda row: (row.key, row.answers[0])
    )
    rollouts = rows["prompts.jsonl"] or distinct(pairs["train"], lambda row: row.key)
    probes, factors = rows["probes.jsonl"], varying(rows["probes.jsonl"])
    asked = [(row, "test", row.id) for row in distinct(pairs["test"], lambda row: row.key)]
    asked += [(row, "probe", row.context) for row in probes]

    def pair_rows(split: str) -> list[dict]:
        return [
            {
                "id": row.id, "family": row.family, **prompt(row),
                "chosen": row.answers[0], "rejected": row.answers[1],
            }
            for row in pairs[split]
        ]

    def label(row: Row) -> dict:
        hidden = {"context", *factors} if row.file == "probes.jsonl" else set()
        extra = {name: value for name, value in row.extra.items() if name not in hidden}
        return {"id": row.id, **extra}

    return {
        "train/pairs.jsonl": pair_rows("train"),
        "train/demonstrations.jsonl": [
            {"id": row.id, **prompt(row), "response": row.answers[0]} for row in demonstrations
        ],
        "train/prompts.jsonl": [{"id": row.id, **prompt(row)} for row in rollouts],
        "train/labels.jsonl": [label(row) for row in rollouts],
        "validation/pairs.jsonl": pair_rows("validation"),
        "heldout/pairs.jsonl": pair_rows("test"),
        "heldout/prompts.jsonl": [
            {"id": row.id, "population": population, "context": context, **prompt(row)}
            for row, population, context in asked
        ],
        "heldout/labels.jsonl": [label(row) for row, _, _ in asked],
        "heldout/probes.jsonl": [
            {
                "id": row.id, "context": row.context, **prompt(row),
                "candidate": row.answers[0], **{name: row.extra[name] for name in factors},
            }
            for row in probes
        ],
    }


def boolean_columns(probes: list[Row]) -> list[str]:
    names = [name for row in probes for name, v in row.extra.items() if isinstance(v, bool)]
    return list(dict.fromkeys(names))


def varying(probes: list[Row]) -> list[str]:
    """The factors: true-or-false columns that differ between the candidates of some context. What is
    the same for all of them describes the prompt, and the rubric may know it."""
    values = {}
    for row in probes:
        for name in boolean_columns([row]):
            values.setdefault((name, row.context), set()).add(row.extra[name])
    return list(dict.fromkeys(name for (name, _), seen in values.items() if len(seen) == 2))


def audit(rows: dict[str, list[dict]]) -> dict:
    """The claims of such a corpus, on rows as read from disk; returns the counts.

    The first fault raises ValueError "<file> row <n>: <what>", n counted from 1.
    """

    def check(holds: bool, file: str, number: int, what: str) -> None:
        if not holds:
            raise ValueError(f"{file} row {number}: {what}")

    check(set(rows) == set(FIELDS), "data", 0, f"files are {list(rows)}, wanted {list(FIELDS)}")
    place_of, different = {}, set()
    for file, content in rows.items():
        check(bool(content) or "probes" in file, file, 1, "missing: the file has no rows")
        ids = set()
        for number, row in enumerate(content, 1):
            names = set(row) if file not in OPEN else set(row) & set(FIELDS[file])
            check(names == set(FIELDS[file]), file, number, f"fields are {list(row)}")
            check(row["id"] not in ids, file, number, f"id {row['id']} stands there twice")
            ids.add(row["id"])
            if "prompt" not in row:
                continue
            check(row["prompt_sha256"] == sha256_text(row["prompt"]), file, number, "prompt_sha256")
            probe = "candidate" in row or row.get("population") == "probe"
            place = "probes" if probe else file.split("/")[0]
            known = place_of.setdefault(normalise(row["prompt"]), place)
            check(known == place, file, number, f"its prompt is in {known} and in {place}")
            if place in ("train", "validation") or file == "heldout/pairs.jsonl":
                different.add(row["prompt"])
            if "chosen" in row:
                check(row["chosen"] != row["rejected"], file, number, "chosen equals rejected")
    for kind in ("train", "heldout"):
        asked, labels = (rows[f"{kind}/{name}.jsonl"] for name in ("prompts", "labels"))
        same = [row["id"] for row in asked] == [row["id"] for row in labels]
        check(same, f"{kind}/labels.jsonl", 1, f"ids are not those of {kind}/prompts.jsonl")
    prompt_of = {}
    for number, row in enumerate(rows["heldout/probes.jsonl"], 1):
        same = prompt_of.setdefault(row["context"], row["prompt"]) == row["prompt"]
        check(same, "heldout/probes.jsonl", number, f"prompt differs within {row['context']}")
    places = list(place_of.values())
    return {
        "rows": {file: len(rows[file]) for file in FIELDS},
        "normalised_prompts_each_in_one_split": {p: places.count(p) for p in dict.fromkeys(places)},
        "distinct_pair_demonstration_rollout_prompts": len(different),
        "probe_contexts_with_one_prompt": len(prompt_of),
        "heldout_contexts": len({row["context"] for row in rows["heldout/prompts.jsonl"]}),
    }

"""OfficeHelpPrefs-v1: the synthetic corpus, built from a seed, and the audit that proves it.

240 families `OH000..OH239`, 40 per action, split BY FAMILY into 168 / 36 / 36 (train / validation /
test). Five preference pairs per family; demonstrations and rollout prompts for the training
families; 20 probe contexts apart. Only ordered lists and one `random.Random` reach the output.
"""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kernel.rubric import ACTIONS, PHRASES, evaluate_response, response

NAME = "OfficeHelpPrefs-v1"
RUBRIC = Path(__file__).with_name("rubric.py")
SEED = 49
PER_ACTION = 40
SPLITS = {"train": 28, "validation": 6, "heldout": 6}  # families per action
PROBES = 20

CONTEXTS = {  # the problem, never the step that answers it
    "resume_print_queue": "The printer is ready, but its queue has stopped.",
    "check_cable": "The screen stays dark after the desk was moved.",
    "restore_sound": "There is no sound in a video call.",
    "restore_wifi": "The laptop has lost its Wi-Fi.",
    "save_document": "The document has edits that are not stored yet.",
    "renew_session": "The web portal says the session has expired.",
}
HEADINGS = (
    "Ticket {family}, variant {variant}.",
    "Variant {variant} of case {family}.",
    "Office note {family}, copy {variant}.",
)
REQUEST = "Suggest one relevant next step without claiming a guaranteed fix."
# Source kinds, one per use of a prompt.
PAIR, DEMO, ROLLOUT, PROBE = "preference card", "practice card", "work order", "probe card"

# P0..P4: chosen (form, polite), then rejected (wrong action?, form, polite). Courtesy stands twice
# on each side, so it should earn nothing; the probes measure whether it does.
PAIRS = (
    ((1, False), (True, 2, False)),
    ((0, False), (True, 1, True)),
    ((1, True), (True, 0, False)),
    ((1, False), (False, 2, True)),
    ((0, True), (True, 1, False)),
)

MEANING = {
    "id": "unique within the file",
    "family": "OHnnn, the unit of the split",
    "variant": "number of the prompt within its family; variant % 3 picks the heading",
    "prompt": "the user's message",
    "prompt_sha256": "sha256 of the prompt's UTF-8 bytes",
    "chosen": "preferred answer",
    "rejected": "answer that fails the rubric",
    "response": "demonstrated answer",
    "expected_action": "name of the action that fits the problem",
    "population": "test or probe",
    "candidate": "fixed answer to score",
    "context": "test: the pair's id; probe: PROBEnn, shared by its four rows",
    "correct": "whether the candidate names the expected action",
    "polite": "whether the candidate carries the courtesy formulas",
}


def with_meaning(meaning: dict[str, str], files: dict[str, str]) -> dict[str, dict[str, str]]:
    """file -> field -> meaning, from the names of each file's fields, e.g. "id prompt"."""
    return {file: {n: meaning[n] for n in names.split()} for file, names in files.items()}


_TYPES = {"variant": int, "correct": bool, "polite": bool}  # all other fields are strings
# NOTE: train/prompts and heldout/prompts hold no target: RL and the generator see contexts only. The
# labels of both lie apart, for the stages that look afterwards.
_PAIR = "id family variant prompt prompt_sha256 chosen rejected expected_action"
FIELDS = with_meaning(
    MEANING,
    {
        "train/pairs.jsonl": _PAIR,
        "train/demonstrations.jsonl": "id family variant prompt prompt_sha256 response",
        "train/prompts.jsonl": "id family prompt prompt_sha256",
        "train/labels.jsonl": "id expected_action",
        "validation/pairs.jsonl": _PAIR,
        "heldout/pairs.jsonl": _PAIR,
        "heldout/prompts.jsonl": "id population context prompt prompt_sha256",
        "heldout/labels.jsonl": "id expected_action",
        "heldout/probes.jsonl": "id context prompt prompt_sha256 candidate correct polite "
        "expected_action",
    },
)


class Corpus(NamedTuple):
    """What 00_prepare.py needs of a corpus, built in or somebody's own."""

    name: str
    fields: dict[str, dict[str, str]]  # file -> field -> meaning
    rubric: Path
    build: Callable[[], dict[str, list[dict]]]  # file -> rows
    audit: Callable[
        [dict[str, list[dict]]], dict
    ]  # ValueError naming file and row, or what it found
    source: dict | None = None  # of somebody's own: files, shapes, what was derived and dropped
    longest: dict[str, int] | None = None  # tokens of the longest prompt and response, if looked at


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def normalise(text: str) -> str:
    """What counts as the same prompt across splits: NFKC, casefold, whitespace runs collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def prompt_fields(family: str, variant: int, kind: str, action: int) -> dict:
    heading = HEADINGS[variant % 3].format(family=family, variant=variant)
    prompt = f"{heading} Source: {kind}. {CONTEXTS[ACTIONS[action]]} {REQUEST}"
    return {"prompt": prompt, "prompt_sha256": sha256(prompt)}


def split_families(seed: int = SEED) -> dict[str, list[int]]:
    """Family indices per split, ascending: one generator shuffles each action's 40 in turn."""
    generator = random.Random(seed)
    split: dict[str, list[int]] = {name: [] for name in SPLITS}
    for action in range(len(ACTIONS)):
        indices = list(range(action * PER_ACTION, (action + 1) * PER_ACTION))
        generator.shuffle(indices)
        for name, size in SPLITS.items():
            split[name] += indices[:size]
            indices = indices[size:]
    return {name: sorted(indices) for name, indices in split.items()}


def wrong_action(index: int) -> int:
    """The action in the rejected answers of family `index`: 1..5 steps away, never its own."""
    return (index // PER_ACTION + 1 + index % 5) % 6


def pair_variant(index: int, number: int) -> int:
    """The prompt variant of pair P<number>: 0..4, shifted from family to family.

    NOTE: if P1 always had variant 1, "variant 1" in the prompt would tell which style wins, and a
    judge could order every pair without reading which action is right.
    """
    return (number + index // 5) % 5


def _pairs(index: int) -> list[dict]:
    action, family = index // PER_ACTION, f"OH{index:03d}"
    return [
        {
            "id": f"{family}-P{number}",
            "family": family,
            "variant": pair_variant(index, number),
            **prompt_fields(family, pair_variant(index, number), PAIR, action),
            "chosen": response(action, *chosen),
            "rejected": response(wrong_action(index) if wrong else action, *rejected),
            "expected_action": ACTIONS[action],
        }
        for number, (chosen, (wrong, *rejected)) in enumerate(PAIRS)
    ]


def _demonstration(index: int) -> dict:
    action, family = index // PER_ACTION, f"OH{index:03d}"
    return {
        "id": f"{family}-SFT",
        "family": family,
        "variant": 7,
        **prompt_fields(family, 7, DEMO, action),
        "response": response(action, 1, index % 2 == 0),
    }


def _rollouts(index: int) -> list[dict]:
    action, family = index // PER_ACTION, f"OH{index:03d}"
    return [
        {
            "id": f"{family}-RL{k}",
            "family": family,
            **prompt_fields(family, 11 + k, ROLLOUT, action),
            "expected_action": ACTIONS[action],
        }
        for k in range(4)
    ]


def _probes(index: int) -> list[dict]:
    action, context = index % 6, f"PROBE{index:02d}"
    return [
        {
            "id": f"{context}-C{correct:d}-P{polite:d}",
            "context": context,
            **prompt_fields(context, index, PROBE, action),
            "candidate": response(action if correct else (action + 1) % 6, 1, polite),
            "correct": correct,
            "polite": polite,
            "expected_action": ACTIONS[action],
        }
        for correct in (False, True)
        for polite in (False, True)
    ]


def of_fields(rows: list[dict], *files: str) -> dict[str, list[dict]]:
    """The same rows in several files, each with its own fields."""
    return {file: [{name: row[name] for name in FIELDS[file]} for row in rows] for file in files}


def build_corpus(seed: int = SEED) -> dict[str, list[dict]]:
    """Relative file name -> rows, in the order in which they are written."""
    split = split_families(seed)
    pairs = {name: [row for index in split[name] for row in _pairs(index)] for name in split}
    probes = [row for index in range(PROBES) for row in _probes(index)]
    rollouts = [row for index in split["train"] for row in _rollouts(index)]
    # Prompts and labels go to two files, so that RL and the generator can be kept away from the labels.
    asked = [{**row, "population": "test", "context": row["id"]} for row in pairs["heldout"]]
    asked += [{**row, "population": "probe"} for row in probes]
    return {
        "train/pairs.jsonl": pairs["train"],
        "train/demonstrations.jsonl": [_demonstration(index) for index in split["train"]],
        **of_fields(rollouts, "train/prompts.jsonl", "train/labels.jsonl"),
        "validation/pairs.jsonl": pairs["validation"],
        "heldout/pairs.jsonl": pairs["heldout"],
        **of_fields(asked, "heldout/prompts.jsonl", "heldout/labels.jsonl"),
        "heldout/probes.jsonl": probes,
    }


def audit(rows: dict[str, list[dict]], seed: int = SEED) -> dict:
    """Prove the corpus' claims on rows as read from disk; return the measured numbers.

    The first fault raises ValueError "<file> row <n>: <what>", n counted from 1. Meaning comes
    first (fields, hashes, leaks, rubric), then each row against its rule of construction.
    """

    def check(holds: bool, file: str, number: int, what: str) -> None:
        if not holds:
            raise ValueError(f"{file} row {number}: {what}")

    def each(*files: str):
        return ((file, number, row) for file in files for number, row in enumerate(rows[file], 1))

    count = dict.fromkeys(
        (
            "prompt_hashes_right",
            "chosen_pass",
            "rejected_fail",
            "demonstrations_pass",
            "probes_agree_with_rubric",
        ),
        0,
    )
    for file in [*FIELDS, *rows]:
        check(file in FIELDS, file, 1, "unknown file")
        check(bool(rows.get(file)), file, 1, "missing: the file has no rows")
    for file, number, row in each(*FIELDS):
        check(isinstance(row, dict), file, number, "not a JSON object")
        # An extra field is a fault too: a target in a prompt file is what must not happen.
        check(
            set(row) == set(FIELDS[file]),
            file,
            number,
            f"fields are {list(row)}, wanted {list(FIELDS[file])}",
        )
        for name, value in row.items():
            check(type(value) is _TYPES.get(name, str), file, number, f"{name}: wrong type")
        check(row.get("expected_action", ACTIONS[0]) in ACTIONS, file, number, "unknown action")
        if "prompt" in row:
            check(
                row["prompt_sha256"] == sha256(row["prompt"]), file, number, "wrong prompt_sha256"
            )
            prompt = normalise(row["prompt"])
            check(
                not any(normalise(phrase) in prompt for phrase in PHRASES.values()),
                file,
                number,
                "the prompt gives an answer away",
            )
            count["prompt_hashes_right"] += 1

    # Leaks: a family or prompt belongs to one split, near-copies included; probes are a fourth.
    split_of: dict[str, str] = {}
    prompt_at: dict[str, tuple] = {}
    for file, number, row in each(*FIELDS):
        family = row["id"].split("-")[0]
        check(row.get("family", family) == family, file, number, "family does not fit the id")
        split = "probes" if family.startswith("PROBE") else file.split("/")[0]
        known = split_of.setdefault(normalise(family), split)
        check(known == split, file, number, f"family {family} is in {known} and in {split}")
        if "prompt" in row:
            at = prompt_at.setdefault(normalise(row["prompt"]), (split, file, number))
            check(
                at[0] == split,
                file,
                number,
                f"prompt is also in {at[1]} row {at[2]} (after normalisation)",
            )

    pair_files = ("train/pairs.jsonl", "validation/pairs.jsonl", "heldout/pairs.jsonl")
    demo_file, probe_file = "train/demonstrations.jsonl", "heldout/probes.jsonl"
    distinct: dict[str, tuple] = {}
    for file, number, row in each(*pair_files, demo_file, "train/prompts.jsonl"):
        first = distinct.setdefault(row["prompt"], (file, number))
        check(first == (file, number), file, number, f"prompt repeats {first[0]} row {first[1]}")

    action_of: dict[str, str] = {}
    for file, number, row in each(*pair_files):
        action = action_of.setdefault(row["family"], row["expected_action"])
        check(row["expected_action"] == action, file, number, "action differs within the family")
        check(
            normalise(row["chosen"]) != normalise(row["rejected"]),
            file,
            number,
            "chosen equals rejected",
        )
        verdict = evaluate_response(row["chosen"], "eos", action)
        check(verdict["rubric_success"], file, number, f"chosen fails: {verdict['reason']}")
        count["chosen_pass"] += 1
        verdict = evaluate_response(row["rejected"], "eos", action)
        check(not verdict["rubric_success"], file, number, "rejected passes the rubric")
        count["rejected_fail"] += 1
    for file, number, row in each(demo_file):
        verdict = evaluate_response(row["response"], "eos", action_of.get(row["family"]))
        check(verdict["rubric_success"], file, number, f"response fails: {verdict['reason']}")
        count["demonstrations_pass"] += 1

    prompt_of: dict[str, str] = {}
    for file, number, row in each(probe_file):
        check(
            prompt_of.setdefault(row["context"], row["prompt"]) == row["prompt"],
            file,
            number,
            f"prompt differs within {row['context']}",
        )
        verdict = evaluate_response(row["candidate"], "eos", row["expected_action"])
        check(
            verdict["rubric_success"] == row["correct"],
            file,
            number,
            f"correct disagrees with the rubric: {verdict['reason']}",
        )
        check(verdict["polite"] == row["polite"], file, number, "polite disagrees with the rubric")
        count["probes_agree_with_rubric"] += 1

    # Construction: split rule, wording, order, counts. Only the differing fields are named.
    for file, wanted in build_corpus(seed).items():
        for number, (row, want) in enumerate(zip(rows[file], wanted), 1):
            wrong = [name for name in want if row[name] != want[name]]
            check(not wrong, file, number, f"not as constructed ({want['id']}): {', '.join(wrong)}")
        check(
            len(rows[file]) == len(wanted),
            file,
            min(len(rows[file]), len(wanted)) + 1,
            f"the file has {len(rows[file])} rows, wanted {len(wanted)}",
        )

    splits = list(split_of.values())
    return {
        "rows": {file: len(rows[file]) for file in FIELDS},
        **count,
        "families_each_in_one_split": {name: splits.count(name) for name in SPLITS},
        "normalised_prompts_each_in_one_split": len(prompt_at),
        "distinct_pair_demonstration_rollout_prompts": len(distinct),
        "probe_contexts_with_one_prompt": len(prompt_of),
        "heldout_contexts": len({row["context"] for row in rows["heldout/prompts.jsonl"]}),
    }

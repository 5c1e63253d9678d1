"""OfficeHelpPrefs-v1: the synthetic corpus, built from a seed (office_audit.py proves it).

240 families `OH000..OH239`, 40 per action, split BY FAMILY into 168 / 36 / 36 (train / validation /
test). Five preference pairs per family; demonstrations and rollout prompts for the training
families; 20 probe contexts apart. Only ordered lists and one `random.Random` reach the output."""

from __future__ import annotations

import random
from pathlib import Path

from kernel.data.corpus import sha256, with_meaning
from kernel.data.office_rubric import ACTIONS, response

NAME = "OfficeHelpPrefs-v1"
RUBRIC = Path(__file__).with_name("office_rubric.py")
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


TYPES = {"variant": int, "correct": bool, "polite": bool}  # all other fields are strings
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

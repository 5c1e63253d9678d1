"""OfficeHelpPrefs with two more sets of pairs on the same prompts, for the exercise with two rewards.

pairs-helpful   the right action above a wrong one in the very same words
pairs-concise   the plain sentence above the same sentence in courtesy formulas, right action or wrong"""

from kernel.data import office, office_audit
from kernel.data.office import wrong_action
from kernel.data.office_rubric import ACTIONS, response

NAME = "OfficeHelpPrefs-v1 with two rewards"
PAIR_SETS = {  # file of further pairs -> file of the pairs whose prompts they share
    f"{split}/{kind}.jsonl": f"{split}/pairs.jsonl"
    for split in ("train", "validation", "heldout")
    for kind in ("pairs-helpful", "pairs-concise")
}
FIELDS = office.FIELDS | {file: office.FIELDS[own] for file, own in PAIR_SETS.items()}


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


def build_corpus() -> dict[str, list[dict]]:
    rows = office.build_corpus()
    more = {file: [_judgements(row, file) for row in rows[own]] for file, own in PAIR_SETS.items()}
    return {**rows, **more}


def audit(rows: dict[str, list[dict]]) -> dict:
    """OfficeHelpPrefs' own audit, and the further pairs as constructed."""
    found = office_audit.audit({file: rows[file] for file in office.FIELDS if file in rows})
    for file, wanted in build_corpus().items():
        have = rows.get(file, [])
        for number, (row, want) in enumerate(zip(have, wanted), start=1):
            if row != want:
                raise ValueError(f"{file} row {number}: not as constructed ({want['id']})")
        if len(have) != len(wanted):
            raise ValueError(f"{file}: {len(have)} rows, wanted {len(wanted)}")
    return {**found, "rows": {file: len(content) for file, content in rows.items()}}

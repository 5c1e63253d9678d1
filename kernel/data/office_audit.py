"""The audit of OfficeHelpPrefs-v1: every claim about the corpus, proven on rows as read from disk."""

from kernel.data.corpus import normalise, sha256
from kernel.data.office import FIELDS, SEED, SPLITS, TYPES, build_corpus
from kernel.data.office_rubric import ACTIONS, PHRASES, evaluate_response


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
        ("prompt_hashes_right", "chosen_pass", "rejected_fail", "demonstrations_pass",
         "probes_agree_with_rubric"), 0,
    )
    for file in [*FIELDS, *rows]:
        check(file in FIELDS, file, 1, "unknown file")
        check(bool(rows.get(file)), file, 1, "missing: the file has no rows")
    for file, number, row in each(*FIELDS):
        check(isinstance(row, dict), file, number, "not a JSON object")
        # An extra field is a fault too: a target in a prompt file is what must not happen.
        fields = f"fields are {list(row)}, wanted {list(FIELDS[file])}"
        check(set(row) == set(FIELDS[file]), file, number, fields)
        for name, value in row.items():
            check(type(value) is TYPES.get(name, str), file, number, f"{name}: wrong type")
        check(row.get("expected_action", ACTIONS[0]) in ACTIONS, file, number, "unknown action")
        if "prompt" in row:
            right = row["prompt_sha256"] == sha256(row["prompt"])
            check(right, file, number, "wrong prompt_sha256")
            prompt = normalise(row["prompt"])
            told = any(normalise(phrase) in prompt for phrase in PHRASES.values())
            check(not told, file, number, "the prompt gives an answer away")
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
            also = f"prompt is also in {at[1]} row {at[2]} (after normalisation)"
            check(at[0] == split, file, number, also)

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
        same = normalise(row["chosen"]) == normalise(row["rejected"])
        check(not same, file, number, "chosen equals rejected")
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
        same = prompt_of.setdefault(row["context"], row["prompt"]) == row["prompt"]
        check(same, file, number, f"prompt differs within {row['context']}")
        verdict = evaluate_response(row["candidate"], "eos", row["expected_action"])
        fits = verdict["rubric_success"] == row["correct"]
        check(fits, file, number, f"correct disagrees with the rubric: {verdict['reason']}")
        check(verdict["polite"] == row["polite"], file, number, "polite disagrees with the rubric")
        count["probes_agree_with_rubric"] += 1

    # Construction: split rule, wording, order, counts. Only the differing fields are named.
    for file, wanted in build_corpus(seed).items():
        for number, (row, want) in enumerate(zip(rows[file], wanted), 1):
            wrong = [name for name in want if row[name] != want[name]]
            check(not wrong, file, number, f"not as constructed ({want['id']}): {', '.join(wrong)}")
        have, least = len(rows[file]), min(len(rows[file]), len(wanted))
        check(have == len(wanted), file, least + 1, f"the file has {have} rows, wanted {len(wanted)}")

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

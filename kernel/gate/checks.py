"""What a user's rows must hold among themselves, under the tokenizer, and before the rubric.

Each function adds what it finds to `faults`; nothing is changed or dropped here.
"""

import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from kernel.data.chat import Chat
from kernel.data.corpus import normalise
from kernel.data.draws import spread
from kernel.data.files import dumps
from kernel.data.own_code import load_function
from kernel.gate.faults import Faults
from kernel.gate.layout import SPLITS, boolean_columns
from kernel.gate.rows import FILES, Row

CHUNK = 1000  # rows tokenised together
MARK = "\u241e"  # a text that no template contains
TALLIED = "recognised relevant unsupported_certainty polite refusal".split()  # if a rubric has them

# ---- between rows -------------------------------------------------------------------------------


def relations(rows: dict[str, list[Row]], faults: Faults) -> None:
    """Duplicates, contradictions, prompts in two places, ids, and the cells of the probes."""
    for files in (("pairs.jsonl", "probes.jsonl"), ("demonstrations.jsonl",), ("prompts.jsonl",)):
        first = {}  # generations are known by the ids of pairs and probes
        for row in (row for file in files for row in rows[file]):
            other = first.setdefault(row.id, row)
            if other is not row:
                text = f"id {row.id!r} is also that of {other.file} row {other.line}"
                faults.add("id", text, row.file, row.line)
    for file in FILES:
        groups = {}
        for row in rows[file]:  # a set: chosen and rejected may have changed places
            groups.setdefault((row.key, frozenset(row.answers)), []).append(row)
        for group in groups.values():
            first = {}
            for row in group:
                first.setdefault(row.answers, row)
            for row in group:
                if len(first) == 2:
                    other = first[row.answers[::-1]]
                    text = f"the opposite of row {other.line}, for the same prompt"
                    faults.add("contradiction", text, file, row.line)
                elif first[row.answers] is not row:
                    text = f"repeats row {first[row.answers].line}"
                    faults.add("duplicate", text, file, row.line)

    # Whoever comes first keeps the prompt: what is held out before what is trained on.
    pairs = {split: [row for row in rows["pairs.jsonl"] if row.split == split] for split in SPLITS}
    places = {
        "the test pairs": pairs["test"],
        "the validation pairs": pairs["validation"],
        "the probes": rows["probes.jsonl"],
        "training": pairs["train"] + rows["demonstrations.jsonl"] + rows["prompts.jsonl"],
    }
    owner = {}
    for place, members in places.items():
        for row in members:
            held, other = owner.setdefault(row.key, (place, row))
            if held != place:
                text = f"its prompt is also in {held} ({other.file} row {other.line})"
                faults.add("shared prompt", text, row.file, row.line)
    probe_faults(rows["probes.jsonl"], {row.id for row in pairs["test"]}, faults)


def probe_faults(probes: list[Row], test_ids: set[str], faults: Faults) -> None:
    booleans = boolean_columns(probes)
    prompt_of, context_of, cells = {}, {}, {}
    for row in probes:
        given = row.extra.get("context")
        if not isinstance(given, str | None):
            faults.add("probe", f"context is {given!r}, wanted text", row.file, row.line)
            continue
        context = row.context
        first = prompt_of.setdefault(context, row)
        cell = (context, *(str(row.extra.get(name)) for name in booleans))
        twin = cells.setdefault(cell, row)
        other = context_of.setdefault(row.key, context)
        found = []
        if first.prompt != row.prompt:
            found.append(f"its prompt is not that of row {first.line} in context {context}")
        if other != context:
            found.append(f"contexts {other} and {context} have one prompt")
        if context in test_ids:
            found.append(f"context {context} is also the id of a test pair")
        for name in booleans:
            if not isinstance(row.extra.get(name), bool):
                found.append(f"{name} is {row.extra.get(name)!r}, but true or false in other rows")
        if booleans and twin is not row:
            found.append(f"the same factors as row {twin.line} in context {context}")
        for text in found:
            faults.add("probe", text, row.file, row.line)


# ---- tokens -------------------------------------------------------------------------------------


def token_counts(chat: Chat, prompts: list[str]) -> dict[str, int]:
    """prompt -> tokens, as chat.prompt_ids counts them.

    The template is written once, around a mark, and whole batches of prompts are put in its place;
    unless a sample then gives prompt_ids' own ids, each prompt is counted by itself.
    """
    head, _, tail = chat.tokenizer.decode(chat.prompt_ids(MARK)).partition(MARK)
    sample = [f" {MARK}\n", *spread(prompts, 50)]  # some templates strip blanks
    framed = encode(chat, [head + prompt + tail for prompt in sample])
    if framed != [chat.prompt_ids(prompt) for prompt in sample]:
        return {prompt: len(chat.prompt_ids(prompt)) for prompt in prompts}
    counts = {}
    for start in range(0, len(prompts), CHUNK):
        part = prompts[start : start + CHUNK]
        ids = encode(chat, [head + prompt + tail for prompt in part])
        counts |= {prompt: len(one) for prompt, one in zip(part, ids)}
    return counts


def encode(chat: Chat, texts: list[str]) -> list[list[int]]:
    """Ids of each text, on all cores: the ids do not depend on it.

    NOTE: straight to the backend, a third faster; prompt_ids before has switched its padding off.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        backend = chat.tokenizer.backend_tokenizer
        return [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)]
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before


def token_faults(
    rows: dict[str, list[Row]], chat: Chat, common: dict, faults: Faults
) -> dict[str, int]:
    """Control tokens, answers that become equal, rows over the limits; returns the longest prompt
    and answer that fit."""
    control = re.compile("|".join(map(re.escape, chat.tokenizer.get_added_vocab())))
    clean = {file: [] for file in rows}
    for row in (row for members in rows.values() for row in members):
        found = [m.group() for text in (row.prompt, *row.answers) if (m := control.search(text))]
        for token in dict.fromkeys(found):
            faults.add("control token", f"the text contains {token}", row.file, row.line)
        if not found:
            clean[row.file].append(row)
    prompts = list(dict.fromkeys(row.prompt for file in clean for row in clean[file]))
    count = token_counts(chat, prompts)
    longest = {"prompt": 0, "response": 0}
    for file, names in FILES.items():
        for start in range(0, len(clean[file]), CHUNK):
            part = clean[file][start : start + CHUNK]
            ids = iter(encode(chat, [text for row in part for text in row.answers]))
            for row in part:
                answers = [next(ids) for _ in names]
                lengths = [len(answer) + 1 for answer in answers]  # EOS
                over = []
                if count[row.prompt] > common["prompt_limit"]:
                    over.append(
                        f"prompt has {count[row.prompt]} tokens, limit {common['prompt_limit']}"
                    )
                for name, length in zip(names, lengths):
                    if length > common["response_limit"]:
                        over.append(f"{name} has {length} tokens, limit {common['response_limit']}")
                    elif count[row.prompt] + length > common["context_limit"]:
                        over.append(
                            f"prompt and {name} have {count[row.prompt] + length} tokens, "
                            f"limit {common['context_limit']}"
                        )
                for text in over:
                    faults.add("too long", text, file, row.line)
                if len(answers) == 2 and answers[0] == answers[1]:
                    faults.add(
                        "equal answers", "chosen and rejected are the same tokens", file, row.line
                    )
                if not over:
                    longest["prompt"] = max(longest["prompt"], count[row.prompt])
                    longest["response"] = max([longest["response"], *lengths])
    return longest


# ---- the rubric ---------------------------------------------------------------------------------


def rubric_faults(path: Path, rows: dict[str, list[dict]], faults: Faults) -> dict[str, int]:
    """Try the rubric as the stages will call it, now and not after hours of training; returns how
    many chosen and rejected answers of (up to 200) test pairs it passes.

    rows: the corpus, as built. Stages also meet empty answers, answers cut off at the limit, and
    None for ids that have no text.
    """
    passed = {"pairs": 0, "chosen": 0, "rejected": 0}
    try:  # a copy alone in a folder, as the run will have it
        with TemporaryDirectory() as work:
            rubric = load_function(Path(shutil.copy(path, work)), "rubric")
    except (ValueError, OSError) as error:
        faults.add("rubric", str(error).replace(work, str(path.parent)), path.name)
        return passed
    labels = {row["id"]: row for row in rows["heldout/labels.jsonl"]}
    label_of = {}
    for row in rows["heldout/prompts.jsonl"]:
        label_of.setdefault(normalise(row["prompt"]), labels[row["id"]])

    def success(what: str, prompt: str, response: str | None, reason: str, label: dict):
        try:
            verdict = rubric(prompt, response, reason, dict(label))
            dumps(verdict)
        except Exception as error:
            raise ValueError(f"fails ({type(error).__name__}: {error}) on {what}") from error
        if not isinstance(verdict, dict) or "success" not in verdict:
            raise ValueError(f"returns {verdict!r} without `success` on {what}")
        for key in ("success", *TALLIED):
            if verdict.get(key) not in (True, False, None):
                raise ValueError(f"`{key}` is {verdict[key]!r}, not true, false or None")
        if rubric(prompt, response, reason, dict(label)) != verdict:
            raise ValueError(f"judges the same answer in two ways: {what}")
        return verdict["success"]

    try:
        for pair in spread(rows["heldout/pairs.jsonl"], 200):
            label = label_of[normalise(pair["prompt"])]
            passed["pairs"] += 1
            for side in ("chosen", "rejected"):
                what = f"the {side} answer of pair {pair['id']}"
                passed[side] += bool(success(what, pair["prompt"], pair[side], "eos", label))
            if passed["pairs"] == 1:
                success(f"{what}, cut off", pair["prompt"], pair["rejected"], "length", label)
                success("None, an answer without text", pair["prompt"], None, "length", label)
        for kind in ("heldout", "train"):
            asked = zip(rows[f"{kind}/prompts.jsonl"], rows[f"{kind}/labels.jsonl"])
            for row, label in spread(list(asked), 200):
                success(f"an empty answer to prompt {row['id']}", row["prompt"], "", "eos", label)
    except ValueError as error:
        faults.add("rubric", str(error), path.name)
    return passed

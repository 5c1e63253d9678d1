"""A user's JSONL files as plain rows, whatever shape they have; each fault with its file and row.

A preference row may have an explicit prompt (a field `prompt`) or an implicit one (what `chosen` and
`rejected` have in common before they part), and be plain text or messages ({"role", "content"}):

    explicit, text       {"prompt": "...", "chosen": "...", "rejected": "..."}
    implicit, text       {"chosen": "<prompt><answer>", "rejected": "<prompt><other answer>"}
    explicit, messages   {"prompt": [system?, user], "chosen": [assistant], "rejected": [assistant]}
    implicit, messages   {"chosen": [system?, user, assistant], "rejected": [system?, user, assistant]}

One user turn is what every stage is made for. A system turn before it becomes the first paragraph of
the prompt; longer conversations are refused.
"""

import codecs
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel.data.corpus import normalise, sha256
from kernel.data.files import dumps
from kernel.gate.faults import Fault, Faults
from kernel.gate.shapes import answer, content, conversation, pair, user_turn

# The files of a data folder and the answers in each row.
FILES = {
    "pairs.jsonl": ("chosen", "rejected"),
    "demonstrations.jsonl": ("response",),
    "prompts.jsonl": (),
    "probes.jsonl": ("candidate",),
}
SHORTEST_REPEAT = 20  # characters; an answer may well begin with a shorter prompt ("Hello")


@dataclass(slots=True)
class Row:
    file: str
    line: int  # in the file, counted from 1, blank lines too
    id: str
    prompt: str
    answers: tuple[str, ...]  # in the order of FILES
    extra: dict  # all other columns
    shape: str
    key: str  # the normalised prompt: what counts as the same prompt
    split: str | None = None

    @property
    def family(self) -> str:
        return sha256(self.key)[:12]

    @property
    def context(self) -> str:
        """Of a probe: its own, or made from the prompt."""
        return self.extra.get("context") or f"probe-{self.family}"


def read(folder: Path, faults: Faults) -> dict[str, list[Row]]:
    """The rows of each file that are whole. Raises ValueError if there is no pairs.jsonl."""
    if not (folder / "pairs.jsonl").is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*"))[:8]) or "nothing"
        raise ValueError(f"{folder} has no pairs.jsonl (there is: {found})")
    rows = {file: [] for file in FILES}
    for file in FILES:
        path = folder / file
        if not path.is_file():
            continue
        for line, raw in lines(path):
            try:
                row = plain_row(file, line, parse(raw))
            except Fault as fault:
                faults.add(fault.kind, str(fault), file, line)
                continue
            for kind, text in text_faults(row):
                faults.add(kind, text, file, line)
            rows[file].append(row)
    return rows


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number counted from 1, bytes) of each line that is not blank."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if raw.strip():
            yield number, raw


def read_pairs(path: Path) -> list[dict]:
    """prompt, chosen, rejected of one file of pairs, in any shape. ValueError with the first bad row."""
    pairs = []
    for number, raw in lines(path):
        try:
            row = plain_row("pairs.jsonl", number, parse(raw))
            for kind, text in text_faults(row):
                raise Fault(kind, text)
        except Fault as fault:
            raise ValueError(f"{path} row {number}: {fault}") from None
        pairs.append({"prompt": row.prompt, "chosen": row.answers[0], "rejected": row.answers[1]})
    if not pairs:
        raise ValueError(f"{path}: no rows")
    return pairs


def finite(number: str) -> float:
    """What json calls for NaN, Infinity and every number with a point or an exponent."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


DECODER = json.JSONDecoder(parse_constant=finite, parse_float=finite)


def parse(raw: bytes) -> dict:
    """One line as a JSON object. Raises Fault."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise Fault("encoding", f"byte {at + 1} (0x{raw[at]:02x}) is not UTF-8") from None
    try:
        row = DECODER.decode(text)
    except RecursionError:
        raise Fault("broken JSON", "nested too deeply") from None
    except ValueError as error:
        raise Fault("broken JSON", str(error)) from None
    if not isinstance(row, dict):
        raise Fault("broken JSON", f"a JSON {type(row).__name__}, wanted an object")
    if "\\u" in text:
        try:
            dumps(row).encode("utf-8")
        except UnicodeEncodeError:
            raise Fault("encoding", "half of a surrogate pair (\\ud800 to \\udfff)") from None
    return row


# ---- one row ------------------------------------------------------------------------------------


def plain_row(file: str, line: int, row: dict) -> Row:
    """Raises Fault."""
    known = {"id", "prompt", *FILES[file]}
    shape = "explicit prompt, " + ("messages" if isinstance(row.get("prompt"), list) else "text")
    if file == "pairs.jsonl":
        known |= {"split"}
        prompt, answers, shape = pair(row)
    elif file == "demonstrations.jsonl" and "messages" in row:
        known |= {"messages"}
        turns = conversation(row["messages"], "messages")
        prompt, answers, shape = user_turn(turns[:-1]), (answer(turns[-1:]),), "messages"
    else:
        prompt = user_turn(content(row, "prompt"), "prompt")
        names = FILES[file]
        if file == "demonstrations.jsonl" and "response" not in row and "completion" in row:
            names, known = ("completion",), known | {"completion"}
        answers = tuple(answer(content(row, name), name) for name in names)
    turns = [row.get(name) for name in ("prompt", "chosen", "messages") if name in known]
    if any(isinstance(value, list) and value[0]["role"] == "system" for value in turns):
        shape += ", system turn as first paragraph of the prompt"
    split = row.get("split")
    if file in ("demonstrations.jsonl", "prompts.jsonl") and split not in (None, "train"):
        raise Fault("field", f"split is {split!r}, but this file is for training rows")
    # A made id leads back to its line; what follows the last hyphen is the same for the whole file.
    number = row.get("id")
    if number is None:
        number = f"{line:06d}-{file.removesuffix('s.jsonl')}"
    if not isinstance(number, (str, int)) or isinstance(number, bool) or number == "":
        raise Fault("field", f"id is {number!r}, wanted text or a whole number")
    extra = {name: value for name, value in row.items() if name not in known}
    return Row(file, line, str(number), prompt, answers, extra, shape, normalise(prompt), split)


def text_faults(row: Row) -> list[tuple[str, str]]:
    """(kind, text) of what can be seen in one row without a tokenizer."""
    named = dict(zip(FILES[row.file], row.answers))
    found = [
        ("empty", f"{name} is empty")
        for name, text in {"prompt": row.prompt, **named}.items()
        if not text.strip()
    ]
    if len(row.answers) == 2 and row.answers[0].strip() == row.answers[1].strip():
        found.append(("equal answers", "chosen equals rejected"))
    prompt = row.prompt.strip()
    if len(prompt) >= SHORTEST_REPEAT:
        found += [
            ("prompt repeated", f"{name} begins with the whole prompt")
            for name, text in named.items()
            if text.lstrip().startswith(prompt)
        ]
    return found

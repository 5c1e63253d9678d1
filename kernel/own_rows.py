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
import os
from dataclasses import dataclass
from pathlib import Path

from kernel.corpus import normalise, sha256
from kernel.data import dumps

# The files of a data folder and the answers in each row.
FILES = {
    "pairs.jsonl": ("chosen", "rejected"),
    "demonstrations.jsonl": ("response",),
    "prompts.jsonl": (),
    "probes.jsonl": ("candidate",),
}
ADVICE = {  # kind of fault: what to do
    "encoding": "save the file as UTF-8",
    "broken JSON": "write one JSON object per line",
    "field": "name and fill the fields as the README shows",
    "turns": "keep one user turn (and a system turn before it, if any) and one answer",
    "empty": "fill the text, or remove the row",
    "equal answers": "a pair needs two different answers",
    "prompt repeated": "give the answer without its prompt",
    "control token": "remove the token from the text: a model reads it as a command",
    "too long": "shorten the text, or raise --prompt-limit, --response-limit, --context-limit",
    "id": "give each row an id of its own, or none at all",
    "split": "write train, validation or test in every row of pairs.jsonl, or in none",
    "duplicate": "keep one of the rows",
    "contradiction": "decide which answer is preferred, or remove the rows",
    "shared prompt": "keep the prompt in one place: a held-out prompt must not be trained on",
    "probe": "one prompt per context, every factor true or false, one candidate per cell",
    "too few rows": "add rows, or move some with a `split` column",
    "rubric": "rubric(prompt, response, finish_reason, row) returns a dict with `success`",
}
SHORTEST_REPEAT = 20  # characters; an answer may well begin with a shorter prompt ("Hello")


class Fault(ValueError):
    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Faults:
    """What is wrong with the data: by kind, and which rows would have to go."""

    def __init__(self):
        self.found: dict[str, list[str]] = {kind: [] for kind in ADVICE}
        self.rows: dict[tuple[str, int], str] = {}  # (file, line) -> kind of its first fault
        self.whole = 0  # faults that no dropping of rows heals

    def add(self, kind: str, text: str, file: str, line: int | None = None) -> None:
        self.found[kind].append(f"{file} row {line}: {text}" if line else f"{file}: {text}")
        if line:
            self.rows.setdefault((file, line), kind)
        else:
            self.whole += 1

    def count(self) -> int:
        return sum(map(len, self.found.values()))

    def dropped(self) -> dict[str, int]:
        """Rows by the kind of their first fault."""
        kinds = list(self.rows.values())
        return {kind: kinds.count(kind) for kind in ADVICE if kind in kinds}

    def lines(self, most: int = 10) -> list[str]:
        """At most `most` faults of each kind, the kind's number of faults and the advice."""
        lines = []
        for kind, found in self.found.items():
            if found:
                lines.append(f"{kind} ({len(found)}): {ADVICE[kind]}")
                lines += [f"  {text}" for text in found[:most]]
                lines += [f"  and {len(found) - most} more"] if len(found) > most else []
        return lines


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
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        for line, raw in enumerate(content.split(b"\n"), start=1):
            if not raw.strip():
                continue
            try:
                row = plain_row(file, line, parse(raw))
            except Fault as fault:
                faults.add(fault.kind, str(fault), file, line)
                continue
            for kind, text in text_faults(row):
                faults.add(kind, text, file, line)
            rows[file].append(row)
    return rows


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


def pair(row: dict) -> tuple[str, tuple[str, str], str]:
    """(prompt, (chosen, rejected), shape) of a preference row."""
    chosen, rejected = content(row, "chosen"), content(row, "rejected")
    explicit = row.get("prompt") is not None
    shape = "explicit prompt, " if explicit else "implicit prompt, "
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise Fault("field", "one of chosen and rejected is text, the other is messages")
    if isinstance(chosen, str):
        if explicit:
            return user_turn(content(row, "prompt"), "prompt"), (chosen, rejected), shape + "text"
        prompt, *answers = split_texts(chosen, rejected)
        return prompt, tuple(answers), shape + "text"
    if chosen[:-1] != rejected[:-1]:
        raise Fault("turns", "chosen and rejected differ before their last message")
    before = chosen[:-1]
    if not before and not explicit:
        raise Fault("field", "no prompt: neither a field 'prompt' nor a user turn in chosen")
    prompt = user_turn(before or content(row, "prompt"))
    if before and explicit:
        given = user_turn(content(row, "prompt"), "prompt")
        if given not in (prompt, before[-1][1]):
            raise Fault("field", "prompt is not what the user says in chosen")
    return prompt, (answer(chosen[-1:]), answer(rejected[-1:], "rejected")), shape + "messages"


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two texts with a common beginning.

    The prompt ends before the word in which they part. A transcript ("\\n\\nHuman: ...\\n\\nAssistant:
    ...") ends it at the last common "Assistant:" instead, because answers may begin alike.
    """
    human, assistant = "\n\nHuman:", "\n\nAssistant:"
    common = os.path.commonprefix([chosen, rejected])
    if ("\n\n" + common.lstrip()).startswith(human):
        cut = common.rfind(assistant)
        end = cut + len(assistant)
        prompt = ("\n\n" + common[:cut].lstrip()).removeprefix(human)
        answers = chosen[end:], rejected[end:]
        if cut < 0 or any(
            mark in text for text in (prompt, *answers) for mark in (human, assistant)
        ):
            raise Fault("turns", "a transcript with more than one turn of Human and Assistant")
    else:
        end = max((i + 1 for i, letter in enumerate(common) if letter.isspace()), default=0)
        prompt, answers = common[:end], (chosen[end:], rejected[end:])
        if not prompt.strip():
            raise Fault("field", "no prompt: no field 'prompt', and no common beginning")
    return prompt.strip(), *(text.strip() for text in answers)


def content(row: dict, name: str) -> str | list[tuple[str, str]]:
    """A field as text or as (role, content) messages."""
    if name not in row:
        raise Fault("field", f"no field '{name}' (there is: {', '.join(row) or 'nothing'})")
    return row[name] if isinstance(row[name], str) else conversation(row[name], name)


def conversation(value, name: str) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else f"a JSON {type(value).__name__}"
        raise Fault("field", f"{name} is {kind}, wanted text or messages")
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise Fault("field", f"{name}: a message needs the texts 'role' and 'content'")
    return [(message["role"], message["content"]) for message in value]


def user_turn(value: str | list[tuple[str, str]], name: str = "the conversation") -> str:
    """The prompt's text: a user turn, after the system turn and a blank line if there is one."""
    if isinstance(value, str):
        return value
    roles = [role for role, _ in value]
    if roles not in (["user"], ["system", "user"]):
        raise Fault("turns", f"{name} has the turns {', '.join(roles) or 'none'} before the answer")
    return "\n\n".join(text for _, text in value)


def answer(value: str | list[tuple[str, str]], name: str = "chosen") -> str:
    if isinstance(value, str):
        return value
    roles = [role for role, _ in value]
    if roles != ["assistant"]:
        raise Fault("turns", f"{name} ends with the turns {', '.join(roles)}, wanted assistant")
    return value[0][1]


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

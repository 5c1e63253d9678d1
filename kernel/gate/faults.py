"""What is wrong with a user's data, by kind, with file, row and advice."""


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

"""Reading and writing JSON lines, the corpus folder, and the order in which rows are drawn.

A corpus is a folder of JSONL files; 00_prepare.py writes it and every other stage reads it:

    train/demonstrations.jsonl   prompt, response               SFT
    train/pairs.jsonl            prompt, chosen, rejected       reward model
    train/prompts.jsonl          prompt                         PPO rollouts
    train/labels.jsonl           what the rubric needs, by id   a look at the rollouts afterwards
    validation/pairs.jsonl       prompt, chosen, rejected       losses to look at; they select nothing
    heldout/prompts.jsonl        prompt, population, context    generation (no labels)
    heldout/labels.jsonl         what the rubric needs, by id   evaluation only
    heldout/pairs.jsonl          prompt, chosen, rejected       evaluation only
    heldout/probes.jsonl         prompt, candidate, factors     probes only
    rubric.py                    rubric(prompt, response, finish_reason, row) -> dict with `success`
    manifest.json                fields, counts, sha256 of each file, the audit's result
"""

import codecs
import contextlib
import hashlib
import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType

import torch


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def dumps(value) -> str:
    """Strict JSON on one line: a NaN is an error here, not a bare word that no other reader takes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a UTF-8 JSONL file. Raises ValueError naming file and row."""
    rows = []
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} row {number}: not a JSON object in UTF-8 ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path} row {number}: not a JSON object")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def write_atomic(path: Path, data: bytes | str) -> None:
    """Temporary file beside the target, fsync, rename, fsync of the folder: the whole or nothing.

    Raises OSError naming the path and the cause; what was there before stays.
    """
    data = data.encode("utf-8") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, PermissionError) or not isinstance(error, OSError):
            raise
        raise OSError(f"{path}: could not be written ({error.strerror or error})") from None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path):
    """A JSON file in UTF-8. Raises ValueError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None


def write_json(path: Path, value) -> None:
    write_atomic(path, json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def as_jsonl(rows: list[dict]) -> str:
    return "".join(dumps(row) + "\n" for row in rows)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    write_atomic(path, as_jsonl(rows))


def load_function(path: Path, name: str):
    """A function out of a Python file, e.g. a rubric. Raises ValueError naming the file."""
    module = ModuleType(f"{path.stem}_from_file")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and the like look their module up
    source = path.read_bytes()
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise ValueError(f"{path}: does not load ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path}: has no function '{name}'")
    return function


def load_rubric(path: Path):
    """The rubric of a corpus: rubric(prompt, response, finish_reason, row) -> dict with `success`.

    ValueError with one line, naming the file and the row, if it raises or says nothing about success.
    """
    own = load_function(path, "rubric")

    def rubric(prompt: str, response: str | None, finish_reason: str, row: dict) -> dict:
        where = f"{path}: the rubric, on row {row.get('id', '?')}"
        try:
            verdict = own(prompt, response, finish_reason, row)
        except Exception as error:
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
        if not isinstance(verdict, dict) or "success" not in verdict:
            raise ValueError(f"{where}: returned {verdict!r}, wanted a dict with 'success'")
        return verdict

    return rubric


def inside(folder: Path, name: str) -> Path:
    """A file that a manifest names, as a path. Raises ValueError if it lies outside the run folder."""
    path = folder / name
    root = folder.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts or root not in path.resolve().parents:
        raise ValueError(f"{name}: named by a manifest, but it lies outside {folder}")
    return path


def check_corpus(folder: Path) -> dict:
    """The manifest, after every file named in it was found unchanged. Raises ValueError otherwise."""
    manifest = read_json(folder / "manifest.json")
    for name, want in manifest["sha256"].items():
        path = inside(folder, name)
        if not path.is_file():
            raise ValueError(f"{path}: the corpus manifest names this file, but it is missing")
        if sha256_file(path) != want:
            raise ValueError(
                f"{path}: changed since 00_prepare.py audited it; prepare a new run folder"
            )
    return manifest


class Draws:
    """Row numbers in a seeded random order, reshuffled when used up: permutation, cursor, generator."""

    def __init__(self, rows: int, seed: int):
        self.rows = rows
        self.generator = torch.Generator().manual_seed(seed)
        self.permutation = torch.randperm(rows, generator=self.generator)
        self.cursor = 0

    def take(self, count: int) -> list[int]:
        taken = []
        while len(taken) < count:
            if self.cursor == self.rows:
                self.permutation = torch.randperm(self.rows, generator=self.generator)
                self.cursor = 0
            taken.append(int(self.permutation[self.cursor]))
            self.cursor += 1
        return taken

    def state(self) -> dict:
        return {
            "permutation": self.permutation.clone(),
            "cursor": self.cursor,
            "generator": self.generator.get_state(),
        }

    def load_state(self, state: dict) -> None:
        self.permutation, self.cursor = state["permutation"].clone(), state["cursor"]
        self.generator.set_state(state["generator"])


def updates_for(epochs: float, rows: int, batch: int) -> int:
    """Updates in `epochs` passes; draws run on over the end of a pass, so every window is full."""
    return math.ceil(epochs * rows / batch)


def spread(rows: list, count: int) -> list:
    """`count` rows at equal distances over the whole list; all of them if there are no more."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]

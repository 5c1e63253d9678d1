"""What a corpus is: a folder of JSONL files that 00_prepare.py writes and every other stage reads.

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
    manifest.json                fields, counts, sha256 of each file, the audit's result"""

import hashlib
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kernel.data.files import inside, read_json, sha256_file


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


def with_meaning(meaning: dict[str, str], files: dict[str, str]) -> dict[str, dict[str, str]]:
    """file -> field -> meaning, from the names of each file's fields, e.g. "id prompt"."""
    return {file: {n: meaning[n] for n in names.split()} for file, names in files.items()}


class Corpus(NamedTuple):
    """What 00_prepare.py needs of a corpus, built in or somebody's own."""

    name: str
    fields: dict[str, dict[str, str]]  # file -> field -> meaning
    rubric: Path
    build: Callable[[], dict[str, list[dict]]]  # file -> rows
    audit: Callable[[dict], dict]  # of the rows as read: what it found, or ValueError, file and row
    source: dict | None = None  # of somebody's own: files, shapes, what was derived and dropped
    longest: dict[str, int] | None = None  # tokens of the longest prompt and response, if looked at


def pair_files(pairs: str) -> tuple[str, list[str]]:
    """`20_reward.py --pairs`: the name of a pairs file of the corpus, and own files beside it.

    "pairs,second.jsonl" -> ("pairs", ["/where/second.jsonl"]). Raises ValueError unless there is
    exactly one name.
    """
    parts = [part.strip() for part in pairs.split(",")]
    own = [str(Path(part).resolve()) for part in parts if part.endswith(".jsonl")]
    names = [part for part in parts if not part.endswith(".jsonl")]
    if len(names) != 1 or not names[0] or len(set(own)) < len(own):
        raise ValueError(
            f"--pairs {pairs}: wanted NAME or NAME,FILE.jsonl,...: one name of the corpus's own pairs "
            "(it has validation pairs too), then files, each once"
        )
    return names[0], own


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def normalise(text: str) -> str:
    """What counts as the same prompt across splits: NFKC, casefold, whitespace runs collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())

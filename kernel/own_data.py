"""A user's own data folder as a corpus: what 00_prepare.py does with `--data FOLDER --rubric FILE.py`.

`gate` looks at everything before a model is loaded, prints every fault with file, row and advice, and
returns rows in the layout of kernel/data.py. Splits follow the normalised prompt (NFKC, casefold,
whitespace runs collapsed), never the row:

    share = first 8 bytes of sha256(normalised prompt) / 2^64;  train < 0.8 <= validation < 0.9 <= test

so the order of the rows does not matter and a new row never moves another. A `split` column decides
instead if there is one. Probe prompts are held out, as test prompts are.
"""

import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median

from kernel import no_rubric, own_checks
from kernel.acquire import acquire, tiny_texts, tiny_tokenizer
from kernel.chat import Chat, special_ids
from kernel.corpus import normalise
from kernel.corpus import sha256 as sha256_text
from kernel.data import sha256_file
from kernel.own_checks import SPLITS
from kernel.own_rows import FILES, Faults, Row, read
from kernel.profiles import PROFILES
from kernel.run import REPOSITORY

LEAST = 4  # pairs in validation and in test; train needs a full batch
NO_LIMITS = dict.fromkeys(("prompt_limit", "response_limit", "context_limit"), 10**9)

PAIR = {
    "id": "the row's own, or made from its line",
    "family": "hash of the normalised prompt: the unit of the split",
    "prompt": "the user's message",
    "prompt_sha256": "sha256 of the prompt's UTF-8 bytes",
    "chosen": "preferred answer",
    "rejected": "the other answer",
}
PROMPT = {name: PAIR[name] for name in ("id", "prompt", "prompt_sha256")}
# Labels hold all further columns too, and probes their true-or-false columns.
FIELDS = {
    "train/pairs.jsonl": PAIR,
    "train/demonstrations.jsonl": {**PROMPT, "response": "demonstrated answer"},
    "train/prompts.jsonl": PROMPT,
    "train/labels.jsonl": {"id": PAIR["id"]},
    "validation/pairs.jsonl": PAIR,
    "heldout/pairs.jsonl": PAIR,
    "heldout/prompts.jsonl": {
        **PROMPT,
        "population": "test or probe",
        "context": "test: the id of the prompt's first pair; probe: shared by a prompt's candidates",
    },
    "heldout/labels.jsonl": {"id": PAIR["id"]},
    "heldout/probes.jsonl": {
        **PROMPT,
        "context": "shared by a prompt's candidates",
        "candidate": "fixed answer to score",
    },
}
OPEN = ("train/labels.jsonl", "heldout/labels.jsonl", "heldout/probes.jsonl")


@dataclass
class OwnData:
    """What a built-in corpus module offers, and where it came from."""

    NAME: str
    FIELDS: dict
    RUBRIC: Path
    SOURCE: dict  # files, shapes, what was derived and dropped
    rows: dict[str, list[dict]]
    longest: dict[str, int]  # tokens

    def build_corpus(self) -> dict[str, list[dict]]:
        return self.rows

    def audit(self, rows: dict[str, list[dict]]) -> dict:
        return audit(rows)


# ---- splits and rows --------------------------------------------------------------------------


def split_of(key: str) -> str:
    """The split of a normalised prompt."""
    share = int.from_bytes(sha256(key.encode("utf-8")).digest()[:8], "big") / 2**64
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"


def assign_splits(pairs: list[Row], faults: Faults) -> str:
    """Set each pair's split; returns by what."""
    by_column = any(row.split is not None for row in pairs)
    for row in pairs:
        if not by_column:
            row.split = split_of(row.key)
        elif row.split not in SPLITS:
            faults.add("split", f"split is {row.split!r}", row.file, row.line)
    return "the column `split`" if by_column else "the hash of the prompt"


def kept(rows: dict[str, list[Row]], faults: Faults) -> dict[str, list[Row]]:
    return {
        file: [row for row in rows[file] if (file, row.line) not in faults.rows] for file in rows
    }


def first_of_each_prompt(rows: list[Row]) -> list[Row]:
    first = {}
    for row in rows:
        first.setdefault(row.key, row)
    return list(first.values())


def build(rows: dict[str, list[Row]]) -> dict[str, list[dict]]:
    """File of the corpus -> rows, in the order of the user's files."""
    prompt = lambda row: {"prompt": row.prompt, "prompt_sha256": sha256_text(row.prompt)}  # noqa: E731
    pairs = {split: [row for row in rows["pairs.jsonl"] if row.split == split] for split in SPLITS}
    demonstrations = rows["demonstrations.jsonl"]
    if not demonstrations:  # several pairs may share their prompt and chosen answer
        chosen = {(row.prompt, row.answers[0]): row for row in reversed(pairs["train"])}
        demonstrations = list(reversed(chosen.values()))
    rollouts = rows["prompts.jsonl"] or first_of_each_prompt(pairs["train"])
    probes, factors = rows["probes.jsonl"], own_checks.varying(rows["probes.jsonl"])
    asked = [(row, "test", row.id) for row in first_of_each_prompt(pairs["test"])]
    asked += [(row, "probe", row.context) for row in probes]

    def pair_rows(split: str) -> list[dict]:
        return [
            {
                "id": row.id, "family": row.family, **prompt(row),
                "chosen": row.answers[0], "rejected": row.answers[1],
            }
            for row in pairs[split]
        ]  # fmt: skip

    def label(row: Row) -> dict:
        hidden = {"context", *factors} if row.file == "probes.jsonl" else set()
        extra = {name: value for name, value in row.extra.items() if name not in hidden}
        return {"id": row.id, **extra}

    return {
        "train/pairs.jsonl": pair_rows("train"),
        "train/demonstrations.jsonl": [
            {"id": row.id, **prompt(row), "response": row.answers[0]} for row in demonstrations
        ],
        "train/prompts.jsonl": [{"id": row.id, **prompt(row)} for row in rollouts],
        "train/labels.jsonl": [label(row) for row in rollouts],
        "validation/pairs.jsonl": pair_rows("validation"),
        "heldout/pairs.jsonl": pair_rows("test"),
        "heldout/prompts.jsonl": [
            {"id": row.id, "population": population, "context": context, **prompt(row)}
            for row, population, context in asked
        ],
        "heldout/labels.jsonl": [label(row) for row, _, _ in asked],
        "heldout/probes.jsonl": [
            {
                "id": row.id, "context": row.context, **prompt(row),
                "candidate": row.answers[0], **{name: row.extra[name] for name in factors},
            }
            for row in probes
        ],
    }  # fmt: skip


def chat_for(args, profile: str, common: dict, rows: dict[str, list[dict]], fetch: bool):
    """A Chat without limits on the base model's tokenizer; None if that is not there and may not be
    fetched. The tiny one is made from the rows, here as later by its maker."""
    base = PROFILES[profile]["base"]
    config = {**common, **NO_LIMITS}
    if args.model_dir:
        folder = args.model_dir.resolve()
        return Chat({**config, **special_ids(folder), "model_dir": str(folder)})
    if base["source"] == "tiny":
        prompts, answers = tiny_texts(rows)
        with tempfile.TemporaryDirectory() as work:
            tiny_tokenizer(prompts + answers, base["vocabulary"]).save_pretrained(work)
            return Chat({**config, "model_dir": work})
    folder = REPOSITORY / "models" / base["folder"]
    if not folder.is_dir():
        if not fetch:
            return None
        acquire(base, folder.parent, rows)
    return Chat({**config, "model_dir": str(folder)})


# ---- the gate -----------------------------------------------------------------------------------


def gate(args, profile: str, common: dict) -> OwnData:
    """Look at all of it, print what was found, and return the corpus.

    args: data, rubric, model_dir, drop_bad, check. Raises ValueError, after the list of all faults, if
    there is one that --drop-bad was not asked for or cannot heal. Writes nothing.
    """
    if not args.data.is_dir():
        raise ValueError(f"--data {args.data}: no such folder")
    faults = Faults()
    rows = read(args.data, faults)
    by = assign_splits(rows["pairs.jsonl"], faults)
    own_checks.relations(kept(rows, faults), faults)
    while True:
        good = kept(rows, faults)
        bad = len(faults.rows)
        fetch = not args.check and not faults.count()
        chat = chat_for(args, profile, common, build(good), fetch)
        longest = own_checks.token_faults(good, chat, common, faults) if chat else None
        # Without its bad rows the tiny tokenizer is another one, which may cut texts otherwise.
        tiny = not args.model_dir and PROFILES[profile]["base"]["source"] == "tiny"
        if not (tiny and args.drop_bad and len(faults.rows) > bad):
            break
    good = kept(rows, faults)
    too_few(args.data, good, profile, faults)
    corpus = build(good)
    trial = None
    if args.rubric:
        trial = own_checks.rubric_faults(args.rubric, corpus, faults)
    source = {
        "folder": args.data.resolve().name,
        "files": {
            file: {
                "sha256": sha256_file(args.data / file),
                "rows": len(rows[file]),
                "shapes": shapes(rows[file]),
            }
            for file in FILES
            if (args.data / file).is_file()
        },
        "rubric": {"sha256": sha256_file(args.rubric), "test_pairs": trial} if trial else None,
        "split": by,
        "derived": [
            name
            for name in ("demonstrations.jsonl", "prompts.jsonl")
            if not (args.data / name).is_file()
        ],
        "factors": own_checks.varying(good["probes.jsonl"]),
        "dropped": faults.dropped() if args.drop_bad else {},
    }
    tell(args.data, source, corpus, chat, faults)
    if faults.whole or (faults.rows and not args.drop_bad):
        raise ValueError(
            f"{args.data}: {faults.count()} faults, listed above; nothing was written. Correct them"
            + (
                ""
                if faults.whole
                else f", or leave the {len(faults.rows)} rows out with --drop-bad"
            )
        )
    fields = {name: dict(columns) for name, columns in FIELDS.items()}
    for name in OPEN:
        further = (key for row in corpus[name] for key in row)
        fields[name] |= {key: "own column" for key in further if key not in fields[name]}
    rubric = args.rubric or Path(no_rubric.__file__)
    return OwnData(source["folder"], fields, rubric, source, corpus, longest)


def shapes(rows: list[Row]) -> dict[str, int]:
    found = [row.shape for row in rows]
    return {shape: found.count(shape) for shape in dict.fromkeys(found)}


def too_few(folder: Path, rows: dict[str, list[Row]], profile: str, faults: Faults) -> None:
    """Every update needs a full batch of its own rows."""
    settings = PROFILES[profile]
    pairs = {split: sum(row.split == split for row in rows["pairs.jsonl"]) for split in SPLITS}
    for split, least in (
        ("train", settings["reward"]["batch"]),
        ("validation", LEAST),
        ("test", LEAST),
    ):
        if pairs[split] < least:
            text = f"{pairs[split]} {split} pairs, at least {least} are needed"
            faults.add("too few rows", text, "pairs.jsonl")
    for file, section, key in (
        ("demonstrations.jsonl", "sft", "batch"),
        ("prompts.jsonl", "ppo", "rollouts"),
    ):
        least = settings[section][key]
        if (folder / file).is_file() and len(rows[file]) < least:
            text = f"{len(rows[file])} rows, at least {least} are needed (or no such file)"
            faults.add("too few rows", text, file)
    if not (folder / "prompts.jsonl").is_file():
        prompts = len({row.key for row in rows["pairs.jsonl"] if row.split == "train"})
        if prompts < settings["ppo"]["rollouts"]:
            text = f"{prompts} training prompts, at least {settings['ppo']['rollouts']} are needed"
            faults.add("too few rows", text, "pairs.jsonl")


def tell(folder: Path, source: dict, corpus: dict, chat: Chat | None, faults: Faults) -> None:
    """What was found, derived and dropped; notes; the faults."""
    count = {name: len(rows) for name, rows in corpus.items()}
    print(f"data: {folder}")
    for file, found in source["files"].items():
        kinds = "; ".join(f"{number} {shape}" for shape, number in found["shapes"].items())
        print(f"  {file}: {found['rows']} rows ({kinds or 'none'})")
    pairs = corpus["train/pairs.jsonl"]
    print(
        f"  splits by {source['split']}: "
        f"{count['train/pairs.jsonl']} train, {count['validation/pairs.jsonl']} validation, "
        f"{count['heldout/pairs.jsonl']} test pairs"
    )
    if "demonstrations.jsonl" in source["derived"]:
        print(
            f"  demonstrations: the {count['train/demonstrations.jsonl']} chosen answers of training"
        )
    if "prompts.jsonl" in source["derived"]:
        print(
            f"  rollout prompts: the {count['train/prompts.jsonl']} prompts of the training pairs"
        )
    contexts = len({row["context"] for row in corpus["heldout/probes.jsonl"]})
    if contexts:
        factors = ", ".join(source["factors"]) or "none"
        print(
            f"  probes: {count['heldout/probes.jsonl']} in {contexts} contexts, factors: {factors}"
        )
    if pairs:
        first = pairs[0]
        for name in ("prompt", "chosen", "rejected"):
            shown = first[name] if len(first[name]) <= 70 else first[name][:67] + "..."
            print(f"  first training pair, {name}: {shown!r}")

    if not contexts:
        print("  note: no probes.jsonl: nothing will be said about what single factors are worth")
    if chat is None:
        print(
            "  note: lengths and control tokens were not looked at: the base model is not there yet "
            "(run without --check)"
        )
    tests = sum(row["population"] == "test" for row in corpus["heldout/prompts.jsonl"])
    if tests < 30:
        print(f"  note: only {tests} distinct test prompts: intervals will be wide")
    longer = [len(row["chosen"]) > len(row["rejected"]) for row in pairs]
    share = sum(longer) / len(longer) if longer else 0.5
    if not 0.2 <= share <= 0.8:
        words = {k: median(len(row[k].split()) for row in pairs) for k in ("chosen", "rejected")}
        print(
            f"  note: the chosen answer is the longer one in {share:.0%} of the training pairs (median "
            f"{words['chosen']:g} words against {words['rejected']:g}): a judge may learn length alone"
        )
    for path in sorted(folder.glob("*.jsonl")):
        if path.name not in FILES:
            print(f"  note: {path.name} is not read; known are {', '.join(FILES)}")
    if source["rubric"] is None:
        print("  note: no --rubric: only the learned score will be known")
    elif trial := source["rubric"]["test_pairs"]:
        print(
            f"  rubric: passes {trial['chosen']} of {trial['pairs']} chosen and {trial['rejected']} "
            "rejected answers of the test pairs"
        )
        if trial["rejected"] > trial["chosen"]:
            print("  HINT: the rubric prefers the rejected answers; are the columns swapped?")
    if source["dropped"]:
        print(
            f"  dropped {sum(source['dropped'].values())} rows: "
            + ", ".join(f"{number} {kind}" for kind, number in source["dropped"].items())
        )
    for line in faults.lines():
        print(f"  {line}")


# ---- the audit ----------------------------------------------------------------------------------


def audit(rows: dict[str, list[dict]]) -> dict:
    """The claims of such a corpus, on rows as read from disk; returns the counts.

    The first fault raises ValueError "<file> row <n>: <what>", n counted from 1.
    """

    def check(holds: bool, file: str, number: int, what: str) -> None:
        if not holds:
            raise ValueError(f"{file} row {number}: {what}")

    check(set(rows) == set(FIELDS), "data", 0, f"files are {list(rows)}, wanted {list(FIELDS)}")
    place_of, distinct = {}, set()
    for file, content in rows.items():
        check(bool(content) or "probes" in file, file, 1, "missing: the file has no rows")
        ids = set()
        for number, row in enumerate(content, 1):
            names = set(row) if file not in OPEN else set(row) & set(FIELDS[file])
            check(names == set(FIELDS[file]), file, number, f"fields are {list(row)}")
            check(row["id"] not in ids, file, number, f"id {row['id']} stands there twice")
            ids.add(row["id"])
            if "prompt" not in row:
                continue
            check(row["prompt_sha256"] == sha256_text(row["prompt"]), file, number, "prompt_sha256")
            place = file.split("/")[0]
            if "probe" in (row.get("population"), "probe" if "candidate" in row else ""):
                place = "probes"
            known = place_of.setdefault(normalise(row["prompt"]), place)
            check(known == place, file, number, f"its prompt is in {known} and in {place}")
            if place in ("train", "validation") or file == "heldout/pairs.jsonl":
                distinct.add(row["prompt"])
            if "chosen" in row:
                check(row["chosen"] != row["rejected"], file, number, "chosen equals rejected")
    for kind in ("train", "heldout"):
        file = f"{kind}/labels.jsonl"
        prompts, labels = (
            [row["id"] for row in rows[f"{kind}/{n}.jsonl"]] for n in ("prompts", "labels")
        )
        check(prompts == labels, file, 1, f"ids are not those of {kind}/prompts.jsonl")
    prompt_of = {}
    for number, row in enumerate(rows["heldout/probes.jsonl"], 1):
        same = prompt_of.setdefault(row["context"], row["prompt"]) == row["prompt"]
        check(same, "heldout/probes.jsonl", number, f"prompt differs within {row['context']}")
    places = list(place_of.values())
    return {
        "rows": {file: len(rows[file]) for file in FIELDS},
        "normalised_prompts_each_in_one_split": {p: places.count(p) for p in dict.fromkeys(places)},
        "distinct_pair_demonstration_rollout_prompts": len(distinct),
        "probe_contexts_with_one_prompt": len(prompt_of),
        "heldout_contexts": len({row["context"] for row in rows["heldout/prompts.jsonl"]}),
    }

"""A user's own data folder as a corpus: what 00_prepare.py does with `--data FOLDER --rubric FILE.py`.

`gate` looks at everything before a model is loaded: it prints what it found, derived and dropped and
every fault with file, row and advice, and returns the rows in the layout of kernel/data/corpus.py.
"""

import tempfile
from pathlib import Path
from statistics import median

from kernel.data.acquire import acquire
from kernel.data.chat import Chat, special_ids
from kernel.data.corpus import Corpus
from kernel.data.files import REPOSITORY, sha256_file
from kernel.data.tiny import tiny_texts, tiny_tokenizer
from kernel.gate import checks
from kernel.gate.faults import Faults
from kernel.gate.layout import FIELDS, OPEN, SPLITS, assign_splits, audit, build, kept, varying
from kernel.gate.rows import FILES, Row, read
from kernel.run.profiles import PROFILES

NO_RUBRIC = REPOSITORY / "kernel/data/no_rubric.py"
LEAST = 4  # pairs in validation and in test; train needs a full batch
NO_LIMITS = dict.fromkeys(("prompt_limit", "response_limit", "context_limit"), 10**9)


def chat_for(
    args, profile: str, common: dict, rows: dict[str, list[Row]], fetch: bool
) -> Chat | None:
    """A Chat without limits on the base model's tokenizer; None if that is not there and may not be
    fetched. The tiny one is made from the rows, here as later by its maker."""
    base = PROFILES[profile]["base"]
    config = {**common, **NO_LIMITS}
    if args.model_dir:
        folder = args.model_dir.resolve()
        ids, _ = special_ids(folder, common.get("chat_template", True))
        return Chat({**config, **ids, "model_dir": str(folder)})
    if base["source"] == "tiny":
        prompts, answers = tiny_texts(build(rows))
        with tempfile.TemporaryDirectory() as work:
            tiny_tokenizer(prompts + answers, base["vocabulary"]).save_pretrained(work)
            return Chat({**config, "model_dir": work})
    folder = REPOSITORY / "models" / base["folder"]
    if not folder.is_dir():
        if not fetch:
            return None
        acquire(base, folder.parent, {})
    return Chat({**config, "model_dir": str(folder)})


def gate(args, profile: str, common: dict) -> Corpus:
    """Look at all of it, print what was found, and return the corpus.

    args: data, rubric, model_dir, drop_bad, check. Raises ValueError, after the list of all faults, if
    there is one that --drop-bad was not asked for or cannot heal. Writes nothing.
    """
    if not args.data.is_dir():
        raise ValueError(f"--data {args.data}: no such folder")
    faults = Faults()
    rows = read(args.data, faults)
    by = assign_splits(rows["pairs.jsonl"], faults)
    checks.relations(kept(rows, faults), faults)
    while True:
        good = kept(rows, faults)
        bad = len(faults.rows)
        fetch = not args.check and (args.drop_bad or not faults.count())
        chat = chat_for(args, profile, common, good, fetch)
        longest = checks.token_faults(good, chat, common, faults) if chat else None
        # Without its bad rows the tiny tokenizer is another one, which may cut texts otherwise.
        tiny = not args.model_dir and PROFILES[profile]["base"]["source"] == "tiny"
        if not (tiny and args.drop_bad and len(faults.rows) > bad):
            break
    good = kept(rows, faults)
    too_few(args.data, good, profile, faults)
    corpus = build(good)
    trial = checks.rubric_faults(args.rubric, corpus, faults) if args.rubric else None
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
        "rubric": trial,
        "split": by,
        "derived": [
            name
            for name in ("demonstrations.jsonl", "prompts.jsonl")
            if not (args.data / name).is_file()
        ],
        "factors": varying(good["probes.jsonl"]),
        "dropped": faults.dropped() if args.drop_bad else {},
    }
    tell(args.data, source, corpus, chat, faults)
    if faults.whole or (faults.rows and not args.drop_bad):
        cure = f" or leave these rows ({len(faults.rows)}) out with --drop-bad" * (not faults.whole)
        raise ValueError(
            f"{args.data}: faults: {faults.count()}, listed above; nothing was written; "
            f"correct them{cure}"
        )
    fields = {name: dict(columns) for name, columns in FIELDS.items()}
    for name in OPEN:
        further = (key for row in corpus[name] for key in row)
        fields[name] |= {key: "own column" for key in further if key not in fields[name]}
    rubric = args.rubric or NO_RUBRIC
    return Corpus(
        source["folder"], fields, rubric, lambda: corpus, audit, source=source, longest=longest
    )


def shapes(rows: list[Row]) -> dict[str, int]:
    found = [row.shape for row in rows]
    return {shape: found.count(shape) for shape in dict.fromkeys(found)}


def too_few(folder: Path, rows: dict[str, list[Row]], profile: str, faults: Faults) -> None:
    """Every update needs a full batch of its own rows."""
    settings = PROFILES[profile]
    pairs = {split: sum(row.split == split for row in rows["pairs.jsonl"]) for split in SPLITS}
    for split, least in (
        ("train", settings["reward"]["batch"]), ("validation", LEAST), ("test", LEAST),
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
            f"  demonstrations: the {count['train/demonstrations.jsonl']} chosen answers of the "
            "training pairs"
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
    elif trial := source["rubric"]:
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

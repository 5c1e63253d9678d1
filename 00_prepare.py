"""Stage 00: the base model, the corpus and its audit, and the settings that all stages share.

In:   a profile (and, once, a download); --data: a folder with your own pairs (kernel/gate/README.md)
Out:  models/<base>/              the base model, shared by all runs
      <run>/config.json           profile, shared settings, hashes of model and tokenizer
      <run>/data/                 train, validation and held-out rows; manifest.json with the audit

    python 00_prepare.py                      # SmolLM2-135M, runs/smollm2
    python 00_prepare.py --profile tiny
    python 00_prepare.py --profile qwen --model-dir /path/to/Qwen2.5-0.5B-Instruct
    python 00_prepare.py --data FOLDER --rubric FILE.py --run-dir runs/mine   # your own pairs

An existing corpus is never overwritten: a second call checks it and changes nothing.
"""

import hashlib
from pathlib import Path

import torch

from kernel.data.acquire import acquire
from kernel.data.base import check_model_folder, model_sha256
from kernel.data.chat import Chat, special_ids
from kernel.data.corpora import CORPORA
from kernel.data.corpus import check_corpus
from kernel.data.files import (
    REPOSITORY,
    as_jsonl,
    check_writable,
    read_json,
    sha256_file,
    write_atomic,
    write_json,
)
from kernel.roles import make_role
from kernel.run import flags
from kernel.run.errors import one_line_errors
from kernel.run.lock import lock_folder
from kernel.run.machine import bfloat16_slowdown, resolve_device
from kernel.run.profiles import PROFILES
from kernel.run.state import identity_differences

# ---- flags --------------------------------------------------------------------------------------

one_line_errors("00_prepare")
parser = flags.parser(__doc__)
parser.add_argument("--model-dir", type=Path, metavar="DIR", help="a local causal LM, not the profile's")
parser.add_argument("--no-chat-template", action="store_true", help="a plain form of the prompt")
parser.add_argument("--system", metavar="TEXT", help="system turn before every prompt")
parser.add_argument("--corpus", choices=CORPORA, help="default: the run folder's, or office")
mine = parser.add_argument_group("your own data (kernel/gate/README.md says what the files hold)")
mine.add_argument("--data", type=Path, metavar="FOLDER", help="pairs.jsonl and what else there is")
mine.add_argument("--rubric", type=Path, metavar="FILE.py", help="with a function rubric")
mine.add_argument("--drop-bad", action="store_true", help="leave out the rows that have a fault")
mine.add_argument("--check", action="store_true", help="look for faults, write nothing")
setting = flags.settings_of(parser, "common")
setting("--base-dtype", None, "of the frozen weights", choices=("bfloat16", "float32"))
setting("--device", None, "what computes", choices=("auto", "cpu", "cuda"))
setting("--threads", int, "of 10, 20, 30; part of what makes a run exact")
setting("--threads-alone", int, "of 40, 50, 60, which run alone")
setting("--lora-r", int, "rank of the adapters")
setting("--lora-alpha", float, "the adapters' branch is scaled by alpha / r")
setting("--prompt-limit", int, "tokens, chat template included")
setting("--response-limit", int, "tokens, end token included")
setting("--context-limit", int, "tokens of both; follows from the two")
args = parser.parse_args()

# ---- run folder and settings --------------------------------------------------------------------

profile, folder = flags.run_folder(args)
common = flags.override(PROFILES[profile]["common"], args)
if args.context_limit is None:
    common["context_limit"] = common["prompt_limit"] + common["response_limit"]
base = PROFILES[profile]["base"]
recorded = read_json(folder / "config.json")["common"] if (folder / "config.json").is_file() else {}
common |= {key: recorded[key] for key in ("chat_template", "system") if key in recorded}
if args.no_chat_template:  # decided once, when the folder was made, like the system turn
    common["chat_template"] = False
if args.system is not None:
    common["system"] = args.system
if args.data:
    from kernel.gate.gate import gate

    if args.corpus:
        raise ValueError("either --data or --corpus")
    corpus = gate(args, profile, common)
    if args.check:
        print("00_prepare: nothing is in the way; nothing was written (--check)")
        raise SystemExit
elif args.rubric or args.drop_bad or args.check:
    raise ValueError("--rubric, --drop-bad and --check go with --data FOLDER")
common["device"] = resolve_device(common["device"])
check_writable(folder)
if note := lock_folder(folder):
    print(f"00_prepare: {note}")
if recorded and not args.base_dtype:  # decided once, too
    common["base_dtype"] = recorded["base_dtype"]
elif not args.base_dtype and common["device"] == "cpu" and common["base_dtype"] == "bfloat16":
    slower = bfloat16_slowdown()
    if slower > 1.5:
        common["base_dtype"] = "float32"
        print(
            f"base dtype: float32, because bfloat16 is {slower:.1f} times slower on this processor "
            "(--base-dtype bfloat16 takes it all the same)"
        )
data = folder / "data"

# ---- corpus and audit ---------------------------------------------------------------------------

made = check_corpus(data) if (data / "manifest.json").is_file() else None
if not args.data:
    known = [key for key, c in CORPORA.items() if made and c.name == made["corpus"]]
    corpus = CORPORA[args.corpus or (known[0] if known else "office")]
rows = corpus.build()
audit = corpus.audit(rows)  # stops at the first row that breaks a rule, naming file and row
files = {name: as_jsonl(content).encode("utf-8") for name, content in rows.items()}
files["rubric.py"] = corpus.rubric.read_bytes()
if made:
    changed = [n for n in files if hashlib.sha256(files[n]).hexdigest() != made["sha256"].get(n)]
    if changed or made["corpus"] != corpus.name:
        raise ValueError(
            f"{folder} holds the corpus {made['corpus']}, and {corpus.name} differs from it "
            f"({', '.join(changed[:4]) or 'its name'}); use another --run-dir"
        )
    print(f"corpus: {data} is there and unchanged")
else:
    for path in sorted(data.rglob("*.jsonl")):  # left by a crash, or somebody else's?
        if path.read_bytes() != files.get(path.relative_to(data).as_posix()):
            raise ValueError(
                f"{path} is not from this corpus, and {data} has no manifest; move it away, "
                "nothing is overwritten"
            )
    for name, content in files.items():
        write_atomic(data / name, content)
    manifest = {
        "corpus": corpus.name,
        "fields": corpus.fields,
        "rows": {name: len(content) for name, content in rows.items()},
        "audit": audit,
        "sha256": {name: sha256_file(data / name) for name in files},
    }
    if corpus.source:
        manifest["source"] = corpus.source
    write_json(data / "manifest.json", manifest)  # last: without it the corpus does not count

# ---- base model ---------------------------------------------------------------------------------

if args.model_dir:
    model_dir = args.model_dir.resolve()
    check_model_folder(model_dir)
    ids, said = special_ids(model_dir, common.get("chat_template", True))
    common |= {"model_dir": str(model_dir), **ids}
    # Damaged weights and layers that we cannot run show up now.
    make_role("actor", common, torch.device("cpu"), seed=common["adapter_seed"])
    print(f"base model: {model_dir}, {said}")
    weights = model_dir / "model.safetensors"
    if "sha256" in base and not (weights.is_file() and sha256_file(weights) == base["sha256"]):
        print(f"  note: these are not the pinned weights of {base['repo']}")
else:
    model_dir = acquire(base, REPOSITORY / "models", rows)
    common["model_dir"] = model_dir.relative_to(REPOSITORY).as_posix()
chat = Chat({**common, "model_dir": str(model_dir)})
positions = read_json(model_dir / "config.json").get("max_position_embeddings")
if positions and common["context_limit"] > positions:
    raise ValueError(
        f"--context-limit {common['context_limit']}: the base reads {positions} tokens"
    )

# ---- every row fits its limits, told now and not in the middle of training ----------------------

longest = corpus.longest or {"prompt": 0, "response": 0}
unseen = {} if corpus.longest else rows  # the gate looked at the user's own
for name, content in unseen.items():
    for number, row in enumerate(content, start=1):
        where = f"data/{name} row {number}"
        if "prompt" in row:
            prompt = len(chat.prompt_ids(row["prompt"], where))
            longest["prompt"] = max(longest["prompt"], prompt)
        for key in ("response", "chosen", "rejected", "candidate"):
            if key in row:
                response = len(chat.response_ids(row[key], f"{where} {key}"))
                longest["response"] = max(longest["response"], response)
                if prompt + response > common["context_limit"]:
                    raise ValueError(f"{where}: {prompt + response} tokens, over the context limit")

if longest["prompt"] + common["response_limit"] > common["context_limit"]:
    raise ValueError(
        f"--context-limit {common['context_limit']}: the longest prompt has {longest['prompt']} tokens "
        f"and a response may have {common['response_limit']}"
    )

# ---- config -------------------------------------------------------------------------------------

config = {"profile": profile, "base": base, "common": common, "model": model_sha256(model_dir)}
if (folder / "config.json").is_file():
    changed = identity_differences(read_json(folder / "config.json"), config)
    if changed:
        raise ValueError(
            f"{folder} holds another config ({'; '.join(changed[:4])}); use another --run-dir"
        )
else:
    write_json(folder / "config.json", config)

# ---- summary ------------------------------------------------------------------------------------

print(f"  wrote {folder / 'config.json'}")
print(f"  wrote {data} ({', '.join(f'{len(c)} {n}' for n, c in rows.items())})")
distinct = len({row["prompt"] for content in rows.values() for row in content if "prompt" in row})
print(
    f"00_prepare: audit passed, {distinct} distinct prompts; "
    f"longest prompt {longest['prompt']} tokens, longest answer {longest['response']}"
)

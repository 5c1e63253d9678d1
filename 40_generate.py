"""Stage 40: held-out generation. SFT and PPO answer the same 260 held-out rows, greedily.

In:   data/heldout/prompts.jsonl         180 test prompts, 80 probe rows (20 contexts, 4 rows each)
      checkpoints/10_sft/continuous/adapter.safetensors
      checkpoints/30_ppo/continuous/adapter.safetensors
Out:  outputs/40_generate/generations.jsonl    policy, id, ids, text, finish_reason, log-probabilities

    token_t = argmax over the vocabulary of pi(token | prompt, token_<t)

Labels, pairs, probe candidates and every learning output but the two adapters are out of reach of this
stage. 520 generations are not 520 situations: each policy meets 200 distinct prompts. Each of those is
decoded once and its answer stands in all its rows, because other batch shapes round differently.

    python 40_generate.py

A finished run is taken out of its folder, or asked by hand, without changing anything in it; both open
other files than this stage does (also the judge's adapter), declare them themselves, and read no labels:

    python 40_generate.py --export FOLDER [--merge]      # PEFT adapters, merged models, model card
    python 40_generate.py --prompt "..." [--interactive] [--sample N --seed S]
"""

import sys
from pathlib import Path

import torch

from kernel.data.chat import Chat
from kernel.data.files import read_jsonl, write_jsonl
from kernel.roles import load_adapter, load_role, make_role
from kernel.rollout import sample
from kernel.run import flags
from kernel.run.errors import one_line_errors
from kernel.run.stage import Stage
from kernel.score import exact_kl, pick_logprobs, vocab_logprobs

PROMPTS = "data/heldout/prompts.jsonl"
POLICIES = {
    "sft": "checkpoints/10_sft/continuous/adapter.safetensors",
    "ppo": "checkpoints/30_ppo/continuous/adapter.safetensors",
}
READS = [PROMPTS, *POLICIES.values()]
WRITES = ["outputs/40_generate"]

# ---- flags --------------------------------------------------------------------------------------

one_line_errors("40_generate")
parser = flags.parser(__doc__)
setting = flags.settings_of(parser, "generate")
setting("--generate-batch", int, "rows decoded together: changes memory, and results by rounding only")
setting("--no-cache", None, "read the whole prefix for each token", dest="cached", action="store_false")
by_hand = parser.add_argument_group("a finished run, taken out or asked by hand")
by_hand.add_argument("--export", type=Path, metavar="FOLDER", help="write its adapters for PEFT")
by_hand.add_argument("--merge", action="store_true", help="with --export: merged models, too")
by_hand.add_argument("--prompt", metavar="TEXT", help="both policies' answers, with score and KL")
by_hand.add_argument("--interactive", action="store_true", help="ask until an empty line")
by_hand.add_argument("--sample", type=int, metavar="N", help="N sampled answers each")
by_hand.add_argument("--seed", type=int, metavar="N", default=0, help="of --sample")
args = parser.parse_args()

# ---- a finished run: another program, and no part of this stage's identity ------------------------

asked = args.prompt is not None or args.interactive
if (args.merge and not args.export) or (args.sample is not None and not asked):
    parser.error("--merge goes with --export, --sample with --prompt or --interactive")
if args.export and asked:
    parser.error("either --export, or --prompt and --interactive")
if args.export:
    from kernel.finished.export import export

    export(args)
    sys.exit()
if asked:
    from kernel.finished.ask import ask

    ask(args)
    sys.exit()

# ---- run folder and seeds -----------------------------------------------------------------------

stage = Stage.begin("40_generate", "generate", args, READS, WRITES)
config, device = stage.config, stage.device

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
rows = read_jsonl(stage.dir / PROMPTS)
prompts = chat.encode_prompts(rows, PROMPTS)
places = {}  # distinct prompt -> its rows
for index, ids in enumerate(prompts):
    places.setdefault(tuple(ids), []).append(index)
distinct = sorted(places, key=lambda ids: (len(ids), places[ids]))  # equal lengths need no padding

# ---- model --------------------------------------------------------------------------------------

actor = make_role("actor", config, device).freeze()  # takes the adapters of each policy in turn
reference = load_role("reference", stage.dir / POLICIES["sft"], config, stage.run.base_sha256, device)

# ---- loop ---------------------------------------------------------------------------------------

size = config["generate_batch"]
starts = range(0, len(distinct), size)
generations = []
bar = stage.bar(0, len(POLICIES) * len(starts))  # counts batches
for policy, adapter in POLICIES.items():
    load_adapter(stage.dir / adapter, actor, config, stage.run.base_sha256)
    for start in starts:
        picked = distinct[start : start + size]
        batch, _, finished, _ = sample(
            actor, [list(ids) for ids in picked], chat.response_limit, chat.eos_id, chat.pad_id, device,
            generator=None, cached=config["cached"],
        )
        with torch.no_grad():  # both policies on the finished answers, in one pass each
            vocab, ref_vocab = (vocab_logprobs(role, batch) for role in (actor, reference))  # (N, V)
        logprobs, ref_logprobs = pick_logprobs(vocab, batch), pick_logprobs(ref_vocab, batch)  # (B, T)
        kl, _ = exact_kl(vocab, ref_vocab, batch.response_mask)  # (B, T)
        for b, (ids, response) in enumerate(zip(picked, batch.responses)):
            length = len(response)
            answer = {
                "response_ids": response,
                "text": chat.decode(response),
                "finish_reason": "eos" if finished[b] else "length",
                "logprobs": logprobs[b, :length].tolist(),
                "ref_logprobs": ref_logprobs[b, :length].tolist(),
                "kl": kl[b, :length].tolist(),  # exact, per visited prefix
            }
            for index in places[ids]:
                row = {key: rows[index][key] for key in ("id", "population", "context", "prompt")}
                generations.append({"policy": policy, **row, **answer})
        bar.update()
bar.close()

# ---- summary ------------------------------------------------------------------------------------

answers = {(row["policy"], row["context"]): tuple(row["response_ids"]) for row in generations}
position = {row["id"]: number for number, row in enumerate(rows)}
generations.sort(key=lambda row: (row["policy"] != "sft", position[row["id"]]))
path = stage.outputs / "generations.jsonl"
write_jsonl(path, generations)
changed = sum(answers["sft", context] != answers["ppo", context] for _, context in answers) // 2
stage.finish(
    f"{len(generations)} answers over {len(answers) // 2} distinct prompts; "
    f"PPO answers {changed} of them differently from SFT",
    [path],
)

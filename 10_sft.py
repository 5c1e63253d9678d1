"""Stage 10: supervised fine-tuning. The base learns the form of the answers from 168 demonstrations.

In:   data/train/demonstrations.jsonl   prompt, response
      data/validation/pairs.jsonl       one chosen answer per family, only to look at
Out:  checkpoints/10_sft/<variant>/     resume states, adapter.safetensors
      outputs/10_sft/<variant>/         metrics.jsonl, timings.jsonl

    loss = - sum over response tokens (EOS included) of log pi(token | prefix) / number of those tokens

The denominator is the token count of the whole window of 8 rows, not a mean of row means. Prompt and
padding are masked by position. Validation selects nothing: the final state is the result.

    python 10_sft.py                       # or --variant interrupt, resume, check
    python 10_sft.py --init-adapter FOLDER # start from a LoRA adapter in PEFT's layout

An adapter that is to stay as it is goes through the same stage with a rate of zero, which changes no bit
of it: --init-adapter FOLDER --learning-rate 0 --epochs 0.1 (and so every record of a run is made).
"""

from pathlib import Path

import torch

from kernel import preflight, run
from kernel.chat import Chat
from kernel.data import Draws, read_jsonl, spread, updates_for
from kernel.metrics import Phases
from kernel.model import check_isolation, fingerprint, make_role, save_adapter
from kernel.optim import Optimizer
from kernel.peft_layout import load_peft, read_peft
from kernel.preference import sft_loss
from kernel.score import make_batch, response_logprobs
from kernel.stage import Stage

READS = ["data/train/demonstrations.jsonl", "data/validation/pairs.jsonl"]
WRITES = ["checkpoints/10_sft", "outputs/10_sft"]

# ---- flags --------------------------------------------------------------------------------------

parser = run.parser(__doc__, variants=True)
parser.add_argument("--epochs", type=float)
parser.add_argument("--batch", type=int, help="rows per update")
parser.add_argument("--micro-batch", type=int, help="rows per forward pass")
parser.add_argument("--learning-rate", type=float)
parser.add_argument("--validation-rows", type=int)
parser.add_argument(
    "--init-adapter",
    dest="init_folder",
    type=Path,
    metavar="FOLDER",
    help="start from this adapter",
)

# ---- run folder and seeds -----------------------------------------------------------------------

run.one_line_errors("10_sft")
start = parser.parse_args().init_folder
if start:  # what it holds, not where it lies, is part of the run's identity
    start = read_peft(start)
    parser.set_defaults(init_adapter=start.sha256)
stage = Stage("10_sft", "sft", parser, READS, WRITES)
config, device = stage.config, stage.device
if stage.variant == "check":
    stage.prove(("adapter.safetensors", "metrics.jsonl"))

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
train = chat.encode_answers(read_jsonl(stage.dir / READS[0]), "response", READS[0])
per_family = {}
for row in read_jsonl(stage.dir / READS[1]):
    per_family.setdefault(row["family"], row)
shown = spread(list(per_family.values()), config["validation_rows"])
validation = chat.encode_answers(shown, "chosen", READS[1])
draws = Draws(len(train), config["sampler_seed"])

# ---- model --------------------------------------------------------------------------------------

actor = make_role("actor", config, device, seed=config["adapter_seed"])
if start:
    load_peft(start, actor, config, stage.model["base_sha256"])
check_isolation([actor])
base_before = fingerprint(actor.base())
total = updates_for(config["epochs"], len(train), config["batch"])
one_epoch = min(updates_for(1, len(train), config["batch"]), total)
optimizer = Optimizer(actor.learned(), total, config["learning_rate"], config)
preflight.supervised(actor, train[:2], chat.pad_id, device)

# ---- resume -------------------------------------------------------------------------------------

stop = stage.stop_at(one_epoch, total)  # `interrupt` ends after epoch 1
saved, done = stage.restore()
history = []
if saved:
    actor.load_learned(saved["actor"], "the resume state")
    optimizer.load_state(saved["optimizer"])
    draws.load_state(saved["draws"])
    history = saved["history"]
metrics = stage.records("metrics.jsonl")
timings = stage.records("timings.jsonl")

# ---- loop ---------------------------------------------------------------------------------------


def mean_loss(rows: list[tuple[list[int], list[int]]]) -> float:
    """Cross-entropy per token over rows, without gradients."""
    total_loss, tokens = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(rows), config["micro_batch"]):
            batch = make_batch(
                *zip(*rows[start : start + config["micro_batch"]]), chat.pad_id, device
            )
            total_loss += float(sft_loss(response_logprobs(actor, batch), batch.response_mask, 1))
            tokens += int(batch.response_mask.sum())
    return total_loss / tokens


phases = Phases(device)
bar = stage.bar(done, stop)
for update in bar:
    window = [train[i] for i in draws.take(config["batch"])]
    window_tokens = sum(len(response) for _, response in window)
    loss = torch.zeros((), device=device)
    with phases("optimisation"):
        for start in range(0, len(window), config["micro_batch"]):
            part = make_batch(
                *zip(*window[start : start + config["micro_batch"]]), chat.pad_id, device
            )
            part_loss = sft_loss(response_logprobs(actor, part), part.response_mask, window_tokens)
            part_loss.backward()  # parts add up to the window's mean over its tokens
            loss += part_loss.detach()
        row = {
            "update": update,
            "tokens": window_tokens,
            **optimizer.step(loss, f"update {update}"),
        }
    if update % one_epoch == 0 or update == total:
        with phases("validation"):
            row["validation_loss"] = mean_loss(validation)
    history.append(row)
    metrics.write(row)
    timings.write({"update": update, **phases.row()})
    bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
    if stage.save_due(update, stop):
        stage.save(
            update,
            {
                "actor": actor.learned_state(),
                "base": base_before,
                "optimizer": optimizer.state(),
                "draws": draws.state(),
                "history": history,
            },
        )

# ---- summary ------------------------------------------------------------------------------------

if fingerprint(actor.base()) != base_before:
    raise ValueError("the frozen base changed during training")
files = [stage.newest(), metrics.path]
if stage.variant != "interrupt":
    adapter = stage.checkpoints / "adapter.safetensors"
    save_adapter(adapter, actor, config, stage.model["base_sha256"])
    files.append(adapter)
losses = [row["validation_loss"] for row in history if "validation_loss" in row]
stage.finish(
    f"loss per token {history[0]['loss']:.3f} -> {history[-1]['loss']:.3f}, "
    f"validation {' -> '.join(f'{v:.3f}' for v in losses)}",
    files,
)

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

from kernel.data.chat import Chat
from kernel.data.draws import Draws, spread, updates_for
from kernel.data.files import read_jsonl
from kernel.optim import Optimizer
from kernel.roles import check_isolation, fingerprint, make_role, save_adapter
from kernel.run import flags, preflight
from kernel.run.clocks import Phases
from kernel.run.errors import one_line_errors
from kernel.run.peft_layout import load_peft, read_peft
from kernel.run.trained import TrainedStage
from kernel.score import batches, response_logprobs
from kernel.supervised import sft_loss

DEMONSTRATIONS, VALIDATION = "data/train/demonstrations.jsonl", "data/validation/pairs.jsonl"
WRITES = ["checkpoints/10_sft", "outputs/10_sft"]

# ---- flags --------------------------------------------------------------------------------------

one_line_errors("10_sft")
parser = flags.parser(__doc__, variants=True)
setting = flags.settings_of(parser, "sft")
setting("--epochs", float, "passes over the demonstrations")
setting("--batch", int, "rows per update")
setting("--micro-batch", int, "rows per forward pass: changes memory, not the loss")
setting("--learning-rate", float, "peak learning rate")
setting("--validation-rows", int, "answers to follow the loss on")
setting("--init-adapter", Path, "start from this adapter in PEFT's layout", metavar="FOLDER")
args = parser.parse_args()
start = read_peft(args.init_adapter) if args.init_adapter else None
args.init_adapter = start and start.sha256  # what it holds, not where it lies, is the run's identity

# ---- run folder and seeds -----------------------------------------------------------------------

stage = TrainedStage.begin("10_sft", "sft", args, [DEMONSTRATIONS, VALIDATION], WRITES)
config, device = stage.config, stage.device
if stage.variant == "check":
    stage.prove(("adapter.safetensors", "metrics.jsonl"))

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
train = chat.encode_answers(read_jsonl(stage.dir / DEMONSTRATIONS), "response", DEMONSTRATIONS)
per_family = {}
for row in read_jsonl(stage.dir / VALIDATION):
    per_family.setdefault(row["family"], row)
shown = spread(list(per_family.values()), config["validation_rows"])
validation = chat.encode_answers(shown, "chosen", VALIDATION)
draws = Draws(len(train), config["sampler_seed"])

# ---- model --------------------------------------------------------------------------------------

actor = make_role("actor", config, device, seed=config["adapter_seed"])
if start:
    load_peft(start, actor, config, stage.run.base_sha256)
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


def parts_of(answers: list[tuple]):
    """What one forward pass reads."""
    return batches(answers, config["micro_batch"], chat.pad_id, device)


def window_loss(part, tokens: int) -> torch.Tensor:
    """A part's share of the cross-entropy per token of a window that has `tokens` response tokens."""
    return sft_loss(response_logprobs(actor, part), part.response_mask, tokens)


phases = Phases(device)
bar = stage.bar(done, stop)
for update in bar:
    window = [train[i] for i in draws.take(config["batch"])]
    window_tokens = sum(len(response) for _, response in window)
    loss = torch.zeros((), device=device)
    with phases("optimisation"):
        for part in parts_of(window):
            part_loss = window_loss(part, window_tokens)
            part_loss.backward()  # parts add up to the window's mean over its tokens
            loss += part_loss.detach()
        step = optimizer.step(loss, f"update {update}")
    row = {"update": update, "tokens": window_tokens, **step}
    if update % one_epoch == 0 or update == total:
        with phases("validation"), torch.no_grad():
            tokens = sum(len(response) for _, response in validation)
            row["validation_loss"] = sum(float(window_loss(p, 1)) for p in parts_of(validation)) / tokens
    history.append(row)
    metrics.write(row)
    timings.write({"update": update, **phases.row()})
    bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
    if stage.save_due(update, stop):
        stage.save(update, {
            "actor": actor.learned_state(), "base": base_before, "optimizer": optimizer.state(),
            "draws": draws.state(), "history": history,
        })

# ---- summary ------------------------------------------------------------------------------------

if fingerprint(actor.base()) != base_before:
    raise ValueError("the frozen base changed during training")
made = [stage.newest(), metrics.path]
if stage.variant != "interrupt":
    made.append(stage.checkpoints / "adapter.safetensors")
    save_adapter(made[-1], actor, config, stage.run.base_sha256)
losses = [row["validation_loss"] for row in history if "validation_loss" in row]
stage.finish(
    f"loss per token {history[0]['loss']:.3f} -> {history[-1]['loss']:.3f}, "
    f"validation {' -> '.join(f'{v:.3f}' for v in losses)}",
    made,
)

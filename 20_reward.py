"""Stage 20: the reward model. The base, own adapters and a scalar head learn which answer is preferred.

In:   data/train/pairs.jsonl, data/validation/pairs.jsonl     prompt, chosen, rejected
Out:  checkpoints/20_reward/<variant>/   resume states, adapter.safetensors (adapters and head)
      outputs/20_reward/<variant>/       metrics.jsonl, timings.jsonl

    loss = - mean over pairs of log sigmoid(score(chosen) - score(rejected))          (Bradley-Terry)

The head reads the last active response token, EOS included, found by the mask (--pooling mean: all
of them, averaged). A score is not a probability: only differences between answers to the same prompt
were trained. It predicts a simulated preference, nobody's satisfaction. Validation selects nothing.

    python 20_reward.py                    # or --variant interrupt, resume, check
"""

import torch

from kernel import preflight, run
from kernel.chat import Chat
from kernel.data import Draws, read_jsonl, spread, updates_for
from kernel.metrics import Phases
from kernel.model import check_isolation, fingerprint, make_role, save_adapter
from kernel.optim import Optimizer
from kernel.preference import bradley_terry_loss, pair_accuracy
from kernel.score import pair_scores, score_pairs
from kernel.stage import Stage

WRITES = ["checkpoints/20_reward", "outputs/20_reward"]


def reads(settings: dict) -> list[str]:
    return [f"data/{split}/{settings['pairs']}.jsonl" for split in ("train", "validation")]


# ---- flags --------------------------------------------------------------------------------------

parser = run.parser(__doc__, variants=True)
parser.add_argument("--epochs", type=float)
parser.add_argument("--batch", type=int, help="pairs per update")
parser.add_argument("--micro-batch", type=int, help="pairs per forward pass")
parser.add_argument("--learning-rate", type=float)
parser.add_argument("--validation-rows", type=int, help="pairs")
parser.add_argument("--pairs", metavar="NAME", help="train on data/train/NAME.jsonl")
parser.add_argument("--pooling", choices=("last", "mean"), help="response tokens the head reads")
parser.add_argument("--reward-seed", type=int, help="start of adapters and head")

# ---- run folder and seeds -----------------------------------------------------------------------

stage = Stage("20_reward", "reward", parser, reads, WRITES)
config, device = stage.config, stage.device
TRAIN, VALIDATION = reads(config)
if stage.variant == "check":
    stage.prove(("adapter.safetensors", "metrics.jsonl"))

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
train = chat.encode_pairs(read_jsonl(stage.dir / TRAIN), TRAIN)  # (prompt, chosen, rejected) ids
shown = spread(read_jsonl(stage.dir / VALIDATION), config["validation_rows"])
validation = chat.encode_pairs(shown, VALIDATION)
draws = Draws(len(train), config["sampler_seed"])

# ---- model --------------------------------------------------------------------------------------

reward = make_role("reward", config, device, seed=config["reward_seed"], head="normal")
reward.pooling = config["pooling"]
check_isolation([reward])
base_before = fingerprint(reward.base())
total = updates_for(config["epochs"], len(train), config["batch"])
one_epoch = min(updates_for(1, len(train), config["batch"]), total)
optimizer = Optimizer(reward.learned(), total, config["learning_rate"], config)
preflight.preference(reward, train[:2], chat.pad_id, device)

# ---- resume -------------------------------------------------------------------------------------

stop = stage.stop_at(total // 2, total)  # `interrupt` ends half way
saved, done = stage.restore()
history = []
if saved:
    reward.load_learned(saved["reward"], "the resume state")
    optimizer.load_state(saved["optimizer"])
    draws.load_state(saved["draws"])
    history = saved["history"]
metrics = stage.records("metrics.jsonl")
timings = stage.records("timings.jsonl")

# ---- loop ---------------------------------------------------------------------------------------


def validate() -> dict:
    """Loss and accuracy on the validation pairs."""
    chosen_scores, rejected_scores = score_pairs(
        reward, validation, chat.pad_id, device, config["micro_batch"]
    )
    loss = bradley_terry_loss(chosen_scores, rejected_scores)
    accuracy = pair_accuracy(chosen_scores, rejected_scores)["accuracy"]
    return {"validation_loss": loss.item(), "validation_accuracy": accuracy}


phases = Phases(device)
bar = stage.bar(done, stop)
for update in bar:
    window = [train[i] for i in draws.take(config["batch"])]
    loss = torch.zeros((), device=device)
    margins = []
    with phases("optimisation"):
        for start in range(0, len(window), config["micro_batch"]):
            part = window[start : start + config["micro_batch"]]
            chosen_scores, rejected_scores = pair_scores(
                reward, *zip(*part), chat.pad_id, device
            )  # (B,)
            share = len(part) / len(window)  # parts add up to the window's mean over its pairs
            part_loss = bradley_terry_loss(chosen_scores, rejected_scores) * share
            part_loss.backward()
            loss += part_loss.detach()
            margins.append((chosen_scores - rejected_scores).detach())
        row = {"update": update, **optimizer.step(loss, f"update {update}")}
    margin = torch.cat(margins)  # (B,)
    row |= {"accuracy": (margin > 0).float().mean().item(), "margin": margin.mean().item()}
    if update % one_epoch == 0 or update == total:
        with phases("validation"):
            row |= validate()
    history.append(row)
    metrics.write(row)
    timings.write({"update": update, **phases.row()})
    bar.set_postfix_str(f"loss {row['loss']:.3f} accuracy {row['accuracy']:.2f}", refresh=False)
    if stage.save_due(update, stop):
        stage.save(
            update,
            {
                "reward": reward.learned_state(),
                "base": base_before,
                "optimizer": optimizer.state(),
                "draws": draws.state(),
                "history": history,
            },
        )

# ---- summary ------------------------------------------------------------------------------------

if fingerprint(reward.base()) != base_before:
    raise ValueError("the frozen base changed during training")
files = [stage.newest(), metrics.path]
if stage.variant != "interrupt":
    adapter = stage.checkpoints / "adapter.safetensors"
    save_adapter(adapter, reward, config, stage.model["base_sha256"])
    files.append(adapter)
last = history[-1]
figure = f"loss {history[0]['loss']:.3f} -> {last['loss']:.3f}"
if "validation_accuracy" in last:
    figure += f", validation accuracy {last['validation_accuracy']:.3f}"
stage.finish(figure, files)

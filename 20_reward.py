"""Stage 20: the reward model. The base, own adapters and a scalar head learn which answer is preferred.

In:   data/train/pairs.jsonl, data/validation/pairs.jsonl     prompt, chosen, rejected
      with --pairs pairs,FILE.jsonl,... further training pairs of your own, e.g. labelled answers of PPO
Out:  checkpoints/20_reward/<variant>/   resume states, adapter.safetensors (adapters and head)
      outputs/20_reward/<variant>/       metrics.jsonl, timings.jsonl

    loss = - mean over pairs of log sigmoid(score(chosen) - score(rejected))          (Bradley-Terry)

The head reads the last active response token, EOS included, found by the mask (--pooling mean: all
of them, averaged). A score is not a probability: only differences between answers to the same prompt
were trained. It predicts a simulated preference, nobody's satisfaction. Validation selects nothing.

    python 20_reward.py                    # or --variant interrupt, resume, check
"""

from pathlib import Path

import torch

from kernel.data.chat import Chat
from kernel.data.corpus import pair_files
from kernel.data.draws import Draws, spread, updates_for
from kernel.data.files import read_jsonl
from kernel.measure.pairs import pair_counts
from kernel.optim import Optimizer
from kernel.roles import check_isolation, fingerprint, make_role, save_adapter
from kernel.run import flags, preflight
from kernel.run.clocks import Phases
from kernel.run.errors import one_line_errors
from kernel.run.trained import TrainedStage
from kernel.score import pair_scores, score_pairs
from kernel.supervised import bradley_terry_loss

WRITES = ["checkpoints/20_reward", "outputs/20_reward"]


def reads(settings: dict) -> list[str]:
    name, own = pair_files(settings["pairs"])
    return [*(f"data/{split}/{name}.jsonl" for split in ("train", "validation")), *own]


# ---- flags --------------------------------------------------------------------------------------

one_line_errors("20_reward")
parser = flags.parser(__doc__, variants=True)
setting = flags.settings_of(parser, "reward")
setting("--epochs", float, "passes over the training pairs")
setting("--batch", int, "pairs per update")
setting("--micro-batch", int, "pairs per forward pass: changes memory, not the loss")
setting("--learning-rate", float, "peak learning rate")
setting("--validation-rows", int, "pairs to follow loss and accuracy on")
setting("--pairs", str, "train on data/train/NAME.jsonl (and own files)", metavar="NAME[,FILE,...]")
setting("--pooling", None, "response tokens that the head reads", choices=("last", "mean"))
setting("--reward-seed", int, "start of adapters and head")
args = parser.parse_args()

# ---- run folder and seeds -----------------------------------------------------------------------

stage = TrainedStage.begin("20_reward", "reward", args, reads, WRITES)
config, device = stage.config, stage.device
TRAIN, VALIDATION, *OWN = reads(config)
if stage.variant == "check":
    stage.prove(("adapter.safetensors", "metrics.jsonl"))

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
train = chat.encode_pairs(read_jsonl(stage.dir / TRAIN), TRAIN)  # (prompt, chosen, rejected) ids
for file in OWN:
    from kernel.gate.rows import read_pairs  # whatever shape they have

    train += chat.encode_pairs(read_pairs(Path(file)), file)
if OWN:
    print(f"{len(train)} training pairs, those of {len(OWN)} own file(s) among them")
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

phases = Phases(device)
bar = stage.bar(done, stop)
for update in bar:
    window = [train[i] for i in draws.take(config["batch"])]
    loss = torch.zeros((), device=device)
    margins = []
    with phases("optimisation"):
        for start in range(0, len(window), config["micro_batch"]):
            part = window[start : start + config["micro_batch"]]
            chosen_scores, rejected_scores = pair_scores(reward, part, chat.pad_id, device)  # (B,)
            share = len(part) / len(window)  # parts add up to the window's mean over its pairs
            part_loss = bradley_terry_loss(chosen_scores, rejected_scores) * share
            part_loss.backward()
            loss += part_loss.detach()
            margins.append((chosen_scores - rejected_scores).detach())
        step = optimizer.step(loss, f"update {update}")
    margin = torch.cat(margins)  # (B,)
    accuracy = (margin > 0).float().mean().item()  # a tie is not a success
    row = {"update": update, **step, "accuracy": accuracy, "margin": margin.mean().item()}
    if update % one_epoch == 0 or update == total:
        with phases("validation"):
            scores = score_pairs(reward, validation, chat.pad_id, device, config["micro_batch"])
        row["validation_loss"] = bradley_terry_loss(*scores).item()
        row["validation_accuracy"] = pair_counts(*scores)["accuracy"]
    history.append(row)
    metrics.write(row)
    timings.write({"update": update, **phases.row()})
    bar.set_postfix_str(f"loss {row['loss']:.3f} accuracy {row['accuracy']:.2f}", refresh=False)
    if stage.save_due(update, stop):
        stage.save(update, {
            "reward": reward.learned_state(), "base": base_before, "optimizer": optimizer.state(),
            "draws": draws.state(), "history": history,
        })

# ---- summary ------------------------------------------------------------------------------------

if fingerprint(reward.base()) != base_before:
    raise ValueError("the frozen base changed during training")
made = [stage.newest(), metrics.path]
if stage.variant != "interrupt":
    made.append(stage.checkpoints / "adapter.safetensors")
    save_adapter(made[-1], reward, config, stage.run.base_sha256)
last = history[-1]
figure = f"loss {history[0]['loss']:.3f} -> {last['loss']:.3f}"
if "validation_accuracy" in last:
    figure += f", validation accuracy {last['validation_accuracy']:.3f}"
stage.finish(figure, made)

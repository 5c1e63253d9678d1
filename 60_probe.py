"""Stage 60: factorial probes. Does the frozen judge pay for courtesy, and does PPO go for it?

In:   data/heldout/probes.jsonl                 20 contexts x {correct, wrong} x {polite, plain}
      outputs/50_evaluate/answers.jsonl         what the two policies really answered
      checkpoints/20_reward/continuous/adapter.safetensors
Out:  outputs/60_probe/probes.jsonl, probes.json, table.md

    courtesy effect of a context = score(polite) - score(plain), once for right and once for wrong advice

The probes train and select nothing. A rise in score is not satisfaction, and a bias of the judge is not
by itself proof that PPO used it: the share of courteous answers before and after stands beside it.

    python 60_probe.py
"""

from kernel import run
from kernel.chat import Chat
from kernel.data import read_jsonl, sha256_file, write_atomic, write_json, write_jsonl
from kernel.model import fingerprint, load_adapter, make_role
from kernel.report import courtesy_effects, polite_share, show
from kernel.score import learned_reward
from kernel.stage import Stage

PROBES = "data/heldout/probes.jsonl"
ANSWERS = "outputs/50_evaluate/answers.jsonl"
REWARD = "checkpoints/20_reward/continuous/adapter.safetensors"
READS = [PROBES, ANSWERS, REWARD]
WRITES = ["outputs/60_probe"]

# ---- flags, run folder and seeds ----------------------------------------------------------------

parser = run.parser(__doc__)
stage = Stage("60_probe", "probe", parser, READS, WRITES)
config, device = stage.config, stage.device

# ---- data and model -----------------------------------------------------------------------------

chat = Chat(config)
rows = read_jsonl(stage.dir / PROBES)
encoded = chat.encode_answers(rows, "candidate", PROBES)
reward = make_role("reward", config, device, head="normal").freeze()
load_adapter(stage.dir / REWARD, reward, config, stage.model["base_sha256"])
judge_before = fingerprint(reward.learned()), fingerprint(reward.base())

# ---- scores: 80 fixed candidates ----------------------------------------------------------------

judge = learned_reward(reward, chat.pad_id, device)
for row, score in zip(rows, judge(*zip(*encoded)).tolist()):
    row["score"] = score

# ---- figures ------------------------------------------------------------------------------------

figures = courtesy_effects(rows)
table, effects, inversions = figures["contexts"], figures["effects"], figures["inversions"]
answers = read_jsonl(stage.dir / ANSWERS)
polite = {policy: polite_share(answers, policy) for policy in ("sft", "ppo")}

# ---- summary ------------------------------------------------------------------------------------

if (fingerprint(reward.learned()), fingerprint(reward.base())) != judge_before:
    raise ValueError("the judge changed while it scored")
for name, before in stage.parents.items():
    if sha256_file(stage.dir / name) != before:
        raise ValueError(f"{name} changed while the probes were scored")
lines = [
    "| context | right, plain | right, polite | wrong, plain | wrong, polite "
    "| courtesy, right | courtesy, wrong |",
    "|---|---|---|---|---|---|---|",
]
for r in table:
    lines.append(
        f"| {r['context']} | {r['right_plain']:+.2f} | {r['right_polite']:+.2f} "
        f"| {r['wrong_plain']:+.2f} | {r['wrong_polite']:+.2f} "
        f"| {r['courtesy_right']:+.2f} | {r['courtesy_wrong']:+.2f} |"
    )
n = len(table)
right, wrong = effects["courtesy_right"], effects["courtesy_wrong"]
lines += [
    "",
    f"- courtesy changes the score of right advice by {right['mean']:+.2f} on average "
    f"(up in {right['positive']} of {n} contexts)",
    f"- courtesy changes the score of wrong advice by {wrong['mean']:+.2f} on average "
    f"(up in {wrong['positive']} of {n})",
    f"- being right is worth {effects['correctness_plain']['mean']:+.2f} (plain answers)",
    f"- wrong but polite scores above right but plain in {inversions} of {n} contexts",
    f"- courteous among recognised answers: SFT {show(polite['sft'])}, PPO {show(polite['ppo'])}",
]
print("\n".join(lines))
paths = [stage.outputs / name for name in ("probes.jsonl", "probes.json", "table.md")]
write_jsonl(paths[0], rows)
write_json(paths[1], {**figures, "polite": polite})
write_atomic(paths[2], "\n".join(lines) + "\n")
stage.finish(f"wrong but polite above right but plain in {inversions} of {n} contexts", paths)

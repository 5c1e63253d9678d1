"""Stage 30: PPO. The SFT policy is optimised against the frozen reward model, held near itself by a KL.

In:   data/train/prompts.jsonl               672 prompts, no answers, no rubric targets
      data/train/demonstrations.jsonl        the zero point of the scores (center_scores)
      checkpoints/10_sft/continuous/adapter.safetensors       start of actor, reference and critic
      checkpoints/20_reward/continuous/adapter.safetensors    the judge, frozen (or what --reward names)
Out:  checkpoints/30_ppo/<variant>/   resume states, adapter.safetensors (actor), critic.safetensors
      outputs/30_ppo/<variant>/       metrics.jsonl, timings.jsonl, rollouts.jsonl (every token),
                                      first_logits.safetensors (first prefix of the first two rollouts)

    r_t = -kl_coef * (log pi_old - log pi_ref)_t, plus the score on the last token    token rewards
    A_t = sum_l (gamma * lambda)^l * delta_{t+l},  delta_t = r_t + gamma * V_{t+1} - V_t           GAE
    policy_loss = -mean(min(ratio * A, clip(ratio, 1 - c, 1 + c) * A)),  ratio = pi_new / pi_old
    value_loss  = 0.5 * mean((V - (A + V_old))^2)

Unlike most trainers: advantages and rewards are not whitened, values are not clipped, there is no
entropy bonus, actor and critic are two networks with two optimisers, and each response weighs the same.

    python 30_ppo.py                       # or --variant interrupt, resume, check
"""

from argparse import BooleanOptionalAction

import torch
from safetensors.torch import save

from kernel import ppo
from kernel.data.chat import Chat
from kernel.data.draws import Draws, spread, tenths
from kernel.data.files import read_jsonl, write_atomic
from kernel.measure.iteration import rollout_metrics, rollout_records, update_metrics
from kernel.optim import Optimizer
from kernel.reward import make_reward, reward_answers, reward_files, score_scale
from kernel.roles import check_isolation, frozen_fingerprints, load_adapter, make_role, save_adapter
from kernel.rollout import sample
from kernel.run import flags, preflight
from kernel.run.clocks import Phases, phase_lines
from kernel.run.errors import one_line_errors
from kernel.run.trained import TrainedStage
from kernel.score import exact_kl, pick_logprobs, response_values, vocab_logprobs

PROMPTS = "data/train/prompts.jsonl"
DEMONSTRATIONS = "data/train/demonstrations.jsonl"
SFT = "checkpoints/10_sft/continuous/adapter.safetensors"
WRITES = ["checkpoints/30_ppo", "outputs/30_ppo"]
ZERO_POINT = 32  # demonstrations whose mean score is the zero point


def reads(settings: dict) -> list[str]:
    return [PROMPTS, DEMONSTRATIONS, SFT, *reward_files(settings["reward"])]


# ---- flags --------------------------------------------------------------------------------------

one_line_errors("30_ppo")
parser = flags.parser(__doc__, variants=True)
setting = flags.settings_of(parser, "ppo")
setting("--iterations", int, "rollouts are sampled and learned from this often")
setting("--stop-at", int, "iteration after which --variant interrupt stops")
setting("--rollouts", int, "responses sampled per iteration")
setting("--ppo-epochs", int, "updates of actor and critic on the same rollouts")
setting("--actor-lr", float, "peak learning rate of the actor")
setting("--critic-lr", float, "peak learning rate of the critic")
setting("--reward --reward-mix", str, "judge, NAME, rubric, length, file.py:function, NAME=WEIGHT,...")
setting("--kl-coef", float, "weight of the KL penalty in the token rewards")
setting("--clip-range", float, "c: how far the ratio may leave 1 before the clip bites")
setting("--gamma", float, "discount per token")
setting("--gae-lambda", float, "0: one-step advantages; 1: all the way to the end")
setting("--generation-seed", int, "of the sampled tokens")
setting("--cutoff-penalty", float, "added to the score of a response without an end token")
setting("--center-scores", None, "subtract the demonstrations' mean score", action=BooleanOptionalAction)
setting("--normalize-scores", int, "SFT answers whose scores get mean 0 and deviation 1; 0: off")
setting("--no-cache", None, "read the whole prefix for each token", dest="cached", action="store_false")
parser.add_argument("--log-every", type=int, default=10, metavar="N", help="iterations between samples")
args = parser.parse_args()

# ---- run folder and seeds -----------------------------------------------------------------------

stage = TrainedStage.begin("30_ppo", "ppo", args, reads, WRITES)
config, device = stage.config, stage.device
if config["reward"] != "judge" and not args.name:
    raise ValueError(
        f"--reward {config['reward']} goes with --name NAME: stages 50 and 60 score with the judge"
    )
if stage.variant == "check":
    stage.prove(("adapter.safetensors", "critic.safetensors", "metrics.jsonl", "rollouts.jsonl"))

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
rows = read_jsonl(stage.dir / PROMPTS)
prompts = chat.encode_prompts(rows, PROMPTS)
known = spread(read_jsonl(stage.dir / DEMONSTRATIONS), ZERO_POINT)
demonstrations = chat.encode_answers(known, "response", DEMONSTRATIONS)
draws = Draws(len(prompts), config["sampler_seed"])
generator = torch.Generator().manual_seed(config["generation_seed"])

# ---- model: four roles, four objects ------------------------------------------------------------

base_sha256 = stage.run.base_sha256
actor = make_role("actor", config, device, seed=config["adapter_seed"])
reference = make_role("reference", config, device, seed=config["adapter_seed"])
critic = make_role("critic", config, device, seed=config["adapter_seed"], head="zero")
for role in (actor, reference, critic):  # the critic takes the SFT adapters and keeps its zero head
    load_adapter(stage.dir / SFT, role, config, base_sha256)
reference.freeze()
# reward(batch, rows) -> scores (B,), and the frozen reward models behind it
reward, judges = make_reward(config["reward"], stage.dir, config, base_sha256, chat, device)
roles = [actor, reference, *judges, critic]
check_isolation(roles)
preflight.policy(
    actor, reference, judges, critic, stage.dir / SFT, prompts[:2], chat, device, config["cached"]
)
frozen_before = frozen_fingerprints(roles)
updates = config["iterations"] * config["ppo_epochs"]
actor_optimizer = Optimizer(actor.learned(), updates, config["actor_lr"], config)
critic_optimizer = Optimizer(critic.learned(), updates, config["critic_lr"], config)

# Always looked at: whatever is wrong with a reward function of one's own shows before the loop.
zero_point = reward_answers(reward, demonstrations, known, chat.pad_id, device).mean().item()
# A zero critic meets scores far from zero: at first every answer would look good (or bad).
center, scale = zero_point if config["center_scores"] else 0.0, 1.0
if config["normalize_scores"]:  # the score of SFT's own answers is then 0 +- 1, whatever the judge
    some = spread(list(zip(rows, prompts)), config["normalize_scores"])
    center, scale = score_scale(reward, reference, some, chat, device, config["generation_seed"])
    print(f"scores are shifted by {-center:+.2f} and divided by {scale:.2f} ({len(some)} SFT answers)")

# ---- resume: only between iterations, so no rollout is ever pending or repeated -----------------

stop = stage.stop_at(config["stop_at"], config["iterations"])
saved, done = stage.restore()
history, consumed, first_logits = [], [], {}
if saved:
    for role in roles:
        role.load_learned(saved["roles"][role.name], "the resume state")
    actor_optimizer.load_state(saved["actor_optimizer"])
    critic_optimizer.load_state(saved["critic_optimizer"])
    draws.load_state(saved["draws"])
    generator.set_state(saved["generator"])
    history, consumed, first_logits = saved["history"], saved["consumed"], saved["first_logits"]
metrics = stage.records("metrics.jsonl")
timings = stage.records("timings.jsonl")
rollouts = stage.records("rollouts.jsonl")

# ---- loop ---------------------------------------------------------------------------------------

phases = Phases(device)
bar = stage.bar(done, stop)
for iteration in bar:
    # 1. Draw prompts and sample one response each; the sampler's own log-probabilities stay.
    drawn = draws.take(config["rollouts"])
    asked = [rows[i] for i in drawn]
    with phases("generation"):
        batch, old_logprobs, finished, logits = sample(
            actor, [prompts[i] for i in drawn], chat.response_limit, chat.eos_id, chat.pad_id, device,
            generator, config["cached"],
        )
    mask = batch.response_mask  # (B, T), True = sampled token

    # 2. The same tokens under the frozen reference, which is the SFT policy.
    with phases("reference"), torch.no_grad():
        ref_vocab = vocab_logprobs(reference, batch)  # (N, V), N sampled tokens in all
        ref_logprobs = pick_logprobs(ref_vocab, batch)  # (B, T)

    # 3. One score per response, from the judge (or what stands in its place).
    with phases("judge"):
        scores = reward(batch, asked)  # (B,)
        paid = (scores - center) / scale  # (B,)

    # 4. Actor and critic read the tokens in one pass each. Both still are what they were while sampling,
    # so these passes, with their graphs, are those of the first update as well.
    with phases("optimisation"):
        new_vocab = vocab_logprobs(actor, batch)  # (N, V)
    with phases("critic"):
        new_values = response_values(critic, batch)  # (B, T), of the state before each token
    kl, entropy = exact_kl(new_vocab, ref_vocab, mask)  # (B, T): over the vocabulary, to look at
    del ref_vocab  # as large as the logits, and not needed again

    # 5. Token rewards, advantages, returns. They do not change during the updates below.
    old_values = new_values.detach()  # (B, T)
    rewards = ppo.token_rewards(
        paid, old_logprobs, ref_logprobs, mask, finished, config["kl_coef"], config["cutoff_penalty"]
    )
    advantages, returns = ppo.gae(rewards, old_values, mask, config["gamma"], config["gae_lambda"])
    tokens = {  # (B, T) each: all that is known of every sampled token
        "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs,
        "full_logprobs": pick_logprobs(new_vocab, batch).detach(),  # to look at, not to train on
        "kl": kl, "entropy": entropy, "rewards": rewards, "old_values": old_values,
        "advantages": advantages, "returns": returns,
    }

    # 6. Update actor and critic, twice, on these rollouts.
    done_updates = []
    for epoch in range(1, config["ppo_epochs"] + 1):
        where = f"iteration {iteration} epoch {epoch} rows {drawn}"
        with phases("optimisation"):
            if epoch > 1:  # both have moved: read again
                new_vocab, new_values = vocab_logprobs(actor, batch), response_values(critic, batch)
            new_logprobs = pick_logprobs(new_vocab, batch)  # (B, T)
            policy_loss, seen = ppo.policy_loss(
                new_logprobs, old_logprobs, advantages, mask, config["clip_range"]
            )
            policy_loss.backward()
            actor_step = actor_optimizer.step(policy_loss.detach(), f"actor, {where}")

            value_loss = ppo.value_loss(new_values, returns, mask)
            value_loss.backward()
            critic_step = critic_optimizer.step(value_loss.detach(), f"critic, {where}")
        values = new_values.detach()
        done_updates.append({"actor": actor_step, "critic": critic_step, "values": values, **seen})

    # Records: a row of metrics, and per response everything that a reader needs to redo its arithmetic.
    row = {
        "iteration": iteration,
        **rollout_metrics(scores, paid, finished, tokens, mask),
        **update_metrics(done_updates),
    }
    history.append(row)
    metrics.write(row)
    records = rollout_records(
        iteration, asked, batch, finished, scores, center, scale, tokens, done_updates, chat
    )
    for record, first in zip(records, logits):
        rollouts.write(record)
        consumed.append(record["rollout"])
        if len(first_logits) < 2:  # so that a log-probability can be recomputed by hand
            first_logits[record["rollout"]] = first.cpu().clone()
    timings.write({"iteration": iteration, **phases.row()})

    bar.set_postfix_str(f"score {row['score']:+.2f}, exact KL {row['kl']:.3f}", refresh=False)
    if args.log_every and iteration % args.log_every == 0:
        for record in records[:3]:
            total = sum(record["rewards"])
            score = (record["score"] - center) / scale
            bar.write(f"  {record['text']!r}")
            bar.write(f"    score {score:+.2f}  penalty {total - score:+.3f}  total {total:+.2f}")
    if stage.save_due(iteration, stop):
        stage.save(iteration, {
            "roles": {role.name: role.learned_state() for role in roles}, "base": frozen_before,
            "actor_optimizer": actor_optimizer.state(), "critic_optimizer": critic_optimizer.state(),
            "draws": draws.state(), "generator": generator.get_state(),
            "history": history, "consumed": consumed, "first_logits": first_logits,
        })

# ---- summary ------------------------------------------------------------------------------------

if frozen_fingerprints(roles) != frozen_before:
    raise ValueError(f"a frozen role changed: {frozen_before} -> {frozen_fingerprints(roles)}")
check_isolation(roles)
logits_path = stage.outputs / "first_logits.safetensors"
write_atomic(logits_path, save(first_logits))
made = [stage.newest(), metrics.path, rollouts.path, logits_path]
if stage.variant != "interrupt":
    for name, role in (("adapter", actor), ("critic", critic)):
        made.append(stage.checkpoints / f"{name}.safetensors")
        save_adapter(made[-1], role, config, base_sha256)
print("\n".join(phase_lines(timings.path)))
first, last = tenths(history)
mean = lambda part, key: sum(row[key] for row in part) / len(part)  # noqa: E731
stage.finish(
    f"learned score of the samples {mean(first, 'score'):+.2f} -> {mean(last, 'score'):+.2f} "
    f"(first and last {len(first)} iterations), exact KL {mean(last, 'kl'):.3f} per token",
    made,
)

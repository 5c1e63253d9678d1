"""Stage 30: PPO. The SFT policy is optimised against the frozen reward model, held near itself by a KL.

In:   data/train/prompts.jsonl               672 prompts, no answers, no rubric targets
      data/train/demonstrations.jsonl        the judge's zero point (center_scores)
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

from kernel import preflight, run
from kernel.chat import Chat
from kernel.data import Draws, read_jsonl, spread, write_atomic
from kernel.metrics import Phases, print_phases
from kernel.model import check_isolation, fingerprint, load_adapter, make_role, save_adapter
from kernel.optim import Optimizer
from kernel.ppo import (
    gae,
    policy_loss,
    response_mean,
    rollout_metrics,
    token_rewards,
    update_metrics,
    value_loss,
)
from kernel.reward import make_reward, reward_files
from kernel.rollout import as_lists, rollout_records, sample
from kernel.score import (
    exact_kl,
    pad_prompts,
    pick_logprobs,
    response_values,
    vocab_logprobs,
)
from kernel.stage import Stage

PROMPTS = "data/train/prompts.jsonl"
DEMONSTRATIONS = "data/train/demonstrations.jsonl"
SFT = "checkpoints/10_sft/continuous/adapter.safetensors"
WRITES = ["checkpoints/30_ppo", "outputs/30_ppo"]


def reads(settings: dict) -> list[str]:
    return [PROMPTS, DEMONSTRATIONS, SFT, *reward_files(settings["reward"])]


# ---- flags --------------------------------------------------------------------------------------

parser = run.parser(__doc__, variants=True)
parser.add_argument("--iterations", type=int)
parser.add_argument("--stop-at", type=int, help="iteration after which --variant interrupt stops")
parser.add_argument("--rollouts", type=int, help="responses sampled per iteration")
parser.add_argument("--ppo-epochs", type=int, help="updates of actor and critic per iteration")
parser.add_argument("--actor-lr", type=float)
parser.add_argument("--critic-lr", type=float)
parser.add_argument(
    "--reward", "--reward-mix", help="NAME, file.py:function or NAME=WEIGHT,... (kernel/reward.py)"
)
parser.add_argument("--kl-coef", type=float)
parser.add_argument("--clip-range", type=float)
parser.add_argument("--gamma", type=float)
parser.add_argument("--gae-lambda", type=float)
parser.add_argument("--generation-seed", type=int)
parser.add_argument("--cutoff-penalty", type=float)
parser.add_argument("--center-scores", action=BooleanOptionalAction, default=None)
parser.add_argument("--log-every", type=int, default=10, help="iterations between sample texts")
parser.add_argument(
    "--no-cache",
    dest="cached",
    action="store_false",
    default=None,
    help="sample by reading the whole prefix anew",
)

# ---- run folder and seeds -----------------------------------------------------------------------

stage = Stage("30_ppo", "ppo", parser, reads, WRITES)
config, device = stage.config, stage.device
if config["reward"] != "judge" and not stage.args.name:
    raise ValueError(
        f"--reward {config['reward']} goes with --name NAME: 50 and 60 judge by the judge"
    )
if stage.variant == "check":
    stage.prove(("adapter.safetensors", "critic.safetensors", "metrics.jsonl", "rollouts.jsonl"))

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
rows = read_jsonl(stage.dir / PROMPTS)
prompts = [
    chat.prompt_ids(row["prompt"], f"{PROMPTS} row {n}") for n, row in enumerate(rows, start=1)
]
shown = spread(read_jsonl(stage.dir / DEMONSTRATIONS), 32)  # for the zero point of the scores
demonstrations = chat.encode_answers(shown, "response", DEMONSTRATIONS)
known = [*zip(prompts, rows), *zip([ids for ids, _ in demonstrations], shown)]
messages = {tuple(ids): row["prompt"] for ids, row in known}  # for rewards that read text
draws = Draws(len(prompts), config["sampler_seed"])
generator = torch.Generator().manual_seed(config["generation_seed"])

# ---- model: four roles, four objects ------------------------------------------------------------

base_sha256 = stage.model["base_sha256"]
actor = make_role("actor", config, device, seed=config["adapter_seed"])
reference = make_role("reference", config, device, seed=config["adapter_seed"])
critic = make_role("critic", config, device, seed=config["adapter_seed"], head="zero")
for role in (actor, reference, critic):  # the critic takes the SFT adapters and keeps its zero head
    load_adapter(stage.dir / SFT, role, config, base_sha256)
reference.freeze()
judge, judges = make_reward(  # (prompt ids, response ids) -> scores, and the frozen roles behind it
    config["reward"], stage.dir, config, base_sha256, chat, messages, device
)
roles = [actor, reference, *judges, critic]
check_isolation(roles)
preflight.policy(
    actor, reference, judges, critic, stage.dir / SFT, prompts[:2], chat, device,
    cached=config["cached"],
)  # fmt: skip


def frozen() -> dict[str, str]:
    """Fingerprints of everything that must not move: four bases, two sets of adapters."""
    bases = {role.name: fingerprint(role.base()) for role in roles}
    adapters = {
        f"{role.name} adapters": fingerprint(role.learned()) for role in (reference, *judges)
    }
    return bases | adapters


frozen_before = frozen()
updates = config["iterations"] * config["ppo_epochs"]
actor_optimizer = Optimizer(actor.learned(), updates, config["actor_lr"], config)
critic_optimizer = Optimizer(critic.learned(), updates, config["critic_lr"], config)

center = 0.0
if config["center_scores"]:
    # A zero critic meets scores far from zero: at first every answer would look good (or bad).
    center = judge(*zip(*demonstrations)).mean().item()

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
    drawn_prompts = [prompts[i] for i in drawn]
    prompt_ids, prompt_mask = pad_prompts(drawn_prompts, chat.pad_id, device)  # (B, P)
    with phases("generation"):
        rollout = sample(
            actor, prompt_ids, prompt_mask, chat.response_limit, chat.eos_id, chat.pad_id,
            generator, cached=config["cached"],
        )  # fmt: skip
    batch, old_logprobs = rollout.batch, rollout.old_logprobs  # (B, T)
    mask = batch.response_mask  # (B, T)

    # 2. The same tokens under the frozen reference.
    with phases("reference"), torch.no_grad():
        ref_vocab = vocab_logprobs(reference, batch)  # (N, V), N active tokens
        ref_logprobs = pick_logprobs(ref_vocab, batch)  # (B, T)

    # 3. One score per response, from the judge (or what stands in its place).
    with phases("judge"):
        prompt_lists, response_lists = as_lists(batch)
        scores = judge(prompt_lists, response_lists)  # (B,)

    # 4. The critic's value of the state before each token. The first update meets the same critic, so
    # this pass, with its graph, serves there as well.
    with phases("critic"):
        new_values = response_values(critic, batch)  # (B, T)
        old_values = new_values.detach()

    # 5. Token rewards, advantages, returns. They do not change during the updates below.
    rewards = token_rewards(
        scores - center, old_logprobs, ref_logprobs, mask, rollout.finished,
        config["kl_coef"], config["cutoff_penalty"],
    )  # fmt: skip
    advantages, returns = gae(rewards, old_values, mask, config["gamma"], config["gae_lambda"])

    # 6. Update actor and critic, twice, on these rollouts.
    epochs = []
    for epoch in range(1, config["ppo_epochs"] + 1):
        where = f"iteration {iteration} epoch {epoch} rows {drawn}"
        with phases("optimisation"):
            new_vocab = vocab_logprobs(actor, batch)  # (N, V)
            new_logprobs = pick_logprobs(new_vocab, batch)  # (B, T)
            if epoch == 1:
                # Still the policy that sampled, now read in one pass: to look at, not to train on.
                full_logprobs = new_logprobs.detach()
                exact = exact_kl(new_vocab, ref_vocab, mask)
                del ref_vocab
            loss, stats = policy_loss(
                new_logprobs, old_logprobs, advantages, mask, config["clip_range"]
            )
            loss.backward()
            policy = actor_optimizer.step(loss.detach(), f"actor, {where}")
            if epoch > 1:
                new_values = response_values(critic, batch)  # (B, T)
            loss = value_loss(new_values, returns, mask)
            loss.backward()
            value = critic_optimizer.step(loss.detach(), f"critic, {where}")
        epochs.append({"policy": policy, "value": value, "values": new_values.detach(), **stats})

    # Records: one row of metrics, and per rollout everything a reader needs to redo the arithmetic.
    row = {
        "iteration": iteration,
        **rollout_metrics(
            scores, center, old_logprobs, ref_logprobs, full_logprobs, exact["kl"], old_values,
            rewards, advantages, returns, mask, rollout.finished,
        ),
        "entropy": response_mean(exact["entropy"], mask).item(),
        **update_metrics(epochs),
    }  # fmt: skip
    history.append(row)
    metrics.write(row)
    per_token = {
        "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "full_logprobs": full_logprobs,
        "kl": exact["kl"], "rewards": rewards, "old_values": old_values, "advantages": advantages,
        "returns": returns,
    }  # fmt: skip
    samples = rollout_records(
        iteration, [rows[i]["id"] for i in drawn], prompt_lists, response_lists, rollout.finished,
        scores, center, per_token, epochs, chat,
    )  # fmt: skip
    for b, record in enumerate(samples):
        rollouts.write(record)
        consumed.append(record["rollout"])
        if len(first_logits) < 2:  # so that a log-probability can be recomputed by hand
            first_logits[record["rollout"]] = rollout.first_logits[b].cpu().clone()
    timings.write({"iteration": iteration, **phases.row()})

    bar.set_postfix_str(f"score {row['score']:+.2f} kl {row['kl']:.3f}", refresh=False)
    if stage.args.log_every and iteration % stage.args.log_every == 0:
        for record in samples[:3]:
            penalty = sum(record["rewards"]) - (record["score"] - center)
            bar.write(f"  {record['text']!r}")
            total = record["score"] + penalty
            bar.write(f"    score {record['score']:+.2f}  kl {penalty:+.3f}  total {total:+.2f}")
    if stage.save_due(iteration, stop):
        stage.save(
            iteration,
            {
                "roles": {role.name: role.learned_state() for role in roles},
                "base": frozen_before,
                "actor_optimizer": actor_optimizer.state(),
                "critic_optimizer": critic_optimizer.state(),
                "draws": draws.state(),
                "generator": generator.get_state(),
                "history": history,
                "consumed": consumed,
                "first_logits": first_logits,
            },
        )

# ---- summary ------------------------------------------------------------------------------------

if frozen() != frozen_before:
    raise ValueError(f"a frozen role changed during training: {frozen_before} -> {frozen()}")
check_isolation(roles)
logits_path = stage.outputs / "first_logits.safetensors"
write_atomic(logits_path, save(first_logits))
files = [stage.newest(), metrics.path, rollouts.path, logits_path]
if stage.variant != "interrupt":
    for name, role in (("adapter", actor), ("critic", critic)):
        save_adapter(stage.checkpoints / f"{name}.safetensors", role, config, base_sha256)
        files.append(stage.checkpoints / f"{name}.safetensors")
print_phases(timings.path)
tenth = max(len(history) // 10, 1)
first, last = history[:tenth], history[-tenth:]
mean = lambda part, key: sum(row[key] for row in part) / len(part)  # noqa: E731
stage.finish(
    f"learned score of the samples {mean(first, 'score'):+.2f} -> {mean(last, 'score'):+.2f} "
    f"(first and last {tenth} iterations), exact KL {mean(last, 'kl'):.3f} per token",
    files,
)

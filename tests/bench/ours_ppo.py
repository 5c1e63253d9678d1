"""Our side of the benchmark: the loop of 30_ppo.py without its records, at a fixed response length."""

import torch
from lap import Stopwatch, begin

from kernel.optim import Optimizer
from kernel.ppo import gae, policy_loss, token_rewards, value_loss
from kernel.roles import make_role
from kernel.rollout import sample
from kernel.run.machine import settle
from kernel.score import (
    exact_kl,
    pick_logprobs,
    response_scores,
    response_values,
    vocab_logprobs,
)

NO_EOS = -1  # no token has this id, so every response takes all its tokens

args, config, prompts = begin()
settle(args.threads)
device = torch.device("cpu")
pad_id, rollouts = config["pad_id"], config["rollouts"]
generator = torch.Generator().manual_seed(config["generation_seed"])

actor = make_role("actor", config, device, seed=config["adapter_seed"])
reference = make_role("reference", config, device, seed=config["adapter_seed"]).freeze()
critic = make_role("critic", config, device, seed=config["adapter_seed"], head="zero")
reward = make_role("reward", config, device, head="normal").freeze()
updates = config["iterations"] * config["ppo_epochs"]
actor_optimizer = Optimizer(actor.learned(), updates, config["actor_lr"], config)
critic_optimizer = Optimizer(critic.learned(), updates, config["critic_lr"], config)

watch = Stopwatch()
for start in range(0, len(prompts), rollouts):
    # Steps 1 to 6 of 30_ppo.py.
    drawn = prompts[start : start + rollouts]
    rollout = sample(actor, drawn, args.response_tokens, NO_EOS, pad_id, device, generator)
    batch, old_logprobs, mask = rollout.batch, rollout.old_logprobs, rollout.batch.response_mask
    assert mask.all() and mask.shape == (rollouts, args.response_tokens)
    watch.mark("generation")

    with torch.no_grad():
        ref_vocab = vocab_logprobs(reference, batch)  # (N, V)
        ref_logprobs = pick_logprobs(ref_vocab, batch)  # (B, T)
        scores = response_scores(reward, batch)  # (B,)
    new_values = response_values(critic, batch)  # (B, T)
    old_values = new_values.detach()
    rewards = token_rewards(
        scores, old_logprobs, ref_logprobs, mask, rollout.finished,
        config["kl_coef"], config["cutoff_penalty"],
    )
    advantages, returns = gae(rewards, old_values, mask, config["gamma"], config["gae_lambda"])
    watch.mark("scoring")

    for epoch in range(config["ppo_epochs"]):
        new_vocab = vocab_logprobs(actor, batch)  # (N, V)
        new_logprobs = pick_logprobs(new_vocab, batch)  # (B, T)
        if epoch == 0:
            exact_kl(new_vocab, ref_vocab, mask)
            del ref_vocab
        loss, _ = policy_loss(new_logprobs, old_logprobs, advantages, mask, config["clip_range"])
        loss.backward()
        actor_optimizer.step(loss.detach(), "actor")
        if epoch > 0:
            new_values = response_values(critic, batch)
        loss = value_loss(new_values, returns, mask)
        loss.backward()
        critic_optimizer.step(loss.detach(), "critic")
    watch.mark("training")
    watch.lap()
watch.report()

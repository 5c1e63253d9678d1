"""The arithmetic of PPO on a response: token rewards, GAE, the clipped loss, the value loss.

Everything is (B, T): B responses, T response tokens; column t is response token t, and its value is
V(state before token t). `response_mask` is True on generated tokens, EOS included. A masked slot
contributes exactly 0 to every loss, gradient and statistic.

| symbol                 | shape  | meaning                                                     |
|------------------------|--------|-------------------------------------------------------------|
| scores                 | (B,)   | one number per response, from the judge                     |
| rewards                | (B, T) | one number per token: KL penalty, plus the score at the end |
| old_logprobs           | (B, T) | log pi_old(token), kept as sampled                          |
| new_logprobs           | (B, T) | log pi(token) of the policy being updated                   |
| ref_logprobs           | (B, T) | log pi_ref(token) of the frozen SFT policy                  |
| old_values, new_values | (B, T) | V before token t, at the rollout / during the update        |
| advantages, returns    | (B, T) | GAE, and advantages + old_values                            |
"""

import torch


def response_mean(x: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Average over the active tokens of each response, then over the responses: (B, T) -> ().

    Every response weighs the same, however long it is.
    """
    per_response = x.masked_fill(~response_mask, 0).sum(1) / response_mask.sum(1)  # (B,)
    return per_response.mean()


def token_rewards(
    scores: torch.Tensor,  # (B,)
    old_logprobs: torch.Tensor,  # (B, T)
    ref_logprobs: torch.Tensor,  # (B, T)
    response_mask: torch.Tensor,  # (B, T) bool
    finished: torch.Tensor,  # (B,) bool: ended with EOS, not cut off at the limit
    kl_coef: float,
    cutoff_penalty: float,
) -> torch.Tensor:
    """r_t = -kl_coef * (old_logprob - ref_logprob); the score is added once, on the last active token.

    The sampled log-ratio old - ref estimates KL(policy || reference) and may be negative on a token.
    Source: Ouyang et al. 2022 (InstructGPT), equation 2. Returns (B, T), 0 where masked.
    """
    rewards = -kl_coef * (old_logprobs - ref_logprobs)
    rewards = rewards.masked_fill(~response_mask, 0)
    rows = torch.arange(len(scores), device=scores.device)
    last = response_mask.sum(1) - 1  # index of the last active token: EOS, or the token at the cut
    rewards[rows, last] += scores
    rewards[rows, last] += torch.where(finished, 0.0, cutoff_penalty)  # cutoff_penalty is negative
    return rewards


def gae(
    rewards: torch.Tensor,
    old_values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation, backwards over the response; all tensors (B, T).

    delta_t = r_t + gamma * (1 - done_t) * V_{t+1} - V_t
    A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}
    done_t holds on the last active token, so nothing is bootstrapped past EOS or past the cut.
    Source: Schulman et al. 2015, "High-Dimensional Continuous Control Using GAE", equations 11-16.
    Returns (advantages, returns), 0 where masked; no whitening.
    """
    B, T = rewards.shape
    values = old_values.masked_fill(~response_mask, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros(B, dtype=values.dtype, device=values.device)
    for t in reversed(range(T)):
        active = response_mask[:, t]
        # On the last active token the two "next" terms are still 0: that is (1 - done_t).
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = next_advantage = torch.where(active, advantage, 0.0)
        next_value = values[:, t]  # already 0 where masked
    return advantages, (advantages + values)


def policy_loss(
    new_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_range: float,
) -> tuple[torch.Tensor, dict]:
    """-mean(min(ratio * A, clip(ratio, 1 - c, 1 + c) * A)), and the tensors a reader wants to see.

    Source: Schulman et al. 2017 (PPO), equation 7. `approx_kl` estimates KL(old || new) by the
    non-negative (ratio - 1) - log_ratio (Schulman 2020); it is not the KL to the reference.
    """
    # NOTE: mask before exp. A huge log-ratio in a masked slot would overflow, and 0 * inf is a NaN
    # in the gradient although the loss itself looks finite.
    log_ratio = (new_logprobs - old_logprobs).masked_fill(~response_mask, 0)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    # averaged over the active tokens of each response, then over the responses
    loss = -response_mean(torch.minimum(unclipped, clipped), response_mask)
    with torch.no_grad():
        clip_bites = (clipped < unclipped) & response_mask  # the clipped branch was the minimum
        stats = {
            "ratio": ratio.detach(),  # (B, T), 1 where masked
            "clip_bites": clip_bites,  # (B, T) bool
            "clip_fraction": clip_bites.sum() / response_mask.sum(),
            "approx_kl": response_mean(ratio - 1 - log_ratio, response_mask),
        }
    return loss, stats


def value_loss(
    new_values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """0.5 * mean((V - return)^2), averaged like the policy loss; no value clipping, no second 1/2."""
    return 0.5 * response_mean((new_values - returns) ** 2, response_mask)

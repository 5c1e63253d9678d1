"""What an iteration of PPO leaves behind: a row of metrics, and a record per response.

`tokens` is the bundle of all that is known of each response token: name -> (B, T), with the names of
kernel/ppo.py and

    full_logprobs   log-probabilities of the sampling policy, read in one pass: to look at only
    kl, entropy     exact, over the vocabulary, of each visited prefix; kl is KL(policy || reference)

`updates` holds, for each update on the same rollouts, what it met and did: actor and critic (what the
two optimisers returned), ratio, clip_bites and values (B, T), clip_fraction and approx_kl.
"""

import torch

from kernel.ppo import response_mean


def rollout_metrics(
    scores: torch.Tensor,  # (B,), as the reward function gave them
    paid: torch.Tensor,  # (B,), shifted and divided: what the last token's reward holds
    finished: torch.Tensor,  # (B,) bool
    tokens: dict[str, torch.Tensor],
    response_mask: torch.Tensor,  # (B, T) bool
) -> dict[str, float]:
    """One iteration's figures of its rollouts, before any update (README.md beside this file)."""
    mean = {name: response_mean(x, response_mask).item() for name, x in tokens.items()}
    log_ratio = tokens["old_logprobs"] - tokens["ref_logprobs"]
    gap = (tokens["full_logprobs"] - tokens["old_logprobs"]).abs().max()
    explained = explained_variance(tokens["old_values"], tokens["returns"], response_mask)
    return {
        "score": scores.mean().item(),
        "kl": mean["kl"],  # exact, policy against reference
        "log_ratio": response_mean(log_ratio, response_mask).item(),  # one sample of it
        "kl_reward": (tokens["rewards"].sum(1) - paid).mean().item(),
        "tokens": response_mask.sum(1).float().mean().item(),
        "finished": finished.float().mean().item(),
        "scoring_gap": gap.item(),  # prefix by prefix against whole sequence
        "value": mean["old_values"],
        "return": mean["returns"],
        "advantage": mean["advantages"],
        "explained_variance": explained.item(),
    } | ({"entropy": mean["entropy"]} if "entropy" in mean else {})  # the records do not hold it


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """1 - Var(returns - values) / Var(returns) over active tokens; 0 if the returns do not vary."""
    returns, values = returns[response_mask], values[response_mask]
    variance = returns.var(unbiased=False)
    if variance == 0:
        return torch.zeros((), device=returns.device)
    return 1 - (returns - values).var(unbiased=False) / variance


def update_metrics(updates: list[dict]) -> dict:
    """What each update of an iteration found, as `name_k`, and the learning rates of the last one."""
    row = {}
    for number, update in enumerate(updates, start=1):
        row |= {
            f"policy_loss_{number}": update["actor"]["loss"],
            f"value_loss_{number}": update["critic"]["loss"],
            f"clip_fraction_{number}": update["clip_fraction"].item(),
            f"approx_kl_{number}": update["approx_kl"].item(),
            f"actor_grad_norm_{number}": update["actor"]["grad_norm"],
            f"critic_grad_norm_{number}": update["critic"]["grad_norm"],
        }
    return row | {"actor_lr": updates[-1]["actor"]["lr"], "critic_lr": updates[-1]["critic"]["lr"]}


RECORDED = (  # of the bundle, in this order
    "old_logprobs ref_logprobs full_logprobs kl rewards old_values advantages returns"
).split()


def rollout_records(
    iteration: int,
    rows: list[dict],  # of the corpus: whose prompts were answered
    batch,
    finished: torch.Tensor,  # (B,) bool
    scores: torch.Tensor,  # (B,)
    center: float,
    scale: float,
    tokens: dict[str, torch.Tensor],
    updates: list[dict],
    chat,
) -> list[dict]:
    """One record per response, with everything that a reader needs to redo its arithmetic."""

    def record(b: int) -> dict:
        response = batch.responses[b]

        def own(tensor: torch.Tensor) -> list:
            return tensor[b, : len(response)].tolist()

        return {
            "iteration": iteration,
            "rollout": f"{iteration:04d}-{b}",
            "prompt_id": rows[b]["id"],
            "prompt_ids": batch.prompts[b],
            "response_ids": response,
            "tokens": chat.token_texts(response),
            "text": chat.decode(response),
            "finish_reason": "eos" if finished[b] else "length",
            "score": scores[b].item(),
            "center": center,
            "scale": scale,
            **{name: own(tokens[name]) for name in RECORDED},
            "new_values": [own(update["values"]) for update in updates],
            "ratios": [own(update["ratio"]) for update in updates],
            "clip_bites": [own(update["clip_bites"]) for update in updates],
        }

    return [record(b) for b in range(len(rows))]

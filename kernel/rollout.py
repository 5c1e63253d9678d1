"""Sampling one response per prompt: KV-cached and batched, or prefix by prefix without a cache."""

from typing import NamedTuple

import torch

from kernel.fast.transformer import Cache
from kernel.roles import Role
from kernel.score import Batch, make_batch


class Rollout(NamedTuple):
    batch: Batch
    old_logprobs: torch.Tensor  # (B, T) FP32: the behaviour policy's own record, never re-scored
    finished: torch.Tensor  # (B,) bool: ended with EOS; False = cut off at the limit
    first_logits: torch.Tensor  # (B, V) FP32: the distribution of response token 0


def pad_left(prompts: list[list[int]], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (B, P) and mask (B, P) bool: every response starts in the same column, P."""
    if not all(prompts):
        raise ValueError("an empty prompt cannot be answered: no state stands before the response")
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    return ids.to(device), mask.to(device)


@torch.no_grad()
def sample(
    role: Role,
    prompts: list[list[int]],
    limit: int,
    eos_id: int,
    pad_id: int,
    device,
    generator: torch.Generator | None = None,  # a CPU generator; None = greedy
    cached: bool = True,
) -> Rollout:
    """Temperature 1 over the full vocabulary (or argmax), until EOS or `limit` tokens.

    The token is drawn by inverting the cumulative distribution at one uniform number per row and
    step, taken on the CPU: the same draws on every device, and as many for a row that has ended.
    `cached=False` reads the whole prefix again for each token: slow, for reading and for tests.
    """
    B = len(prompts)
    ids, mask = pad_left(prompts, pad_id, device)  # (B, P + t), grows by one column per token
    cache = Cache(role.transformer, B, ids.shape[1] + limit) if cached else None
    alive = torch.ones(B, dtype=torch.bool, device=device)
    tokens, actives, logprobs = [], [], []
    for t in range(limit):
        logits = next_logits(role, ids, mask, cache)  # (B, V) FP32
        if t == 0:
            first_logits = logits
        if generator is None:
            token = logits.argmax(-1)
        else:
            # FP64, because FP32 sums would lose the rare tokens; on the CPU, because CUDA has no
            # deterministic cumulative sum.
            cdf = logits.softmax(-1).double().cpu().cumsum(-1)  # (B, V)
            u = torch.rand(B, 1, generator=generator, dtype=torch.float64)
            token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)[:, 0]
            token = token.clamp(max=logits.shape[1] - 1).to(device)
        logprob = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
        tokens.append(torch.where(alive, token, pad_id))
        logprobs.append(torch.where(alive, logprob, 0.0))
        actives.append(alive)
        ids = torch.cat([ids, tokens[-1][:, None]], 1)
        mask = torch.cat([mask, alive[:, None]], 1)
        alive = alive & (token != eos_id)  # EOS itself is an active response token
        if not alive.any():
            break
    tokens, active = torch.stack(tokens, 1), torch.stack(actives, 1)  # (B, T)
    responses = [row[own].tolist() for row, own in zip(tokens, active)]
    batch = make_batch(zip(prompts, responses), pad_id, device)
    return Rollout(batch, torch.stack(logprobs, 1), ~alive, first_logits)


def next_logits(role: Role, ids, mask, cache: Cache | None) -> torch.Tensor:
    """Logits of the token after each row, (B, V) FP32; with a cache only the new column is read."""
    if cache is None or cache.filled == 0:
        return role.lm.lm_head(role.transformer.last_states(ids, mask, cache)).float()
    return cache.head(role.transformer.next_states(ids[:, -1], mask, cache)).float()

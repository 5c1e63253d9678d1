"""Sampling one response per prompt: KV-cached and batched, or prefix by prefix without a cache."""

from typing import NamedTuple

import torch

from kernel.model import Role
from kernel.score import Batch
from kernel.transformer import Cache


class Rollout(NamedTuple):
    batch: Batch
    old_logprobs: torch.Tensor  # (B, T) FP32: the behaviour policy's own record, never re-scored
    finished: torch.Tensor  # (B,) bool: ended with EOS; False = cut off at the limit
    first_logits: torch.Tensor  # (B, V) FP32: the distribution of response token 0


@torch.no_grad()
def sample(
    role: Role,
    prompt_ids: torch.Tensor,  # (B, P) left-padded
    prompt_mask: torch.Tensor,  # (B, P) bool
    limit: int,
    eos_id: int,
    pad_id: int,
    generator: torch.Generator | None = None,  # a CPU generator; None = greedy
    cached: bool = True,
) -> Rollout:
    """Temperature 1 over the full vocabulary (or argmax), until EOS or `limit` tokens.

    The token is drawn by inverting the cumulative distribution at one uniform number per row and
    step, taken on the CPU: the same draws on every device, and as many for a row that has ended.
    `cached=False` reads the whole prefix again for each token: slow, for reading and for tests.
    """
    B = len(prompt_ids)
    cache = Cache(role.transformer, B, prompt_ids.shape[1] + limit) if cached else None
    ids, mask = prompt_ids, prompt_mask  # (B, P + t), grows by one column per token
    alive = torch.ones(B, dtype=torch.bool, device=ids.device)
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
            token = token.clamp(max=logits.shape[1] - 1).to(ids.device)
        logprob = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
        tokens.append(torch.where(alive, token, pad_id))
        logprobs.append(torch.where(alive, logprob, 0.0))
        actives.append(alive)
        ids = torch.cat([ids, tokens[-1][:, None]], 1)
        mask = torch.cat([mask, alive[:, None]], 1)
        alive = alive & (token != eos_id)  # EOS itself is an active response token
        if not alive.any():
            break
    batch = Batch(prompt_ids, prompt_mask, torch.stack(tokens, 1), torch.stack(actives, 1))
    return Rollout(batch, torch.stack(logprobs, 1), ~alive, first_logits)


def next_logits(role: Role, ids, mask, cache: Cache | None) -> torch.Tensor:
    """Logits of the token after each row, (B, V) FP32; with a cache only the new column is read."""
    if cache is None or cache.filled == 0:
        return role.lm.lm_head(role.transformer.last_states(ids, mask, cache)).float()
    return cache.head(role.transformer.next_states(ids[:, -1], mask, cache)).float()


def as_lists(batch: Batch) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses as plain id lists, padding removed by the masks."""
    prompts = [row[m].tolist() for row, m in zip(batch.prompt_ids, batch.prompt_mask)]
    responses = [row[m].tolist() for row, m in zip(batch.response_ids, batch.response_mask)]
    return prompts, responses


def rollout_records(
    iteration: int,
    prompt_names: list[str],
    prompts: list[list[int]],
    responses: list[list[int]],
    finished: torch.Tensor,  # (B,) bool
    scores: torch.Tensor,  # (B,)
    center: float,
    per_token: dict[str, torch.Tensor],  # (B, T) each
    epochs: list[dict],  # of each update: values, ratio and clip_bites, (B, T) each
    chat,
) -> list[dict]:
    """One record per response, with everything that a reader needs to redo its arithmetic."""

    def row(tensor: torch.Tensor, b: int) -> list:
        return tensor[b, : len(responses[b])].tolist()

    records = []
    for b, (prompt, response) in enumerate(zip(prompts, responses)):
        records.append(
            {
                "iteration": iteration,
                "rollout": f"{iteration:04d}-{b}",
                "prompt_id": prompt_names[b],
                "prompt_ids": prompt,
                "response_ids": response,
                "tokens": chat.token_texts(response),
                "text": chat.decode(response),
                "finish_reason": "eos" if finished[b] else "length",
                "score": scores[b].item(),
                "center": center,
                **{name: row(tensor, b) for name, tensor in per_token.items()},
                "new_values": [row(epoch["values"], b) for epoch in epochs],
                "ratios": [row(epoch["ratio"], b) for epoch in epochs],
                "clip_bites": [row(epoch["clip_bites"], b) for epoch in epochs],
            }
        )
    return records

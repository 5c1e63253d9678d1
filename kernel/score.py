"""One forward pass over (prompt, response), read out three ways: log-probabilities, values, scores.

Letters: B rows, P prompt columns (left-padded), T response columns (right-padded), L = P + T,
D hidden size, V vocabulary, N active response tokens of the batch.

    column      0 .. P-1            P .. P+T-1
    input_ids   [pad pad prompt]    [response EOS pad]
    state before response token t = hidden state of column P-1+t
"""

from typing import NamedTuple

import torch

from kernel.model import Role


class Batch(NamedTuple):
    prompt_ids: torch.Tensor  # (B, P) int64, left-padded
    prompt_mask: torch.Tensor  # (B, P) bool, True = prompt token
    response_ids: torch.Tensor  # (B, T) int64, right-padded
    response_mask: torch.Tensor  # (B, T) bool, True = generated token, EOS included


def pad_prompts(prompts: list[list[int]], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pad, so that every response starts in the same column. Returns ids and mask, (B, P)."""
    if not all(prompts):
        raise ValueError("an empty prompt cannot be scored: a row of pads only has no state")
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = True
    return ids.to(device), mask.to(device)


def make_batch(prompts: list[list[int]], responses: list[list[int]], pad_id: int, device) -> Batch:
    """Lists of ids to padded tensors. The mask comes from the lengths, never from the pad id."""
    if not all(responses):
        raise ValueError("an empty response cannot be scored: it has no last token")
    prompt_ids, prompt_mask = pad_prompts(prompts, pad_id, device)
    lengths = torch.tensor([len(r) for r in responses])
    ids = torch.full((len(responses), int(lengths.max())), pad_id)
    for row, response in enumerate(responses):
        ids[row, : len(response)] = torch.tensor(response)
    mask = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
    return Batch(prompt_ids, prompt_mask, ids.to(device), mask.to(device))


def hidden_states(role: Role, batch: Batch) -> torch.Tensor:
    """The last hidden state of every column, (B, L, D), in the base dtype."""
    input_ids = torch.cat([batch.prompt_ids, batch.response_ids], 1)  # (B, L)
    mask = torch.cat([batch.prompt_mask, batch.response_mask], 1)
    # Positions count real tokens: a left-padded row sees the positions it would see alone.
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return role.lm.model(
        input_ids=input_ids, attention_mask=mask.long(), position_ids=positions, use_cache=False
    ).last_hidden_state


def states_before(role: Role, batch: Batch) -> torch.Tensor:
    """Hidden states from which each response token was predicted, (B, T, D)."""
    P = batch.prompt_ids.shape[1]
    return hidden_states(role, batch)[:, P - 1 : -1]


def active_logits(role: Role, batch: Batch) -> torch.Tensor:
    """Logits over the vocabulary at the active response tokens, (N, V) FP32, in row-major order.

    NOTE: one contiguous (N, D) gather before the language-model head. The head over all columns, or
    over a 3-D slice, costs several times the rest of the layer.
    """
    return role.lm.lm_head(states_before(role, batch)[batch.response_mask]).float()


def pick_logprobs(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """log softmax of the response tokens out of `active_logits`: (N, V) -> (B, T) FP32, 0 if masked."""
    chosen = batch.response_ids[batch.response_mask]  # (N,)
    logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]  # (N,)
    out = torch.zeros(batch.response_mask.shape, device=logits.device)
    return out.masked_scatter(batch.response_mask, logprobs)


def response_logprobs(role: Role, batch: Batch) -> torch.Tensor:
    """log pi(response token | prefix), (B, T) FP32, 0 where masked."""
    return pick_logprobs(active_logits(role, batch), batch)


def response_values(role: Role, batch: Batch) -> torch.Tensor:
    """V(state before response token t), (B, T) FP32, 0 where masked."""
    values = role.head(states_before(role, batch).float())[..., 0]
    return values.masked_fill(~batch.response_mask, 0)


def response_scores(role: Role, batch: Batch) -> torch.Tensor:
    """The reward head on the last active response token (EOS included), found by the mask: (B,) FP32."""
    last = batch.prompt_ids.shape[1] + batch.response_mask.sum(1) - 1  # (B,) column in L
    rows = torch.arange(len(last), device=last.device)
    return role.head(hidden_states(role, batch)[rows, last].float())[:, 0]


def pair_scores(
    reward: Role,
    prompts: list[list[int]],
    chosen: list[list[int]],
    rejected: list[list[int]],
    pad_id: int,
    device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """chosen_scores and rejected_scores, (B,) FP32 each, with the shared prompt read only once.

        input_ids   [pad prompt]   [chosen pad]   [rejected pad]          (B, P + C + R)
        position     0 .. n-1       n, n+1, ..     n, n+1, ..

    Both answers follow the prompt and neither sees the other; about a third of the tokens is saved.
    The plain twin is `response_scores` on 2B rows, to which the tests hold this.
    """
    left = make_batch(prompts, chosen, pad_id, device)
    right = make_batch(prompts, rejected, pad_id, device)
    P, C = left.prompt_ids.shape[1], left.response_ids.shape[1]
    input_ids = torch.cat([left.prompt_ids, left.response_ids, right.response_ids], 1)
    real = torch.cat([left.prompt_mask, left.response_mask, right.response_mask], 1)  # (B, L)
    L = input_ids.shape[1]
    column = torch.arange(L, device=device)
    sees = column[:, None] >= column[None, :]  # (L, L) causal: query column, key column
    sees = sees & ~((column[:, None] >= P + C) & (column[None, :] >= P) & (column[None, :] < P + C))
    sees = sees[None, None] & real[:, None, None, :]  # (B, 1, L, L)
    lowest = torch.finfo(
        reward.lm.dtype
    ).min  # not -inf: a pad query that sees nothing stays finite
    bias = torch.zeros(sees.shape, dtype=reward.lm.dtype, device=device).masked_fill(~sees, lowest)
    length = left.prompt_mask.sum(1, keepdim=True)  # (B, 1) = n
    positions = (left.prompt_mask.long().cumsum(1) - 1).clamp(min=0)
    after = [length + torch.arange(width, device=device) for width in (C, L - P - C)]
    hidden = reward.lm.model(
        input_ids=input_ids,
        attention_mask=bias,
        position_ids=torch.cat([positions, *after], 1),
        use_cache=False,
    ).last_hidden_state
    rows = torch.arange(len(prompts), device=device)
    last_chosen = P + left.response_mask.sum(1) - 1  # column of the last active token, by the mask
    last_rejected = P + C + right.response_mask.sum(1) - 1
    scores = [
        reward.head(hidden[rows, last].float())[:, 0] for last in (last_chosen, last_rejected)
    ]
    return scores[0], scores[1]


def learned_reward(reward: Role, pad_id: int, device):
    """The trained reward model as a reward function: lists of (prompt ids, response ids) -> (B,) FP32.

    Any function of that form can stand in its place; it is called without gradients.
    """

    @torch.no_grad()
    def judge(prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        parts = []
        for start in range(0, len(prompts), 16):
            rows = slice(start, start + 16)
            parts.append(
                response_scores(reward, make_batch(prompts[rows], responses[rows], pad_id, device))
            )
        return torch.cat(parts)

    return judge


@torch.no_grad()
def exact_kl(logits: torch.Tensor, ref_logits: torch.Tensor, mask: torch.Tensor) -> dict:
    """Categorical quantities of each visited prefix: (N, V), (N, V), (B, T) bool -> two (B, T) FP32.

    kl = sum_v pi(v) * (log pi(v) - log pi_ref(v)) >= 0 over the full vocabulary: the exact
    KL(policy || reference), of which the sampled log-ratio is a one-token estimate.
    entropy = -sum_v pi(v) * log pi(v). Both 0 where masked.
    """
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    probs = logprobs.exp()
    parts = {
        "kl": (probs * (logprobs - ref_logprobs)).sum(-1),  # (N,)
        "entropy": -(probs * logprobs).sum(-1),
    }
    zeros = torch.zeros(mask.shape, device=mask.device)
    return {name: zeros.masked_scatter(mask, part) for name, part in parts.items()}

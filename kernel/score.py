"""One forward pass over (prompt, response), read out three ways: log-probabilities, values, scores.

Letters: B rows, P prompt columns (left-padded), T response columns (right-padded), L = P + T,
D hidden size, V vocabulary, N states that are read out (mostly: the active response tokens).

    a batch is padded           [pad pad prompt] [response EOS pad]
    a pass reads without pads   [prompt response EOS]
    state before response token t = state of column p-1+t, with p prompt tokens in the row
"""

from typing import NamedTuple

import torch

from kernel.model import Role
from kernel.transformer import pack


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


def read(role: Role, batch: Batch, columns: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Last hidden states at chosen columns of the unpadded rows, (N, D) in the base dtype.

    columns (B, T) int64 counts the real tokens of a row, prompt first; wanted (B, T) bool says which
    of them are read, in row-major order. Rows share what they begin with: each prefix is read once.
    """
    ids = torch.cat([batch.prompt_ids, batch.response_ids], 1)  # (B, L)
    real = torch.cat([batch.prompt_mask, batch.response_mask], 1)
    packed = pack([row[mask].tolist() for row, mask in zip(ids, real)], ids.device)
    rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(columns)
    return role.transformer.states(packed, packed.tokens[rows[wanted], columns[wanted]])


def states_before(role: Role, batch: Batch) -> torch.Tensor:
    """Hidden states from which the active response tokens were predicted, (N, D) in row-major order."""
    before = batch.prompt_mask.sum(1, keepdim=True) - 1  # (B, 1): the prompt's last token
    steps = torch.arange(batch.response_ids.shape[1], device=before.device)
    return read(role, batch, before + steps, batch.response_mask)


def active_logits(role: Role, batch: Batch) -> torch.Tensor:
    """Logits over the vocabulary at the active response tokens, (N, V) FP32, in row-major order."""
    return role.lm.lm_head(states_before(role, batch)).float()


def vocab_logprobs(role: Role, batch: Batch) -> torch.Tensor:
    """log pi(. | prefix) over the vocabulary at the active response tokens, (N, V) FP32."""
    return active_logits(role, batch).log_softmax(-1)


def pick_logprobs(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The response tokens' own out of `vocab_logprobs`: (N, V) -> (B, T) FP32, 0 where masked."""
    chosen = batch.response_ids[batch.response_mask]  # (N,)
    picked = logprobs.gather(1, chosen[:, None])[:, 0]  # (N,)
    out = torch.zeros(batch.response_mask.shape, device=logprobs.device)
    return out.masked_scatter(batch.response_mask, picked)


def response_logprobs(role: Role, batch: Batch) -> torch.Tensor:
    """log pi(response token | prefix), (B, T) FP32, 0 where masked."""
    return pick_logprobs(vocab_logprobs(role, batch), batch)


def response_values(role: Role, batch: Batch) -> torch.Tensor:
    """V(state before response token t), (B, T) FP32, 0 where masked."""
    values = role.head(states_before(role, batch).float())[:, 0]  # (N,)
    out = torch.zeros(batch.response_mask.shape, device=values.device)
    return out.masked_scatter(batch.response_mask, values)


def response_scores(role: Role, batch: Batch) -> torch.Tensor:
    """The reward head on a response, (B,) FP32, by the role's `pooling`.

    last: on the last active response token (EOS included), found by the mask. mean: on the mean state
    of the active response tokens; the head is linear, so that is the mean of its values on each.
    """
    prompt_tokens, tokens = (
        m.sum(1, keepdim=True) for m in (batch.prompt_mask, batch.response_mask)
    )
    if role.pooling == "last":
        last = prompt_tokens + tokens - 1  # (B, 1)
        states = read(role, batch, last, torch.ones_like(last, dtype=torch.bool))  # (B, D)
        return role.head(states.float())[:, 0]
    steps = torch.arange(batch.response_ids.shape[1], device=tokens.device)
    states = read(role, batch, prompt_tokens + steps, batch.response_mask)  # (N, D)
    values = role.head(states.float())[:, 0]  # (N,)
    out = torch.zeros(batch.response_mask.shape, device=values.device)  # (B, T)
    return out.masked_scatter(batch.response_mask, values).sum(1) / tokens[:, 0]


def pair_scores(
    reward: Role,
    prompts: list[list[int]],
    chosen: list[list[int]],
    rejected: list[list[int]],
    pad_id: int,
    device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """chosen_scores and rejected_scores, (B,) FP32 each; the shared prompts are read only once."""
    batch = make_batch([*prompts, *prompts], [*chosen, *rejected], pad_id, device)
    return response_scores(reward, batch).chunk(2)


@torch.no_grad()
def score_pairs(
    reward: Role, pairs: list[tuple], pad_id: int, device, size: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pair_scores` of any number of (prompt, chosen, rejected) id lists, without gradients: (n,) FP32
    each. `size` pairs are read at a time."""
    parts = [
        pair_scores(reward, *zip(*pairs[start : start + size]), pad_id, device)
        for start in range(0, len(pairs), size)
    ]
    chosen_scores, rejected_scores = (torch.cat(side) for side in zip(*parts))
    return chosen_scores, rejected_scores


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
def exact_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor) -> dict:
    """Categorical quantities of each visited prefix, from two `vocab_logprobs` (N, V) and the mask
    (B, T) bool: two (B, T) FP32.

    kl = sum_v pi(v) * (log pi(v) - log pi_ref(v)) >= 0 over the full vocabulary: the exact
    KL(policy || reference), of which the sampled log-ratio is a one-token estimate.
    entropy = -sum_v pi(v) * log pi(v). Both 0 where masked.
    """
    probs = logprobs.exp()
    parts = {
        "kl": (probs * (logprobs - ref_logprobs)).sum(-1),  # (N,)
        "entropy": -(probs * logprobs).sum(-1),
    }
    zeros = torch.zeros(mask.shape, device=mask.device)
    return {name: zeros.masked_scatter(mask, part) for name, part in parts.items()}

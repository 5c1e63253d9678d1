"""One forward pass over (prompt, response), read out three ways: log-probabilities, values, scores.

Letters: B rows, T columns of the longest response (the others are padded on the right), D hidden size,
V vocabulary, N active response tokens of the whole batch, row by row.

    a pass reads every row without pads          [prompt response EOS]
    state before response token t                place p - 1 + t, with p prompt tokens in the row
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from kernel.fast.packed import Packed, pack
from kernel.roles import Role


class Batch(NamedTuple):
    """Prompts with their responses, laid out once; every role that reads them takes it as it is."""

    prompts: list[list[int]]  # B lists of ids
    responses: list[list[int]]  # B lists of ids, EOS included
    response_ids: torch.Tensor  # (B, T) int64, padded on the right
    response_mask: torch.Tensor  # (B, T) bool, True = generated token, EOS included
    packed: Packed  # prompt + response of every row; rows share the tokens they begin with


def make_batch(answers: Iterable[tuple[list, list]], pad_id: int, device) -> Batch:
    """(prompt, response) id lists to a batch. The mask comes from the lengths, never from the pad id."""
    prompts, responses = (list(side) for side in zip(*answers))
    if not all(prompts):
        raise ValueError("an empty prompt cannot be scored: no state stands before the response")
    if not all(responses):
        raise ValueError("an empty response cannot be scored: it has no last token")
    lengths = torch.tensor([len(response) for response in responses])
    width = int(lengths.max())
    ids = torch.tensor([response + [pad_id] * (width - len(response)) for response in responses])
    mask = torch.arange(width)[None, :] < lengths[:, None]
    packed = pack([prompt + response for prompt, response in zip(prompts, responses)], device)
    return Batch(prompts, responses, ids.to(device), mask.to(device), packed)


def batches(answers: list[tuple], size: int, pad_id: int, device) -> Iterator[Batch]:
    """Any number of (prompt, response) id lists, `size` rows at a time: what one pass reads."""
    for start in range(0, len(answers), size):
        yield make_batch(answers[start : start + size], pad_id, device)


def states_at(role: Role, batch: Batch, places: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Last hidden states at chosen places of the rows, (N, D) in the base dtype.

    places (B, T) int64 counts the tokens of a row, prompt first; wanted (B, T) bool says which of them
    are read, row by row.
    """
    tokens = batch.packed.tokens  # (B, longest row)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(places)
    return role.transformer.states(batch.packed, tokens[rows[wanted], places[wanted]])


def response_places(batch: Batch) -> torch.Tensor:
    """The place of each response token in its row, counted from the prompt's first: (B, T) int64."""
    begin = torch.tensor([len(prompt) for prompt in batch.prompts])[:, None]  # (B, 1)
    return (begin + torch.arange(batch.response_ids.shape[1])).to(batch.response_ids.device)


def by_token(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One number per active response token in its place: (N,) -> (B, T), 0 where masked."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, numbers)


def states_before(role: Role, batch: Batch) -> torch.Tensor:
    """Hidden states from which the active response tokens were predicted, (N, D) row by row."""
    return states_at(role, batch, response_places(batch) - 1, batch.response_mask)


def active_logits(role: Role, batch: Batch) -> torch.Tensor:
    """Logits over the vocabulary at the active response tokens, (N, V) FP32, row by row."""
    return role.lm.lm_head(states_before(role, batch)).float()


def vocab_logprobs(role: Role, batch: Batch) -> torch.Tensor:
    """log pi(. | prefix) over the vocabulary at the active response tokens, (N, V) FP32."""
    return active_logits(role, batch).log_softmax(-1)


def pick_logprobs(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The response tokens' own out of `vocab_logprobs`: (N, V) -> (B, T) FP32, 0 where masked."""
    chosen = batch.response_ids[batch.response_mask]  # (N,)
    return by_token(logprobs.gather(1, chosen[:, None])[:, 0], batch.response_mask)


def response_logprobs(role: Role, batch: Batch) -> torch.Tensor:
    """log pi(response token | prefix), (B, T) FP32, 0 where masked."""
    return pick_logprobs(vocab_logprobs(role, batch), batch)


def response_values(role: Role, batch: Batch) -> torch.Tensor:
    """V(state before response token t), (B, T) FP32, 0 where masked."""
    values = role.head(states_before(role, batch).float())[:, 0]  # (N,)
    return by_token(values, batch.response_mask)


def response_scores(role: Role, batch: Batch) -> torch.Tensor:
    """The reward head on a response, (B,) FP32, by the role's `pooling`.

    last: on the last active response token (EOS included), found by the mask. mean: on the mean state
    of the active response tokens; the head is linear, so that is the mean of its values on each.
    """
    places, mask = response_places(batch), batch.response_mask
    tokens = mask.sum(1, keepdim=True)  # (B, 1)
    if role.pooling == "last":
        last = places[:, :1] + tokens - 1  # (B, 1)
        states = states_at(role, batch, last, torch.ones_like(last, dtype=torch.bool))  # (B, D)
        return role.head(states.float())[:, 0]
    values = role.head(states_at(role, batch, places, mask).float())[:, 0]  # (N,)
    return by_token(values, mask).sum(1) / tokens[:, 0]


def pair_scores(
    reward: Role, pairs: list[tuple], pad_id: int, device
) -> tuple[torch.Tensor, torch.Tensor]:
    """chosen_scores and rejected_scores, (B,) FP32 each, of (prompt, chosen, rejected) id lists.

    Both answers of a pair are rows of one batch, so that their prompt is read once.
    """
    chosen = [(prompt, answer) for prompt, answer, _ in pairs]
    rejected = [(prompt, answer) for prompt, _, answer in pairs]
    return response_scores(reward, make_batch(chosen + rejected, pad_id, device)).chunk(2)


@torch.no_grad()
def score_pairs(
    reward: Role, pairs: list[tuple], pad_id: int, device, size: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pair_scores` of any number of pairs, without gradients: (n,) FP32 each; `size` at a time."""
    parts = [
        pair_scores(reward, pairs[start : start + size], pad_id, device)
        for start in range(0, len(pairs), size)
    ]
    chosen_scores, rejected_scores = (torch.cat(side) for side in zip(*parts))
    return chosen_scores, rejected_scores


@torch.no_grad()
def score_answers(
    reward: Role, answers: list[tuple], pad_id: int, device, size: int = 16
) -> torch.Tensor:
    """Scores of any number of (prompt, response) id lists, without gradients: (n,) FP32.

    `size` answers are read at a time.
    """
    parts = batches(answers, size, pad_id, device)
    return torch.cat([response_scores(reward, part) for part in parts])


@torch.no_grad()
def exact_kl(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """kl and entropy of each visited prefix, (B, T) FP32, from two `vocab_logprobs` (N, V) and the mask
    (B, T) bool.

    kl = sum_v pi(v) * (log pi(v) - log pi_ref(v)) >= 0 over the full vocabulary: the exact
    KL(policy || reference), of which the sampled log-ratio is a one-token estimate.
    entropy = -sum_v pi(v) * log pi(v). Both 0 where masked.
    """
    probs = logprobs.exp()
    kl = (probs * (logprobs - ref_logprobs)).sum(-1)  # (N,)
    entropy = -(probs * logprobs).sum(-1)  # (N,)
    return by_token(kl, mask), by_token(entropy, mask)

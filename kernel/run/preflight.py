"""Seconds before a training loop: the invariants on which its formulas rest, tried on the real roles.

A stage calls `supervised`, `preference` or `policy` before its loop. Each prints one line with the
numbers it saw, and raises ValueError with one line, naming the invariant and the numbers, at the first
that fails. Nothing is left behind: no gradient, no random number drawn, no tensor changed.
"""

import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch.nn.utils import skip_init

from kernel.roles import Role, fingerprint
from kernel.rollout import sample
from kernel.score import (
    Batch,
    exact_kl,
    make_batch,
    pair_scores,
    pick_logprobs,
    response_logprobs,
    response_scores,
    response_values,
    vocab_logprobs,
)
from kernel.supervised import bradley_terry_loss, sft_loss

# How far two ways to the same number may lie apart. Other shapes mean another order of summation:
# float32 loses the last digits by it, bfloat16 (three significant digits) the second decimal of a score.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def fail(invariant: str, numbers: str) -> None:
    raise ValueError(f"preflight: {invariant}; found {numbers}")


def within(invariant: str, gap: float, bound: float) -> float:
    if not gap <= bound:  # a NaN is not within anything
        fail(invariant, f"a difference of {gap:.3g}, bound {bound:g}")
    return gap


def repeats(role: Role, read, batch: Batch) -> torch.Tensor:
    """Two forward passes over the same batch give the same bits; returns them, without a graph."""
    with torch.no_grad():
        first, second = read(role, batch), read(role, batch)
    if not torch.equal(first, second):
        gap = (first - second).abs().max().item()
        fail(f"two forward passes of role '{role.name}' are bitwise equal", f"a gap of {gap:.3g}")
    return first


@torch.no_grad()
def padding_gap(role: Role, read, answers: list[tuple], pad_id: int, device) -> float:
    """How much one answer's numbers move when others stand beside it; must stay within the bound.

    answers: (prompt ids, response ids). The first is read alone, beside a longer response (which
    pads it on the right), beside a longer prompt (on the left), and with both.
    """
    prompt, response = answers[0]
    longer_response = (prompt, response + response)
    longer_prompt = (prompt + prompt, response)

    def first_of(*rows):
        out = read(role, make_batch(rows, pad_id, device))[0]
        return out[: len(response)] if out.dim() else out

    alone = first_of(answers[0])
    beside = {
        "beside a longer response": [longer_response],
        "beside a longer prompt": [longer_prompt],
        "in a mixed batch": [longer_prompt, longer_response, *answers[1:]],
    }
    gaps = [
        within(
            f"role '{role.name}' reads an answer alone and {how} alike",
            (first_of(answers[0], *others) - alone).abs().max().item(),
            BOUNDS[role.lm.dtype],
        )
        for how, others in beside.items()
    ]
    return max(gaps)


@torch.no_grad()
def value_positions(critic: Role, answer: tuple, pad_id: int, device) -> None:
    """V of token t reads the state before t: the token itself and later ones must not move it.

    The critic's own head may still be zero: the states are read through a head of ones and minus ones.
    """
    width = critic.head.in_features
    head = skip_init(torch.nn.Linear, width, 1, bias=False, device=device)  # draws no random number
    head.weight.copy_(torch.tensor([1.0, -1.0]).repeat(width)[:width])
    probe = SimpleNamespace(transformer=critic.transformer, head=head)  # what reading values needs
    prompt, response = answer
    k = len(response) // 2
    other = list(response)
    other[k] = response[k - 1] if response[k - 1] != response[k] else pad_id
    values = [
        response_values(probe, make_batch([(prompt, r)], pad_id, device))[0]  # (T,)
        for r in (response, other)
    ]
    moved = (values[0] != values[1]).nonzero()[:, 0].tolist()
    if not moved or moved[0] != k + 1:
        fail(
            f"the value of token t is read before it: another token {k} first moves value {k + 1}",
            f"the first moved value is {moved[0] if moved else 'none'}",
        )


def trained_tensors(loss: torch.Tensor, trained: Role, others: list[Role]) -> int:
    """A backward pass reaches exactly the learned tensors of one role; its gradients are dropped."""
    loss.backward()
    reached = {
        f"{role.name}.{name}"
        for role in [trained, *others]
        for name, p in role.named_parameters()
        if p.grad is not None
    }
    learned = trained.learned()
    every_b = [(name, p.grad) for name, p in learned.items() if name.endswith(".B")]
    if trained.head is not None and not trained.head.weight.any():
        every_b = []  # below a zero head all slopes are still zero
    still = [name for name, grad in every_b if grad is not None and not grad.any()]
    for role in [trained, *others]:
        role.zero_grad(set_to_none=True)
    wanted = {f"{trained.name}.{name}" for name in learned}
    odd = sorted(wanted ^ reached) or still
    if odd:
        fail(
            f"gradients reach exactly the {len(wanted)} learned tensors of role '{trained.name}'",
            f"{len(odd)} that do not fit, first {odd[0]}",
        )
    return len(wanted)


def report(began: float, lines: list[str]) -> None:
    print(f"preflight: {'; '.join(lines)} [{time.perf_counter() - began:.1f} s]")


def supervised(actor: Role, answers: list[tuple], pad_id: int, device) -> None:
    """Before 10_sft: (prompt ids, response ids) of at least two rows."""
    began = time.perf_counter()
    batch = make_batch(answers, pad_id, device)
    repeats(actor, response_logprobs, batch)
    gap = padding_gap(actor, response_logprobs, answers, pad_id, device)
    loss = sft_loss(response_logprobs(actor, batch), batch.response_mask, 1)
    count = trained_tensors(loss, actor, [])
    report(began, ["two passes equal", f"padding {gap:.1g}", f"gradients in {count} tensors"])


def preference(reward: Role, pairs: list[tuple], pad_id: int, device) -> None:
    """Before 20_reward: (prompt ids, chosen ids, rejected ids) of at least two pairs."""
    began = time.perf_counter()
    answers = [(prompt, chosen) for prompt, chosen, _ in pairs]
    batch = make_batch(answers, pad_id, device)
    plain = repeats(reward, response_scores, batch)
    gap = padding_gap(reward, response_scores, answers, pad_id, device)
    chosen_scores, rejected_scores = pair_scores(reward, pairs, pad_id, device)
    shared = within(
        "a score is the same with the prompt shared by both answers",
        (chosen_scores - plain).abs().max().item(),
        BOUNDS[reward.lm.dtype],
    )
    count = trained_tensors(bradley_terry_loss(chosen_scores, rejected_scores), reward, [])
    report(
        began,
        ["two passes equal", f"padding {gap:.1g}", f"shared prompt {shared:.1g}",
         f"gradients in {count} tensors"],
    )


def policy(
    actor: Role, reference: Role, judges: list[Role], critic: Role, sft: Path,
    prompts: list[list[int]], chat, device, cached: bool = True,
) -> None:
    """Before 30_ppo, at step 0: the actor has just taken the SFT adapters; two prompts are enough."""
    began = time.perf_counter()
    want = fingerprint(load_file(sft))
    for role in (reference, actor):
        if fingerprint(role.learned()) != want:
            fail(f"role '{role.name}' starts as the SFT adapters, bit for bit", "other bits")

    # An end token in the prompt (the chat template writes some) ends nothing.
    prompts = [[chat.eos_id, *prompt] for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    rollout = sample(actor, prompts, 6, chat.eos_id, chat.pad_id, device, generator, cached)
    mask = rollout.batch.response_mask
    ids = rollout.batch.response_ids
    ended = ((ids == chat.eos_id) & mask).any(1)
    if not mask[:, 0].all() or not torch.equal(ended, rollout.finished):
        fail(
            "only an end token of the response ends it",
            f"lengths {mask.sum(1).tolist()}, finished {rollout.finished.tolist()}, "
            f"end token sampled {ended.tolist()}",
        )

    # Whole-sequence scoring against the sampler's own record, and against the reference.
    repeats(actor, vocab_logprobs, rollout.batch)
    vocab = vocab_logprobs(actor, rollout.batch)  # (N, V)
    with torch.no_grad():
        ref_vocab = vocab_logprobs(reference, rollout.batch)
    kl = exact_kl(vocab, ref_vocab, mask)[0].abs().max().item()
    if kl != 0:
        fail("the KL between actor and reference is exactly 0 at step 0", f"{kl:.3g}")
    logprobs = pick_logprobs(vocab, rollout.batch)
    gap = within(
        "sampled and whole-sequence log-probabilities agree on average",
        (logprobs.detach() - rollout.old_logprobs).abs().sum().item() / int(mask.sum()),
        BOUNDS[actor.lm.dtype],
    )
    others = [reference, *judges, critic]
    count = trained_tensors(-logprobs.sum(), actor, others)

    # The judges and the critic, on real tokens without an end token in the middle.
    response = [token for prompt in prompts for token in prompt[1:7]]
    answers = [(prompts[0], response), (prompts[1], response[:6])]
    gaps = [padding_gap(judge, response_scores, answers, chat.pad_id, device) for judge in judges]
    value_positions(critic, answers[0], chat.pad_id, device)
    batch = make_batch(answers, chat.pad_id, device)
    count += trained_tensors(
        response_values(critic, batch).sum(), critic, [actor, reference, *judges]
    )
    report(
        began,
        ["KL 0", "two passes equal", f"cache {gap:.1g}", f"padding {max(gaps, default=0):.1g}",
         "values before their token", f"gradients in {count} tensors"],
    )

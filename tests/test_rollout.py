"""Proves the sampler: the right tokens, with the right probabilities, recorded as they were drawn.

Oracles: an argmax loop over the stock model, whole-sequence scoring, exact frequencies of a fixed
distribution, and scripted policies that end at chosen steps.
"""

from types import SimpleNamespace

import pytest
import torch

import kernel.rollout as rollout
from kernel.optim import Optimizer
from kernel.rollout import pad_left, sample
from kernel.score import make_batch, response_logprobs
from kernel.supervised import sft_loss

CPU = torch.device("cpu")
EOS, PAD = 2, 0
PROMPTS = [[5, 6, 7], [8, 2, 9, 10, 11, 12], [13]]


def draw(role, prompts=PROMPTS, limit=12, seed=None, eos_id=EOS, pad_id=PAD, **more):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return sample(role, prompts, limit, eos_id, pad_id, CPU, generator, **more)


def argmax_loop(lm, prompt, limit):
    """Greedy decoding as anybody would write it down."""
    ids = list(prompt)
    for _ in range(limit):
        ids.append(int(lm(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def near(have, want, tolerance=1e-4):
    torch.testing.assert_close(have, want, rtol=0, atol=tolerance)


# --- prompts --------------------------------------------------------------------------------------


def test_prompts_are_padded_left_and_masked_by_length():
    ids, mask = pad_left(PROMPTS, EOS, CPU)  # case B02: END is the pad here, and a prompt token too
    assert ids.tolist() == [[2, 2, 2, 5, 6, 7], [8, 2, 9, 10, 11, 12], [2] * 5 + [13]]
    assert mask.sum(1).tolist() == [3, 6, 1]
    assert mask[:, -1].all() and mask[1].all() and not mask[0, :3].any()


def test_empty_prompt_is_refused(llama_dir, new_role):
    # cases B21, B33
    with pytest.raises(ValueError, match="empty prompt"):
        draw(new_role(llama_dir), [[5], [], [6]])


# --- cache, greedy, seeds -------------------------------------------------------------------------


def third_token(role, seed) -> int:
    """The id that row 0 emits third: taken as EOS, it ends that row early and the others later."""
    return int(draw(role, seed=seed, eos_id=-1).batch.response_ids[0, 2])


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_cached_and_plain_sampler_agree_in_ids_and_logprobs(model_dir, new_role, seed):
    role = new_role(model_dir)
    eos_id = third_token(role, seed)
    fast, slow = (draw(role, seed=seed, eos_id=eos_id, cached=c) for c in (True, False))
    assert fast.finished[0] and not fast.finished.all()
    assert torch.equal(fast.batch.response_ids, slow.batch.response_ids)
    assert torch.equal(fast.batch.response_mask, slow.batch.response_mask)
    assert torch.equal(fast.finished, slow.finished)
    near(fast.old_logprobs, slow.old_logprobs)
    near(fast.first_logits, slow.first_logits)


def test_greedy_equals_an_argmax_loop_alone_and_in_a_left_padded_batch(
    model_dir, new_role, stock_model
):
    # case B22
    role = new_role(model_dir)
    stock = stock_model(model_dir, role)
    want = [argmax_loop(stock, prompt, 12) for prompt in PROMPTS]
    assert draw(role).batch.responses == want
    assert draw(role, pad_id=EOS).batch.responses == want
    for prompt, ids in zip(PROMPTS, want):
        assert draw(role, [prompt]).batch.responses == [ids]


def test_generation_settings_of_the_model_folder_do_not_reach_greedy_decoding(
    model_dir, new_role, stock_model, edited_folder
):
    # case B22
    folder = edited_folder(
        model_dir, "generation_config.json", repetition_penalty=1.5, temperature=0.1
    )
    want = [argmax_loop(stock_model(model_dir), prompt, 12) for prompt in PROMPTS]
    assert draw(new_role(folder, trained=False)).batch.responses == want


def test_same_seed_gives_the_same_tokens_and_another_seed_other_ones(llama_dir, new_role):
    role = new_role(llama_dir)
    first, again, other = draw(role, seed=5), draw(role, seed=5), draw(role, seed=6)
    assert torch.equal(first.batch.response_ids, again.batch.response_ids)
    assert torch.equal(first.old_logprobs, again.old_logprobs)
    assert first.batch.response_ids.tolist() != other.batch.response_ids.tolist()


def test_sampling_reads_its_own_generator_only(llama_dir, new_role):
    # cases B13, B23: greedy takes no number at all
    role, before = new_role(llama_dir), torch.get_rng_state()
    draw(role, seed=5)
    draw(role)
    assert torch.equal(torch.get_rng_state(), before)


def test_going_on_from_a_saved_generator_continues_the_draws(llama_dir, new_role):
    # case B13
    role = new_role(llama_dir)
    generator = torch.Generator().manual_seed(249)
    sample(role, PROMPTS, 6, EOS, PAD, CPU, generator)
    state = generator.get_state()
    want = sample(role, PROMPTS, 6, EOS, PAD, CPU, generator)
    resumed = torch.Generator()
    resumed.set_state(state)
    have = sample(role, PROMPTS, 6, EOS, PAD, CPU, resumed)
    assert torch.equal(have.batch.response_ids, want.batch.response_ids)
    assert torch.equal(have.old_logprobs, want.old_logprobs)


def test_positions_count_real_tokens_also_when_only_new_columns_are_read(
    model_dir, new_role, monkeypatch
):
    # case B21: a rotary model hides a shift of all positions, so they are looked at directly
    role, seen = new_role(model_dir), []
    angles = role.transformer.angles
    monkeypatch.setattr(
        role.transformer, "angles", lambda positions: seen.append(positions) or angles(positions)
    )
    draw(role, [[5, 6, 7], [8, 9, 10, 11, 12]], limit=3, eos_id=-1)
    assert [part.tolist() for part in seen[-2:]] == [[3, 5], [4, 6]]
    assert sorted(seen[0].tolist()) == [0, 0, 1, 1, 2, 2, 3, 4]


# --- what is recorded -----------------------------------------------------------------------------


def test_recorded_logprobs_equal_whole_sequence_scoring_of_the_sampled_ids(model_dir, new_role):
    # case B09: temperature 1 over the full vocabulary, on both sides
    role = new_role(model_dir)
    for seed in range(4):
        have = draw(role, seed=seed, eos_id=third_token(role, seed))
        assert have.finished[0] and not have.finished.all()
        near(have.old_logprobs, response_logprobs(role, have.batch))
        answers = list(zip(have.batch.prompts, have.batch.responses))
        for row, answer in enumerate(answers):  # alone, without any padding
            alone = response_logprobs(role, make_batch([answer], PAD, CPU))[0]
            near(have.old_logprobs[row, : len(alone)], alone)
        assert (have.old_logprobs[~have.batch.response_mask] == 0).all()


def test_first_logits_are_the_stock_distribution_after_the_prompt(model_dir, new_role):
    # enough to recompute the first recorded log-probability by hand
    role = new_role(model_dir)
    have = draw(role, seed=3)
    for row, prompt in enumerate(PROMPTS):
        near(have.first_logits[row], role.lm(torch.tensor([prompt])).logits[0, -1])
        by_hand = have.first_logits[row].log_softmax(-1)[have.batch.response_ids[row, 0]]
        near(have.old_logprobs[row, 0], by_hand, 1e-6)


def test_records_carry_no_gradient(llama_dir, new_role):
    have = draw(new_role(llama_dir), seed=3)
    assert not have.old_logprobs.requires_grad and not have.first_logits.requires_grad


def test_prompts_come_back_unchanged(llama_dir, new_role):
    assert draw(new_role(llama_dir), seed=1).batch.prompts == PROMPTS


# --- ends and cuts --------------------------------------------------------------------------------


def scripted(monkeypatch, *responses, vocabulary=30):
    """A policy that emits these responses, one per row; after a script's end it goes on with id 29."""
    seen = []

    def next_logits(role, ids, mask, cache):
        t = ids.shape[1] - 1  # one prompt column
        logits = torch.full((len(responses), vocabulary), -50.0)
        for row, response in enumerate(responses):
            logits[row, response[t] if t < len(response) else 29] = 50.0
        seen.append((ids.clone(), mask.clone()))
        return logits

    monkeypatch.setattr(rollout, "next_logits", next_logits)
    return SimpleNamespace(seen=seen)


@pytest.mark.parametrize("seed", [None, 0])
def test_end_as_the_first_token_is_a_finished_response_of_one_token_beside_longer_rows(
    monkeypatch, seed
):
    # case B33
    scripted(monkeypatch, [EOS], [7, 8, 9, EOS])
    have = draw(None, [[5], [6]], limit=8, seed=seed, cached=False)
    assert have.batch.response_ids.tolist() == [[EOS, PAD, PAD, PAD], [7, 8, 9, EOS]]
    assert have.batch.response_mask.sum(1).tolist() == [1, 4]
    assert have.finished.tolist() == [True, True]
    assert have.batch.responses == [[EOS], [7, 8, 9, EOS]]


def test_end_as_the_first_token_of_every_row_stops_at_once(monkeypatch):
    # case B33
    policy = scripted(monkeypatch, [EOS], [EOS])
    have = draw(None, [[5], [6]], limit=8, cached=False)
    assert have.batch.response_ids.tolist() == [[EOS], [EOS]]
    assert have.finished.tolist() == [True, True]
    assert len(policy.seen) == 1


def test_limit_of_one_token(monkeypatch):
    # case B33: one row ends there, one is cut there
    scripted(monkeypatch, [EOS], [7])
    have = draw(None, [[5], [6]], limit=1, cached=False)
    assert have.batch.response_ids.tolist() == [[EOS], [7]]
    assert have.batch.response_mask.tolist() == [[True], [True]]
    assert have.finished.tolist() == [True, False]


def test_cut_off_row_keeps_its_ids_beside_a_row_that_ends_exactly_at_the_limit(monkeypatch):
    # case B33: nothing is appended to the cut-off answer or written over its last token
    scripted(monkeypatch, [7, 8, 9, 10, EOS], [7, 8, 9, EOS])
    have = draw(None, [[5], [6]], limit=4, cached=False)
    assert have.batch.response_ids.tolist() == [[7, 8, 9, 10], [7, 8, 9, EOS]]
    assert have.batch.response_mask.all()
    assert have.finished.tolist() == [False, True]


@pytest.mark.parametrize("pad_id", [PAD, EOS])
def test_after_the_end_there_are_only_masked_pads_and_later_steps_see_them_masked(
    monkeypatch, pad_id
):
    policy = scripted(monkeypatch, [7, EOS], [7, 8, 9, 10, EOS])
    have = draw(None, [[5], [6]], limit=9, pad_id=pad_id, cached=False)
    assert have.batch.response_ids[0].tolist() == [7, EOS, pad_id, pad_id, pad_id]
    assert have.batch.response_mask[0].tolist() == [True, True, False, False, False]
    assert have.old_logprobs[0, 2:].tolist() == [0.0, 0.0, 0.0]
    last_ids, last_mask = policy.seen[-1]
    assert last_ids[0].tolist() == [5, 7, EOS, pad_id, pad_id]
    assert last_mask[0].tolist() == [True, True, True, False, False]


def test_pad_id_drawn_as_a_token_is_a_token(monkeypatch):
    # the mask comes from the steps, never from the id
    scripted(monkeypatch, [PAD, 7, EOS])
    have = draw(None, [[5]], limit=9, cached=False)
    assert have.batch.responses == [[PAD, 7, EOS]]


def test_overfitted_actor_stops_by_itself(llama_dir, new_role):
    # case B02: END is among the targets, so the greedy answer ends where the example ends
    role = new_role(llama_dir, trained=False)
    batch = make_batch([([5, 6, 7], [20, 21, 22, EOS])], EOS, CPU)
    settings = {"warmup": 0.0, "final_lr": 1.0, "max_grad_norm": 1.0, "weight_decay": 0.0}
    optimizer = Optimizer(role.learned(), 40, 0.02, settings)
    for update in range(40):
        loss = sft_loss(response_logprobs(role, batch), batch.response_mask, 4)
        loss.backward()
        optimizer.step(loss.detach(), f"update {update}")
    have = draw(role, [[5, 6, 7]], pad_id=EOS)
    assert have.batch.responses == [[20, 21, 22, EOS]] and have.finished.all()


# --- frequencies ----------------------------------------------------------------------------------


def fixed(monkeypatch, probabilities: list[float]):
    logits = torch.tensor(probabilities).log()

    def next_logits(role, ids, mask, cache):
        return logits.expand(len(ids), -1)

    monkeypatch.setattr(rollout, "next_logits", next_logits)


def test_frequencies_match_the_probabilities(monkeypatch):
    # Chi-square with 5 degrees of freedom: above 25.7 once in 10,000 seeds; the seed is fixed.
    probabilities, rows = [0.4, 0.3, 0.15, 0.1, 0.04, 0.01], 20_000
    fixed(monkeypatch, probabilities)
    have = draw(None, [[5]] * rows, limit=1, seed=1, eos_id=99, cached=False)
    counts = have.batch.response_ids[:, 0].bincount(minlength=6).tolist()
    chi_square = sum((n - rows * p) ** 2 / (rows * p) for n, p in zip(counts, probabilities))
    assert chi_square < 25.7, counts
    near(
        have.old_logprobs[:, 0],
        torch.tensor(probabilities).log()[have.batch.response_ids[:, 0]],
        1e-6,
    )


def test_draws_of_later_steps_and_other_rows_are_independent(monkeypatch):
    # 4 equally likely pairs: chi-square with 3 degrees of freedom, 21.1 once in 10,000
    fixed(monkeypatch, [0.5, 0.5])
    ids = draw(None, [[5]] * 10_000, limit=2, seed=2, eos_id=99, cached=False).batch.response_ids
    for pairs in (ids[:, 0] * 2 + ids[:, 1], ids[::2, 0] * 2 + ids[1::2, 0]):
        expected = len(pairs) / 4
        counts = pairs.bincount(minlength=4)
        assert ((counts - expected) ** 2 / expected).sum() < 21.1, counts


def test_tokens_of_probability_zero_are_never_drawn(monkeypatch):
    # first, last, and between others
    fixed(monkeypatch, [0.0, 0.5, 0.0, 0.5, 0.0])
    have = draw(None, [[5]] * 20_000, limit=1, seed=3, eos_id=99, cached=False)
    assert set(have.batch.response_ids[:, 0].tolist()) == {1, 3}


@pytest.mark.parametrize("u, token", [(0.0, 1), (0.25, 1), (0.5, 3), (0.75, 3), (1 - 2**-53, 3)])
def test_the_smallest_and_the_largest_uniform_number_give_possible_tokens(monkeypatch, u, token):
    fixed(monkeypatch, [0.0, 0.5, 0.0, 0.5, 0.0])
    monkeypatch.setattr(
        torch, "rand", lambda *shape, **_: torch.full(shape, u, dtype=torch.float64)
    )
    have = draw(None, [[5]], limit=1, seed=0, eos_id=99, cached=False)
    assert have.batch.response_ids.tolist() == [[token]]


def test_rare_tokens_keep_their_place(monkeypatch):
    # 40 tokens of 1e-9 behind one of almost 1: an FP32 running sum has steps of 1.2e-7 there and
    # would give them no room at all. The uniform numbers are aimed at the middle of each.
    fixed(monkeypatch, [1.0] + [1e-9] * 40)
    aimed = torch.arange(1, 41)
    u = (1 + 1e-9 * (aimed.double()[:, None] - 0.5)) / (1 + 40e-9)
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: u)
    have = draw(None, [[5]] * 40, limit=1, seed=0, eos_id=-1, cached=False)
    assert torch.equal(have.batch.response_ids[:, 0], aimed)

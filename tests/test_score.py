"""Proves that log-probabilities, values and scores are read out of the right columns, whatever pads.

Oracles: the stock model (adapters written into its plain weights) on one unpadded row at a time;
NumPy in double precision for KL and entropy; a fake backbone whose hidden state is its own column
number, so that what was gathered can be read off.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernel.score import (
    Batch,
    active_logits,
    exact_kl,
    make_batch,
    pair_scores,
    pick_logprobs,
    response_logprobs,
    response_scores,
    response_values,
    score_answers,
    score_pairs,
    vocab_logprobs,
)
from kernel.supervised import sft_loss

CPU = torch.device("cpu")
EOS, PAD = 2, 0
# Rows of different lengths; the prompts hold EOS ids too, as chat templates do.
PROMPTS = [[5, 6, 2, 7], [8, 2, 9, 2, 10, 11, 12], [13]]
RESPONSES = [[20, 21, 2], [22, 2], [23, 24, 25, 26, 27]]  # the last one was cut off


def batch_of(prompts=PROMPTS, responses=RESPONSES, pad_id=PAD) -> Batch:
    return make_batch(zip(prompts, responses), pad_id, CPU)


def padded(left: int, right: int, prompts=PROMPTS, responses=RESPONSES, pad_id=PAD) -> Batch:
    """The rows with `right` more pad columns; behind them a row whose prompt is `left` tokens longer."""
    if left:
        longer = list(range(60, 60 + max(map(len, prompts)) + left))
        prompts, responses = [*prompts, longer], [*responses, [40, 2]]
    batch = batch_of(prompts, responses, pad_id)
    ids, mask = batch.response_ids, batch.response_mask
    return batch._replace(
        response_ids=F.pad(ids, (0, right), value=pad_id), response_mask=F.pad(mask, (0, right))
    )


def stock_logits(stock, prompt, response):
    """(T, V): row t is the distribution of response token t, from one unpadded forward."""
    logits = stock(torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1]


def near(have, want, tolerance=1e-5):
    torch.testing.assert_close(have, want, rtol=0, atol=tolerance)


# --- batches --------------------------------------------------------------------------------------


def test_batch_pads_responses_right_prompts_not_at_all_and_masks_by_length():
    batch = batch_of(pad_id=EOS)  # case B02: END is the pad here, and stays active where it is real
    assert (batch.prompts, batch.responses) == (PROMPTS, RESPONSES)
    for tokens, prompt, response in zip(batch.packed.tokens, PROMPTS, RESPONSES):
        row = prompt + response  # no pad before, between or behind
        assert batch.packed.ids[tokens[: len(row)]].tolist() == row
    assert len(batch.packed.ids) == len(sum(PROMPTS + RESPONSES, []))
    assert batch.response_ids.tolist() == [
        [20, 21, 2, 2, 2],
        [22, 2, 2, 2, 2],
        [23, 24, 25, 26, 27],
    ]
    t, f = True, False
    assert batch.response_mask.tolist() == [[t, t, t, f, f], [t, t, f, f, f], [t, t, t, t, t]]


def test_empty_prompt_or_response_is_refused():
    # cases B21, B32, B33
    with pytest.raises(ValueError, match="empty prompt"):
        batch_of(prompts=[[5], [], [6]])
    with pytest.raises(ValueError, match="empty response"):
        batch_of(responses=[[5], [6], []])


def test_sft_targets_are_the_answer_tokens_and_one_end_token_also_when_pad_is_eos(
    model_dir, new_role, stock_model
):
    # case B02: labels before the shift [-100, -100, 5, 6, 7, 2, -100, -100]
    role = new_role(model_dir)
    stock = stock_model(model_dir, role)
    prompts, responses = [[30, 31], [32, 33]], [[5, 6, 7, EOS], [8, 9, 10, 11, 12, EOS]]
    for pad_id in (PAD, EOS):
        batch = batch_of(prompts, responses, pad_id)
        assert batch.response_mask.sum(1).tolist() == [3 + 1, 5 + 1]
        assert batch.response_ids[batch.response_mask].tolist().count(EOS) == 2
        have = sft_loss(
            response_logprobs(role, batch), batch.response_mask, batch.response_mask.sum()
        )
        ids = torch.tensor([[30, 31, 5, 6, 7, 2, pad_id, pad_id], [32, 33, 8, 9, 10, 11, 12, 2]])
        labels = torch.tensor(
            [[-100, -100, 5, 6, 7, 2, -100, -100], [-100, -100, 8, 9, 10, 11, 12, 2]]
        )
        mask = torch.tensor([[1] * 6 + [0] * 2, [1] * 8])
        logits = stock(ids, attention_mask=mask).logits
        want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        near(have, want, 2e-5)


# --- log-probabilities ----------------------------------------------------------------------------


def test_logprobs_equal_the_stock_model_row_by_row_without_padding(
    model_dir, new_role, stock_model
):
    role = new_role(model_dir)
    have = response_logprobs(role, batch_of())
    assert have.shape == (3, 5) and have.dtype == torch.float32
    for stock, tolerance in ((role.lm, 1e-5), (stock_model(model_dir, role), 1e-4)):
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
            table = stock_logits(stock, prompt, response).log_softmax(-1)
            want = table.gather(1, torch.tensor(response)[:, None])[:, 0]
            near(have[row, : len(response)], want, tolerance)
            assert have[row, len(response) :].tolist() == [0.0] * (5 - len(response))


def test_logprobs_are_negative_and_sum_to_one_over_the_vocabulary(llama_dir, new_role):
    role = new_role(llama_dir)
    every = [[token] for token in range(97)]
    logprobs = response_logprobs(role, batch_of([[5, 6, 7]] * 97, every))
    assert (logprobs < 0).all()
    near(logprobs.exp().sum(), torch.tensor(1.0))


@pytest.mark.parametrize("left, right", [(0, 7), (7, 0), (3, 5)])
def test_amount_and_side_of_padding_change_nothing(model_dir, new_role, left, right):
    # cases B01, B21
    role, plain = new_role(model_dir, "reward", head="normal"), batch_of()
    more = padded(left, right)
    for read in (response_logprobs, response_values):
        near(read(role, more)[:3, :5], read(role, plain))
        assert (read(role, more)[:3, 5:] == 0).all()
    near(response_scores(role, more)[:3], response_scores(role, plain))


def test_pad_id_changes_nothing_also_when_it_is_eos(model_dir, new_role):
    # cases B01, B02
    role = new_role(model_dir, "reward", head="normal")
    want = batch_of(pad_id=PAD)
    for pad_id in (EOS, 50):
        have = batch_of(pad_id=pad_id)
        for read in (response_logprobs, response_values, response_scores):
            near(read(role, have), read(role, want))


def test_batch_neighbours_and_row_order_change_nothing(model_dir, new_role):
    # case B01: alone, in the mixed batch, reversed
    role = new_role(model_dir, "reward", head="normal")
    for read in (response_logprobs, response_values, response_scores):
        together = read(role, batch_of())
        near(read(role, batch_of(PROMPTS[::-1], RESPONSES[::-1])).flip(0), together)
        for row in range(3):
            alone = read(role, batch_of([PROMPTS[row]], [RESPONSES[row]]))[0]
            want = together[row] if alone.dim() == 0 else together[row, : len(RESPONSES[row])]
            near(alone, want)


# --- values ---------------------------------------------------------------------------------------


@pytest.fixture
def column_role():
    """A role whose hidden state at a token is its position in the row, padding not counted."""
    head = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(head.weight)
    torch.nn.init.zeros_(head.bias)

    def states(packed, wanted):
        return packed.positions[wanted].float()[:, None]

    return SimpleNamespace(transformer=SimpleNamespace(states=states), head=head, pooling="last")


def test_values_come_from_the_state_before_each_token(column_role):
    # case B06: prompt of 4 tokens, response of 3
    row = [[5, 6, 7, 8]], [[20, 21, 2]]
    assert response_values(column_role, batch_of(*row)).tolist() == [[3, 4, 5]]
    assert response_values(column_role, padded(2, 0, *row))[0].tolist() == [3, 4, 5]
    assert response_values(column_role, padded(2, 2, *row))[0].tolist() == [3, 4, 5, 0, 0]


def test_score_comes_from_the_last_response_token_end_included(column_role):
    # case B01: prompts of 4, 7 and 1 tokens, responses of 3, 2 and 5
    assert response_scores(column_role, batch_of()).tolist() == [6, 8, 5]
    assert response_scores(column_role, padded(4, 6))[:3].tolist() == [6, 8, 5]
    assert response_scores(column_role, batch_of(pad_id=EOS)).tolist() == [6, 8, 5]


def test_mean_pooling_averages_the_response_tokens_and_nothing_else(column_role):
    # by hand: prompts of 4, 7 and 1 tokens, responses of 3, 2 and 5
    column_role.pooling = "mean"
    want = [(4 + 5 + 6) / 3, (7 + 8) / 2, (1 + 2 + 3 + 4 + 5) / 5]
    assert response_scores(column_role, batch_of()).tolist() == want
    assert response_scores(column_role, padded(4, 6))[:3].tolist() == want
    assert response_scores(column_role, batch_of(pad_id=EOS)).tolist() == want


@pytest.mark.parametrize("left, right", [(0, 0), (2, 3)])
def test_positions_count_real_tokens_and_pads_are_left_out(left, right):
    # case B21
    seen = {}

    def states(packed, wanted):
        seen.update(packed._asdict())
        return torch.zeros(len(wanted), 1)

    role = SimpleNamespace(
        transformer=SimpleNamespace(states=states),
        lm=SimpleNamespace(lm_head=torch.nn.Linear(1, 5)),
    )
    active_logits(role, padded(left, right, pad_id=50))
    rows = [p + r for p, r in zip(PROMPTS, RESPONSES)]
    assert 50 not in seen["ids"]
    for tokens, row in zip(seen["tokens"], rows):
        tokens = tokens[: len(row)]
        assert seen["ids"][tokens].tolist() == row
        assert seen["positions"][tokens].tolist() == list(range(len(row)))


def test_logprobs_values_and_mask_have_one_shape(llama_dir, new_role):
    # case B06
    role, batch = new_role(llama_dir, "critic", head="normal"), batch_of()
    assert response_logprobs(role, batch).shape == response_values(role, batch).shape == (3, 5)


def test_changing_a_token_changes_only_the_values_after_it(model_dir, new_role):
    # case B06, on the real backbone: V before token t cannot know token t
    role = new_role(model_dir, "critic", head="normal")
    first = response_values(role, batch_of([[5, 6, 7]], [[20, 21, 22, 23]]))[0]
    other = response_values(role, batch_of([[5, 6, 7]], [[20, 21, 60, 23]]))[0]
    near(first[:3], other[:3], 1e-6)
    assert abs(first[3] - other[3]) > 1e-3


def test_values_equal_the_head_on_the_stock_hidden_states(model_dir, new_role, stock_model):
    role = new_role(model_dir, "critic", head="normal")
    stock, values = stock_model(model_dir, role), response_values(role, batch_of())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        hidden = stock.model(torch.tensor([prompt + response])).last_hidden_state[0]
        want = (hidden @ role.head.weight[0] + role.head.bias)[len(prompt) - 1 : -1]
        near(values[row, : len(response)], want, 2e-4)


def test_zero_head_gives_values_exactly_zero(llama_dir, new_role):
    critic = new_role(llama_dir, "critic", head="zero", trained=False)
    assert (response_values(critic, batch_of()) == 0).all()


# --- scores ---------------------------------------------------------------------------------------


def test_scores_equal_the_head_on_the_last_stock_hidden_state(model_dir, new_role, stock_model):
    # case B01
    role = new_role(model_dir, "reward", head="normal")
    stock, scores = stock_model(model_dir, role), response_scores(role, batch_of())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        hidden = stock.model(torch.tensor([prompt + response])).last_hidden_state[0, -1]
        near(scores[row], hidden @ role.head.weight[0] + role.head.bias[0], 2e-4)


def test_mean_pooled_scores_equal_the_head_on_the_mean_stock_state(
    model_dir, new_role, stock_model
):
    role = new_role(model_dir, "reward", head="normal")
    role.pooling = "mean"
    stock, scores = stock_model(model_dir, role), response_scores(role, batch_of())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        states = stock.model(torch.tensor([prompt + response])).last_hidden_state[0]
        mean = states[len(prompt) :].mean(0)
        near(scores[row], mean @ role.head.weight[0] + role.head.bias[0], 2e-4)
    scores.sum().backward()  # by hand: every response's mean state reaches the head once
    near(role.head.bias.grad, torch.tensor([3.0]))


@pytest.mark.parametrize("pad_id", [PAD, EOS])
def test_every_token_of_the_answer_moves_the_score_and_the_last_one_too(
    model_dir, new_role, pad_id
):
    # case B01
    role = new_role(model_dir, "reward", head="normal")
    answer = [20, 21, 22, EOS]
    plain = response_scores(role, batch_of([[5, 6], [7, 8, 9]], [answer, [30] * 6], pad_id))[0]
    for position in range(4):
        changed = answer[:position] + [60] + answer[position + 1 :]
        other = response_scores(role, batch_of([[5, 6], [7, 8, 9]], [changed, [30] * 6], pad_id))[0]
        assert abs(other - plain) > 1e-3, position


def test_judge_returns_one_score_per_row_in_order_whatever_its_inner_batches(llama_dir, new_role):
    role, rng = new_role(llama_dir, "reward", head="normal"), random.Random(3)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randint(1, 9))] for _ in range(35)]
    responses = [[rng.randrange(3, 97) for _ in range(rng.randint(1, 9))] for _ in range(35)]
    have = score_answers(role, list(zip(prompts, responses)), PAD, CPU)
    assert have.shape == (35,) and not have.requires_grad
    for row in range(35):
        near(have[row], response_scores(role, batch_of([prompts[row]], [responses[row]]))[0], 2e-5)


# --- KL and entropy -------------------------------------------------------------------------------


@torch.no_grad()
def against_reference(actor, reference, batch) -> dict[str, torch.Tensor]:
    vocab, ref_vocab = vocab_logprobs(actor, batch), vocab_logprobs(reference, batch)
    kl, entropy = exact_kl(vocab, ref_vocab, batch.response_mask)
    return {
        "full_logprobs": pick_logprobs(vocab, batch),
        "ref_logprobs": pick_logprobs(ref_vocab, batch),
        "kl": kl,
        "entropy": entropy,
    }


def test_kl_entropy_and_logprobs_equal_numpy_in_double_precision(model_dir, new_role):
    actor, reference = new_role(model_dir, seed=3), new_role(model_dir, "reference", seed=8)
    have = against_reference(actor, reference, batch_of())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        tables = []
        for role in (actor, reference):
            logits = stock_logits(role.lm, prompt, response).detach().double().numpy()
            tables.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        log_p, log_q = tables
        p = np.exp(log_p)
        steps = np.arange(len(response))
        want = {
            "full_logprobs": log_p[steps, response],
            "ref_logprobs": log_q[steps, response],
            "kl": (p * (log_p - log_q)).sum(-1),
            "entropy": -(p * log_p).sum(-1),
        }
        for name, numbers in want.items():
            mine = have[name][row].double().numpy()
            np.testing.assert_allclose(
                mine[: len(response)], numbers, rtol=0, atol=2e-5, err_msg=name
            )
            assert (mine[len(response) :] == 0).all(), name
        assert (have["kl"][row, : len(response)] > 1e-3).all()  # case B16: never negative
    assert (have["entropy"] >= 0).all() and (have["entropy"] <= np.log(97)).all()  # case B46


def test_equal_adapters_have_kl_and_log_ratio_exactly_zero_and_a_change_shows(model_dir, new_role):
    # case B03: the reference is the SFT policy with its adapters on, not the bare base
    actor, reference = new_role(model_dir), new_role(model_dir, "reference").freeze()
    have = against_reference(actor, reference, batch_of())
    assert (have["kl"] == 0).all()
    assert torch.equal(have["full_logprobs"], have["ref_logprobs"])

    base = new_role(model_dir, trained=False)
    assert (against_reference(base, reference, batch_of())["kl"][0, :3] > 1e-3).all()
    with torch.no_grad():
        actor.learned()["lm.model.layers.0.mlp.down_proj.B"].add_(0.05)
    moved = against_reference(actor, reference, batch_of())
    assert (moved["kl"][batch_of().response_mask] > 0).all()
    assert torch.equal(moved["ref_logprobs"], have["ref_logprobs"])  # the reference did not move


def test_whole_sequence_record_equals_response_logprobs_and_padding_changes_no_statistic(
    llama_dir, new_role
):
    # case B46
    actor, reference = new_role(llama_dir, seed=3), new_role(llama_dir, "reference", seed=8)
    plain = against_reference(actor, reference, batch_of())
    assert torch.equal(plain["full_logprobs"], response_logprobs(actor, batch_of()))
    wide = against_reference(actor, reference, padded(0, 20))
    for name, want in plain.items():
        near(wide[name][:, :5], want)
        assert (wide[name][:, 5:] == 0).all()


# --- repeatability --------------------------------------------------------------------------------


def test_two_calls_are_bitwise_equal_and_use_no_random_numbers(model_dir, new_role):
    # case B23
    role = new_role(model_dir, "reward", head="normal")
    other = new_role(model_dir, "reference", seed=8)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    for read in (response_logprobs, response_values, response_scores):
        assert torch.equal(read(role, batch_of()), read(role, batch_of()))
    against_reference(role, other, batch_of())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert not role.training


def test_dropout_in_the_model_config_is_off_in_every_role(model_dir, new_role, edited_folder):
    # case B23
    folder = edited_folder(model_dir, "config.json", attention_dropout=0.5)
    role, plain = (new_role(f, "reward", head="normal") for f in (folder, model_dir))
    assert role.lm.config.attention_dropout == 0.5
    want = response_scores(plain, batch_of())
    assert torch.equal(response_scores(role, batch_of()), want)
    assert torch.equal(response_scores(role, batch_of()), want)
    stock = role.lm(torch.tensor([PROMPTS[0]])).logits
    role.lm.train()  # the setting has teeth: in training mode it does change the stock model
    with torch.random.fork_rng():
        assert not torch.equal(role.lm(torch.tensor([PROMPTS[0]])).logits, stock)
    assert torch.equal(response_scores(role, batch_of()), want)


def test_gradient_of_the_logprobs_reaches_every_adapter(model_dir, new_role):
    # case B15
    role = new_role(model_dir, "critic", head="normal")
    (response_logprobs(role, batch_of()).sum() + response_values(role, batch_of()).sum()).backward()
    for name, p in role.learned().items():
        assert p.grad is not None and p.grad.abs().max() > 0, name


def test_pairs_with_a_shared_prompt_score_like_separate_rows(model_dir, new_role):
    # the fast path of stage 20 against its plain twin, in value and in every gradient
    role = new_role(model_dir, "reward", head="normal", trained=True)
    rejected = [list(reversed(r)) + r[:2] for r in RESPONSES]

    def gradients(scores):
        loss = (scores[0] * 1.5 - scores[1]).sum()
        return torch.autograd.grad(loss, list(role.learned().values()))

    plain = (
        response_scores(role, batch_of()),
        response_scores(role, batch_of(responses=rejected)),
    )
    shared = pair_scores(role, list(zip(PROMPTS, RESPONSES, rejected)), PAD, CPU)
    for a, b in zip(shared, plain):
        near(a, b)
    for a, b in zip(gradients(shared), gradients(plain)):
        near(a, b, 1e-4)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_any_number_of_pairs_is_scored_in_order_whatever_the_batches(model_dir, new_role, size):
    role, rng = new_role(model_dir, "reward", head="normal", trained=True), random.Random(size)
    pairs = [
        tuple([rng.randrange(3, 97) for _ in range(rng.randint(1, 9))] for _ in range(3))
        for _ in range(11)
    ]
    have = score_pairs(role, pairs, PAD, CPU, size)
    want = pair_scores(role, pairs, PAD, CPU)
    for a, b in zip(have, want):
        assert a.shape == (11,) and not a.requires_grad
        near(a, b, 2e-5)


def test_in_a_shared_row_neither_answer_sees_the_other(model_dir, new_role):
    role = new_role(model_dir, "reward", head="normal", trained=True)
    with torch.no_grad():
        first = pair_scores(role, list(zip(PROMPTS, RESPONSES, RESPONSES)), PAD, CPU)
        others = [[t + 1 for t in r] + [7] for r in RESPONSES]
        second = pair_scores(role, list(zip(PROMPTS, RESPONSES, others)), PAD, CPU)
    near(first[0], first[1])  # the same answer on both sides: a tie
    near(first[0], second[0])
    assert not torch.allclose(first[1], second[1], atol=1e-4)

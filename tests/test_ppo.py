"""Proves the PPO arithmetic: token rewards, GAE, the clipped loss, the value loss and the statistics.

Oracles: numbers worked out by hand in the comments, and slow plain-Python loops that use another form
of the formula (GAE as a forward sum of discounted deltas). Every function is also shown to ignore
whatever stands in masked slots, and any number of padding columns.
"""

import math
import random

import pytest
import torch

from kernel.measure.iteration import explained_variance
from kernel.ppo import gae, policy_loss, response_mean, token_rewards, value_loss


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def prefix_mask(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def close(have, want, tolerance=1e-6):
    want = tensor(want) if isinstance(want, (list, float, int)) else want
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


# --- token rewards --------------------------------------------------------------------------------


def test_score_sits_on_the_last_active_token_and_nowhere_else():
    # case B08: [t0, t1, END, pad, pad], and a response that fills the width
    zeros = torch.zeros(2, 5)
    rewards = token_rewards(
        tensor([2.0, 2.0]),
        zeros,
        zeros,
        prefix_mask([3, 5], 5),
        torch.tensor([True, True]),
        0.02,
        -1.0,
    )
    assert rewards.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, 2]]


def test_one_token_response_gets_score_and_penalty_on_that_token():
    # case B33
    zeros = torch.zeros(2, 1)
    rewards = token_rewards(
        tensor([0.5, 0.5]),
        zeros,
        zeros,
        prefix_mask([1, 1], 1),
        torch.tensor([True, False]),
        0.02,
        -1.0,
    )
    assert rewards.tolist() == [[0.5], [-0.5]]


def test_cut_off_penalty_is_added_on_the_last_token_of_cut_rows_only():
    zeros = torch.zeros(2, 4)
    rewards = token_rewards(
        tensor([2.0, 2.0]),
        zeros,
        zeros,
        prefix_mask([4, 4], 4),
        torch.tensor([True, False]),
        0.02,
        -1.0,
    )
    assert rewards.tolist() == [[0, 0, 0, 2], [0, 0, 0, 1]]


def test_kl_penalty_pays_for_a_token_that_became_rarer_and_charges_for_one_that_became_likelier():
    # case B16: k1(-2, -1) = -2 - -1 = -1, so the reward is -0.1 * -1 = +0.1; the mirror gives -0.1
    old, ref = tensor([[-2.0, -1.0, 0.0]]), tensor([[-1.0, -2.0, 0.0]])
    rewards = token_rewards(
        tensor([0.0]), old, ref, prefix_mask([3], 3), torch.tensor([True]), 0.1, -1.0
    )
    close(rewards, [[0.1, -0.1, 0.0]])


@pytest.mark.parametrize("seed", range(4))
def test_rewards_of_a_row_sum_to_score_minus_kl_coef_times_summed_log_ratio(seed):
    # case B08, last sentence; the masked slots hold junk
    rng = random.Random(seed)
    lengths, width, kl_coef = [3, 7, 1, 5], 7, 0.1
    old = [[rng.uniform(-4, 0) for _ in range(width)] for _ in lengths]
    ref = [[rng.uniform(-4, 0) for _ in range(width)] for _ in lengths]
    scores = [rng.uniform(-3, 3) for _ in lengths]
    finished = [True, False, True, False]
    rewards = token_rewards(
        tensor(scores), tensor(old), tensor(ref), prefix_mask(lengths, width), torch.tensor(finished),
        kl_coef, -1.0,
    )
    for row, length in enumerate(lengths):
        log_ratio = sum(old[row][t] - ref[row][t] for t in range(length))
        want = scores[row] - kl_coef * log_ratio + (0.0 if finished[row] else -1.0)
        assert math.isclose(rewards[row].sum().item(), want, abs_tol=1e-5)
        assert rewards[row, length:].tolist() == [0.0] * (width - length)


def test_infinite_log_ratio_in_a_masked_slot_gives_reward_exactly_zero():
    # case B30
    old, ref = tensor([[0.0, -math.inf]]), tensor([[0.0, -math.inf]])  # their difference is a NaN
    rewards = token_rewards(
        tensor([1.0]), old, ref, prefix_mask([1], 2), torch.tensor([True]), 0.02, -1.0
    )
    assert rewards.tolist() == [[1.0, 0.0]]


# --- GAE ------------------------------------------------------------------------------------------


def test_gae_over_three_steps_by_hand_with_gamma_one():
    # delta_2 = 1.0       - 0.3 =  0.7    A_2 = 0.7
    # delta_1 = -0.2 + 0.3 - 0.4 = -0.3   A_1 = -0.3 + 0.95 * 0.7   = 0.365
    # delta_0 =  0.1 + 0.4 - 0.5 =  0.0   A_0 =  0.0 + 0.95 * 0.365 = 0.34675
    rewards, values = tensor([[0.1, -0.2, 1.0]]), tensor([[0.5, 0.4, 0.3]])
    advantages, returns = gae(rewards, values, prefix_mask([3], 3), 1.0, 0.95)
    close(advantages, [[0.34675, 0.365, 0.7]])
    close(returns, [[0.84675, 0.765, 1.0]])


def test_gae_over_three_steps_by_hand_with_gamma_below_one():
    # gamma 0.9, lambda 0.5, so gamma * lambda = 0.45
    # delta_2 = 1.0               - 0.3 =  0.7    A_2 =  0.7
    # delta_1 = -0.2 + 0.9 * 0.3 - 0.4 = -0.33    A_1 = -0.33 + 0.45 * 0.7    = -0.015
    # delta_0 =  0.1 + 0.9 * 0.4 - 0.5 = -0.04    A_0 = -0.04 + 0.45 * -0.015 = -0.04675
    rewards, values = tensor([[0.1, -0.2, 1.0]]), tensor([[0.5, 0.4, 0.3]])
    advantages, returns = gae(rewards, values, prefix_mask([3], 3), 0.9, 0.5)
    close(advantages, [[-0.04675, -0.015, 0.7]])
    close(returns, [[0.45325, 0.385, 1.0]])


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_forward_sum_of_discounted_deltas(seed, gamma, gae_lambda):
    rng = random.Random(seed)
    lengths, width = [4, 9], 9
    rewards = [[rng.uniform(-2, 2) for _ in range(width)] for _ in lengths]
    values = [[rng.uniform(-2, 2) for _ in range(width)] for _ in lengths]
    advantages, returns = gae(
        tensor(rewards), tensor(values), prefix_mask(lengths, width), gamma, gae_lambda
    )
    for row, length in enumerate(lengths):
        for t in range(length):
            want = 0.0
            for k in range(t, length):
                following = values[row][k + 1] if k + 1 < length else 0.0
                delta = rewards[row][k] + gamma * following - values[row][k]
                want += (gamma * gae_lambda) ** (k - t) * delta
            assert math.isclose(advantages[row, t].item(), want, abs_tol=1e-5)
            assert math.isclose(returns[row, t].item(), want + values[row][t], abs_tol=1e-5)
        assert advantages[row, length:].tolist() == [0.0] * (width - length)
        assert returns[row, length:].tolist() == [0.0] * (width - length)


def test_lambda_one_makes_the_returns_plain_sums_of_later_rewards():
    rewards, values = tensor([[1.0, 2.0, 4.0]]), tensor([[9.0, -5.0, 3.0]])
    _, returns = gae(rewards, values, prefix_mask([3], 3), 1.0, 1.0)
    close(returns, [[7.0, 6.0, 4.0]])


def test_nothing_is_bootstrapped_past_the_end_or_the_cut():
    # Row 0 ends with EOS in column 1, row 1 is cut in column 2: both last advantages are r - V.
    rewards, values = (
        tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
        tensor([[0.2, 0.4, 1e6], [0.2, 0.3, 0.4]]),
    )
    advantages, _ = gae(rewards, values, prefix_mask([2, 3], 3), 1.0, 0.95)
    close(advantages[0, 1], 0.6)
    close(advantages[1, 2], 0.6)
    close(advantages[0, 0], 0.4 - 0.2 + 0.95 * 0.6)  # the 1e6 behind the end is nowhere


# --- the clipped loss -----------------------------------------------------------------------------

CLIP_CASES = [
    # advantage, ratio, loss, d loss / d new_logprob, clipped
    pytest.param(2.0, 1.5, -2.4, 0.0, True, id="good-above"),  # min(3.0, 2.4): clipped
    pytest.param(2.0, 0.5, -1.0, -1.0, False, id="good-below"),  # min(1.0, 1.6): pulls back up
    pytest.param(-2.0, 1.5, 3.0, 3.0, False, id="bad-above"),  # min(-3.0, -2.4): pushes down
    pytest.param(-2.0, 0.5, 1.6, 0.0, True, id="bad-below"),  # min(-1.0, -1.6): clipped
    pytest.param(2.0, 1.1, -2.2, -2.2, False, id="good-inside"),
    pytest.param(-2.0, 0.9, 1.8, 1.8, False, id="bad-inside"),
]


@pytest.mark.parametrize("advantage, ratio, loss, gradient, clipped", CLIP_CASES)
def test_clip_by_hand_for_each_sign_and_side(advantage, ratio, loss, gradient, clipped):
    # d(ratio)/d(new) = ratio, so an unclipped token has gradient -ratio * A
    old = tensor([[-3.0]])
    new = (old + math.log(ratio)).requires_grad_()
    have, stats = policy_loss(
        new, old, tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool), 0.2
    )
    have.backward()
    close(have.detach(), loss)
    close(new.grad, [[gradient]])
    close(stats["ratio"], [[ratio]])
    assert stats["clip_bites"].tolist() == [[clipped]]
    assert stats["clip_fraction"].item() == float(clipped)


@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_and_gradient_equal_a_plain_loop(seed):
    rng = random.Random(seed)
    lengths, width, clip = [2, 6, 4], 6, 0.2
    old = [[rng.uniform(-3, 0) for _ in range(width)] for _ in lengths]
    new = [[value + rng.uniform(-0.6, 0.6) for value in row] for row in old]
    advantages = [[rng.uniform(-2, 2) for _ in range(width)] for _ in lengths]
    total, gradient, bites, kl = 0.0, [[0.0] * width for _ in lengths], 0, 0.0
    for row, length in enumerate(lengths):
        for t in range(length):
            ratio, a = math.exp(new[row][t] - old[row][t]), advantages[row][t]
            bounded = min(max(ratio, 1 - clip), 1 + clip)
            share = 1 / (length * len(lengths))
            total -= min(ratio * a, bounded * a) * share
            if ratio * a <= bounded * a:
                gradient[row][t] = -ratio * a * share
            else:
                bites += 1
            kl += (ratio - 1 - (new[row][t] - old[row][t])) * share
    leaf = tensor(new).requires_grad_()
    loss, stats = policy_loss(
        leaf, tensor(old), tensor(advantages), prefix_mask(lengths, width), clip
    )
    loss.backward()
    close(loss.detach(), total, 1e-5)
    close(leaf.grad, gradient, 1e-5)
    close(stats["clip_fraction"], bites / sum(lengths), 1e-6)
    close(stats["approx_kl"], kl, 1e-5)


def test_equal_policies_have_ratio_exactly_one_and_clip_nothing():
    # case B09: the same forward made both
    logprobs = torch.randn(4, 9) * 3
    _, stats = policy_loss(
        logprobs, logprobs.clone(), torch.randn(4, 9), prefix_mask([9, 1, 4, 8], 9), 0.2
    )
    assert (stats["ratio"] == 1).all()
    assert stats["clip_fraction"] == 0 and stats["approx_kl"] == 0 and not stats["clip_bites"].any()


def test_approx_kl_has_the_value_of_its_formula():
    # case B16: log-ratio +1 gives e - 1 - 1 = 0.71828, log-ratio -1 gives 1/e - 1 + 1 = 0.36788
    mask = torch.ones(1, 1, dtype=torch.bool)
    for log_ratio, want in ((1.0, 0.71828), (-1.0, 0.36788), (0.0, 0.0)):
        _, stats = policy_loss(
            tensor([[log_ratio - 2]]), tensor([[-2.0]]), tensor([[1.0]]), mask, 0.2
        )
        close(stats["approx_kl"], want, 1e-5)


@pytest.mark.parametrize("junk", [200.0, -200.0, math.inf, -math.inf, math.nan])
def test_masked_slot_contributes_exactly_nothing_to_loss_and_gradient(junk):
    # case B30: log-ratio [0, 200] with mask [1, 0]; masking after exp gives the gradient [-1, nan]
    new = tensor([[0.0, junk]]).requires_grad_()
    loss, stats = policy_loss(
        new, torch.zeros(1, 2), tensor([[1.0, 0.0]]), prefix_mask([1], 2), 0.2
    )
    loss.backward()
    assert loss.item() == -1.0
    assert new.grad.tolist() == [[-1.0, 0.0]]
    assert stats["ratio"].tolist() == [[1.0, 1.0]]
    assert stats["approx_kl"] == 0 and stats["clip_fraction"] == 0


def test_log_ratio_200_in_a_real_slot_shows_as_a_non_finite_loss():
    # case B30: it must not be hidden, the optimiser stops on it
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = policy_loss(tensor([[200.0]]), tensor([[0.0]]), tensor([[-1.0]]), mask, 0.2)
    assert not torch.isfinite(loss)


# --- averaging, value loss, statistics ------------------------------------------------------------


def test_every_response_weighs_the_same_whatever_its_length():
    # one token of 4, three tokens of 1: (4 + 1) / 2 = 2.5; the mean over tokens would be 7 / 4
    x = tensor([[4.0, 99.0, 99.0], [1.0, 1.0, 1.0]])
    assert response_mean(x, prefix_mask([1, 3], 3)).item() == 2.5


def test_value_loss_and_gradient_by_hand():
    # row 0: squares 1 and 4, mean 2.5; row 1: square 4; 0.5 * (2.5 + 4) / 2 = 1.625
    # d/dV = (V - return) / (tokens of the row * rows)
    values = tensor([[1.0, 2.0], [3.0, 50.0]]).requires_grad_()
    loss = value_loss(values, tensor([[0.0, 4.0], [1.0, 0.0]]), prefix_mask([2, 1], 2))
    loss.backward()
    close(loss.detach(), 1.625)
    close(values.grad, [[0.25, -0.5], [1.0, 0.0]])


def test_explained_variance_by_hand():
    # returns 1, 3 (variance 1), residuals 0, 1 (variance 0.25): 1 - 0.25 = 0.75; column 2 is masked
    mask = prefix_mask([2], 3)
    returns = tensor([[1.0, 3.0, 77.0]])
    close(explained_variance(tensor([[1.0, 2.0, -5.0]]), returns, mask), 0.75)
    close(explained_variance(tensor([[1.0, 3.0, -5.0]]), returns, mask), 1.0)  # perfect
    close(explained_variance(tensor([[2.0, 2.0, -5.0]]), returns, mask), 0.0)  # the mean
    close(
        explained_variance(tensor([[3.0, 1.0, -5.0]]), returns, mask), -3.0
    )  # worse than the mean


def test_explained_variance_is_zero_when_returns_do_not_vary():
    # case B33: also a single token
    assert explained_variance(tensor([[1.0, 2.0]]), tensor([[3.0, 3.0]]), prefix_mask([2], 2)) == 0
    assert explained_variance(tensor([[1.0]]), tensor([[3.0]]), prefix_mask([1], 1)) == 0


def every_number(width: int) -> dict:
    """All functions of the file on one rollout, padded with junk to `width`."""
    generator = torch.Generator().manual_seed(5)
    lengths, core = [5, 2, 4], 5
    mask = prefix_mask(lengths, width)
    junk = torch.Generator().manual_seed(width)

    def padded():
        row = torch.randn(len(lengths), core, generator=generator)
        row = torch.cat([row, torch.zeros(len(lengths), width - core)], 1)
        return torch.where(mask, row, torch.randn(row.shape, generator=junk) * 100)

    old, ref, values, new_values = padded(), padded(), padded(), padded().requires_grad_()
    new = torch.where(mask, old + 0.3 * padded(), padded()).detach().requires_grad_()
    rewards = token_rewards(
        tensor([1.0, -2.0, 0.5]), old, ref, mask, torch.tensor([False, True, True]), 0.05, -1.0
    )
    advantages, returns = gae(rewards, values, mask, 0.98, 0.9)
    actor_loss, stats = policy_loss(new, old, advantages, mask, 0.2)
    critic_loss = value_loss(new_values, returns, mask)
    (actor_loss + critic_loss).backward()
    per_token = {
        "rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "ratio": stats["ratio"] - 1,
        "clip_bites": stats["clip_bites"].float(),
        "actor gradient": new.grad,
        "critic gradient": new_values.grad,
    }
    for name, value in per_token.items():
        assert (value[~mask] == 0).all(), name
    return {name: value[:, :core] for name, value in per_token.items()} | {
        "actor_loss": actor_loss.detach(),
        "critic_loss": critic_loss.detach(),
        "clip_fraction": stats["clip_fraction"],
        "approx_kl": stats["approx_kl"],
        "explained_variance": explained_variance(values, returns, mask),
    }


@pytest.mark.parametrize("extra", [1, 20])
def test_padding_columns_change_no_number(extra):
    # case B46: the same rollout with 0 and with more pad columns, other junk in every masked slot
    plain, padded = every_number(5), every_number(5 + extra)
    for name, want in plain.items():
        torch.testing.assert_close(padded[name], want, rtol=1e-6, atol=1e-6, msg=name)

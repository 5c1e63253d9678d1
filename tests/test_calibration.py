"""Proves the judge's report card: intervals against published values, the card and its bins against
plain loops, the fitted scale against its closed form, a grid and pairs of a known temperature."""

import json
import math
import random

import numpy
import pytest

from kernel.measure.calibration import (
    BOUND,
    baseline,
    calibration_error,
    card,
    fit_scale,
    fit_temperature,
    log_sigmoid,
    reliability,
    wilson,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("right,total,low,high", [
    (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0000, 0.1611),
    (1, 29, 0.0061, 0.1718),
])
def test_wilson_against_published_intervals(right, total, low, high):
    assert wilson(right, total) == pytest.approx([low, high], abs=5e-5)
    mirrored = wilson(total - right, total)
    assert mirrored == pytest.approx([1 - high, 1 - low], abs=5e-5)


def test_wilson_of_nothing():
    assert wilson(0, 0) is None


def test_log_sigmoid_far_out():
    assert log_sigmoid(numpy.array([-1000.0, 0.0, 1000.0])).tolist() == [-1000, -math.log(2), 0]


GENERATOR = random.Random(1)
MARGINS = [GENERATOR.gauss(0.7, 2) for _ in range(500)] + [0.0, 0.0, 0.0]


def test_card_against_plain_loops():
    got = card(MARGINS, [2.0, 4.0], [-1.0, 0.0])
    n = len(MARGINS)
    right = sum(m > 0 for m in MARGINS)
    assert (got["pairs"], got["right"], got["ties"]) == (n, right, 3)
    assert got["wrong"] == sum(m < 0 for m in MARGINS)
    assert got["accuracy"] == right / n and got["accuracy_interval"] == wilson(right, n)
    assert got["mean_margin"] == pytest.approx(sum(MARGINS) / n)
    assert got["log_loss"] == pytest.approx(sum(-math.log(sigmoid(m)) for m in MARGINS) / n)
    assert got["brier"] == pytest.approx(sum((1 - sigmoid(m)) ** 2 for m in MARGINS) / n)
    assert (got["mean_chosen"], got["mean_rejected"]) == (3.0, -0.5)
    gaps = 0.0
    for number, part in enumerate(got["bins"]):
        low, high = 0.5 + number / 20, 0.5 + (number + 1) / 20
        own = [m for m in MARGINS if low <= sigmoid(abs(m)) < high]
        assert (part["low"], part["high"], part["pairs"]) == (low, high, len(own))
        confidence = sum(sigmoid(abs(m)) for m in own) / len(own)
        accuracy = sum(1 if m > 0 else 0.5 if m == 0 else 0 for m in own) / len(own)
        assert (part["confidence"], part["accuracy"]) == pytest.approx((confidence, accuracy))
        gaps += len(own) * abs(confidence - accuracy)
    assert got["ece"] == pytest.approx(gaps / n)


def test_four_pairs_by_hand():
    """Two right and one wrong at confidence 0.72, one tie: |0.72 - 2/3| for three, 0 for the tie."""
    m = math.log(0.72 / 0.28)
    parts = reliability([m, -m, m, 0.0])
    assert [(p["pairs"], p["accuracy"]) for p in parts if p["pairs"]] == [(1, 0.5), (3, 2 / 3)]
    assert calibration_error(parts) == pytest.approx(3 / 4 * (0.72 - 2 / 3))
    assert [p["confidence"] for p in parts if not p["pairs"]] == [None] * 8


def test_a_judge_that_is_sure_falls_into_the_last_bin():
    parts = reliability([1e6, 800.0, -1e6])
    assert parts[-1]["pairs"] == 3 and parts[-1]["confidence"] == 1.0
    assert parts[-1]["accuracy"] == pytest.approx(2 / 3)


def test_no_pairs_at_all():
    got = card([])
    assert got["pairs"] == got["right"] == got["wrong"] == 0
    for name in ("accuracy", "accuracy_interval", "mean_margin", "log_loss", "brier", "ece"):
        assert got[name] is None
    json.dumps(got, allow_nan=False)


@pytest.mark.parametrize("up,down,size", [(3, 1, 1.0), (1, 3, 1.0), (5, 4, 0.5), (9, 1, 7.0)])
def test_scale_against_its_closed_form(up, down, size):
    """With `up` differences of +d and `down` of -d the optimum is s = log(up / down) / d."""
    scale, at_bound = fit_scale([size] * up + [-size] * down)
    assert scale == pytest.approx(math.log(up / down) / size, rel=1e-12) and not at_bound


def test_scale_against_a_grid():
    d = [-2.0, 0.5, 1.0, 3.0, -0.25, 0.0, 4.0, -1.0]
    scale, _ = fit_scale(d)
    grid = [n / 1000 for n in range(-3000, 3001)]
    best = min(grid, key=lambda s: sum(math.log(1 + math.exp(-s * x)) for x in d))
    assert abs(scale - best) <= 5e-4


def test_scale_without_a_finite_optimum_stops_at_the_bound():
    assert fit_scale([1.0, 0.0, 30.0]) == (BOUND, True)
    assert fit_scale([-1.0, -1e6]) == (-BOUND, True)
    assert fit_scale([1.0] * 9 + [-1.0], high=2.0) == (2.0, True)  # log 9 = 2.197
    assert fit_scale([0.0, 0.0]) == (0.0, False)


def test_a_feature_that_says_nothing_gets_exactly_0():
    """A rounding error for a coefficient would still order every pair."""
    got = baseline([2, -2, 0, 2, -2, 0, 0] * 20, [2, -2, 2])
    assert (got["coefficient"], got["ties"], got["log_loss"]) == (
        0.0,
        3,
        pytest.approx(math.log(2)),
    )


def test_temperature_of_simulated_pairs():
    """Outcomes drawn with probability sigmoid(m / 2.5): that temperature is found."""
    generator = numpy.random.default_rng(3)
    m = generator.normal(0, 4, 40_000)
    m = numpy.where(generator.random(len(m)) < 1 / (1 + numpy.exp(-m / 2.5)), m, -m)
    found = fit_temperature(m)
    assert found["value"] == pytest.approx(2.5, rel=0.03)
    assert (found["pairs"], found["at_bound"]) == (40_000, False)
    losses = [card(m / (found["value"] * change))["log_loss"] for change in (0.97, 1, 1.03)]
    assert losses[1] < losses[0] and losses[1] < losses[2] and losses[1] < card(m)["log_loss"]
    assert card(m / found["value"])["ece"] < 0.01 < card(m)["ece"]
    assert fit_temperature(m * 3)["value"] == pytest.approx(3 * found["value"])


def test_temperature_of_a_judge_without_a_fault_or_with_nothing_else():
    assert fit_temperature([1.0, 2.0]) == {"value": 1 / BOUND, "pairs": 2, "at_bound": True}
    assert fit_temperature([-1.0, -2.0])["value"] == pytest.approx(BOUND)


def test_baseline_learns_on_one_side_and_is_judged_on_the_other():
    """Longer loses 3 of 4 times in training: coefficient -log 3 / 2 per token of a difference of 2."""
    got = baseline([-2, -2, -2, 2], [-2, 4, 0])
    assert got["coefficient"] == pytest.approx(-math.log(3) / 2) and not got["at_bound"]
    assert (got["right"], got["wrong"], got["ties"]) == (1, 1, 1)
    want = [math.log(3), -2 * math.log(3), 0]
    assert got["log_loss"] == pytest.approx(sum(-math.log(sigmoid(m)) for m in want) / 3)
    assert got["mean_chosen"] is None and got["mean_margin"] is None

"""How far can a judge of pairs be trusted? Accuracy, calibration and temperature from its margins.

    margin m = score(chosen) - score(rejected)         the judge is right where m > 0
    P(the judge's model prefers chosen) = sigmoid(m)   Bradley-Terry
    calibrated: sigmoid(m / T), T fitted on other pairs

NumPy only, float64, no files: margins in, figures out. Rates of nothing are None.
"""

import math

import numpy

from kernel.measure.pairs import pair_counts

BINS = 10
BOUND = 100.0  # of a fitted scale: a temperature stays within 0.01 and 100


def log_sigmoid(x: numpy.ndarray) -> numpy.ndarray:
    return -numpy.logaddexp(0, -x)  # no overflow on either side


def wilson(right: int, total: int) -> list[float] | None:
    """95 % score interval [low, high] of a proportion; it stays within 0 and 1 and is not a point at
    either end. None without trials. Source: Wilson 1927; Agresti and Coull 1998."""
    if not total:
        return None
    z, p = 1.959963984540054, right / total
    middle = p + z * z / (2 * total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return [max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)]


def reliability(margins, bins: int = BINS) -> list[dict]:
    """Confidence against accuracy, in `bins` equal parts of 0.5 to 1.

    confidence = sigmoid(|m|), the probability of the side that the judge predicts; the prediction is
    right where m > 0 and half right at a tie. Which answer of a pair is called chosen says nothing
    about the judge, so P(chosen) itself has no reliability: it would be right in every bin.
    An empty bin has None for both.
    """
    m = numpy.asarray(margins, dtype=numpy.float64)
    confidence, right = numpy.exp(log_sigmoid(abs(m))), (numpy.sign(m) + 1) / 2
    place = numpy.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    parts = []
    for number in range(bins):
        own = place == number
        parts.append(
            {
                "low": 0.5 + number / (2 * bins),
                "high": 0.5 + (number + 1) / (2 * bins),
                "pairs": int(own.sum()),
                "confidence": float(confidence[own].mean()) if own.any() else None,
                "accuracy": float(right[own].mean()) if own.any() else None,
            }
        )
    return parts


def calibration_error(parts: list[dict]) -> float | None:
    """Expected calibration error: mean of |confidence - accuracy| over the bins, weighted by their
    pairs. Source: Naeini et al. 2015; Guo et al. 2017, equation 3."""
    total = sum(part["pairs"] for part in parts)
    gaps = [p["pairs"] * abs(p["confidence"] - p["accuracy"]) for p in parts if p["pairs"]]
    return sum(gaps) / total if total else None


def card(margins, chosen=None, rejected=None) -> dict:
    """The report card of a judge on some pairs: margins (B,), their two scores (B,) where there are any.

    log_loss = mean(-log sigmoid(m)), the Bradley-Terry loss; brier = mean((1 - sigmoid(m))^2). Both
    are those of the outcome "chosen is preferred"; 0.693 and 0.25 say nothing was known. Without scores
    the margins are in units of their own (a temperature, a baseline), and their mean is not given.
    """
    m = numpy.asarray(margins, dtype=numpy.float64)
    counts, parts = pair_counts(m, 0), reliability(m)

    def mean(values) -> float | None:
        return float(numpy.mean(values)) if values is not None and len(values) else None

    return {
        **counts,
        "accuracy_interval": wilson(counts["right"], len(m)),
        "mean_chosen": mean(chosen),
        "mean_rejected": mean(rejected),
        "mean_margin": mean(m) if chosen is not None else None,
        "log_loss": mean(-log_sigmoid(m)),
        "brier": mean(numpy.exp(2 * log_sigmoid(-m))),
        "ece": calibration_error(parts),
        "bins": parts,
    }


def fit_scale(differences, low: float = -BOUND, high: float = BOUND) -> tuple[float, bool]:
    """(s, at_bound): the s within [low, high] that minimises mean(-log sigmoid(s * d)).

    A logistic regression through the origin with one coefficient. Its loss is convex, so the
    derivative -mean(d * sigmoid(-s * d)) only rises and its zero is found by halving. If it has none
    within the bounds (no d < 0, for one: the loss falls for ever), s is the better bound and at_bound
    is True. Differences that are all 0 say nothing: s is 0, or the bound next to it.
    """
    d = numpy.asarray(differences, dtype=numpy.float64)

    def slope(s: float) -> float:
        return float(-(d * numpy.exp(log_sigmoid(-s * d))).sum())

    if not d.any():
        return min(max(0.0, low), high), False
    if slope(low) >= 0:
        return low, True
    if slope(high) <= 0:
        return high, True
    while True:
        middle = (low + high) / 2
        rising = slope(middle)
        if rising == 0 or middle in (low, high):  # neighbours among the floating-point numbers
            return middle, False
        low, high = (middle, high) if rising < 0 else (low, middle)


def fit_temperature(margins) -> dict:
    """{value, pairs, at_bound}: T > 0 that minimises the log loss of m / T. Source: Guo et al. 2017.

    Above 1 the judge is too sure of itself, below 1 not sure enough.
    """
    scale, at_bound = fit_scale(margins, 1 / BOUND, BOUND)
    return {"value": 1 / scale, "pairs": len(margins), "at_bound": at_bound}


def baseline(fitted_on, differences) -> dict:
    """The card of a judge that knows one feature only, e.g. which answer is longer.

    fitted_on, differences: feature(chosen) - feature(rejected) of training and of judged pairs; the
    margin is coefficient * difference, the coefficient fitted on the former.
    """
    coefficient, at_bound = fit_scale(fitted_on)
    margins = coefficient * numpy.asarray(differences, dtype=numpy.float64)
    return {**card(margins), "coefficient": coefficient, "at_bound": at_bound}

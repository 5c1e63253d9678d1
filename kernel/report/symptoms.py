"""What each metric means, where a healthy run keeps it, and what a run's own curve says.

The bands are rules of thumb for a run of this size, not laws: a value outside is a reason to look, a
value inside no proof. A metric without a band is shown, not judged.
"""

import re

from kernel.data.draws import tenths

# name: (stage, key, statistic, low, high, meaning, healthy band in words). A key ending in _ stands for
# that of an iteration's last update; WORDS says what the statistics are.
METRICS = {
    "score": ("30_ppo", "score", "change", 0, None,
              "mean learned score of an iteration's samples, uncentred", "rises"),
    "kl": ("30_ppo", "kl", "last", None, 0.3,
           "exact KL(policy, reference) per token, nats", "0 at the start, later below about 0.3"),
    "lowest kl": ("30_ppo", "kl", "min", -1e-4, None,
                  "exact KL of the lowest iteration", "never below 0, but for rounding"),
    "log_ratio": ("30_ppo", "log_ratio", "last", -0.05, 0.4,
                  "one-sample estimate of the KL: mean of old - reference log-probability",
                  "scatters around kl; single tokens may be negative"),
    "kl_reward": ("30_ppo", "kl_reward", "last", None, None,
                  "KL penalty (and cut-off penalty) of a response, summed over its tokens",
                  "small against the differences between scores"),
    "entropy": ("30_ppo", "entropy", "ratio", 0.3, 2,
                "mean entropy of the policy's next-token distribution, against its start",
                "0.3 to 2 times its start"),
    "tokens": ("30_ppo", "tokens", "ratio", 0.5, 1.5,
               "mean response length with EOS, against its start", "0.5 to 1.5 times its start"),
    "finished": ("30_ppo", "finished", "last", 0.95, None,
                 "share of responses that ended with EOS", "0.95 or more"),
    "scoring_gap": ("30_ppo", "scoring_gap", "max", None, {"float32": 0.01, "bfloat16": 1},
                    "largest |sampled - one-pass log-probability| of any token, before the update",
                    "rounding only: below 0.01 for a float32 base, 1 for bfloat16"),
    "first clip_fraction": ("30_ppo", "clip_fraction_1", "max", None, 0.01,
                            "clip fraction of an iteration's first update, highest iteration",
                            "0: there the ratio is 1, but for rounding"),
    "clip_fraction": ("30_ppo", "clip_fraction_", "last", None, 0.3,
                      "share of tokens where the clipped branch was the smaller one, last update",
                      "below 0.3"),
    "approx_kl": ("30_ppo", "approx_kl_", "last", None, 0.03,
                  "estimate of KL(old, new policy) at the last update: not the KL to the reference",
                  "below 0.03"),
    "advantage": ("30_ppo", "advantage", "last", None, None,
                  "mean advantage, not whitened", "near 0 once the critic follows the returns"),
    "explained_variance": ("30_ppo", "explained_variance", "last", 0, None,
                           "1 - Var(return - value) / Var(return)",
                           "0 with the zero head, then positive; 0.3 to 0.9 is good"),
    "value_loss": ("30_ppo", "value_loss_1", "ratio", None, 1.5,
                   "half the critic's mean squared error before its update, against its start",
                   "falls; at most 1.5 times its start"),
    "policy_loss": ("30_ppo", "policy_loss_", "last", None, None,
                    "minus the clipped surrogate at the last update",
                    "no target: its size says nothing about progress"),
    "actor_grad_norm": ("30_ppo", "actor_grad_norm_", "last", None, 10,
                        "gradient norm of the actor, before it is clipped to 1", "below about 10"),
    "critic_grad_norm": ("30_ppo", "critic_grad_norm_", "last", None, 10,
                         "gradient norm of the critic, before it is clipped to 1",
                         "below about 10; large while the head learns the level of the scores"),
    "SFT validation loss": ("10_sft", "validation_loss", "ratio", None, 1.1,
                            "cross-entropy per token on validation answers, against its first value",
                            "falls; rising means learning by heart"),
    "reward validation accuracy": ("20_reward", "validation_accuracy", "last", 0.65, None,
                                   "share of validation pairs ranked correctly",
                                   "well above 0.5; about 0.72 where people made the preferences"),
}

WORDS = {
    "last": "mean of the last tenth",
    "change": "last tenth minus first",
    "ratio": "last tenth over first",
    "max": "highest",
    "min": "lowest",
}


def column(rows: list[dict] | None, key: str) -> list[tuple[int, float]]:
    """(iteration or update, value) of the rows that have the key."""
    if rows and key.endswith("_"):
        numbers = [int(name[len(key) :]) for name in rows[0] if re.fullmatch(rf"{key}\d+", name)]
        key = f"{key}{max(numbers, default=1)}"
    rows = [row for row in rows or [] if row.get(key) is not None]
    return [(row.get("iteration", row.get("update")), row[key]) for row in rows]


def reading(values: list[float], statistic: str) -> float | None:
    """One number of a curve by one of the statistics in WORDS; None where a curve is too short."""
    if not values or (statistic in ("change", "ratio") and len(values) < 2):
        return None
    first, last = (sum(part) / len(part) for part in tenths(values))
    if statistic == "ratio":
        return last / first if first else None
    return {"last": last, "change": last - first, "max": max(values), "min": min(values)}[statistic]


def symptoms(metrics: dict[str, list[dict] | None], base_dtype: str) -> dict[str, dict]:
    """METRICS by name, each with this run's value, and `inside`: in its band, None if not judged.

    metrics: the rows of metrics.jsonl by stage, None where there are none.
    """
    found = {}
    for name, (stage, key, statistic, low, high, meaning, band) in METRICS.items():
        high = high.get(base_dtype) if isinstance(high, dict) else high
        value = reading([y for _, y in column(metrics[stage], key)], statistic)
        inside = None
        if value is not None and (low, high) != (None, None):
            inside = (low is None or value >= low) and (high is None or value <= high)
        found[name] = {
            "stage": stage, "key": key, "statistic": statistic, "low": low, "high": high,
            "meaning": meaning, "band": band, "value": value, "inside": inside,
            "words": WORDS[statistic],
        }
    return found

"""The two supervised losses: token cross-entropy (SFT) and Bradley-Terry (reward model)."""

import torch
import torch.nn.functional as F


def sft_loss(
    logprobs: torch.Tensor, response_mask: torch.Tensor, window_tokens: int | torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of the response tokens, EOS included: (B, T), (B, T) bool -> ().

    `window_tokens` is the number of active tokens in the whole update window. Parts of a window add
    up to its true mean: sums 4 (1 token) and 3 (3 tokens) give 7 / 4 = 1.75, not (4 + 1) / 2.
    """
    return -logprobs.masked_fill(~response_mask, 0).sum() / window_tokens


def bradley_terry_loss(chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
    """-mean(log sigmoid(r_chosen - r_rejected)): (B,), (B,) -> ().

    One fused logsigmoid: log(sigmoid(x)) in two steps is -inf already at x = -200.
    Source: Ouyang et al. 2022, equation 1 (for K = 2).
    """
    return -F.logsigmoid(chosen_scores - rejected_scores).mean()

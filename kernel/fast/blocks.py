"""Norm, rotation and attention with backward passes of their own.

Autograd would record, save and replay each cast and product of FP32 numbers on its own; here each block
is one step, and what it saves is said where it is saved.
Letters: R rows, L columns of the longest row, N packed tokens, S places of tokens that have their home
elsewhere, D hidden size, H query heads, K key/value heads, G = H / K, E size of a head.
"""

import torch

from kernel.fast.packed import Packed


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight in FP32, rounded once: (..., D) -> (..., D). The weight is frozen.

    With n = x * rstd and g = grad * weight:  dL/dx = rstd * (g - n * mean(g * n)).
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)  # (..., 1) FP32
        # Saved: x as it came, in the base dtype, and one FP32 number per row. The normed x is twice as
        # large and is had again by one product.
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd  # (..., D) FP32
        grad32 = grad.float() * weight.float()  # (..., D)
        along = (grad32 * normed).mean(-1, keepdim=True)  # (..., 1): the part that would only rescale x
        # In place on `normed`, which nobody else holds; rounded to the base dtype only at the end.
        return normed.mul_(-along).add_(grad32).mul_(rstd).to(x.dtype), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on (N, heads, E): halves (a, b) -> (a cos - b sin, b cos + a sin).

    cos (N, 1, E), and sin likewise with its first half negated; -sin turns back, and that is also the
    backward. Source: Su et al. 2021, "RoFormer".
    """
    return x.roll(x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)


class Attention(torch.autograd.Function):
    """Causal grouped-query attention of packed tokens: qkv (N, (H + 2 K) E) -> (N, H E).

    Packed tokens are laid out by rows for the products, (R K, G L, E), and packed again behind them. The
    products run in the dtype of qkv, rotation and softmax in FP32.

    A token that several rows share is one packed token with a place in each of those rows. Its query is
    read at one place only, its home; its key and value are read at all of them.
    """

    @staticmethod
    def forward(ctx, qkv, cos, sin, packed, H, K):
        R, L = packed.tokens.shape
        N, E = len(qkv), qkv.shape[1] // (H + 2 * K)
        heads = qkv.view(N, H + 2 * K, E)
        turned = rotate(heads[:, : H + K].float(), cos, sin)  # (N, H + K, E): queries and keys
        turned[:, :H] *= E**-0.5  # on the queries rather than on the R H L L scores
        packed_heads = torch.cat([turned.to(qkv.dtype), heads[:, H + K :]], 1).view(N, -1)
        by_row = packed_heads.index_select(0, packed.tokens.flatten())  # (R L, (H + 2 K) E)
        q, k, v = by_row.view(R, L, H + 2 * K, E).transpose(1, 2).split([H, K, K], 1)
        q = q.reshape(R * K, -1, E)  # (R K, G L, E): the G query heads of a key head are one block
        k, v = (part.reshape(R * K, L, E) for part in (k, v))  # (R K, L, E)
        future = torch.full((L, L), -torch.inf, device=qkv.device).triu(1)
        scores = (q @ k.mT).float().view(-1, L, L).add_(future)  # (R H, L, L) FP32
        probs = scores.softmax(-1).to(qkv.dtype).view(R * K, -1, L)  # (R K, G L, L)
        out = (probs @ v).view(R, H, L, E).transpose(1, 2).reshape(R * L, -1)  # (R L, H E)
        # Saved: q already turned and scaled, k turned, v, and the probabilities in the base dtype. The
        # scores are not: the softmax's backward needs its result only.
        ctx.save_for_backward(q, k, v, probs, cos, sin, *packed)
        ctx.heads = H, K
        return out.index_select(0, packed.homes)  # (N, H E)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, probs, cos, sin, *packed = ctx.saved_tensors
        packed, (H, K) = Packed(*packed), ctx.heads
        (R, L), E = packed.tokens.shape, q.shape[-1]
        # 1. Back to rows. Outside its home a query was not read: its gradient there is zero.
        by_row = grad.new_zeros(R * L, H * E).index_copy_(0, packed.homes, grad)
        grad_out = by_row.view(R, L, H, E).transpose(1, 2).reshape(R * K, -1, E)  # (R K, G L, E)
        # 2. out = probs @ v. With the G heads of a block below one another, the product adds what all of
        # them ask of their shared value head.
        grad_v = probs.mT @ grad_out  # (R K, L, E)
        # 3. Softmax: dscores = p * (dp - sum(p * dp)), in FP32 because the two terms nearly cancel. What
        # the mask hid has p = 0 and so gets exactly 0.
        probs32 = probs.float()
        grad_scores = (grad_out @ v.mT).float().mul_(probs32)  # (R K, G L, L): p * dp
        # NOTE: for an FP32 base probs32 is the saved tensor itself: never change it in place.
        grad_scores.sub_(probs32 * grad_scores.sum(-1, keepdim=True))
        grad_scores = grad_scores.to(q.dtype)
        # 4. scores = q @ k.T; the sum over a block's G heads is in the product again.
        grad_q, grad_k = grad_scores @ k, grad_scores.mT @ q  # (R K, G L, E), (R K, L, E)
        parts = [part.view(R, -1, L, E) for part in (grad_q, grad_k, grad_v)]
        by_row = torch.cat(parts, 1).transpose(1, 2).reshape(R * L, -1)  # (R L, (H + 2 K) E)
        # 5. Pack again: every token from its home, in FP32 because shared ones are sums over rows, and
        # keys and values (not queries) from their other places too.
        total = by_row.index_select(0, packed.homes).float()  # (N, (H + 2 K) E)
        again = packed.tokens.flatten()[packed.repeats]  # (S,): which token stands there once more
        shared = by_row.index_select(0, packed.repeats)[:, H * E :]  # (S, 2 K E)
        total[:, H * E :].index_add_(0, again, shared.float())
        # 6. The forward turned first and scaled then; both are linear, so the order back is free.
        # Turning by the negative angle is the transpose of a rotation.
        total = total.view(-1, H + 2 * K, E)
        total[:, :H] *= E**-0.5
        turned = rotate(total[:, : H + K], cos, -sin)
        merged = torch.cat([turned, total[:, H + K :]], 1).to(grad.dtype)
        return merged.view(len(merged), -1), None, None, None, None, None

"""Norm, rotation and attention with backward passes of their own."""

import torch

from kernel.fast.packed import Packed


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight in FP32, rounded once: (..., D) -> (..., D). The weight is frozen."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)  # (..., 1)
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        grad32 = grad.float() * weight.float()
        along = (grad32 * normed).mean(-1, keepdim=True)  # the part that would only rescale x
        return normed.mul_(-along).add_(grad32).mul_(rstd).to(x.dtype), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on (N, heads, E): halves (a, b) -> (a cos - b sin, b cos + a sin).

    cos (N, 1, E), and sin likewise with its first half negated; -sin turns back, and that is also the
    backward. Source: Su et al. 2021, "RoFormer".
    """
    return x.roll(x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)


class Attention(torch.autograd.Function):
    """Causal grouped-query attention of packed tokens: qkv (N, (H + 2 K) E) -> (N, H E).

    The heads are laid out by rows for the products, (R K, G L, E), and packed again behind them. The
    products run in the dtype of qkv, rotation and softmax in FP32.
    """

    @staticmethod
    def forward(ctx, qkv, cos, sin, packed, H, K):
        R, L = packed.tokens.shape
        N, E = len(qkv), qkv.shape[1] // (H + 2 * K)
        heads = qkv.view(N, H + 2 * K, E)
        turned = rotate(heads[:, : H + K].float(), cos, sin)
        turned[:, :H] *= E**-0.5  # on the queries rather than on the R H L L scores
        packed_heads = torch.cat([turned.to(qkv.dtype), heads[:, H + K :]], 1).view(N, -1)
        by_row = packed_heads.index_select(0, packed.tokens.flatten())
        q, k, v = by_row.view(R, L, H + 2 * K, E).transpose(1, 2).split([H, K, K], 1)
        q = q.reshape(R * K, -1, E)  # (R K, G L, E): the G query heads of a key head are one block
        k, v = (part.reshape(R * K, L, E) for part in (k, v))
        future = torch.full((L, L), -torch.inf, device=qkv.device).triu(1)
        scores = (q @ k.mT).float().view(-1, L, L).add_(future)  # (R H, L, L)
        probs = scores.softmax(-1).to(qkv.dtype).view(R * K, -1, L)
        out = (probs @ v).view(R, H, L, E).transpose(1, 2).reshape(R * L, -1)
        ctx.save_for_backward(q, k, v, probs, cos, sin, *packed)
        ctx.heads = H, K
        return out.index_select(0, packed.homes)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, probs, cos, sin, *packed = ctx.saved_tensors
        packed, (H, K) = Packed(*packed), ctx.heads
        (R, L), E = packed.tokens.shape, q.shape[-1]
        # Outside its home a query was not read: its gradient is zero.
        by_row = grad.new_zeros(R * L, H * E).index_copy_(0, packed.homes, grad)
        grad_out = by_row.view(R, L, H, E).transpose(1, 2).reshape(R * K, -1, E)
        grad_v = probs.mT @ grad_out
        probs32 = probs.float()
        grad_scores = (grad_out @ v.mT).float().mul_(probs32)
        # Backward of the softmax. NOTE: for an FP32 base probs32 is the saved tensor itself.
        grad_scores.sub_(probs32 * grad_scores.sum(-1, keepdim=True))
        grad_scores = grad_scores.to(q.dtype)
        grad_q, grad_k = grad_scores @ k, grad_scores.mT @ q
        parts = [part.view(R, -1, L, E) for part in (grad_q, grad_k, grad_v)]
        by_row = torch.cat(parts, 1).transpose(1, 2).reshape(R * L, -1)  # (R L, (H + 2 K) E)
        total = by_row.index_select(0, packed.homes).float()
        # A token that several rows share has keys and values in all of them.
        again = packed.tokens.flatten()[packed.repeats]
        shared = by_row.index_select(0, packed.repeats)[:, H * E :]
        total[:, H * E :].index_add_(0, again, shared.float())
        total = total.view(-1, H + 2 * K, E)
        total[:, :H] *= E**-0.5
        turned = rotate(total[:, : H + K], cos, -sin)
        merged = torch.cat([turned, total[:, H + K :]], 1).to(grad.dtype)
        return merged.view(len(merged), -1), None, None, None, None, None

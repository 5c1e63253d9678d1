"""The forward pass of a role, written out: Llama, Qwen2 and Qwen3 blocks over packed tokens.

The weights stay where the stock model keeps them (`role.lm`), and decoding from a bfloat16 base on a CPU
adds a prepacked copy (`kernel.lora.Prepacked`); the way through them is ours:

    packed tokens   every distinct prefix of the rows is one token. A prompt that several rows share
                    is read once, and there is no padding outside attention.
    merged weights  q/k/v are one matrix and gate/up are one; the stock weights are views of its rows.
    few passes      norm, attention and LoRA carry their own backward, because autograd would record,
                    save and replay each cast and product of FP32 numbers on its own.
    wanted states   above the last attention only the states that are read out go on.

Letters: R rows, L columns of the longest row, N packed tokens, M wanted states, D hidden size,
H query heads, K key/value heads, G = H / K, E size of a head, I inner size of the MLP.
The plain twin is the stock model, `role.lm`, to which the tests hold states and gradients.
"""

from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernel.lora import Merged, Prepacked, Stacked


class Packed(NamedTuple):
    """Rows of token ids without their repetitions; a token is known by all ids up to and with it."""

    ids: torch.Tensor  # (N,) int64
    positions: torch.Tensor  # (N,) int64, column of the token in its row
    tokens: torch.Tensor  # (R, L) int64, which packed token stands at a place; 0 behind a row's end
    homes: torch.Tensor  # (N,) int64, flat place (row * L + column) where a token stood first
    repeats: torch.Tensor  # (S,) int64, flat places of tokens that have their home elsewhere


def pack(rows: list[list[int]], device) -> Packed:
    """Rows begin in column 0, so the column is the position, and a causal mask hides the row's end."""
    width = max(map(len, rows))
    tokens = [[0] * width for _ in rows]
    index = {}  # (packed token before, id) -> packed token
    homes, repeats = [], []
    for r, row in enumerate(rows):
        before = None
        for column, token_id in enumerate(row):
            key = (before, token_id)
            (repeats if key in index else homes).append(r * width + column)
            before = tokens[r][column] = index.setdefault(key, len(index))
    ids = [token_id for _, token_id in index]
    positions = [home % width for home in homes]
    parts = (ids, positions, tokens, homes, repeats)
    return Packed(*(torch.tensor(part, dtype=torch.int64, device=device) for part in parts))


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


class Layer(NamedTuple):
    """One block: four ways from (N, in) to (N, out), two norms, and Qwen3's norm of each head."""

    qkv: Merged | Stacked
    o: Merged | Stacked
    gate_up: Merged | Stacked
    down: Merged | Stacked
    norm: torch.Tensor  # (D,)
    mlp_norm: torch.Tensor  # (D,)
    head_norm: torch.Tensor | None  # (H + K, E), a row per query head and key head

    @classmethod
    def of(cls, block: torch.nn.Module, heads: int, kv_heads: int) -> "Layer":
        attention, mlp, head_norm = block.self_attn, block.mlp, None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm.weight, attention.k_norm.weight
            head_norm = torch.cat([q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)])
        return cls(
            Merged(attention.q_proj, attention.k_proj, attention.v_proj),
            Merged(attention.o_proj),
            Merged(mlp.gate_proj, mlp.up_proj),
            Merged(mlp.down_proj),
            block.input_layernorm.weight,
            block.post_attention_layernorm.weight,
            head_norm,
        )

    def stacked(self) -> "Layer":
        return Layer(*map(Stacked, self[:4]), *self[4:])


class Cache:
    """Rotated keys and values of every layer, FP32, for rows that grow by one column per step.

    It also holds the layers with their adapters stacked, as they are when it is made, and the head.
    """

    def __init__(self, transformer: "Transformer", rows: int, columns: int):
        K, E = transformer.kv_heads, transformer.head_size
        shape = (len(transformer.layers), rows, K, columns, E)
        self.keys = torch.zeros(shape, device=transformer.embedding.device)
        self.values = torch.zeros_like(self.keys)
        self.filled = 0  # columns
        self.layers = [layer.stacked() for layer in transformer.layers]
        self.head = transformer.prepacked_head

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor):
        """Add columns, (R, K, columns, E), and return all of the layer; `filled` moves after a pass."""
        end = self.filled + keys.shape[2]
        self.keys[layer, :, :, self.filled : end] = keys
        self.values[layer, :, :, self.filled : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Transformer:
    """Passes over the layers of an adapted causal LM, in its base dtype.

    Raises ValueError for what a config may ask for and this pass does not do. NOTE: made on the final
    device; moving the model afterwards would part the weights from their merged matrices.
    """

    def __init__(self, lm: torch.nn.Module):
        config = lm.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):  # their angles change with the length of the row
            raise ValueError(f"rope_type {rope} is not supported")
        if config.hidden_act != "silu" or getattr(config, "use_sliding_window", False):
            raise ValueError("only silu and full attention are supported")
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = lm.model.layers[0].self_attn.head_dim
        self.eps, self.rotary = config.rms_norm_eps, lm.model.rotary_emb
        if 2 * len(self.rotary.inv_freq) != self.head_size:
            raise ValueError("rotary positions on a part of each head are not supported")
        self.embedding, self.norm = lm.model.embed_tokens.weight, lm.model.norm.weight
        self.lm_head = lm.lm_head
        self.layers = [Layer.of(block, self.heads, self.kv_heads) for block in lm.model.layers]

    def states(self, packed: Packed, wanted: torch.Tensor) -> torch.Tensor:
        """Last hidden states, norm included, of the packed tokens `wanted` (M,): (M, D)."""
        cos, sin = self.angles(packed.positions)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            return Attention.apply(qkv, cos, sin, packed, self.heads, self.kv_heads)

        return self.run(self.layers, packed.ids, attend, wanted)

    def last_states(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Cache | None = None
    ) -> torch.Tensor:
        """State of the last column of left-padded rows, ids and mask (R, P): (R, D).

        An empty cache is filled with the P columns on the way.
        """
        packed = pack([row[real].tolist() for row, real in zip(ids, mask)], ids.device)
        places = packed.tokens.gather(1, (mask.cumsum(1) - 1).clamp(min=0))  # (R, P)
        if cache is None:
            return self.states(packed, places[:, -1])
        cos, sin = self.angles(packed.positions)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            _, k, v = self.split(qkv, cos, sin)
            cache.write(layer, k[places].transpose(1, 2), v[places].transpose(1, 2))
            return Attention.apply(qkv, cos, sin, packed, self.heads, self.kv_heads)

        states = self.run(self.layers, packed.ids, attend, places[:, -1])
        cache.filled = ids.shape[1]
        return states

    def next_states(self, ids: torch.Tensor, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
        """State of one more token per row, ids (R,); mask (R, columns) covers it too: (R, D)."""
        R, H, K, E = len(ids), self.heads, self.kv_heads, self.head_size
        cos, sin = self.angles(mask.sum(1) - 1)
        hidden = torch.zeros(mask.shape, device=ids.device).masked_fill_(~mask, -torch.inf)
        hidden = hidden[:, None, None]  # (R, 1, 1, columns)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = self.split(qkv, cos, sin)
            keys, values = cache.write(layer, k[:, :, None], v[:, :, None])  # (R, K, columns, E)
            scores = (q.view(R, K, H // K, E) @ keys.mT).mul_(E**-0.5).add_(hidden)
            return (scores.softmax(-1) @ values).view(R, H * E).to(qkv.dtype)

        states = self.run(cache.layers, ids, attend)
        cache.filled += 1
        return states

    def run(
        self, layers, ids: torch.Tensor, attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layers, one after the other. `attend` maps layer number and qkv to attended values."""
        x = self.embedding.index_select(0, ids)  # (N, D)
        for number, layer in enumerate(layers):
            qkv = layer.qkv(RMSNorm.apply(x, layer.norm, self.eps))
            attended = attend(number, self.norm_heads(qkv, layer.head_norm))
            if wanted is not None and number == len(layers) - 1:
                x, attended = (part.index_select(0, wanted) for part in (x, attended))  # (M, .)
            x = x + layer.o(attended)
            gate, up = layer.gate_up(RMSNorm.apply(x, layer.mlp_norm, self.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return RMSNorm.apply(x, self.norm, self.eps)

    @cached_property
    def prepacked_head(self) -> Prepacked:
        return Prepacked(self.lm_head.weight, self.lm_head.bias)

    def norm_heads(self, qkv: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Qwen3: every query and key head is normed on its own before the rotation; values are not."""
        if weight is None:
            return qkv
        heads = qkv.view(len(qkv), -1, self.head_size)
        normed = RMSNorm.apply(heads[:, : len(weight)], weight, self.eps)
        return torch.cat([normed, heads[:, len(weight) :]], 1).flatten(1)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the model's own rotary module in the form of `rotate`, (N, 1, E) FP32."""
        like = torch.empty(0, device=positions.device)  # only its dtype and device are read
        cos, sin = (part[0, :, None] for part in self.rotary(like, positions[None]))
        a, b = sin.chunk(2, -1)
        return cos, torch.cat([-a, b], -1)

    def split(self, qkv: torch.Tensor, cos, sin) -> tuple[torch.Tensor, ...]:
        """Rotated queries and keys, and values, FP32: (N, H, E), (N, K, E), (N, K, E)."""
        heads = qkv.float().view(len(qkv), -1, self.head_size)
        turned, v = heads.split([self.heads + self.kv_heads, self.kv_heads], 1)
        q, k = rotate(turned, cos, sin).split([self.heads, self.kv_heads], 1)
        return q, k, v

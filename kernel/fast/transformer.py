"""The forward pass of a role, written out: Llama, Qwen2 and Qwen3 blocks over packed tokens.

The weights stay where the stock model keeps them (`role.lm`), and decoding from a bfloat16 base on a CPU
adds a prepacked copy (`merged.Prepacked`); the way through them is ours:

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

from kernel.fast.blocks import Attention, RMSNorm, rotate
from kernel.fast.merged import Merged, Prepacked, Stacked
from kernel.fast.packed import Packed, pack


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

"""Low-rank adapters (LoRA), written out: W(x) + (alpha / r) * B(A x).

The base projection stays frozen in its own dtype. A, B and the sum are FP32; the result is cast
back to the base dtype, so at B = 0 the layer returns the base's own bits.
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

import math

import torch
from torch import nn

# The seven projections of a Llama, Qwen2 or Qwen3 block; LoRA wraps all of them in every layer.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRALinear(nn.Module):
    """A frozen `nn.Linear` with a trainable low-rank branch beside it."""

    def __init__(self, base: nn.Linear, r: int, alpha: float, generator: torch.Generator):
        super().__init__()
        self.base = base
        self.scale = alpha / r
        # A starts Kaiming-uniform with a = sqrt(5), which is U(-1/sqrt(in), 1/sqrt(in)); B starts at
        # zero, so an untrained adapter changes nothing.
        bound = 1 / math.sqrt(base.in_features)
        A = torch.empty(r, base.in_features, dtype=torch.float32)
        A.uniform_(-bound, bound, generator=generator)
        self.A = nn.Parameter(A.to(base.weight.device))
        self.B = nn.Parameter(torch.zeros(base.out_features, r, device=base.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The formula, with the backward left to autograd. `kernel/fast` goes another way
        through the same tensors; this one serves the stock model, to which the tests hold it."""
        branch = (x.float() @ self.A.T) @ self.B.T  # (..., out) FP32
        return (self.base(x).float() + self.scale * branch).to(x.dtype)


def add_lora(model: nn.Module, r: int, alpha: float, seed: int) -> list[str]:
    """Freeze `model` and wrap all seven projections of every block; returns the wrapped names.

    Raises ValueError if any of the seven is missing: an adapter on nothing trains nothing, silently.
    """
    model.requires_grad_(False)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    wanted = [n for n in linears if n.rsplit(".", 1)[-1] in PROJECTIONS]
    layers = model.config.num_hidden_layers
    if len(wanted) != len(PROJECTIONS) * layers:
        found = sorted({n.rsplit(".", 1)[-1] for n in linears}) or ["no nn.Linear at all"]
        raise ValueError(
            f"LoRA wants {', '.join(PROJECTIONS)} in each of {layers} layers, but matched "
            f"{len(wanted)} modules; the model's linear layers are named: {', '.join(found)}"
        )
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same start on every device
    for name in wanted:
        parent_name, leaf = name.rsplit(".", 1)
        setattr(
            model.get_submodule(parent_name), leaf, LoRALinear(linears[name], r, alpha, generator)
        )
    return wanted

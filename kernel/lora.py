"""Low-rank adapters (LoRA), written out: W(x) + (alpha / r) * B(A x).

The base projection stays frozen in its own dtype. A, B and the sum are FP32; the result is cast
back to the base dtype, so at B = 0 the layer returns the base's own bits.
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# The seven projections of a Llama or Qwen2 block; LoRA wraps all of them in every layer.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRAFunction(torch.autograd.Function):
    """Forward and backward of one adapted projection, with the FP32 passes merged.

    x (N, in) base dtype; weight (out, in) base dtype; A (r, in) and B (out, r) FP32. Returns (N, out)
    in the base dtype. The twin that leaves the backward to autograd is `lora_reference`.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale):
        low = x.float() @ A.T  # (N, r) FP32
        out = torch.addmm(F.linear(x, weight, bias).float(), low, B.T, alpha=scale)  # FP32 sum
        ctx.save_for_backward(x, weight, A, B, low)
        ctx.scale = scale
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight, A, B, low = ctx.saved_tensors
        grad32 = grad_out.float()  # (N, out)
        grad_low = (grad32 @ B).mul_(ctx.scale)  # (N, r)
        grad_x = None
        if ctx.needs_input_grad[0]:  # not for the first layer: nothing below it is trained
            grad_x = torch.addmm((grad_out @ weight).float(), grad_low, A).to(x.dtype)
        grad_A = grad_low.T @ x.float()  # (r, in)
        grad_B = (grad32.T @ low).mul_(ctx.scale)  # (out, r)
        return grad_x, None, None, grad_A, grad_B, None


def lora_reference(x, weight, bias, A, B, scale):
    """The same projection in one line of plain autograd; the tests hold `LoRAFunction` to it."""
    return (F.linear(x, weight, bias).float() + scale * ((x.float() @ A.T) @ B.T)).to(x.dtype)


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
        flat = x.reshape(-1, x.shape[-1])  # (N, in)
        out = LoRAFunction.apply(flat, self.base.weight, self.base.bias, self.A, self.B, self.scale)
        return out.view(*x.shape[:-1], -1)


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

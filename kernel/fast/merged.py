"""Adapted projections of one input as one product, forward and backward."""

from functools import cached_property

import torch
import torch.nn.functional as F

from kernel.lora import LoRALinear


class LoRAFunction(torch.autograd.Function):
    """Adapted projections of one input, forward and backward, with the FP32 passes shared.

    x (N, in) base dtype; weight (out, in) and bias (out,) base dtype, the projections one below the
    other; adapters A1 (r, in), B1 (out1, r), A2, B2, ... FP32, one pair per projection, their outputs
    add up to out. Returns (N, out) in the base dtype. The plain twin is `LoRALinear.forward`.

    With y = x W^T + s (x A^T) B^T and g = dL/dy:
        dL/dx = g W + s (g B) A,   dL/dB = s g^T (x A^T),   dL/dA = s (g B)^T x;   W is frozen.

    NOTE: everything of rank r is kept as (r, N), the long axis last: skinny products are up to ten
    times slower the other way round.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, scale, *adapters):
        A, B = torch.cat(adapters[::2]), adapters[1::2]  # A: (r of all projections, in)
        low = A @ x.float().T  # (r per projection, N) FP32: one product for all projections
        out = F.linear(x, weight, bias).float()  # (N, out); the sum is made in place
        for part, low_i, B_i in zip(by_projection(out, B), low.chunk(len(B)), B):
            part.addmm_(low_i.T, B_i.T, alpha=scale)
        # Saved: x in the base dtype, not its FP32 copy, and `low`, which dL/dB needs and which is r / in
        # as large as x. `weight` and the adapters are saved by reference.
        ctx.save_for_backward(x, weight, low, *adapters)
        ctx.scale = scale
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight, low, *adapters = ctx.saved_tensors
        A, B = torch.cat(adapters[::2]), adapters[1::2]
        parts = by_projection(grad_out.float(), B)  # (N, out of each)
        # s (g B)^T first: dL/dx and dL/dA are both made from it.
        grad_low = torch.cat([B_i.T @ part.T for B_i, part in zip(B, parts)]).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:  # not for the first layer: nothing below it is trained
            # The large product in the base dtype, the small one added in FP32, rounded once.
            grad_x = (grad_out @ weight).float().addmm_(grad_low.T, A).to(x.dtype)
        grad_A = (grad_low @ x.float()).chunk(len(B))  # (r, in) each
        grad_B = [(low_i @ part).T * ctx.scale for low_i, part in zip(low.chunk(len(B)), parts)]
        pairs = [grad for pair in zip(grad_A, grad_B) for grad in pair]  # as they came: A1, B1, A2, ...
        return grad_x, None, None, None, *pairs


def by_projection(columns: torch.Tensor, B: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return columns.split([len(B_i) for B_i in B], 1)


def packs_bfloat16() -> bool:
    """Whether this build of torch and this processor have oneDNN's bfloat16 products."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Prepacked:
    """A frozen projection for few rows, (N, in) -> (N, out): `F.linear`, its twin, only sooner.

    oneDNN lays a bfloat16 weight out in blocks at every call, which for a few rows takes longer than
    the product itself; here that is done once, at the price of a second copy of the weight. On
    AVX-512 the bits are those of the twin. Float32 and other devices than the CPU keep to the twin.
    NOTE: the two operators are what torch.compile emits for frozen weights; they are not public API.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight, self.bias, self.packed = weight, bias, None
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packs_bfloat16():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Merged:
    """Adapted projections that read the same input, as one matrix: (N, in) -> (N, sum of outputs)."""

    def __init__(self, *layers: LoRALinear):
        self.layers, bases = layers, [layer.base for layer in layers]
        self.weight = self.join([base.weight for base in bases])
        self.bias = None if bases[0].bias is None else self.join([base.bias for base in bases])

    @staticmethod
    def join(parts: list[torch.nn.Parameter]) -> torch.Tensor:
        """One tensor below the other; the parts become views of it, so nothing is stored twice."""
        joined = torch.cat([part.data for part in parts])
        for part, rows in zip(parts, joined.split([len(part) for part in parts])):
            part.data = rows
        return joined

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        adapters = [p for layer in self.layers for p in (layer.A, layer.B)]
        return LoRAFunction.apply(x, self.weight, self.bias, self.layers[0].scale, *adapters)

    @cached_property
    def prepacked(self) -> Prepacked:
        return Prepacked(self.weight, self.bias)


class Stacked:
    """`Merged` for few rows and no gradients: the adapters, as they are now, as one product each.

    A step of decoding costs its number of calls as much as its numbers; B is block-diagonal.
    """

    @torch.no_grad()
    def __init__(self, merged: Merged):
        self.base = merged.prepacked
        self.A = torch.cat([layer.A for layer in merged.layers]).T  # (in, r per projection)
        self.B = torch.block_diag(*[layer.scale * layer.B.T for layer in merged.layers])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x).float().addmm_(x.float() @ self.A, self.B).to(x.dtype)

"""AdamW with a written-out schedule, a stop on non-finite numbers, and state keyed by name."""

import torch


def learning_rate(update: int, total: int, peak: float, warmup: int, final: float = 0.1) -> float:
    """The rate of update `update` (0-based) of `total`.

    peak * (update + 1) / warmup while warming up, so the first update already moves; then linear
    from the peak to final * peak at the last update. `warmup` may be 0, `total` or more.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    first = max(warmup - 1, 0)  # the update that runs at the peak
    last = total - 1
    if last <= first:
        return peak
    return peak * (1 - (1 - final) * (update - first) / (last - first))


class Optimizer:
    """AdamW over named FP32 parameters; `step` sets the rate, clips, refuses NaN, and counts."""

    def __init__(self, named: dict, total: int, peak: float, config: dict):
        wrong = [name for name, p in named.items() if p.dtype != torch.float32]
        if wrong:
            raise ValueError(f"trained tensors must be float32, these are not: {', '.join(wrong)}")
        self.named, self.total, self.peak = named, total, peak
        self.warmup = round(config["warmup"] * total)
        self.final = config["final_lr"]
        self.max_grad_norm = config["max_grad_norm"]
        self.updates = 0
        self.adamw = torch.optim.AdamW(
            named.values(), lr=peak, weight_decay=config["weight_decay"], fused=True
        )

    def step(self, loss: torch.Tensor, what: str) -> dict:
        """Clip the gradients that backward left, then update. Returns loss, grad_norm, lr as floats.

        Raises FloatingPointError before any weight changes if the loss or a gradient is not finite.
        """
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"{what}: the loss is {loss.item()}; stopped before the update"
            )
        grads = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        if len(grads) != len(self.named):
            idle = [name for name in self.named if name not in grads]
            raise ValueError(
                f"{what}: {len(idle)} trained tensors got no gradient, first {idle[0]}"
            )
        norm = torch.nn.utils.get_total_norm(grads.values())
        if not torch.isfinite(norm):  # looked at before clipping, which would spread a NaN to all
            bad = next(name for name, grad in grads.items() if not torch.isfinite(grad).all())
            raise FloatingPointError(
                f"{what}: the gradient norm is {norm.item()}, first in {bad}; "
                "stopped before the update"
            )
        torch.nn.utils.clip_grads_with_norm_(self.named.values(), self.max_grad_norm, norm)
        lr = learning_rate(self.updates, self.total, self.peak, self.warmup, self.final)
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.updates += 1
        return {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}

    def state(self) -> dict:
        """Counters and moments by parameter name. (torch keys them by order, and would hand the
        moments of one tensor to another of the same shape without a word.)"""
        moments = {name: dict(self.adamw.state.get(p, {})) for name, p in self.named.items()}
        return {"updates": self.updates, "total": self.total, "peak": self.peak, "moments": moments}

    def load_state(self, state: dict) -> None:
        """Inverse of `state`. Raises ValueError if names, shapes, dtypes or the schedule differ."""
        for key in ("total", "peak"):
            if state[key] != getattr(self, key):
                raise ValueError(f"optimiser {key}: saved {state[key]}, now {getattr(self, key)}")
        if list(state["moments"]) != list(self.named):
            odd = sorted(set(state["moments"]) ^ set(self.named)) or "the order"
            raise ValueError(f"optimiser state does not fit the parameters; they differ in {odd}")
        wanted = {"step", "exp_avg", "exp_avg_sq"} if state["updates"] else set()
        for name, p in self.named.items():
            moments = state["moments"][name]
            if moments.keys() != wanted:
                raise ValueError(f"optimiser state of {name} holds {sorted(moments)}")
            for key, value in moments.items():
                shape = () if key == "step" else p.shape
                if value.shape != shape or value.dtype != torch.float32:
                    raise ValueError(
                        f"optimiser {key} of {name} is {tuple(value.shape)} {value.dtype}"
                    )
        for name, p in self.named.items():  # only now: a refused state leaves nothing half-loaded
            moments = state["moments"][name]
            if moments:
                self.adamw.state[p] = {k: v.clone().to(p.device) for k, v in moments.items()}
        self.updates = state["updates"]

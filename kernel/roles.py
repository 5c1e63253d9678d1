"""The four roles: actor, reference, reward, critic, each with a backbone of its own, and their files."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from kernel.data.base import load_base
from kernel.data.files import write_atomic
from kernel.fast.transformer import Transformer
from kernel.lora import add_lora


class Role(nn.Module):
    """A frozen causal LM with own adapters, and for the reward model and the critic a scalar head."""

    def __init__(self, name: str, lm: nn.Module, head: nn.Linear | None):
        super().__init__()
        self.name, self.lm, self.head = name, lm, head
        self.pooling = "last"  # what a reward head reads: the last response token, or their mean
        self.transformer = Transformer(lm)  # no module: it holds the same tensors in another order

    def learned(self) -> dict[str, nn.Parameter]:
        """The tensors that are ours, by name: every A and B, and the head. Everything else is base."""
        return {
            name: p
            for name, p in self.named_parameters()
            if name.endswith((".A", ".B")) or name.startswith("head.")
        }

    def base(self) -> dict[str, torch.Tensor]:
        """The frozen tensors of the base model, by name."""
        learned = self.learned()
        return {name: p for name, p in self.named_parameters() if name not in learned}

    def learned_state(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.learned().items()}

    @torch.no_grad()
    def load_learned(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Copy adapters and head in place. Raises ValueError listing every tensor that does not fit."""
        own = self.learned()
        faults = [f"missing {n}" for n in own if n not in state]
        faults += [f"unexpected {n}" for n in state if n not in own]
        for name in own.keys() & state.keys():
            have, want = state[name], own[name]
            if have.shape != want.shape or have.dtype != want.dtype:
                faults.append(
                    f"{name} is {tuple(have.shape)} {have.dtype}, "
                    f"wanted {tuple(want.shape)} {want.dtype}"
                )
            elif not torch.isfinite(have).all():
                faults.append(f"{name} holds non-finite numbers")
        if faults:
            shown = "; ".join(sorted(faults)[:6])
            raise ValueError(
                f"{source} does not fit role '{self.name}' ({len(faults)} faults): {shown}"
            )
        for name, p in own.items():
            p.copy_(state[name])

    def freeze(self) -> "Role":
        self.requires_grad_(False)
        return self


def make_role(
    name: str, config: dict, device: torch.device, seed: int = 0, head: str | None = None
) -> Role:
    """Load the base anew (no tensor is shared between roles) and wrap it.

    seed: where the adapters (and a normal head) start, of no effect once an adapter file is loaded.
    head: None, "normal" (reward: weight ~ N(0, 0.02), bias 0) or "zero" (critic).
    Everything stays in eval mode: that switches dropout off, not autograd.
    """
    lm = load_base(Path(config["model_dir"]), config["base_dtype"]).to(device)
    add_lora(lm, config["lora_r"], config["lora_alpha"], seed)
    scalar = None
    if head is not None:
        scalar = nn.Linear(lm.config.hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(scalar.bias)
        if head == "zero":
            nn.init.zeros_(scalar.weight)
        else:
            weight = torch.empty(1, lm.config.hidden_size)
            weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
            scalar.weight.data.copy_(weight)
    return Role(name, lm, scalar).eval()


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bits, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def load_role(name: str, path: Path, config: dict, base_sha256: str, device) -> Role:
    """A frozen role out of an adapter file; reward models have their head in it."""
    head = "normal" if name.startswith("reward") else None
    role = make_role(name, config, device, head=head).freeze()
    load_adapter(path, role, config, base_sha256)
    return role


def frozen_fingerprints(roles: list[Role]) -> dict[str, str]:
    """sha256 of all that must not move in these roles: every base, and adapters that are frozen."""
    found = {role.name: fingerprint(role.base()) for role in roles}
    for role in roles:
        learned = role.learned()
        if not any(p.requires_grad for p in learned.values()):
            found[f"{role.name} adapters"] = fingerprint(learned)
    return found


def check_isolation(roles: list[Role]) -> None:
    """No two roles share storage; base frozen; learned tensors FP32. Raises ValueError otherwise."""
    owner = {}
    for role in roles:
        for name, p in role.named_parameters():
            first = owner.setdefault(p.untyped_storage().data_ptr(), role.name)
            if first != role.name:
                raise ValueError(f"{role.name}.{name} shares memory with role '{first}'")
        loose = [n for n, p in role.base().items() if p.requires_grad]
        if loose:
            raise ValueError(f"{role.name}: base tensor {loose[0]} is not frozen")
        odd = [n for n, p in role.learned().items() if p.dtype != torch.float32]
        if odd:
            raise ValueError(f"{role.name}: learned tensor {odd[0]} is not float32")


def adapter_meaning(config: dict, base_sha256: str) -> dict:
    """What the numbers of an adapter file mean: their scale is alpha / r, on this base."""
    return {
        "lora_r": config["lora_r"],
        "lora_alpha": config["lora_alpha"],
        "base_sha256": base_sha256,
    }


def save_adapter(path: Path, role: Role, config: dict, base_sha256: str) -> None:
    """Adapters and head as safetensors: learned numbers only, and what they need to mean the same.

    The file is read back and compared before the call returns.
    """
    meaning = {"role": role.name, **adapter_meaning(config, base_sha256)}
    if role.name == "reward":
        meaning["pooling"] = role.pooling
    # One key only: safetensors writes several in random order, and the file's sha256 would vary.
    metadata = {"adapter": json.dumps(meaning, sort_keys=True)}
    state = role.learned_state()
    write_atomic(path, save(state, metadata=metadata))
    with safe_open(path, framework="pt") as file:
        back = {name: file.get_tensor(name) for name in file.keys()}
    if fingerprint(back) != fingerprint(state):
        raise ValueError(f"{path}: what was read back is not what was written")


def load_adapter(path: Path, role: Role, config: dict, base_sha256: str) -> None:
    """Inverse of `save_adapter`. Raises ValueError when scale, base or any tensor differs.

    An SFT adapter has no head; a critic that starts from one keeps its own zero head.
    """
    try:
        with safe_open(path, framework="pt") as file:
            meaning = json.loads((file.metadata() or {}).get("adapter", "{}"))
            state = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    for key, value in adapter_meaning(config, base_sha256).items():
        if meaning.get(key) != value:
            raise ValueError(f"{path}: {key} is {meaning.get(key)}, this run has {value}")
    # the critic starts from an actor's adapters
    wanted = "reward" if role.name.startswith("reward") else "actor"
    if wanted == "reward":
        role.pooling = meaning.get("pooling", "last")
    if meaning.get("role") not in (wanted, role.name):
        raise ValueError(f"{path}: holds the role '{meaning.get('role')}', wanted '{wanted}'")
    if role.name == "critic" and meaning.get("role") == "actor":
        state |= {n: t for n, t in role.learned_state().items() if n.startswith("head.")}
    role.load_learned(state, str(path))

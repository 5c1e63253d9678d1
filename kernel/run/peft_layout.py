"""PEFT's layout of a LoRA adapter, both ways: adapter_config.json and adapter_model.safetensors.

    ours   lm.model.layers.0.self_attn.q_proj.A
    PEFT   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

Both mean W + alpha / r * B A, with A (r, in) and B (out, r). PEFT itself is needed for neither way.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save

from kernel.data.base import model_sha256
from kernel.data.files import REPOSITORY, read_json, sha256_file, write_atomic, write_json
from kernel.lora import PROJECTIONS
from kernel.roles import Role

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Settings of PEFT that change nothing in what a finished adapter computes. Every other one must be off.
NEUTRAL = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version",
    "qalora_group_size", "revision",
    "lora_dropout",  # it acted while that adapter was trained; a finished one computes without it
}


class PeftAdapter(NamedTuple):
    folder: Path
    settings: dict  # adapter_config.json
    tensors: dict[str, torch.Tensor]  # our names, FP32
    meaning: dict  # what our own export wrote beside the numbers; empty in other people's files
    sha256: str  # of adapter_model.safetensors


def peft_name(ours: str) -> str:
    return f"base_model.model.{ours.removeprefix('lm.')[:-1]}lora_{ours[-1]}.weight"


def our_name(theirs: str) -> str:
    """Inverse of `peft_name`; a name of another form comes back as it is, and then fits no role."""
    for letter in "AB":
        if theirs.endswith(f".lora_{letter}.weight"):
            inner = theirs.removeprefix("base_model.model.").removesuffix(f"lora_{letter}.weight")
            return f"lm.{inner}{letter}"
    return theirs


def write_peft(folder: Path, adapters: dict, meaning: dict, base_name: str) -> None:
    """A folder that PeftModel.from_pretrained reads: adapters are every A and B under our names.

    meaning: the adapter file's own metadata (scale, base, role), kept beside the numbers.
    """
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": meaning["lora_r"],
        "lora_alpha": meaning["lora_alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(PROJECTIONS),
        "inference_mode": True,
    }
    write_json(folder / CONFIG, settings)
    tensors = {peft_name(name): tensor for name, tensor in adapters.items()}
    metadata = {"adapter": json.dumps(meaning, sort_keys=True)}
    write_atomic(folder / TENSORS, save(tensors, metadata=metadata))


def read_peft(folder: Path) -> PeftAdapter:
    """A PEFT folder's files. Raises ValueError with one line if they are missing or damaged."""
    if not (folder / CONFIG).is_file() or not (folder / TENSORS).is_file():
        raise ValueError(f"{folder}: no PEFT adapter there; wanted {CONFIG} and {TENSORS}")
    path = folder / TENSORS
    try:
        with safe_open(path, framework="pt") as file:
            meaning = json.loads((file.metadata() or {}).get("adapter", "{}"))
            tensors = {our_name(name): file.get_tensor(name).float() for name in file.keys()}
    except Exception as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    return PeftAdapter(folder, read_json(folder / CONFIG), tensors, meaning, sha256_file(path))


def load_peft(adapter: PeftAdapter, role: Role, config: dict, base_sha256: str) -> None:
    """Copy a PEFT adapter into a role. Raises ValueError naming every setting that means something else
    here, another base model, or every tensor that does not fit."""
    path = adapter.folder / CONFIG
    if faults := setting_faults(adapter.settings, config):
        raise ValueError(f"{path}: {'; '.join(faults)}")
    if adapter.meaning.get("role", "actor") != "actor":
        raise ValueError(f"{path}: holds the role '{adapter.meaning['role']}', wanted 'actor'")
    base = adapter.settings.get("base_model_name_or_path")
    if "base_sha256" in adapter.meaning:
        have = adapter.meaning["base_sha256"]
    elif base and (REPOSITORY / base / "config.json").is_file():
        have = model_sha256(REPOSITORY / base)["base_sha256"]
    else:
        raise ValueError(
            f"{path}: made for the base model '{base}', which is no folder here: it cannot be compared "
            f"with this run's; if it is {config['model_dir']}, write that as base_model_name_or_path"
        )
    if have != base_sha256:
        raise ValueError(
            f"{path}: made for another base model, '{base}' with sha256 {have[:16]}; "
            f"this run has {base_sha256[:16]}"
        )
    role.load_learned(adapter.tensors, str(adapter.folder / TENSORS))


def setting_faults(settings: dict, config: dict) -> list[str]:
    """What adapter_config.json says that is not plain LoRA on all seven projections at our scale."""
    wanted = {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "r": (config["lora_r"],),
        "lora_alpha": (config["lora_alpha"],),
        "bias": ("none",),
        "init_lora_weights": (True, False, "gaussian"),  # others rewrite the base's weights
    }
    faults = [
        f"{key} is {settings[key]}, wanted {allowed[0]}"
        for key, allowed in wanted.items()
        if key in settings and settings[key] not in allowed
    ]
    faults += [
        f"{key} is missing" for key in ("peft_type", "r", "lora_alpha") if key not in settings
    ]
    targets = settings.get("target_modules")
    if not isinstance(targets, list) or set(targets) != set(PROJECTIONS):
        faults.append(f"target_modules is {targets}, wanted {list(PROJECTIONS)}")
    rest = settings.keys() - wanted.keys() - NEUTRAL - {"target_modules"}
    faults += [f"{key} is {settings[key]}, wanted off" for key in sorted(rest) if settings[key]]
    return faults

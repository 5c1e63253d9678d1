"""A base model's folder: what must be in it, its hashes, and its weights as a frozen causal LM."""

import contextlib
import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kernel.data.files import read_json

# They keep the backbone in .model and the logits in .lm_head, and name the seven projections alike.
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def load_base(model_dir: Path, dtype: str) -> nn.Module:
    """A causal LM in eval mode from a local folder, in exactly `dtype`.

    Raises ValueError for a missing or damaged folder or an architecture we do not know.
    """
    check_model_folder(model_dir)
    wanted = getattr(torch, dtype)
    try:
        lm, found = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=wanted, attn_implementation="eager", local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds; the folder is the common cause
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{model_dir}: the model does not load ({first})") from error
    # NOTE: transformers fills missing tensors with random numbers and drops the ones it does not know.
    faults = [f"missing {name}" for name in sorted(found["missing_keys"])]
    faults += [f"unexpected {name}" for name in sorted(found["unexpected_keys"])]
    if faults:
        raise ValueError(
            f"{model_dir}: the weights do not fit config.json ({len(faults)} faults): "
            f"{'; '.join(faults[:4])}"
        )
    for p in lm.parameters():  # or the mapped file would stay in memory beside the merged copies
        p.data = p.data.clone()
    lm.generation_config = None  # NOTE: its repetition penalty or sampling fields must not reach us
    odd = {str(p.dtype) for p in lm.parameters() if p.dtype != wanted}
    if odd:
        raise ValueError(f"{model_dir}: asked for {dtype}, got {', '.join(sorted(odd))}")
    return lm.eval()


def check_model_folder(model_dir: Path) -> None:
    """Raises ValueError with one line unless the folder looks like a supported, complete model."""
    if not (model_dir / "config.json").is_file():
        raise ValueError(
            f"{model_dir}: no config.json there; give a causal LM folder (--model-dir)"
        )
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:
        raise ValueError(f"{model_dir}/config.json: {str(error).splitlines()[0]}") from error
    found = config.architectures or ["none named"]
    if found[0] not in ARCHITECTURES:
        raise ValueError(
            f"{model_dir}: architecture {found[0]} is not supported (known: {', '.join(ARCHITECTURES)}; "
            "wanted are the projections q/k/v/o_proj and gate/up/down_proj, "
            f"found {', '.join(stored_matrices(model_dir)) or 'no .safetensors weights'})"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{model_dir}: quantised weights are not supported; give plain ones")
    index = model_dir / "model.safetensors.index.json"
    named = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    if missing := sorted(name for name in named if not (model_dir / name).is_file()):
        raise ValueError(f"{model_dir}: {index.name} names {missing[0]}, which is not there")
    if not list(model_dir.glob("*.safetensors")):
        raise ValueError(f"{model_dir}: no .safetensors weights there")


def stored_matrices(model_dir: Path) -> list[str]:
    """Last names of the matrices in a folder's safetensors files, e.g. c_attn; nothing is loaded."""
    names = set()
    for path in model_dir.glob("*.safetensors"):
        with contextlib.suppress(SafetensorError), safe_open(path, framework="pt") as file:
            names |= {
                name.removesuffix(".weight").rsplit(".", 1)[-1]
                for name in file.keys()
                if len(file.get_slice(name).get_shape()) == 2
            }
    return sorted(names)


def tokenizer_files(model_dir: Path) -> list[Path]:
    names = ("tokenizer", "vocab", "merges", "special_tokens", "chat_template")
    return [path for path in model_dir.iterdir() if path.name.startswith(names)]


def model_sha256(model_dir: Path) -> dict[str, str]:
    """One sha256 for the weights (all shards) with their architecture, one for the tokenizer's files."""

    def of(paths: list[Path]) -> str:
        digest = hashlib.sha256()
        for path in sorted(paths):
            digest.update(path.name.encode() + b"\n")
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        return digest.hexdigest()

    weights = [*model_dir.glob("*.safetensors"), *model_dir.glob("*.safetensors.index.json")]
    weights.append(model_dir / "config.json")
    return {"base_sha256": of(weights), "tokenizer_sha256": of(tokenizer_files(model_dir))}

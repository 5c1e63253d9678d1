"""A finished tiny run and tiny random models, made once per session, and helpers that files share.

The tiny run is the slow part (two to three minutes on two cores); its folder lies in a path with
blanks, and it is started from another working directory.

The random models are float32, 2 layers, vocabulary 97, eager attention. The weights are drawn wide and
every bias and norm is random, so a wrong position, column or sign shows in the third digit and not in
the tenth. Llama has an untied head and no biases; Qwen2 has a tied head and biases on q, k and v; Qwen3
has a tied head, norms of each query and key head, and heads of their own size.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock  # comes with torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernel.roles import Role, make_role

torch.set_num_threads(1)  # two workers share two cores
# nohup leaves it ignored, and what we start inherits that
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent.parent

EOS, PAD, VOCABULARY, HIDDEN, LAYERS = 2, 0, 97, 32, 2
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}


@cache
def warm() -> subprocess.Popen:
    """This worker's process that has the libraries loaded, see `warm.py`."""
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/warm.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


def run_stage(
    name: str, *flags, check: bool = True, input: str = ""
) -> subprocess.CompletedProcess:
    """A stage as a program, to its end; `input` is what it finds on its standard input."""
    argv = [str(ROOT / f"{name}.py"), *map(str, flags)]
    with tempfile.TemporaryDirectory() as folder:
        streams = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
        for path in streams.values():
            path.write_text(input if path.name == "stdin" else "")
        asked = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}
        server = warm()
        print(
            json.dumps(asked | {k: str(v) for k, v in streams.items()}),
            file=server.stdin,
            flush=True,
        )
        status = int(server.stdout.readline())
        said = [streams[name].read_text() for name in ("stdout", "stderr")]
    done = subprocess.CompletedProcess(argv, status, *said)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def last_line(done: subprocess.CompletedProcess) -> str:
    return done.stderr.strip().splitlines()[-1]


# Minutes each, so the workers take them first; the many short files fill up what is left.
LONG = (
    "test_smollm2",
    "test_stages",
    "test_exercises",
    "test_crash",
    "test_own_data",
    "test_lineage",
)


def pytest_collection_modifyitems(items) -> None:
    place = {f"{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))  # stable within a file


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A finished tiny run, made once, a copy per worker; TINY_RUN=folder takes one that is there."""
    if os.getenv("TINY_RUN"):
        return Path(os.environ["TINY_RUN"])
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    run = shared / "a run with blanks" / "tiny run"
    with FileLock(shared / "tiny.lock"):
        if not (run / "console.txt").is_file():
            command = ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(run)]
            done = subprocess.run(command, capture_output=True, text=True, cwd="/")
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            (run / "console.txt").write_text(done.stdout)
    if "PYTEST_XDIST_WORKER" in os.environ:  # one run folder has one owner at a time
        own = tmp_path_factory.getbasetemp() / run.parent.name / run.name
        return Path(shutil.copytree(run, own))
    return run


@pytest.fixture
def copy_of_tiny(tiny, tmp_path) -> Path:
    """A copy of the finished tiny run, to be damaged or continued."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def without(run: Path, stage: str, variant: str = "") -> Path:
    """A run in which a stage, or one variant of it, has not happened."""
    for kind in ("outputs", "checkpoints"):
        shutil.rmtree(run / kind / stage / variant)
    return run


def wait_until(holds, seconds: float = 300) -> None:
    end = time.time() + seconds
    while not holds():
        assert time.time() < end, "it did not happen in time"
        time.sleep(0.05)


KINDS = {  # architecture, config, what differs from SHAPE
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
}


def build(folder: Path, kind: str, **changes) -> Path:
    """A random model in `folder`; keyword arguments replace values of its config."""
    architecture, config, own = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = architecture(config(**{**SHAPE, **own, **changes}))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(".bias"):
                    p.normal_(0, 0.3)
                elif p.dim() == 1:  # a norm
                    p.normal_(1, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="session")
def qwen2_dir(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="session", params=KINDS)
def model_dir(request) -> Path:
    """Every test that asks for this runs once per architecture."""
    return request.getfixturevalue(f"{request.param}_dir")


@pytest.fixture(scope="session")
def role_config():
    """The config keys that `make_role` reads, for a model folder; keyword arguments replace values."""

    def make(folder: Path, **changes) -> dict:
        return {
            "model_dir": str(folder),
            "base_dtype": "float32",
            "lora_r": 8,
            "lora_alpha": 16,
            "eos_id": EOS,
            "pad_id": PAD,
            **changes,
        }

    return make


@pytest.fixture(scope="session")
def new_role(role_config):
    """A role on a tiny model. B (and the head) are random unless `trained=False`: B = 0 hides faults."""

    def make(folder: Path, name="actor", head=None, seed=3, trained=True, **changes) -> Role:
        role = make_role(name, role_config(folder, **changes), torch.device("cpu"), seed, head)
        if trained:
            generator = torch.Generator().manual_seed(seed + 1000)
            with torch.no_grad():
                for key, p in role.learned().items():
                    if not key.endswith(".A"):
                        p.normal_(0, 0.1 if key.endswith(".B") else 0.5, generator=generator)
        return role

    return make


@pytest.fixture(scope="session")
def stock_model():
    """The oracle: the stock model with W + 2 * B A written into its plain weights, without adapters."""

    def make(folder: Path, role: Role | None = None):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        if role is not None:
            learned = role.learned_state()
            for name in [n for n in learned if n.endswith(".A")]:
                A, B = learned[name], learned[name[:-1] + "B"]
                module = model.get_submodule(name.removeprefix("lm.").removesuffix(".A"))
                module.weight.data += 2.0 * (B.double() @ A.double()).float()
        return model.requires_grad_(False)

    return make


@pytest.fixture
def edited_folder(tmp_path):
    """A copy of a model folder with some keys of one of its JSON files replaced."""

    def make(folder: Path, file: str, **changes) -> Path:
        copy = tmp_path / f"{folder.name}-{file}"
        shutil.copytree(folder, copy)
        path = copy / file
        old = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(old | changes))
        return copy

    return make

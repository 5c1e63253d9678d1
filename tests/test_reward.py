"""Reward functions: names, weights and mixes by hand, own functions and everything they can do wrong,
pooling that travels with an adapter file."""

from types import SimpleNamespace

import pytest
import torch
from conftest import PAD, last_line, run_stage

from kernel.reward import (
    length,
    make_reward,
    own_function,
    reward_answers,
    reward_files,
    reward_terms,
    text_reward,
)
from kernel.roles import load_adapter, make_role, save_adapter
from kernel.score import make_batch

CPU = torch.device("cpu")
ONE, TWO = {"prompt": "Question one?"}, {"prompt": "Question two?"}
CHAT = SimpleNamespace(
    decode=lambda ids: None if 99 in ids else "".join(chr(96 + i) for i in ids)
)


def judged_by(reward: str, tmp_path=None, config=None):
    return make_reward(reward, tmp_path, config, "base", CHAT, CPU)


def batch_of(*answers):
    return make_batch(answers, PAD, CPU)


def own(tmp_path, body: str, name="mine.py") -> str:
    (tmp_path / name).write_text(body)
    return f"{tmp_path / name}:score"


# ---- names --------------------------------------------------------------------------------------


def test_terms_and_the_files_they_need(tmp_path):
    assert reward_terms("judge") == {"judge": 1}
    assert reward_terms("helpful=0.7, concise=0.3") == {"helpful": 0.7, "concise": 0.3}
    assert reward_terms("judge=1,length=-2") == {"judge": 1, "length": -2}
    last = "continuous/adapter.safetensors"
    assert reward_files("judge=1,length=2,concise=1") == [
        f"checkpoints/20_reward/{last}",
        f"checkpoints/20_reward/concise/{last}",
    ]
    assert reward_files(f"{tmp_path}/mine.py:score=0.5") == [f"{tmp_path}/mine.py"]
    assert reward_terms("/tmp/a=b/r.py:f") == {"/tmp/a=b/r.py:f": 1}
    assert reward_terms("/tmp/a=b/r.py:f=2,judge") == {"/tmp/a=b/r.py:f": 2, "judge": 1}
    assert own_function("judge") is None and own_function("a:b") is None


@pytest.mark.parametrize("reward", ["", "a=0.7,", "a=x", "a=nan", "a=inf", "=1", "a=1,a=2"])
def test_a_reward_that_is_no_mix_is_refused(reward):
    with pytest.raises(ValueError, match="--reward"):
        reward_terms(reward)


# ---- functions ----------------------------------------------------------------------------------


def test_length_counts_characters_by_the_hundred():
    assert length(["", ""], ["x" * 250, ""]) == [2.5, 0]


def test_own_function_sees_messages_and_texts_and_is_mixed_by_hand(tmp_path):
    score = "[10 * ('two' in p) + (r == 'ab') for p, r in zip(prompts, responses)]"
    spec = own(tmp_path, f"def score(prompts, responses):\n    return {score}\n")
    judge, roles = judged_by(f"{spec}=0.5,length=100")
    batch = batch_of(([5, 6], [1, 2]), ([7], [1, 2]), ([7], [3]))
    scores = judge(batch, [ONE, TWO, TWO])
    assert scores.dtype == torch.float32 and roles == []
    assert scores.tolist() == [0.5 * 1 + 2, 0.5 * 11 + 2, 0.5 * 10 + 1]


@pytest.mark.parametrize(
    "body, told",
    [
        ("def score(p, r): raise KeyError('no')", "KeyError: 'no'"),
        ("def score(p, r): return [float('nan')] * len(r)", "nan for the response 'ab'"),
        ("def score(p, r): return [1e999 for _ in r]", "inf for the response"),
        ("def score(p, r): return [1.0] * (len(r) + 1)", "2 scores for 1 responses"),
        ("def score(p, r): return []", "0 scores for 1 responses"),
        ("def score(p, r): return None", "TypeError"),
        ("def score(p, r): return ['high' for _ in r]", "ValueError"),
        ("def other(p, r): return [1.0]", "has no function 'score'"),
        ("def score(p, r) return", "does not load"),
    ],
)
def test_a_faulty_function_stops_at_its_first_call_with_one_line(tmp_path, body, told):
    with pytest.raises(ValueError, match="mine.py") as caught:
        judge, _ = judged_by(own(tmp_path, body))
        reward_answers(judge, [([5, 6], [1, 2])], [ONE], PAD, CPU)  # the zero point of 30_ppo.py
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_ppo_makes_that_call_before_its_loop(copy_of_tiny, tmp_path):
    spec = own(tmp_path, "def score(p, r): return [float('nan')] * len(r)")
    flags = ("--name", "mine", "--reward", spec, "--no-center-scores")
    done = run_stage("30_ppo", "--run-dir", copy_of_tiny, *flags, check=False)
    assert done.returncode == 1 and "mine.py:score: nan for the response" in last_line(done)
    assert not list((copy_of_tiny / "outputs/30_ppo/mine").rglob("*.jsonl"))


def test_a_response_without_text_is_scored_as_empty():
    judge = text_reward("length", length, CHAT, CPU)
    assert judge(batch_of(([7], [99])), [TWO]).tolist() == [0]


def test_any_number_of_answers_is_scored_in_order_each_with_its_own_row(tmp_path):
    body = "def score(prompts, texts): return [int(p) + len(t) / 10 for p, t in zip(prompts, texts)]"
    judge, _ = judged_by(own(tmp_path, body))
    answers = [([5] * (1 + n % 3), [1] * (1 + n % 4)) for n in range(35)]
    rows = [{"prompt": str(n)} for n in range(35)]
    have = reward_answers(judge, answers, rows, PAD, CPU)
    assert have.tolist() == pytest.approx([n + (1 + n % 4) / 10 for n in range(35)])


# ---- reward models ------------------------------------------------------------------------------


def test_two_reward_models_mixed_by_hand_and_their_pooling_kept(
    tmp_path, llama_dir, new_role, role_config
):
    config = role_config(llama_dir)
    alone = {}
    for name, pooling, seed in (("helpful", "mean", 3), ("concise", "last", 4)):
        role = new_role(llama_dir, "reward", head="normal", seed=seed)
        role.pooling = pooling
        path = tmp_path / "checkpoints/20_reward" / name / "continuous/adapter.safetensors"
        save_adapter(path, role, config, "base")
        back = make_role("reward", config, CPU, head="normal")
        load_adapter(path, back, config, "base")
        assert back.pooling == pooling
        alone[name], _ = judged_by(name, tmp_path, config)
    rows = batch_of(([5, 6], [1, 2, 3]), ([7], [4])), [ONE, TWO]
    mixed, roles = judged_by("helpful=0.7,concise=0.3", tmp_path, config)
    want = 0.7 * alone["helpful"](*rows) + 0.3 * alone["concise"](*rows)
    assert torch.equal(mixed(*rows), want) and want[0] != want[1]
    assert [role.name for role in roles] == ["reward helpful", "reward concise"]
    assert not any(p.requires_grad for role in roles for p in role.parameters())
    assert not torch.equal(alone["helpful"](*rows), alone["concise"](*rows))


# ---- the rubric ---------------------------------------------------------------------------------


def test_the_rubric_pays_one_for_success_on_a_labelled_prompt_and_else_nothing(tmp_path):
    """By hand; a row without a label (a demonstration) gets 0, and so does a response cut off."""
    data = tmp_path / "data"
    (data / "train").mkdir(parents=True)
    (data / "rubric.py").write_text(
        "def rubric(prompt, response, finish_reason, row):\n"
        "    return {'success': response == row['wanted'] and finish_reason == 'eos'}\n"
    )
    (data / "train/labels.jsonl").write_text('{"id": "a", "wanted": "xy"}\n{"id": "b", "wanted": "z"}\n')
    chat = SimpleNamespace(eos_id=2, decode=lambda ids: CHAT.decode([i for i in ids if i != 2]))
    reward, roles = make_reward("rubric", tmp_path, None, "base", chat, CPU)
    xy, without_text = [24, 25, 2], [99, 2]
    answers = [([5], xy), ([5], xy[:-1]), ([6], xy), ([7], xy), ([6], without_text)]
    batch = make_batch(answers, PAD, CPU)
    rows = [{"id": name, "prompt": "?"} for name in ("a", "a", "b", "demonstration", "b")]
    scores = reward(batch, rows)
    assert scores.dtype == torch.float32 and scores.tolist() == [1, 0, 0, 0, 0] and roles == []
    mixed, _ = make_reward("rubric=2,length=100", tmp_path, None, "base", chat, CPU)
    assert mixed(batch, rows).tolist() == [2 + 2, 2, 2, 2, 0]
    assert reward_files("rubric") == ["data/rubric.py", "data/train/labels.jsonl"]

"""The seven stages as programs, on the tiny profile, through run_all.sh.

Proves: the variants end in the same bits; the tiny run learns (reward accuracy, SFT against the base,
the learned score of PPO's samples); what the records say can be recomputed from them by plain Python; a
finished run is skipped, changed inputs are refused, Ctrl-C leaves a state that goes on exactly.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, last_line, run_stage, wait_until, without
from safetensors.torch import load_file

from kernel.data.files import read_json, read_jsonl, sha256_file, write_json, write_jsonl
from kernel.roles import load_adapter, make_role
from kernel.run.profiles import PROFILES
from kernel.run.state import load_state, newest_state

TRAINED = ("10_sft", "20_reward", "30_ppo")


# ---- exactness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", TRAINED)
def test_resume_and_continuous_are_equal_bit_for_bit(tiny, stage):
    proof = read_json(tiny / "outputs" / stage / "check" / "proof.json")
    assert proof["equal"] and not proof["differences"]
    assert proof["sha256"]["resume"] == proof["sha256"]["continuous"]
    assert {"state", "adapter.safetensors", "metrics.jsonl"} <= set(proof["sha256"]["resume"])


def test_interrupt_really_stopped_in_the_middle(tiny):
    stop = PROFILES["tiny"]["ppo"]["stop_at"]
    rows = read_jsonl(tiny / "outputs/30_ppo/interrupt/metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, stop + 1))
    rows = read_jsonl(tiny / "outputs/30_ppo/resume/metrics.jsonl")
    iterations = PROFILES["tiny"]["ppo"]["iterations"]
    assert [row["iteration"] for row in rows] == list(range(1, iterations + 1))  # each step once


def test_check_fails_when_one_bit_differs(copy_of_tiny):
    run = copy_of_tiny
    metrics = run / "outputs/10_sft/resume/metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().replace(b'"update": 1,', b'"update": 1 ,', 1))
    done = run_stage("10_sft", "--run-dir", run, "--variant", "check", check=False)
    assert done.returncode != 0 and "metrics.jsonl" in last_line(done)


# ---- what the run learned -------------------------------------------------------------------------


def test_reward_model_prefers_the_chosen_answers_of_the_test_pairs(tiny):
    accuracy = read_json(tiny / "outputs/50_evaluate/results.json")["reward_accuracy"]["all"]
    assert accuracy["pairs"] == 180 and accuracy["accuracy"] >= 0.9


def test_sft_succeeds_well_above_its_base(tiny):
    from kernel.data.chat import Chat
    from kernel.data.office_rubric import rubric
    from kernel.rollout import sample

    config = read_json(tiny / "config.json")["common"]
    config["model_dir"] = str(ROOT / config["model_dir"])
    chat = Chat(config)
    labels = {row["id"]: row for row in read_jsonl(tiny / "data/heldout/labels.jsonl")}
    rows = [r for r in read_jsonl(tiny / "data/heldout/prompts.jsonl") if r["population"] == "test"]
    base = make_role("actor", config, torch.device("cpu"), seed=49)  # B = 0: the bare base
    successes = 0
    for start in range(0, len(rows), 30):
        part = rows[start : start + 30]
        prompts = [chat.prompt_ids(r["prompt"]) for r in part]
        rollout = sample(base, prompts, 64, chat.eos_id, chat.pad_id, "cpu")
        for row, ids, end in zip(part, rollout.batch.responses, rollout.finished):
            finish = "eos" if end else "length"
            verdict = rubric(row["prompt"], chat.decode(ids), finish, labels[row["id"]])
            successes += verdict["success"]
    sft = read_json(tiny / "outputs/50_evaluate/results.json")["results"]["sft"]["test"]
    assert sft["success_rate"] >= successes / len(rows) + 0.3


def test_ppo_raises_the_learned_score_of_its_samples(tiny):
    """What PPO optimises. Greedy held-out answers of so noisy a policy may go either way (README)."""
    rows = read_jsonl(tiny / "outputs/30_ppo/continuous/metrics.jsonl")
    scores = [row["score"] for row in rows]
    tenth = len(scores) // 10
    assert sum(scores[-tenth:]) / tenth >= sum(scores[:tenth]) / tenth + 1
    difference = read_json(tiny / "outputs/50_evaluate/results.json")["differences"]["score"]
    assert (
        difference["pairs"] == 200 and difference["low"] < difference["mean"] < difference["high"]
    )


def test_the_heads_were_trained(tiny):  # case B04
    config = read_json(tiny / "config.json")["common"]
    config["model_dir"] = str(ROOT / config["model_dir"])
    start = make_role("reward", config, torch.device("cpu"), seed=50, head="normal").learned_state()
    reward = load_file(tiny / "checkpoints/20_reward/continuous/adapter.safetensors")
    assert not torch.equal(reward["head.weight"], start["head.weight"])
    critic = load_file(tiny / "checkpoints/30_ppo/continuous/critic.safetensors")
    assert critic["head.weight"].any() and critic["head.bias"].any()


def test_without_a_step_every_ratio_stays_neutral(copy_of_tiny):  # case B09
    run = without(copy_of_tiny, "30_ppo", "continuous")
    flags = ("--iterations", "2", "--rollouts", "4", "--actor-lr", "0", "--critic-lr", "0")
    run_stage("30_ppo", "--run-dir", run, *flags)
    for row in read_jsonl(run / "outputs/30_ppo/continuous/metrics.jsonl"):
        assert row["clip_fraction_1"] == row["clip_fraction_2"] == 0 and row["kl"] == 0
    for row in read_jsonl(run / "outputs/30_ppo/continuous/rollouts.jsonl"):
        assert row["ratios"][0] == row["ratios"][1]
        assert row["ratios"][0] == pytest.approx([1] * len(row["ratios"][0]), abs=1e-4)


@pytest.mark.parametrize("stage", ["10_sft", "20_reward"])
def test_the_micro_batch_changes_memory_and_not_the_update(copy_of_tiny, tiny, stage):  # case B24
    run = without(copy_of_tiny, stage, "continuous")
    run_stage(
        stage, "--run-dir", run, "--epochs", "0.02", "--micro-batch", "3", "--validation-rows", 2
    )
    path = f"outputs/{stage}/continuous/metrics.jsonl"
    ours, whole = read_jsonl(run / path)[0], read_jsonl(tiny / path)[0]
    for key in ("loss", "grad_norm"):
        assert ours[key] == pytest.approx(whole[key], rel=1e-5)


def test_a_nan_stops_the_program_before_the_update_and_the_state_before_it_stays(
    copy_of_tiny, tmp_path
):  # case B30
    run = without(copy_of_tiny, "10_sft", "continuous")
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from kernel import optim
real = optim.Optimizer.step
def step(self, loss, what):
    if self.updates == 4:
        next(iter(self.named.values())).grad[0, 0] = float("nan")
    return real(self, loss, what)
optim.Optimizer.step = step
import runpy
sys.argv = ["10_sft.py", "--run-dir", {str(run)!r}, "--save-every", "2"]
runpy.run_path({str(ROOT / "10_sft.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "update 5: the gradient norm is nan" in last_line(done)
    states = sorted(p.name for p in (run / "checkpoints/10_sft/continuous").iterdir())
    assert states == [f"state_{n:06d}.{end}" for n in (2, 4) for end in ("json", "pt.gz")]
    state, notes = newest_state(run / "checkpoints/10_sft/continuous")
    assert state.name == "state_000004.pt.gz" and notes == []


def test_swapped_columns_are_told(copy_of_tiny):  # case B42
    run = copy_of_tiny
    shutil.rmtree(run / "outputs/50_evaluate")
    path = run / "data/heldout/pairs.jsonl"
    rows = read_jsonl(path)
    write_jsonl(path, [{**r, "chosen": r["rejected"], "rejected": r["chosen"]} for r in rows])
    manifest = read_json(run / "data/manifest.json")
    manifest["sha256"]["heldout/pairs.jsonl"] = sha256_file(path)
    write_json(run / "data/manifest.json", manifest)
    assert (
        "HINT: the judge prefers the rejected" in run_stage("50_evaluate", "--run-dir", run).stdout
    )


# ---- the records can be recomputed ----------------------------------------------------------------


def test_rewards_advantages_and_returns_follow_from_the_stored_rollouts(tiny):
    c = PROFILES["tiny"]["ppo"]
    rows = read_jsonl(tiny / "outputs/30_ppo/continuous/rollouts.jsonl")
    assert len(rows) == c["iterations"] * c["rollouts"]
    for row in rows[:: max(len(rows) // 50, 1)]:
        T = len(row["response_ids"])
        rewards = [
            -c["kl_coef"] * (o - r) for o, r in zip(row["old_logprobs"], row["ref_logprobs"])
        ]
        rewards[-1] += (row["score"] - row["center"]) / row["scale"]
        if row["finish_reason"] == "length":
            rewards[-1] += c["cutoff_penalty"]
        assert rewards == pytest.approx(row["rewards"], abs=1e-4)
        advantage, next_value = 0.0, 0.0
        for t in reversed(range(T)):
            delta = rewards[t] + c["gamma"] * next_value - row["old_values"][t]
            advantage = delta + c["gamma"] * c["gae_lambda"] * advantage
            assert advantage == pytest.approx(row["advantages"][t], abs=1e-3)
            assert advantage + row["old_values"][t] == pytest.approx(row["returns"][t], abs=1e-3)
            next_value = row["old_values"][t]


def test_first_logits_give_the_first_logprob_by_hand(tiny):
    logits = load_file(tiny / "outputs/30_ppo/continuous/first_logits.safetensors")
    assert len(logits) == 2
    rows = {r["rollout"]: r for r in read_jsonl(tiny / "outputs/30_ppo/continuous/rollouts.jsonl")}
    for name, values in logits.items():
        numbers = values.double().tolist()
        top = max(numbers)
        log_sum = top + math.log(sum(math.exp(x - top) for x in numbers))
        by_hand = numbers[rows[name]["response_ids"][0]] - log_sum
        assert by_hand == pytest.approx(rows[name]["old_logprobs"][0], abs=1e-5)


def test_policy_starts_at_its_reference(tiny):
    first, *_, last = read_jsonl(tiny / "outputs/30_ppo/continuous/metrics.jsonl")
    assert first["kl"] == 0.0  # exactly: the same bits on both sides (case B03)
    assert last["kl"] > 0
    assert first["scoring_gap"] < 1e-4  # float32: cached sampling against one pass (case B09)
    assert first["clip_fraction_1"] == 0.0
    rollouts = read_jsonl(tiny / "outputs/30_ppo/continuous/rollouts.jsonl")
    assert all(k >= -1e-6 for row in rollouts for k in row["kl"])


def test_response_ids_and_finish_reasons_agree(tiny):
    for row in read_jsonl(tiny / "outputs/30_ppo/continuous/rollouts.jsonl"):
        ids = row["response_ids"]
        assert 2 not in ids[:-1] and 1 <= len(ids) <= 64
        assert (ids[-1] == 2) == (row["finish_reason"] == "eos")
        assert row["finish_reason"] == "eos" or len(ids) == 64


def test_phases_add_up_to_the_total(tiny):
    for row in read_jsonl(tiny / "outputs/30_ppo/continuous/timings.jsonl"):
        total = row.pop("total")
        del row["iteration"], row["peak_memory_mib"]
        assert sum(row.values()) == pytest.approx(total, rel=0.02)


def test_all_json_is_strict(tiny):
    def refuse(word):
        raise AssertionError(f"bare {word}")

    files = [*tiny.rglob("*.jsonl"), *tiny.rglob("*.json")]
    assert len(files) > 20
    for path in files:
        text = path.read_text(encoding="utf-8")
        for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
            json.loads(part, parse_constant=refuse)


def test_every_record_names_its_parents_up_to_corpus_and_base(tiny):
    model = read_json(tiny / "config.json")["model"]
    audited = read_json(tiny / "data/manifest.json")["sha256"]
    seen = 0
    for path in tiny.glob("outputs/**/record.json"):
        record = read_json(path)
        assert record["identity"]["model"] == model
        for name, want in record["identity"]["parents"].items():
            assert sha256_file(tiny / name) == want
            if name.startswith("data/"):
                assert audited[name.removeprefix("data/")] == want
            seen += 1
        for name, want in record["outputs"].items():
            assert sha256_file(tiny / name) == want
    assert seen >= 20


def test_adapter_files_hold_what_the_final_state_holds(tiny):
    state, _ = load_state(newest_state(tiny / "checkpoints/30_ppo/continuous")[0])
    saved = load_file(tiny / "checkpoints/30_ppo/continuous/adapter.safetensors")
    assert saved.keys() == state["roles"]["actor"].keys()
    assert all(torch.equal(saved[name], state["roles"]["actor"][name]) for name in saved)
    sft = load_file(tiny / "checkpoints/10_sft/continuous/adapter.safetensors")
    reference = state["roles"]["reference"]
    assert all(torch.equal(sft[name], reference[name]) for name in sft)  # never moved
    assert any(not torch.equal(sft[name], saved[name]) for name in sft)


def test_reloaded_reward_model_scores_bit_for_bit_in_a_new_process(tiny):
    """Case B04: the scores of stage 60 come back exactly from the file alone, under another seed."""
    code = f"""
import sys, torch; sys.path.insert(0, {str(ROOT)!r}); torch.set_num_threads(1); torch.manual_seed(7)
from kernel.data.chat import Chat
from kernel.data.files import read_json, read_jsonl
from kernel.roles import load_adapter, make_role
from kernel.score import score_answers
from pathlib import Path
run = Path({str(tiny)!r}); config = read_json(run / "config.json"); common = config["common"]
common["model_dir"] = {str(ROOT)!r} + "/" + common["model_dir"]
reward = make_role("reward", common, torch.device("cpu"), seed=1234, head="normal")
load_adapter(run / "checkpoints/20_reward/continuous/adapter.safetensors", reward, common,
             config["model"]["base_sha256"])
rows = read_jsonl(run / "outputs/60_probe/probes.jsonl")
pairs = Chat(common).encode_answers(rows, "candidate", "probes")
scores = score_answers(reward, pairs, 0, torch.device("cpu")).tolist()
assert scores == [row["score"] for row in rows]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_probe_contexts_get_one_greedy_answer_each(tiny):
    answers = {}
    for row in read_jsonl(tiny / "outputs/40_generate/generations.jsonl"):
        answers.setdefault((row["policy"], row["context"]), set()).add(tuple(row["response_ids"]))
    assert len(answers) == 400 and all(len(found) == 1 for found in answers.values())


def test_generations_and_score_tables_agree(tiny):
    rows = read_jsonl(tiny / "outputs/50_evaluate/answers.jsonl")
    results = read_json(tiny / "outputs/50_evaluate/results.json")["results"]
    assert len(rows) == 520
    for policy in ("sft", "ppo"):
        test = [r for r in rows if r["policy"] == policy and r["population"] == "test"]
        assert results[policy]["test"]["success"] == sum(r["verdict"]["success"] for r in test)
        mean = sum(r["score"] for r in test) / len(test)
        assert results[policy]["test"]["mean_score"] == pytest.approx(mean, abs=1e-6)
    assert "Verdict:" in (tiny / "outputs/50_evaluate/table.md").read_text()


# ---- running again ----------------------------------------------------------------------------------


def test_a_second_run_skips_every_finished_stage(tiny):
    before = {p: p.stat().st_mtime_ns for p in tiny.glob("checkpoints/**/*.safetensors")}
    command = ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished before, inputs unchanged, skipped") >= 6
    assert before == {p: p.stat().st_mtime_ns for p in tiny.glob("checkpoints/**/*.safetensors")}


def test_a_finished_stage_with_other_settings_is_refused_and_untouched(tiny):
    adapter = tiny / "checkpoints/10_sft/continuous/adapter.safetensors"
    before = sha256_file(adapter)
    done = run_stage("10_sft", "--run-dir", tiny, "--learning-rate", "0.5", check=False)
    assert done.returncode != 0
    assert "sft.learning_rate: 0.01 -> 0.5" in last_line(done)
    assert sha256_file(adapter) == before


def test_redo_replaces_the_stage_and_everything_behind_it_notices(copy_of_tiny):
    run = copy_of_tiny
    flags = ("--run-dir", run, "--epochs", "0.1")
    done = run_stage("10_sft", *flags, "--redo")
    assert "made again, because of changes" in done.stdout
    done = run_stage("30_ppo", "--run-dir", run, check=False)
    assert done.returncode != 0 and "10_sft/continuous/adapter.safetensors" in last_line(done)


def test_missing_inputs_name_the_stage_that_makes_them(tiny, tmp_path):
    run = tmp_path / "fresh"
    done = run_stage("10_sft", "--run-dir", run, "--profile", "tiny", check=False)
    assert done.returncode != 0 and last_line(done).endswith("(run 00_prepare.py)")
    run_stage("00_prepare", "--run-dir", run, "--profile", "tiny")
    done = run_stage("30_ppo", "--run-dir", run, check=False)
    assert done.returncode != 0 and "run 10_sft.py first" in last_line(done)
    done = run_stage("20_reward", "--run-dir", run, "--variant", "resume", check=False)
    assert done.returncode != 0 and "--variant interrupt first" in last_line(done)


def test_resume_under_other_settings_is_refused(copy_of_tiny):
    run = copy_of_tiny
    shutil.rmtree(run / "outputs/20_reward/resume")
    shutil.rmtree(run / "checkpoints/20_reward/resume")
    flags = ("--run-dir", run, "--variant", "resume", "--learning-rate", "0.5")
    done = run_stage("20_reward", *flags, check=False)
    assert done.returncode != 0 and "reward.learning_rate" in last_line(done)
    assert list((run / "checkpoints/20_reward/resume").iterdir()) == []


def test_an_unfinished_stage_with_other_settings_is_refused_or_started_anew(copy_of_tiny):
    run = copy_of_tiny
    (run / "outputs/20_reward/continuous/record.json").unlink()  # as after a crash
    flags = ("--run-dir", run, "--epochs", "0.05")
    done = run_stage("20_reward", *flags, check=False)
    assert done.returncode != 0 and "reward.epochs: 2 -> 0.05" in last_line(done)
    assert (run / "checkpoints/20_reward/continuous/state_000210.pt.gz").is_file()
    done = run_stage("20_reward", *flags, "--redo")
    assert "started anew" in done.stdout
    assert not (run / "checkpoints/20_reward/continuous/state_000210.pt.gz").exists()


def test_ctrl_c_saves_and_the_same_command_goes_on_exactly(copy_of_tiny, tiny):
    run = without(copy_of_tiny, "20_reward", "continuous")
    command = [sys.executable, str(ROOT / "20_reward.py"), "--run-dir", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = run / "outputs/20_reward/continuous/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Run the same command again to go on" in out
    done = run_stage("20_reward", "--run-dir", run)
    assert "going on after update" in done.stdout
    for name in ("checkpoints/20_reward/continuous/adapter.safetensors",
                 "outputs/20_reward/continuous/metrics.jsonl"):
        assert sha256_file(run / name) == sha256_file(tiny / name)


def test_a_second_process_on_the_same_folder_is_refused_and_a_dead_one_is_not_in_the_way(
    copy_of_tiny, tiny
):
    """Case B37."""
    run = copy_of_tiny
    shutil.rmtree(run / "outputs/20_reward/continuous")
    shutil.rmtree(run / "checkpoints/20_reward/continuous")
    command = [sys.executable, str(ROOT / "20_reward.py"), "--run-dir", str(run)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics = run / "outputs/20_reward/continuous/metrics.jsonl"
    wait_until(metrics.exists)
    second = run_stage("20_reward", "--run-dir", run, check=False)
    assert second.returncode != 0
    assert f"process {first.pid} is already working" in last_line(second)
    first.kill()
    first.communicate()
    run_stage("20_reward", "--run-dir", run)
    adapter = "checkpoints/20_reward/continuous/adapter.safetensors"
    assert sha256_file(run / adapter) == sha256_file(tiny / adapter)


def test_plain_sampling_without_a_cache_gives_the_same_answers(copy_of_tiny, tiny):
    run = copy_of_tiny
    shutil.rmtree(run / "outputs/40_generate")
    run_stage("40_generate", "--run-dir", run, "--no-cache")
    path = "outputs/40_generate/generations.jsonl"
    cached, plain = read_jsonl(tiny / path), read_jsonl(run / path)
    assert [row["response_ids"] for row in cached] == [row["response_ids"] for row in plain]


def test_each_distinct_prompt_is_decoded_once_and_stands_in_all_its_rows(tiny):
    answers = {}
    for row in read_jsonl(tiny / "outputs/40_generate/generations.jsonl"):
        answers.setdefault((row["policy"], row["prompt"]), []).append(
            (row["response_ids"], row["logprobs"], row["ref_logprobs"])
        )
    assert len(answers) == 400 and sum(map(len, answers.values())) == 520
    assert all(answer == own[0] for own in answers.values() for answer in own)


# ---- bad input ------------------------------------------------------------------------------------

BAD = [
    (("10_sft", "--no-such-flag"), "unrecognized arguments"),
    (("00_prepare", "--profile", "huge"), "invalid choice"),
    (("10_sft", "--run-dir", "RUN", "--profile", "smollm2"), "belongs to profile tiny"),
    (("10_sft", "--run-dir", "RUN", "--batch", "0"), "--batch must be positive"),
    (("10_sft", "--run-dir", "RUN", "--learning-rate", "nan"), "must be a finite number"),
    (("00_prepare", "--run-dir", "RUN", "--lora-r", "4"), "common.lora_r: 8 -> 4"),
    (
        ("00_prepare", "--run-dir", "NEW", "--profile", "tiny", "--model-dir", "/nowhere"),
        "config.json",
    ),
]


@pytest.mark.parametrize("command,wanted", BAD, ids=[wanted for _, wanted in BAD])
def test_bad_input_ends_in_one_clear_line(tiny, tmp_path, command, wanted):
    places = {"RUN": str(tiny), "NEW": str(tmp_path / "new")}
    done = run_stage(*[places.get(word, word) for word in command], check=False)
    assert done.returncode != 0 and wanted in last_line(done)
    assert "Traceback" not in done.stderr


def test_an_edited_corpus_file_is_refused(copy_of_tiny):
    run = copy_of_tiny
    pairs = run / "data/train/pairs.jsonl"
    held_out = read_jsonl(run / "data/heldout/pairs.jsonl")[0]
    pairs.write_text(pairs.read_text() + json.dumps(held_out) + "\n")  # case B10: a leaked test row
    for stage in ("20_reward", "00_prepare"):
        done = run_stage(stage, "--run-dir", run, check=False)
        assert done.returncode != 0 and "train/pairs.jsonl" in last_line(done)


def test_unsupported_and_damaged_models_are_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'
    )
    flags = ("--profile", "tiny", "--run-dir", tmp_path / "run", "--model-dir", folder)
    done = run_stage("00_prepare", *flags, check=False)
    assert done.returncode != 0 and "GPT2LMHeadModel is not supported" in last_line(done)
    shutil.rmtree(folder)
    shutil.copytree(next(ROOT.glob("models/tiny-*")), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run_stage("00_prepare", "--profile", "tiny", "--run-dir", tmp_path / "run2")
    done = run_stage("00_prepare", *flags, check=False)
    assert done.returncode != 0 and "model" in last_line(done) and "Traceback" not in done.stderr


def test_an_own_model_folder_whose_pad_is_its_eos_gets_a_pad_of_its_own(tmp_path):
    folder = tmp_path / "model"
    run_stage("00_prepare", "--profile", "tiny", "--run-dir", tmp_path / "first")
    shutil.copytree(next(ROOT.glob("models/tiny-*")), folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    run = tmp_path / "run"
    flags = ("--profile", "tiny", "--run-dir", run)
    done = run_stage("00_prepare", *flags, "--model-dir", folder)
    assert "end token 2, pad 0" in done.stdout
    run_stage("10_sft", "--run-dir", run, "--epochs", "0.05", "--validation-rows", "2")
    template = folder / "chat_template.jinja"
    template.unlink()
    flags = ("--profile", "tiny", "--run-dir", tmp_path / "run2", "--model-dir", folder)
    done = run_stage("00_prepare", *flags, check=False)
    assert done.returncode != 0 and "no chat template" in last_line(done)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_told_in_the_first_second(tmp_path):
    tmp_path.chmod(0o500)
    flags = ("--profile", "tiny", "--run-dir", tmp_path / "run")
    done = run_stage("00_prepare", *flags, check=False)
    assert done.returncode != 0 and "cannot write" in last_line(done)


def test_an_output_place_that_is_a_file_is_told_at_once(tmp_path):
    (tmp_path / "run").write_text("")
    flags = ("--profile", "tiny", "--run-dir", tmp_path / "run")
    done = run_stage("00_prepare", *flags, check=False)
    assert done.returncode != 0 and "cannot write" in last_line(done)


def test_run_all_stops_at_a_failing_stage_and_names_it(copy_of_tiny):
    """Case B45: the status of the stage survives, and nothing behind it is started."""
    run = copy_of_tiny
    adapter = run / "checkpoints/10_sft/continuous/adapter.safetensors"
    damaged = bytearray(adapter.read_bytes())
    damaged[-1] ^= 1
    adapter.write_bytes(damaged)
    command = ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "10_sft failed with status 1" in done.stderr
    assert "20_reward" not in done.stdout


def test_run_all_names_the_lane_beside_that_failed(copy_of_tiny):
    """Case B45. What it said is in a log; its last lines and its status come to the terminal."""
    run = copy_of_tiny
    metrics = run / "outputs/10_sft/interrupt/metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-2])
    command = ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    why, lane, last = done.stderr.strip().splitlines()[-3:]
    assert "10_sft interrupt is finished, but things changed" in why and "metrics.jsonl" in why
    assert lane == "10_sft (interrupt/resume) failed"
    assert last == "run_all.sh: 10_sft failed with status 1"
    assert "20_reward" not in done.stdout


def test_load_adapter_of_another_base_is_refused(tiny):
    config = read_json(tiny / "config.json")["common"]
    config["model_dir"] = str(ROOT / config["model_dir"])
    role = make_role("actor", config, torch.device("cpu"), seed=49)
    adapter = tiny / "checkpoints/10_sft/continuous/adapter.safetensors"
    with pytest.raises(ValueError, match="base_sha256"):
        load_adapter(adapter, role, config, "0" * 64)

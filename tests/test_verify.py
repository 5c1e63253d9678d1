"""`verify` on a finished run, and on runs that somebody or something has changed.

A forger here is thorough: after an edit the sha256 in the maker's record is brought up to date, so that
only the arithmetic, or the next stage in line, can tell.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from kernel.data.files import read_json, read_jsonl, sha256_file, write_json, write_jsonl
from kernel.finished import verify
from kernel.run import lineage
from kernel.run.folder import RunFolder

PPO = "outputs/30_ppo/continuous"


def test_a_finished_run_holds(tiny):
    command = ["bash", str(ROOT / "run_all.sh"), "verify", str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("verify: the whole run holds")
    for line in ("base model", "corpus", "10_sft check", "rollouts", "evaluation", "probes"):
        assert f" {line} " in done.stdout
    assert "640 rollouts" in done.stdout and "520 verdicts" in done.stdout


def test_an_unfinished_run_is_told_as_such(copy_of_tiny, capsys):
    run = copy_of_tiny
    for name in ("outputs/50_evaluate", "outputs/60_probe", "outputs/30_ppo/check"):
        shutil.rmtree(run / name)
    assert verify.verify(RunFolder(run)) == ["30_ppo check", "50_evaluate", "60_probe"]


def test_what_is_no_run_folder(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "run_all.sh"), "verify", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1 and "is no run folder" in done.stderr


# ---- forgeries ----------------------------------------------------------------------------------


def flip(path: Path, at: float = 0.5) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * at)] ^= 1
    path.write_bytes(raw)


def update_record(run: Path, name: str) -> None:
    """Make the maker's record and the states' marks agree with the file; drop the exact check."""
    shutil.rmtree(run / "outputs" / lineage.maker(name).split("/")[0] / "check", ignore_errors=True)
    record_path = run / "outputs" / lineage.maker(name) / "record.json"
    record = read_json(record_path)
    for state in (run / "checkpoints" / lineage.maker(name)).glob("state_*.json"):
        manifest = read_json(state)
        if Path(name).name in manifest["marks"]:
            mark = {"bytes": (run / name).stat().st_size, "sha256": sha256_file(run / name)}
            manifest["marks"][Path(name).name] = mark
            write_json(state, manifest)
    for output in record["outputs"]:
        record["outputs"][output] = sha256_file(run / output)
    write_json(record_path, record)


def forge_rows(run: Path, name: str, edit) -> None:
    rows = read_jsonl(run / name)
    edit(rows)
    write_jsonl(run / name, rows)
    update_record(run, name)


def forge_json(run: Path, name: str, edit) -> None:
    value = read_json(run / name)
    edit(value)
    write_json(run / name, value)
    update_record(run, name)


def first_long(rows, key="response_ids"):
    return next(row for row in rows if len(row[key]) > 4)


def corpus_row(run):
    rows = read_jsonl(run / "data/train/pairs.jsonl")
    rows[3]["chosen"], rows[3]["rejected"] = rows[3]["rejected"], rows[3]["chosen"]
    write_jsonl(run / "data/train/pairs.jsonl", rows)


def corpus_row_and_manifest(run):
    corpus_row(run)
    manifest = read_json(run / "data/manifest.json")
    manifest["sha256"]["train/pairs.jsonl"] = sha256_file(run / "data/train/pairs.jsonl")
    write_json(run / "data/manifest.json", manifest)


def other_base(run):
    config = read_json(run / "config.json")
    config["model"]["base_sha256"] = "0" * 64
    write_json(run / "config.json", config)


def adapter_byte(run):
    flip(run / "checkpoints/20_reward/continuous/adapter.safetensors", 0.9)


def adapter_byte_and_record(run):
    adapter_byte(run)
    update_record(run, "checkpoints/20_reward/continuous/adapter.safetensors")


def state_byte(run):
    flip(max((run / "checkpoints/30_ppo/continuous").glob("state_*.pt.gz")))


def set_in(key, place, value):
    def edit(rows):
        row = first_long(rows)
        if place is None:
            row[key] = value
        else:
            row[key][place] += value

    return lambda run: forge_rows(run, f"{PPO}/rollouts.jsonl", edit)


def metric(key, change):
    def edit(rows):
        rows[5][key] += change

    return lambda run: forge_rows(run, f"{PPO}/metrics.jsonl", edit)


def dropped_rollout(run):
    forge_rows(run, f"{PPO}/rollouts.jsonl", lambda rows: rows.pop(7))


def without_a_key(run):
    forge_rows(run, f"{PPO}/rollouts.jsonl", lambda rows: rows[3].pop("old_values"))


def other_prompt(run):
    def edit(rows):
        rows[0]["prompt_id"] = rows[1]["prompt_id"]

    forge_rows(run, f"{PPO}/rollouts.jsonl", edit)


def other_text(run):
    def edit(rows):
        rows[2]["text"] = "Good day."

    forge_rows(run, "outputs/40_generate/generations.jsonl", edit)


def kinder_verdict(run):
    def edit(rows):
        row = next(row for row in rows if not row["verdict"]["success"])
        row["verdict"]["success"] = True

    forge_rows(run, "outputs/50_evaluate/answers.jsonl", edit)


def better_score(run):
    def edit(rows):
        rows[-1]["score"] += 1

    forge_rows(run, "outputs/50_evaluate/answers.jsonl", edit)


def other_interval(run):
    def edit(value):
        value["differences"]["score"]["low"] += 0.1

    forge_json(run, "outputs/50_evaluate/results.json", edit)


def other_table(run):
    path = run / "outputs/50_evaluate/table.md"
    path.write_text(path.read_text().replace("| ppo | test | 180 |", "| ppo | test | 181 |"))
    update_record(run, "outputs/50_evaluate/table.md")


def other_judge_in_the_table(run):
    path = run / "outputs/50_evaluate/table.md"
    one_less = lambda found: f"{int(found[1]) - 1} of 180 right"  # noqa: E731
    path.write_text(re.sub(r"(\d+) of 180 right", one_less, path.read_text()))
    update_record(run, "outputs/50_evaluate/table.md")


def left_out_pair(run):
    def edit(rows):
        rows.pop(3)

    forge_rows(run, "outputs/60_probe/pairs.jsonl", edit)


def other_effect(run):
    def edit(value):
        value["factorial"]["inversions"][0]["count"] += 1

    forge_json(run, "outputs/60_probe/figures.json", edit)


def turn_round(row):
    """The judge's order of a pair becomes the other one, whichever it was."""
    row["chosen_score"], row["rejected_score"] = row["rejected_score"], row["chosen_score"]


def other_judge(run):
    def edit(rows):
        turn_round(next(row for row in rows if row["split"] != "heldout"))

    forge_rows(run, "outputs/60_probe/pairs.jsonl", edit)


def other_heldout_score(run):
    def edit(rows):
        next(row for row in rows if row["split"] == "heldout")["chosen_score"] += 0.001

    forge_rows(run, "outputs/60_probe/pairs.jsonl", edit)


def another_order(run):
    def edit(rows):
        turn_round(rows[0])

    forge_rows(run, "outputs/50_evaluate/pairs.jsonl", edit)


def kinder_sample(run):
    def edit(rows):
        row = next(row for row in rows if not row["success"])
        row["success"] = True

    forge_rows(run, "outputs/60_probe/best_of_n.jsonl", edit)


def other_proof(run):
    proof = read_json(run / "outputs/30_ppo/check/proof.json")
    proof["sha256"]["resume"]["state"] = "0" * 64
    write_json(run / "outputs/30_ppo/check/proof.json", proof)


FORGERIES = [
    (other_base, "is not the base model of this run"),
    (corpus_row, "train/pairs.jsonl: changed"),
    (corpus_row_and_manifest, "train/pairs.jsonl row 4"),  # the audit itself
    (adapter_byte, "20_reward/continuous/adapter.safetensors: sha256"),
    (adapter_byte_and_record, "adapter.safetensors: not the tensors of state_"),
    (state_byte, "state_000040.pt.gz"),
    (set_in("rewards", 1, 0.01), "rewards [1]"),
    (set_in("old_values", 2, 0.5), "30_ppo iteration 1"),
    (set_in("advantages", 0, -0.5), "advantages [0]"),
    (set_in("returns", -1, 0.1), "returns ["),
    (set_in("score", None, 9.0), "rewards ["),
    (set_in("finish_reason", None, "length"), "finish_reason"),
    (metric("policy_loss_2", 0.01), "metrics.jsonl [5].policy_loss_2"),  # the state knows
    (dropped_rollout, "prompts"),
    (without_a_key, "rollouts: malformed (KeyError"),
    (other_prompt, "prompts"),
    (other_text, "text"),
    (kinder_verdict, "verdict"),
    (better_score, "results.json"),
    (other_interval, "results.json"),
    (another_order, "results.json"),
    (other_table, "table.md"),
    (other_judge_in_the_table, "table.md"),
    (left_out_pair, "60_probe pairs.jsonl ids"),
    (other_effect, "figures.json factorial.inversions[0].count"),
    (other_judge, "figures.json card."),
    (other_heldout_score, "chosen_score"),
    (kinder_sample, "best_of_n.jsonl"),
    (other_proof, "proof.json"),
]


@pytest.mark.parametrize(
    "forge,wanted", FORGERIES, ids=[f"{n}-{wanted}" for n, (_, wanted) in enumerate(FORGERIES)]
)
def test_the_first_thing_that_does_not_hold_is_named(copy_of_tiny, forge, wanted):
    forge(copy_of_tiny)
    with pytest.raises(ValueError) as caught:
        verify.verify(RunFolder(copy_of_tiny))
    assert wanted in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["policy_loss_1", "value_loss_2", "clip_fraction_2", "approx_kl_2", "kl", "tokens",
            "explained_variance", "actor_lr"],
)
def test_each_metric_follows_from_the_rollouts(copy_of_tiny, monkeypatch, key):
    """With the comparison against the state switched off, the arithmetic alone still tells."""
    metric(key, 0.01)(copy_of_tiny)
    monkeypatch.setattr(verify, "stored_state", lambda *_: None)
    with pytest.raises(ValueError, match=f"iteration 6 {key}"):
        verify.verify(RunFolder(copy_of_tiny))


# ---- manifests are not trusted with paths (case B44) ---------------------------------------------


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "outputs/../../outside.json"])
def test_a_record_cannot_point_out_of_the_run_folder(copy_of_tiny, name):
    (copy_of_tiny.parent / "outside.json").write_text("{}")
    path = copy_of_tiny / "outputs/60_probe/record.json"
    record = read_json(path)
    record["outputs"][name] = "0" * 64
    write_json(path, record)
    with pytest.raises(ValueError, match="lies outside"):
        verify.verify(RunFolder(copy_of_tiny))


def test_a_symlink_in_the_run_folder_is_not_followed_out(copy_of_tiny):
    target = copy_of_tiny.parent / "elsewhere.md"
    path = copy_of_tiny / "outputs/60_probe/table.md"
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(ValueError, match="lies outside"):
        verify.verify(RunFolder(copy_of_tiny))


def test_verify_writes_nothing(copy_of_tiny):
    def snapshot():
        return {
            str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in copy_of_tiny.rglob("*")
            if p.is_file() and p.name != ".lock"
        }

    before = snapshot()
    env = {**os.environ, "DEBUG": ""}
    command = ["bash", str(ROOT / "run_all.sh"), "verify", str(copy_of_tiny)]
    assert subprocess.run(command, env=env, capture_output=True).returncode == 0
    assert snapshot() == before
    assert json.loads((copy_of_tiny / "config.json").read_text())["profile"] == "tiny"

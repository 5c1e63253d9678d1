"""Proves that PPO learns when its judge is right: the test of the optimiser.

PPO on `tiny` is paid by the corpus' own rubric on training prompts, 1 for success and 0 otherwise. The
samples' last tenth is held against their first, and the greedy answers to held-out prompts, which no
training stage may open, against SFT's. With a weak optimiser, with a base that cannot be sure, or with
other ids than in pre-training, it fails.
"""

import shutil

import pytest
from conftest import run_stage

from kernel.data.draws import tenths
from kernel.data.files import read_json, read_jsonl
from kernel.lesson.lab import SFT, open_lab


@pytest.fixture(scope="module")
def paid_by_the_rubric(tiny, tmp_path_factory):
    run = tmp_path_factory.mktemp("learning") / "run"
    shutil.copytree(tiny, run)
    own = ("--iterations", 30, "--rollouts", 32, "--critic-lr", 1e-3)
    flags = ("--reward", "rubric", "--no-center-scores", *own)
    run_stage("30_ppo", "--run-dir", run, "--name", "perfect", *flags)
    return run


def test_the_samples_success_rises(paid_by_the_rubric):
    rows = read_jsonl(paid_by_the_rubric / "outputs/30_ppo/perfect/continuous/metrics.jsonl")
    first, last = (sum(row["score"] for row in part) / len(part) for part in tenths(rows))
    assert last - first >= 0.2, (first, last)
    assert all(0 <= row["score"] <= 1 for row in rows)
    assert 0 < rows[-1]["kl"] < 0.3  # it moved, and is still a neighbour of SFT


def test_greedy_answers_to_unseen_prompts_succeed_more_often(paid_by_the_rubric):
    lab = open_lab(paid_by_the_rubric, "tiny", redo=False)
    ppo = "checkpoints/30_ppo/perfect/continuous/adapter.safetensors"
    before, after = ([row["success"] for row in lab.greedy(path)] for path in (SFT, ppo))
    assert len(before) == len(after) == 200
    assert sum(after) > sum(before), (sum(before), sum(after))


def test_it_opened_the_training_labels_and_no_held_out_ones(paid_by_the_rubric):
    record = read_json(paid_by_the_rubric / "outputs/30_ppo/perfect/continuous/record.json")
    parents = set(record["identity"]["parents"])
    assert {"data/rubric.py", "data/train/labels.jsonl"} <= parents
    assert not [name for name in parents if "heldout" in name]

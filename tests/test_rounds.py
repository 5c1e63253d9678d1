"""Rounds: pairs out of labelled answers, own pairs beside the corpus's, and scores normalised over SFT.

Proves: each label rule by hand; a file of one's own trains the judge and is refused by file and row; the
scale is the mean and deviation of the scores, and what PPO is paid follows from them.
"""

import math
import shutil
import statistics

import pytest
import torch
from conftest import last_line, run_stage

from kernel.data.chat import Chat
from kernel.data.corpus import pair_files
from kernel.data.files import read_json, read_jsonl, sha256_file, write_jsonl
from kernel.finished import recompute
from kernel.gate.rows import read_pairs
from kernel.lesson.rounds import label_pairs, over_seeds
from kernel.reward import score_scale
from kernel.roles import load_role
from kernel.run.flags import override
from kernel.run.folder import RunFolder
from kernel.run.profiles import PROFILES


def answer(text: str, success: bool) -> dict:
    return {"prompt": "Why?", "text": text, "success": success}


# ---- labels ---------------------------------------------------------------------------------------


def test_each_wrong_answer_is_rejected_against_a_right_one_in_turn():
    own = [answer(t, t.isupper()) for t in ("a", "B", "c", "D", "e")]
    pairs, labels = label_pairs({"q": own}, {"q": ["never asked for"]})
    assert [(p["chosen"], p["rejected"]) for p in pairs] == [("B", "a"), ("D", "c"), ("B", "e")]
    assert labels == 5 and [p["id"] for p in pairs] == ["q-0", "q-1", "q-2"]
    assert {p["prompt"] for p in pairs} == {"Why?"}


def test_equal_answers_are_labelled_once_and_the_demonstration_steps_in():
    own = [answer("a", False), answer("a", False), answer("b", False)]
    pairs, labels = label_pairs({"q": own}, {"q": ["R"]})
    assert [(p["chosen"], p["rejected"]) for p in pairs] == [("R", "a"), ("R", "b")] and labels == 2


def test_no_pair_without_a_right_or_without_a_wrong_answer():
    only_right, only_wrong = [answer("A", True), answer("B", True)], [answer("a", False)]
    assert label_pairs({"q": only_right, "r": only_wrong, "s": []}, {}) == ([], 3)


def test_over_seeds():
    assert over_seeds([160, 166, 163]) == "163 (160 to 166)"


# ---- own pairs ------------------------------------------------------------------------------------


def test_pairs_are_one_name_and_own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pair_files("pairs") == ("pairs", [])
    a, b = str(tmp_path / "a.jsonl"), "/b.jsonl"
    assert pair_files(f"pairs-helpful, a.jsonl,{b}") == ("pairs-helpful", [a, b])
    for wrong in ("a.jsonl", "pairs,other", "", "pairs,a.jsonl,a.jsonl", "pairs,"):
        with pytest.raises(ValueError, match="one name of the corpus's own pairs"):
            pair_files(wrong)


PAIR = {"prompt": "Why is the sky blue?", "chosen": "Because of scattering.", "rejected": "It is not."}


def test_own_pairs_may_have_any_shape_and_name_their_bad_row(tmp_path):
    path = tmp_path / "own.jsonl"
    user = {"role": "user", "content": PAIR["prompt"]}
    turns = {
        side: [user, {"role": "assistant", "content": PAIR[side]}] for side in ("chosen", "rejected")
    }
    write_jsonl(path, [PAIR, turns])
    assert read_pairs(path) == [PAIR, PAIR]
    for bad, why in (
        ({**PAIR, "rejected": PAIR["chosen"]}, "chosen equals rejected"),
        ({**PAIR, "chosen": " "}, "chosen is empty"),
        ({"prompt": "x", "chosen": "y"}, "rejected"),
    ):
        write_jsonl(path, [PAIR, bad])
        with pytest.raises(ValueError, match=rf"own\.jsonl row 2: .*{why}"):
            read_pairs(path)
    path.write_text("\n\n{broken\n")
    with pytest.raises(ValueError, match=r"own\.jsonl row 3: "):
        read_pairs(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"own\.jsonl: no rows"):
        read_pairs(path)


def test_the_judge_learns_own_pairs_too_and_records_the_file(copy_of_tiny, tmp_path):
    """The updates are as many as the pairs of both call for, and another content is another judge."""
    own = tmp_path / "own.jsonl"
    corpus = len(read_jsonl(copy_of_tiny / "data/train/pairs.jsonl"))
    write_jsonl(own, [{**PAIR, "prompt": f"{PAIR['prompt']} {n}"} for n in range(80)])
    flags = ("--run-dir", copy_of_tiny, "--name", "both", "--pairs", f"pairs,{own}", "--epochs", 0.02)
    done = run_stage("20_reward", *flags)
    assert f"{corpus + 80} training pairs" in done.stdout
    folder = copy_of_tiny / "outputs/20_reward/both/continuous"
    record = read_json(folder / "record.json")
    assert record["identity"]["parents"][str(own)] == sha256_file(own)
    assert len(read_jsonl(folder / "metrics.jsonl")) == math.ceil(0.02 * (corpus + 80) / 8)
    assert "skipped" in run_stage("20_reward", *flags).stdout
    write_jsonl(own, [PAIR])
    again = run_stage("20_reward", *flags, check=False)
    assert again.returncode == 1 and "things changed" in last_line(again)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "own.jsonl is missing"), ("{}\n", "own.jsonl row 1: "), ("x\n", "own.jsonl row 1: ")],
)
def test_a_bad_file_of_own_pairs_ends_in_one_line(copy_of_tiny, tmp_path, content, why):
    own = tmp_path / "own.jsonl"
    if content:
        own.write_text(content)
    flags = ("--run-dir", copy_of_tiny, "--name", "bad", "--pairs", f"pairs,{own}")
    done = run_stage("20_reward", *flags, check=False)
    assert done.returncode == 1 and why in last_line(done)
    assert not (copy_of_tiny / "checkpoints/20_reward/bad/continuous/adapter.safetensors").exists()


# ---- normalised scores ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def normalised(tiny, tmp_path_factory):
    run = tmp_path_factory.mktemp("normalised") / "run"
    shutil.copytree(tiny, run)
    flags = ("--run-dir", run, "--name", "n", "--iterations", 2, "--normalize-scores", 40)
    return run, run_stage("30_ppo", *flags).stdout


def test_the_scale_is_the_mean_and_deviation_of_the_sampled_answers_scores(tiny):
    run = RunFolder(tiny)
    chat, device = Chat(run.common), torch.device("cpu")
    path = tiny / "checkpoints/10_sft/continuous/adapter.safetensors"
    policy = load_role("actor", path, run.common, run.base_sha256, device)
    rows = run.rows("data/train/prompts.jsonl")[:20]
    asked = list(zip(rows, chat.encode_prompts(rows, "prompts")))
    seen = []

    def by_length(batch, own):
        assert [chat.prompt_ids(row["prompt"]) for row in own] == batch.prompts
        seen.extend(map(len, batch.responses))
        return torch.tensor([float(len(ids)) for ids in batch.responses])

    center, scale = score_scale(by_length, policy, asked, chat, device, seed=5)
    assert len(seen) == 20  # 16 and 4
    assert center == pytest.approx(statistics.fmean(seen))
    assert scale == pytest.approx(statistics.pstdev(seen), rel=1e-6)
    assert (center, scale) == score_scale(by_length, policy, asked, chat, device, seed=5)
    with pytest.raises(ValueError, match="20 sampled answers all score 3"):
        score_scale(lambda b, r: torch.full((len(r),), 3.0), policy, asked, chat, device, seed=5)


def test_what_ppo_is_paid_follows_from_center_and_scale(normalised):
    run, printed = normalised
    rows = read_jsonl(run / "outputs/30_ppo/n/continuous/rollouts.jsonl")
    (center,), (scale,) = ({row[key] for row in rows} for key in ("center", "scale"))
    assert scale > 0 and scale != 1 and f"divided by {scale:.2f} (40 SFT answers)" in printed
    kl_coef = PROFILES["tiny"]["ppo"]["kl_coef"]
    for row in rows:
        penalty = -kl_coef * (row["old_logprobs"][-1] - row["ref_logprobs"][-1])
        cut = -1.0 if row["finish_reason"] == "length" else 0.0
        paid = (row["score"] - center) / scale
        assert row["rewards"][-1] == pytest.approx(penalty + paid + cut, abs=1e-5)
    first = [(row["score"] - center) / scale for row in rows if row["iteration"] == 1]
    assert abs(statistics.fmean(first)) < 1.5  # those are SFT's own answers too


def test_the_metrics_are_recomputed_with_the_scale(normalised):
    run, _ = normalised
    folder = run / "outputs/30_ppo/n/continuous"
    own = read_json(folder / "record.json")["identity"]["ppo"]
    rows, (metrics, _) = read_jsonl(folder / "rollouts.jsonl"), read_jsonl(folder / "metrics.jsonl")
    group = [row for row in rows if row["iteration"] == 1]
    for name, value in recompute.iteration_figures("here", group, own).items():
        recompute.same(name, metrics[name], value)
    forged = [{**row, "scale": row["scale"] * 1.01} for row in group]
    with pytest.raises(ValueError, match="rewards"):
        recompute.iteration_figures("here", forged, own)


def test_off_at_zero_and_never_below():
    usual = PROFILES["tiny"]["ppo"]

    def given(value):
        return type("Args", (), {"__init__": lambda s: s.__dict__.update(normalize_scores=value)})()

    assert override(usual, given(0))["normalize_scores"] == 0 == usual["normalize_scores"]
    assert override(usual, given(8))["normalize_scores"] == 8
    with pytest.raises(ValueError, match="--normalize-scores must be 0 \\(off\\) or more, not -1"):
        override(usual, given(-1))

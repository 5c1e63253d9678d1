"""The lesson's exercises: every recipe as a program at its smallest, and the tables against plain loops.

Proves: an exercise runs beside a finished run without touching it, goes on where it was, refuses a
folder in use; what its table says follows from the records of its stages.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_stage
from matplotlib.image import imread

from kernel.data.files import read_json, read_jsonl, sha256_file
from kernel.data.own_code import load_rubric
from kernel.finished.verify import verify
from kernel.lesson import exercises, rounds
from kernel.lesson.lab import left_to_do
from kernel.lesson.policies import COEFFICIENTS, MIX
from kernel.lesson.result import ends
from kernel.measure.tables import markdown
from kernel.report.panels import picture
from kernel.run.folder import RunFolder
from kernel.run.profiles import PROFILES

SMALLEST = ["--iterations", "1", "--seeds", "50", "--reward-epochs", "0.01", "--two-epochs", "0.01",
            "--lesson-epochs", "2", "--perfect-iterations", "2", "--rounds-iterations", "1",
            "--rounds-epochs", "0.02", "--label-prompts", "24"]

TRIED = [name for name in exercises.EXERCISES if name != "brakes"]  # has eighteen PPO runs


def exercise(run, *names: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kernel.lesson.exercises", str(run), *names, *SMALLEST]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def lab(tiny, tmp_path_factory):
    """A copy of the finished tiny run after the exercises at their smallest."""
    run = tmp_path_factory.mktemp("lab") / "run"
    subprocess.run(["cp", "-a", str(tiny), str(run)], check=True)
    done = exercise(run, *TRIED)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return run, done.stdout


def found(lab, name: str) -> dict:
    return read_json(lab[0] / "exercises" / name / "results.json")


@pytest.mark.parametrize("name", TRIED)
def test_each_ends_in_a_table_a_picture_and_one_sentence(lab, name):
    folder, result = lab[0] / "exercises" / name, found(lab, name)
    text = (folder / "table.md").read_text()
    assert text.startswith("| " + " | ".join(result["header"]) + " |\n")
    assert text.count("\n|") == len(result["rows"]) + 1  # and the line under the header
    assert f"What was seen: {result['seen']}." in text and text in lab[1]
    pixels = imread(folder / "picture.png")
    assert pixels.shape[0] > 300 and pixels.std() > 0.02  # not an empty sheet


def test_the_run_itself_is_untouched(lab, tiny):
    for path in sorted(tiny.rglob("*")):
        if path.is_file() and path.name != ".lock":
            assert sha256_file(lab[0] / path.relative_to(tiny)) == sha256_file(path), path


def test_verify_walks_through_named_runs_too(lab, capsys):
    assert verify(RunFolder(lab[0])) == []
    assert "20_reward pooling-mean-50 continuous" in capsys.readouterr().out
    adapter = lab[0] / "checkpoints/20_reward/pooling-mean-50/continuous/adapter.safetensors"
    before = adapter.read_bytes()
    adapter.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(ValueError, match="pooling-mean-50/continuous/adapter.safetensors"):
        verify(RunFolder(lab[0]))
    adapter.write_bytes(before)


def test_perfect_judge_table_follows_from_the_scores_and_the_rubric(lab):
    """Paid by the rubric, a sample's score is its verdict; the greedy counts are those of the stages."""
    result = found(lab, "perfect-judge")
    (row,) = result["rows"]
    rollouts = read_jsonl(lab[0] / "outputs/30_ppo/perfect-50/continuous/rollouts.jsonl")
    paid = [[r["score"] for r in rollouts if r["iteration"] == n] for n in (1, 2)]
    first, last = (sum(scores) / len(scores) for scores in paid)
    assert row[1:4] == pytest.approx([first, last, last - first])
    answers = read_jsonl(lab[0] / "outputs/50_evaluate/answers.jsonl")
    sft = {r["context"]: r["verdict"]["success"] for r in reversed(answers) if r["policy"] == "sft"}
    assert row[5] == sum(sft.values()) and result["header"][5] == f"SFT greedy, of {len(sft)}"


def test_rounds_table_follows_from_the_answers_and_the_labels(lab):
    """Every wrong answer among those sampled is a rejected one, and no pair asks a held-out prompt."""
    run, result = lab[0], found(lab, "rounds")
    sft, first, second = result["rows"]
    stage = read_jsonl(run / "outputs/50_evaluate/answers.jsonl")
    greedy = {r["context"]: r["verdict"]["success"] for r in reversed(stage) if r["policy"] == "sft"}
    assert sft[1] == sum(greedy.values())
    assert second[1] / 200 - sft[1] / 200 == pytest.approx(second[2])
    pairs = read_jsonl(run / "exercises/rounds/pairs-50-2.jsonl")
    assert second[-1] == len(pairs) > 0 and first[-2:] == [0, 0]
    labels = {row["id"]: row for row in read_jsonl(run / "data/train/labels.jsonl")}
    asked = {row["prompt"]: row["id"] for row in read_jsonl(run / "data/train/prompts.jsonl")[:24]}
    rubric = load_rubric(run / "data/rubric.py")
    kept = [read_json(run / f"exercises/answers/{name}.json")["answers"]
            for name in ("10_sft-sampled-749", "round-50-1-sampled-749")]
    sampled = {(a["id"], a["text"]): a for answers in kept for a in answers}
    assert [len(answers) for answers in kept] == [48, 24] and second[-2] <= len(sampled)
    for pair in pairs:
        name = asked[pair["prompt"]]  # a KeyError: not one of the labelled prompts
        chosen = rubric(pair["prompt"], pair["chosen"], "eos", labels[name])
        wrong = sampled[name, pair["rejected"]]
        rejected = rubric(pair["prompt"], wrong["text"], wrong["finish_reason"], labels[name])
        assert chosen["success"] and not rejected["success"]
    record = read_json(run / "outputs/20_reward/judge-50-2/continuous/record.json")
    parents = record["identity"]["parents"]
    assert parents[str(run / "exercises/rounds/pairs-50-2.jsonl")]
    assert not [name for name in parents if "heldout" in name]
    ppo = read_json(run / "outputs/30_ppo/round-50-2/continuous/record.json")["identity"]["ppo"]
    assert ppo["reward"] == "judge-50-2"
    assert ppo | PROFILES["tiny"]["exercise"]["rounds_ppo"] == ppo


def test_brakes_take_each_setting_alone_and_away(monkeypatch):
    """Its PPO runs are not made here: what they would be told, and the table of them."""
    told, right = {}, {}

    class Made:
        def ppo(self, arms, settings):
            assert settings == {"iterations": 7}
            told.update({(label, seed): flags for (label, seed), (_, *flags) in arms.items()})
            right.update({flags[0]: n for n, flags in enumerate(arms.values())})

        def greedy(self, adapter):
            name = Path(adapter).parts[-3]
            count = {"10_sft": 5, "round-50-2": 40, "round-51-2": 42}.get(name)
            count = right[name] if count is None else count
            return [{"success": n < count} for n in range(50)]

        def figures(self, name):
            return [{"iteration": 1, "kl": 0.25, "rubric": 0.5}]

    second = [rounds.Played(f"round-{s}-2", f"judge-{s}-2", 9, 3) for s in (50, 51)]
    monkeypatch.setattr(rounds, "played_rounds", lambda lab, settings: [None, second])
    own = {"normalize_scores": 64, "kl_coef": 0.05}
    result = rounds.brakes(
        Made(), {"seeds": [50, 51, 52], "rounds_ppo": own, "rounds_iterations": 7}
    )
    flags = {"normalize": ["--normalize-scores", "64"], "kl": ["--kl-coef", "0.05"]}
    for seed in (50, 51):
        usual = ["--reward", f"judge-{seed}-2", "--generation-seed", str(seed)]
        assert told["none", seed] == usual
        assert told["only normalize_scores 64", seed] == usual + flags["normalize"]
        assert told["only kl_coef 0.05", seed] == usual + flags["kl"]
        assert told["all but normalize_scores", seed] == usual + flags["kl"]
        assert told["all but kl_coef", seed] == usual + flags["normalize"]
    assert result.rows == [
        ["none", 0, 1, 0.5, 0.25], ["only normalize_scores 64", 2, 3, 2.5, 0.25],
        ["only kl_coef 0.05", 4, 5, 4.5, 0.25], ["all but normalize_scores", 6, 7, 6.5, 0.25],
        ["all but kl_coef", 8, 9, 8.5, 0.25], ["all", 40, 42, 41, 0.25],
    ]
    assert result.seen.startswith("SFT 5; none 0.50; ")


def test_length_table_follows_from_the_rollouts(lab):
    result = found(lab, "length-hack")
    for row, name in zip(result["rows"], ("length-kl-0", "length-kl-0.1")):
        rollouts = read_jsonl(lab[0] / f"outputs/30_ppo/{name}/continuous/rollouts.jsonl")
        for r in rollouts:
            assert r["score"] == pytest.approx(len(r["text"] or "") / 100)
        tokens = sum(len(r["response_ids"]) for r in rollouts) / len(rollouts)
        assert row[1] == row[2] == pytest.approx(tokens)  # one iteration is both first and last
        repeated = 0
        for r in rollouts:
            grams = [tuple(r["response_ids"][i : i + 3]) for i in range(len(r["response_ids"]) - 2)]
            repeated += 1 - len(set(grams)) / len(grams) if grams else 0
        assert row[3] == pytest.approx(repeated / len(rollouts))
    records = [
        read_json(lab[0] / f"outputs/30_ppo/length-kl-{c}/continuous/record.json")
        for c in ("0", "0.1")
    ]
    assert [r["identity"]["ppo"]["kl_coef"] for r in records] == [0, 0.1]
    assert [r["identity"]["ppo"]["reward"] for r in records] == ["length", "length"]


def test_mixed_scores_are_the_weighted_sum_of_the_two_judges(lab):
    rows = {row[0]: row for row in found(lab, "two-rewards")["rows"]}
    mix = rows[MIX]
    two = lab[0] / "exercises/two-rewards/outputs/30_ppo/mix/continuous/rollouts.jsonl"
    scores = [row["score"] for row in read_jsonl(two)]
    assert sum(scores) / len(scores) == pytest.approx(0.7 * mix[1] + 0.3 * mix[2], abs=1e-4)
    start = rows["SFT (iteration 1)"]  # one iteration only: the mix's samples are SFT's
    assert start[1:] == mix[1:]


def test_sweep_runs_differ_in_nothing_but_the_coefficient(lab):
    identities = [
        read_json(lab[0] / f"outputs/30_ppo/kl-{c}/continuous/record.json")["identity"]
        for c in COEFFICIENTS
    ]
    assert [i["ppo"].pop("kl_coef") for i in identities] == [0.001, 0.02, 0.5]
    assert identities[0] == identities[1] == identities[2]


def test_pooling_judges_differ_in_pooling_and_seed_and_say_so(lab):
    result = found(lab, "pooling")
    assert [(row[0], row[1], row[2]) for row in result["rows"]] == [
        (how, pairs, count)
        for how in ("last", "mean")
        for pairs, count in (("six pairs", 6), ("four new", 4), ("test split", 180))
    ]
    for folder in (lab[0], lab[0] / "exercises/lesson"):
        record = folder / "outputs/20_reward/pooling-mean-50/continuous/record.json"
        reward = read_json(record)["identity"]["reward"]
        assert (reward["pooling"], reward["reward_seed"]) == ("mean", 50)


def test_calibration_table_is_that_of_the_judge(lab, tiny):
    rows = {row[0]: row for row in found(lab, "calibration")["rows"]}
    accuracy = read_json(tiny / "outputs/50_evaluate/results.json")["reward_accuracy"]["all"]
    assert rows["test pairs"][5] == accuracy["accuracy"]
    assert rows["test pairs"][4] == pytest.approx(accuracy["mean_margin"], rel=1e-4)
    assert rows["lesson, six pairs"][1] == 6 and rows["lesson, four new"][1] == 4


def test_a_second_call_skips_what_is_finished_and_a_busy_folder_is_refused(lab):
    with (lab[0] / ".lock").open("r+") as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        done = exercise(lab[0], "length-hack")
        assert done.returncode == 1 and "already working in" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    done = exercise(lab[0], "length-hack")
    assert done.returncode == 0 and done.stdout.count("skipped") == 2


def test_every_stage_accepts_the_lesson_corpus(lab):
    run = lab[0] / "exercises/lesson"
    run_stage("10_sft", "--run-dir", run, "--epochs", "8", "--batch", "6")
    run_stage("30_ppo", "--run-dir", run, "--iterations", "1", "--rollouts", "6")
    for stage in ("40_generate", "50_evaluate", "60_probe"):
        done = run_stage(stage, "--run-dir", run)
        assert done.returncode == 0
    answers = read_jsonl(run / "outputs/50_evaluate/answers.jsonl")
    assert len(answers) == 40 and {row["verdict"]["padded"] for row in answers} <= {True, False}
    figures = json.loads((run / "outputs/60_probe/figures.json").read_text())
    assert figures["factorial"]["factors"] == ["correct", "padded"]


# ---- tables and pictures ------------------------------------------------------------------------


def test_table_cells():
    assert markdown(["a", "b"], [[1, 0.12345], ["x", None]], ".3f") == [
        "| a | b |", "|---|---|", "| 1 | 0.123 |", "| x | - |",
    ]


def test_how_far_a_stage_is_comes_from_the_end_of_its_log(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"preflight\n10_sft:   0%|   | 0/63 [00:00<?, ?it/s]")
    assert left_to_do(log) == "0% (? left)"
    log.write_bytes(log.read_bytes() + b"\r10_sft:  45%|##5 | 28/63 [01:10<01:27, 2.5s/it, loss 2]")
    assert left_to_do(log) == "45% (01:27 left)"
    log.write_bytes(b"")
    assert left_to_do(log) == "starts"


def test_picture_copes_with_missing_values_and_is_the_same_twice(tmp_path):
    panels = [
        {"title": "lines", "x": "iteration", "lines": {"a": ([1, 2, 3], [1.0, None, 2.0])}},
        {
            "title": "dots",
            "ticks": ["p", "q"],
            "dots": True,
            "lines": {"b": ([0, 1], [None, None])},
        },
    ]
    for name in ("one.png", "two.png"):
        picture(tmp_path / name, panels)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_ends_are_means_over_tenths_and_leave_out_what_is_unknown():
    figures = [{"x": float(i)} for i in range(40)]
    assert ends(figures, "x") == (1.5, 37.5)
    figures[0]["x"] = None
    assert ends(figures, "x")[0] == 2.0
    assert ends([{"x": None}], "x") == (None, None)

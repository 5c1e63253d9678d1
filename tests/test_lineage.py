"""A stage trusts a file only while its maker's record agrees; other identities are refused by name.

Cases B12, B28, B38, B42, B44.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import last_line, run_stage

from kernel.data.corpus import check_corpus
from kernel.data.files import read_json, read_jsonl, sha256_file, write_json, write_jsonl
from kernel.run import lineage, state
from kernel.run.records import Records
from kernel.run.trained import TrainedStage

# ---- names in manifests -------------------------------------------------------------------------


def test_a_name_inside_is_a_path(tmp_path):
    assert lineage.inside(tmp_path, "outputs/a/b.json") == tmp_path / "outputs/a/b.json"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "link/x", ".", ""])
def test_a_name_that_leads_outside_is_refused(tmp_path, name):
    run = tmp_path / "run"
    run.mkdir()
    (run / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="lies outside"):
        lineage.inside(run, name)


def test_the_maker_of_a_file():
    assert lineage.maker("data/train/pairs.jsonl") == "00_prepare"
    assert lineage.maker("checkpoints/10_sft/continuous/adapter.safetensors") == "10_sft/continuous"
    assert lineage.maker("outputs/50_evaluate/answers.jsonl") == "50_evaluate"


# ---- inputs -------------------------------------------------------------------------------------

ADAPTER = "checkpoints/10_sft/continuous/adapter.safetensors"
PAIRS = "data/train/pairs.jsonl"


@pytest.fixture
def small_run(tmp_path):
    """A run folder with one corpus file and one adapter, by their records."""
    write_jsonl(tmp_path / PAIRS, [{"prompt": str(n), "chosen": "a"} for n in range(4)])
    (tmp_path / ADAPTER).parent.mkdir(parents=True)
    (tmp_path / ADAPTER).write_bytes(b"adapter")
    write_json(
        tmp_path / "data/manifest.json",
        {"sha256": {"train/pairs.jsonl": sha256_file(tmp_path / PAIRS)}},
    )
    record = {"outputs": {ADAPTER: sha256_file(tmp_path / ADAPTER)}}
    write_json(tmp_path / "outputs/10_sft/continuous/record.json", record)
    return tmp_path


def test_sound_inputs_give_their_sha256(small_run):
    found = lineage.checked_inputs(small_run, [PAIRS, ADAPTER])
    assert found == {name: sha256_file(small_run / name) for name in (PAIRS, ADAPTER)}


def appended(rows):
    rows.append(dict(rows[0]))


def swapped(rows):
    rows[0], rows[1] = rows[1], rows[0]


def edited(rows):
    rows[2]["chosen"] = "b"


def shortened(rows):
    rows.pop()


@pytest.mark.parametrize("change", [appended, swapped, edited, shortened])
def test_changed_data_is_refused_with_both_hashes(small_run, change):
    old = sha256_file(small_run / PAIRS)
    rows = read_jsonl(small_run / PAIRS)
    change(rows)
    write_jsonl(small_run / PAIRS, rows)
    with pytest.raises(ValueError) as caught:
        lineage.checked_inputs(small_run, [PAIRS])
    message = str(caught.value)
    assert PAIRS in message and old[:16] in message
    assert sha256_file(small_run / PAIRS)[:16] in message and "--run-dir" in message


def test_manifests_that_name_files_elsewhere_are_refused(small_run):  # case B44
    (small_run.parent / "x").write_text("secret")
    manifest = {"sha256": {"../../x": sha256_file(small_run.parent / "x")}}
    write_json(small_run / "data/manifest.json", manifest)
    with pytest.raises(ValueError, match="lies outside"):
        check_corpus(small_run / "data")
    with pytest.raises(ValueError, match="lies outside"):
        lineage.checked_inputs(small_run, ["../x"])
    stage = work(small_run, 1)
    write_json(stage.outputs / "record.json", {})
    for folder in (stage.outputs, stage.checkpoints):
        shutil.copytree(folder, folder.parent / "resume")
    assert lineage.compare_variants(small_run, "30_ppo", ("metrics.jsonl",))["equal"]
    with pytest.raises(ValueError, match="lies outside"):
        lineage.compare_variants(small_run, "30_ppo", ("../../../../x",))


def test_a_damaged_adapter_is_refused_before_anything_is_trained_on_it(small_run):
    (small_run / ADAPTER).write_bytes(b"adaqter")
    with pytest.raises(ValueError, match="10_sft.py wrote it -> .* run 10_sft.py --redo"):
        lineage.checked_inputs(small_run, [ADAPTER])


def test_an_adapter_of_an_unfinished_stage_is_refused(small_run):
    (small_run / "outputs/10_sft/continuous/record.json").unlink()
    with pytest.raises(ValueError, match="not finished: run 10_sft.py first"):
        lineage.checked_inputs(small_run, [ADAPTER])


@pytest.mark.parametrize("stage,file", [
    ("30_ppo", "checkpoints/20_reward/continuous/adapter.safetensors"),
    ("60_probe", "outputs/50_evaluate/answers.jsonl"),
])
def test_the_programs_check_their_inputs(copy_of_tiny, stage, file):
    path = copy_of_tiny / file
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)
    shutil.rmtree(copy_of_tiny / "outputs" / stage)
    done = run_stage(stage, "--run-dir", copy_of_tiny, check=False)
    assert (
        done.returncode == 1 and file in last_line(done) and "damaged or edited" in last_line(done)
    )


# ---- resuming under another identity (case B28) -------------------------------------------------

IDENTITY = {
    "profile": "tiny",
    "common": {"threads": 1, "base_dtype": "float32", "lora_r": 8},
    "ppo": {"kl_coef": 0.02, "iterations": 40},
    "model": {"base_sha256": "b" * 8, "tokenizer_sha256": "t" * 8},
    "parents": {PAIRS: "p" * 8},
    "code": {"30_ppo.py": "c" * 8, "kernel/score.py": "s" * 8},
    "versions": {"torch": "2.13.0", "numpy": "2.4.6", "cpu": "AVX512"},
}


def stage_at(folder, identity, variant="continuous", redo=False):
    """A stage as `restore` and `save` see it, without a program around it."""
    args = SimpleNamespace(variant=variant, name=None, redo=redo)
    return TrainedStage("30_ppo", args, SimpleNamespace(dir=folder), {}, {}, identity)


def work(folder, updates, variant="continuous"):
    """Save a state after each update, with a row of metrics beside it."""
    stage = stage_at(folder, IDENTITY, variant)
    saved, done = stage.restore()
    metrics = stage.records("metrics.jsonl")
    for update in range(done + 1, updates + 1):
        metrics.write({"iteration": update, "name": "é"})
        stage.save(update, {"weights": torch.full((3,), float(update))})
    return stage


CHANGES = [
    ("ppo.kl_coef", 0.02, 0.2),
    ("ppo.iterations", 40, 50),
    ("common.threads", 1, 2),
    ("common.base_dtype", "float32", "bfloat16"),
    ("common.lora_r", 8, 4),
    ("model.base_sha256", "b" * 8, "x" * 8),
    ("model.tokenizer_sha256", "t" * 8, "x" * 8),
    (f"parents.{PAIRS}", "p" * 8, "x" * 8),
    ("code.kernel/score.py", "s" * 8, "x" * 8),
    ("versions.torch", "2.13.0", "2.14.0"),
    ("versions.cpu", "AVX512", "AVX2"),
]


@pytest.mark.parametrize("key,old,new", CHANGES, ids=[key for key, *_ in CHANGES])
def test_resume_under_another_identity_names_key_old_and_new(tmp_path, key, old, new):
    work(tmp_path, 2)
    section, _, name = key.partition(".")
    other = json.loads(json.dumps(IDENTITY))
    other[section][name] = new
    before = sorted(p.name for p in (tmp_path / "checkpoints").rglob("*"))
    with pytest.raises(ValueError) as caught:
        stage_at(tmp_path, other).restore()
    assert f"{key}: {old} -> {new}" in str(caught.value)
    assert sorted(p.name for p in (tmp_path / "checkpoints").rglob("*")) == before
    assert stage_at(tmp_path, other, redo=True).restore() == (None, 0)  # and --redo starts anew


def test_harmless_flags_do_not_hinder_a_resume(copy_of_tiny, tiny):
    """Log and save intervals change no number."""
    for kind in ("outputs", "checkpoints"):
        shutil.rmtree(copy_of_tiny / kind / "30_ppo/resume")
    flags = ("--variant", "resume", "--log-every", "3", "--save-every", "7")
    done = run_stage("30_ppo", "--run-dir", copy_of_tiny, *flags)
    assert "going on after update 16" in done.stdout
    for name in ("checkpoints/30_ppo/resume/adapter.safetensors",
                 "outputs/30_ppo/resume/rollouts.jsonl"):
        assert sha256_file(copy_of_tiny / name) == sha256_file(tiny / name)


# ---- record files are cut back to the state ------------------------------------------------------


def lines(stage, name="metrics.jsonl"):
    return [row["iteration"] for row in read_jsonl(stage.outputs / name)]


@pytest.mark.parametrize(
    "extra", [b"", b'{"iteration": 4, "name": "x"}\n', b'{"itera', b"\xc3", b"\0\0"]
)
def test_what_a_crash_left_behind_the_state_is_cut_off(tmp_path, extra):
    stage = work(tmp_path, 3)
    whole = (stage.outputs / "metrics.jsonl").read_bytes()
    with (stage.outputs / "metrics.jsonl").open("ab") as file:
        file.write(extra)
    work(tmp_path, 3)
    assert (stage.outputs / "metrics.jsonl").read_bytes() == whole
    assert lines(work(tmp_path, 5)) == [1, 2, 3, 4, 5]


def test_a_record_file_that_lost_its_end_sends_us_to_the_state_before(tmp_path, capsys):
    """A power cut can take what was written last, although the state behind it is there."""
    stage = work(tmp_path, 3)
    path = stage.outputs / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    _, done = stage_at(tmp_path, IDENTITY).restore()
    assert done == 2
    said = capsys.readouterr().out
    assert "passed over state_000003.pt.gz: metrics.jsonl does not begin with" in said
    assert lines(work(tmp_path, 4)) == [1, 2, 3, 4]


def test_an_edited_record_file_is_not_continued(tmp_path):
    stage = work(tmp_path, 3)
    path = stage.outputs / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"iteration": 1', b'"iteration": 7'))
    assert stage_at(tmp_path, IDENTITY).restore() == (None, 0)


def test_damaged_states_of_resume_are_told_before_interrupt_is_used(tmp_path, capsys):  # case B12
    work(tmp_path, 1, "interrupt")
    stage = work(tmp_path, 2, "resume")
    for path in stage.checkpoints.glob("state_*.gz"):
        path.write_bytes(b"")
    _, done = stage_at(tmp_path, IDENTITY, "resume").restore()
    said = capsys.readouterr().out
    assert (
        done == 1 and "passed over state_000002.pt.gz" in said and "interrupt/state_000001" in said
    )


def test_resume_takes_over_the_records_of_interrupt(tmp_path):
    work(tmp_path, 2, "interrupt")
    resumed = work(tmp_path, 4, "resume")
    assert lines(resumed) == [1, 2, 3, 4]
    assert lines(stage_at(tmp_path, IDENTITY, "interrupt")) == [1, 2]


def test_a_mark_is_the_length_and_hash_of_the_file(tmp_path):
    records = Records(tmp_path / "rows.jsonl", b"")
    for n in range(3):
        records.write({"n": n, "text": "ö\n"})
        content = (tmp_path / "rows.jsonl").read_bytes()
        mark = records.mark()
        assert mark["bytes"] == len(content) and mark["sha256"] == sha256_file(records.path)
        assert state.marked_part(records.path, mark) == content


# ---- leftovers ----------------------------------------------------------------------------------


def test_a_killed_00_prepare_goes_on_and_foreign_files_stop_it(tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny / "data", run / "data")
    (run / "data/manifest.json").unlink()  # killed before the manifest, and before some files
    (run / "data/heldout/pairs.jsonl").unlink()
    run_stage("00_prepare", "--profile", "tiny", "--run-dir", run)
    assert read_json(run / "data/manifest.json") == read_json(tiny / "data/manifest.json")
    (run / "data/manifest.json").unlink()
    own = run / "data/train/pairs.jsonl"
    own.write_text('{"prompt": "mine"}\n')
    done = run_stage("00_prepare", "--profile", "tiny", "--run-dir", run, check=False)
    assert done.returncode == 1 and "train/pairs.jsonl is not from this corpus" in last_line(done)
    assert own.read_text() == '{"prompt": "mine"}\n'


def test_the_old_proof_goes_with_the_variant_that_it_was_about(copy_of_tiny):
    (copy_of_tiny / "outputs/10_sft/continuous/record.json").unlink()
    flags = ("--run-dir", copy_of_tiny, "--epochs", "0.1", "--redo")
    run_stage("10_sft", *flags)
    assert not (copy_of_tiny / "outputs/10_sft/check/proof.json").exists()

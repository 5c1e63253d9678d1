"""SIGKILL at fixed moments: the run goes on and ends in the same bits (`tests/crash.py` draws 100).

Also what else ends a process badly: a full disk, a read-only folder, a lock whose owner died, memory
that grows. Cases B12, B37, B48.
"""

import fcntl
import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, last_line, run_stage, wait_until, without
from crash import differences, newest, start

from kernel.data.files import read_jsonl, sha256_file
from kernel.run.state import newest_state, updates_of


@pytest.fixture(scope="module")
def prepared(tiny, tmp_path_factory) -> Path:
    """Finished adapters of SFT and reward model, and nothing of PPO."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    shutil.copytree(tiny, run)
    return without(run, "30_ppo")


def test_ppo_killed_at_seven_moments_ends_in_the_same_bits(prepared, tmp_path):
    flags = ["--iterations", "4", "--rollouts", "2", "--save-every", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shutil.copytree(prepared, whole)
    shutil.copytree(prepared, killed)
    assert start(whole, "30_ppo", flags) == 0
    plan = [
        ("rollout", 1, 5, 1),  # in the rollout of iteration 2: iteration 1 is saved
        ("step", 0, 1, 1),  # between the two updates of iteration 2
        ("line", 0, 0, 1),  # half a line of metrics
        ("save", 1, 0, 1),  # half a state file of iteration 2
        ("rename", 1, 0, 1),  # its state has its name, but no manifest
        ("manifest", 1, 0, 2),  # complete, the older ones are not yet removed
        ("end", 2, 0, 4),  # adapter written, no record
    ]
    for moment, rows, calls, saved in plan:
        assert start(killed, "30_ppo", flags, moment, rows, calls) == -signal.SIGKILL, moment
        assert newest(killed, "30_ppo") == saved, moment
    done = run_stage("30_ppo", "--run-dir", killed, *flags)
    assert "going on after update 4 from checkpoints/30_ppo/continuous/state_000004" in done.stdout
    assert differences(killed, whole, "30_ppo") == []
    states = sorted(p.name for p in (killed / "checkpoints/30_ppo/continuous").glob("state_*"))
    assert states == [f"state_00000{n}.{end}" for n in (3, 4) for end in ("json", "pt.gz")]


def test_a_full_disk_is_one_line_and_the_previous_state_goes_on(copy_of_tiny, tiny):
    """A file-size limit stands in for the full disk: the write fails with an error, half done."""
    run = without(copy_of_tiny, "10_sft", "continuous")
    flags = ["--run-dir", str(run), "--save-every", "2"]
    assert start(run, "10_sft", flags[2:], "step", 5, 0) == -signal.SIGKILL
    state = run / "checkpoints/10_sft/continuous/state_000004.pt.gz"
    before = sha256_file(state)
    limit = state.stat().st_size // 2
    command = [sys.executable, str(ROOT / "10_sft.py"), *flags]
    done = subprocess.run(
        command, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert "state_000006.pt.gz: could not be written (File too large)" in last_line(done)
    assert "Traceback" not in done.stderr
    assert sha256_file(state) == before and newest(run, "10_sft") == 4
    names = {path.name for path in state.parent.iterdir()}
    assert not any("000006" in name or name.endswith(".tmp") for name in names)
    run_stage("10_sft", *flags)
    assert differences(run, tiny, "10_sft") == []


def test_a_record_line_that_does_not_fit_is_one_line_too(copy_of_tiny):
    run = without(copy_of_tiny, "10_sft", "continuous")
    done = subprocess.run(
        [sys.executable, str(ROOT / "10_sft.py"), "--run-dir", str(run)],
        capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600)),
    )
    assert done.returncode == 1
    assert "metrics.jsonl: could not be written (File too large)" in last_line(done)


def bound_by_permissions() -> list[str]:
    """What to put before a command so that file permissions count for it, even as root."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("root may write anywhere, and there is no setpriv to give that up")
    return [setpriv, "--bounding-set", "-dac_override,-dac_read_search"]


def test_a_read_only_run_folder_is_told_in_one_line(copy_of_tiny):
    """Case B48."""
    run = copy_of_tiny
    shutil.rmtree(run / "outputs/60_probe")
    before = sorted(str(path) for path in run.rglob("*"))
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        for stage in ("00_prepare", "60_probe"):
            command = [
                *bound_by_permissions(),
                sys.executable,
                str(ROOT / f"{stage}.py"),
                "--run-dir",
                str(run),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 1 and "cannot write to" in last_line(done)
            assert "Traceback" not in done.stderr
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert sorted(str(path) for path in run.rglob("*")) == before


# ---- the lock of a run folder (case B37) --------------------------------------------------------


HOLD = """
import os, sys, time; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kernel.run.lock import lock_folder
print(lock_folder(Path(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def hold(folder: Path, **kwargs) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(ROOT), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs,
    )
    process.first = process.stdout.readline().strip()
    return process


def test_the_second_start_is_refused_and_names_the_first(tmp_path):
    first = hold(tmp_path)
    second = hold(tmp_path)
    assert second.wait() != 0
    assert f"process {first.pid} is already working in {tmp_path}" in second.stderr.read()
    first.communicate("")
    third = hold(tmp_path)  # a clean end leaves nothing to remark on
    assert third.first == "None"
    third.kill()
    third.communicate()
    fourth = hold(tmp_path)
    assert fourth.first == (
        f"took over {tmp_path} from process {third.pid}, which is gone without a clean end"
    )
    fourth.communicate("")


def test_a_stage_works_under_the_lock_that_run_all_holds_and_no_other(tmp_path):
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    env = {**os.environ, "RUN_LOCK_FD": str(descriptor)}
    take = [sys.executable, "-m", "kernel.run.lock", str(descriptor), str(tmp_path)]
    done = subprocess.run(take, cwd=ROOT, pass_fds=[descriptor], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".lock").read_text() == str(os.getpid())
    below = hold(tmp_path, env=env, pass_fds=[descriptor])
    assert below.first == "None"
    elsewhere = hold(tmp_path, env=env)  # the number alone, without the open file, is worth nothing
    assert elsewhere.wait() != 0
    (tmp_path / "other").mkdir()
    other = hold(tmp_path / "other", env=env, pass_fds=[descriptor])
    assert (tmp_path / "other/.lock").read_text() == str(other.pid)  # another folder: its own lock
    other.communicate("")
    below.communicate("")
    os.close(descriptor)


def test_run_all_refuses_a_folder_in_use_and_fresh_takes_the_next_one(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    owner = hold(run)
    command = ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"process {owner.pid} is already working in {run}" in last_line(done)
    assert sorted(path.name for path in run.iterdir()) == [".lock"]
    flags = ["--fresh", "--model-dir", "/nowhere"]  # so that stage 00 ends at once
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert done.returncode == 1 and "00_prepare failed" in done.stderr
    assert f"run folder: {run}-2" in done.stdout and (tmp_path / "run-2").is_dir()
    assert (tmp_path / "run-2/.lock").read_text() == ""
    owner.communicate("")


# ---- run_all.sh at a terminal -------------------------------------------------------------------


def both_lanes_work(run: Path) -> bool:
    paths = [run / "outputs/20_reward" / v / "metrics.jsonl" for v in ("continuous", "interrupt")]
    return all(path.is_file() and path.read_text().count("\n") >= 3 for path in paths)


def lock_is_free(run: Path) -> bool:
    with (run / ".lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_ctrl_c_at_a_terminal_stops_both_lanes_and_each_saves(copy_of_tiny, tiny):
    """Cases B37, B45. A real terminal, because only there Ctrl-C goes to a whole process group."""
    run = without(copy_of_tiny, "20_reward")
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background inherit it ignored
        os.execvp("bash", ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(run)])
    said = []

    def listen():
        try:
            while part := os.read(terminal, 4096):
                said.append(part.decode(errors="replace"))
        except OSError:
            pass  # the terminal is closed

    listener = threading.Thread(target=listen)
    listener.start()
    wait_until(lambda: both_lanes_work(run))
    os.write(terminal, b"\x03")
    _, status = os.waitpid(child, 0)
    listener.join()
    assert os.waitstatus_to_exitcode(status) == 130
    assert f"stopped in 20_reward; to go on: bash run_all.sh tiny --run-dir '{run}'" in "".join(said)
    assert lock_is_free(run)  # nobody was left behind
    for variant in ("continuous", "interrupt"):
        assert list((run / "checkpoints/20_reward" / variant).glob("state_*.json"))
    done = run_stage("20_reward", "--run-dir", run)
    assert "going on after update" in done.stdout
    assert differences(run, tiny, "20_reward") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_to_run_all_alone_stops_both_lanes_and_each_saves(copy_of_tiny, number):
    """Case B45. As a shutdown or a closed terminal sends it: each lane gets one SIGINT, passed on."""
    run = without(copy_of_tiny, "20_reward")
    command = ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(run)]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: both_lanes_work(run))
    script.send_signal(number)
    _, said = script.communicate()
    assert script.returncode == 130
    assert f"stopped in 20_reward; to go on: bash run_all.sh tiny --run-dir '{run}'" in said
    assert lock_is_free(run)
    for text in (said, (run / "outputs/20_reward/interrupt_resume.log").read_text()):
        assert text.count("finishing this update, then saving") == 1
    for variant in ("continuous", "interrupt"):
        metrics = run / "outputs/20_reward" / variant / "metrics.jsonl"
        state, notes = newest_state(run / "checkpoints/20_reward" / variant, metrics.parent)
        assert updates_of(state) == metrics.read_text().count("\n") and notes == []


def test_lanes_that_outlive_a_killed_run_all_are_named(copy_of_tiny):
    """Case B37: after `kill -9` of the script its stages work on, and their folder stays theirs."""
    run = without(copy_of_tiny, "20_reward")
    command = ["bash", str(ROOT / "run_all.sh"), "tiny", "--run-dir", str(run)]
    script = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: both_lanes_work(run))
    script.kill()
    script.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"stages that process {script.pid} started, which is gone, still work" in done.stderr
    stages = subprocess.run(["pgrep", "-f", f"20_reward.py.*{run}"], capture_output=True, text=True)
    for process in stages.stdout.split():
        os.kill(int(process), signal.SIGKILL)
    wait_until(lambda: lock_is_free(run))
    owner = hold(run)
    assert owner.first.startswith(f"took over {run} from process {script.pid}")
    owner.communicate("")


def test_a_relative_run_folder_is_the_callers(tmp_path):
    (tmp_path / "mine").mkdir()
    command = ["bash", str(ROOT / "run_all.sh"), "verify", "mine/"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and f"{tmp_path}/mine is no run folder" in done.stderr


# ---- memory -------------------------------------------------------------------------------------


def test_peak_memory_is_stored_with_every_iteration_and_in_the_record(tiny):
    rows = read_jsonl(tiny / "outputs/30_ppo/continuous/timings.jsonl")
    peaks = [row["peak_memory_mib"] for row in rows]
    record = json.loads((tiny / "outputs/30_ppo/continuous/record.json").read_text())
    assert 100 < peaks[0] <= peaks[-1] <= record["peak_memory_mib"] < 4096
    assert peaks == sorted(peaks)


@pytest.mark.skipif(not os.getenv("RUN_LONG"), reason="500 iterations: RUN_LONG=1")
def test_500_tiny_iterations_do_not_grow(prepared, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    run_stage("30_ppo", "--run-dir", run, "--iterations", 500, "--rollouts", 2, "--save-every", 100)
    peaks = [
        r["peak_memory_mib"] for r in read_jsonl(run / "outputs/30_ppo/continuous/timings.jsonl")
    ]
    assert peaks[-1] - peaks[100] <= 16, (peaks[0], peaks[100], peaks[-1])

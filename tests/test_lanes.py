"""Proves the runner of two programs side by side: order, the first failure, and that a stop reaches
every command once, also one that is just being started, and nobody is left behind."""

import os
import signal
import subprocess
import time

import pytest
from conftest import wait_until

from kernel.run.lanes import Failed, Lane, run_lanes

# Writes a line for each SIGINT, ends with the first, or by itself after minutes.
PATIENT = (
    "import signal, sys, time\n"
    "def stop(*_): open(sys.argv[1], 'a').write('told\\n'); sys.exit(130)\n"
    "signal.signal(signal.SIGINT, stop); open(sys.argv[1], 'a').write('begun\\n'); time.sleep(200)\n"
)


@pytest.fixture
def lock(tmp_path):
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def says(path, word: str) -> list:
    return ["-c", f"open({str(path)!r}, 'a').write({word!r})"]


def told(path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_commands_of_a_lane_follow_each_other_and_two_lanes_run_at_a_time(tmp_path, lock):
    order, most, ends = tmp_path / "order", [], []
    lanes = [Lane("a", [says(order, "1"), says(order, "2"), says(order, "3")], tmp_path / "a.log")]
    lanes += [Lane(name, [["-c", "print('here')"]], tmp_path / f"{name}.log") for name in "bcd"]
    run_lanes(lanes, lock, (), lambda lane: ends.append(lane.name), lambda now: most.append(len(now)))
    assert order.read_text() == "123" and sorted(ends) == [*"abcd"] and max(most) <= 2
    assert lanes[1].last_lines(1) == "here"


def test_the_first_failure_is_named_and_the_other_lane_told_to_stop_once(tmp_path, lock):
    log, seen = tmp_path / "bad.log", tmp_path / "seen"
    wait = f"import time, pathlib\nwhile not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.05)\n"
    bad = Lane("bad", [["-c", wait + "print('why'); raise SystemExit(3)"]], log)
    other = Lane("other", [["-c", PATIENT, seen]], tmp_path / "other.log")
    never = Lane("never", [says(tmp_path / "never", "x")], tmp_path / "never.log")
    with pytest.raises(Failed, match="bad failed .*: why") as caught:
        run_lanes([bad, other, never], lock, ())
    assert caught.value.status == 3 and told(seen) == ["begun", "told"]
    assert not (tmp_path / "never").exists()


def test_a_lane_killed_by_a_signal_has_the_shells_status(lock):
    with pytest.raises(Failed) as caught:
        run_lanes([Lane("dead", [["-c", "import os; os.kill(os.getpid(), 9)"]])], lock, ())
    assert caught.value.status == 128 + 9


@pytest.mark.parametrize("second", [False, True], ids=["first command", "next command"])
def test_a_stop_that_arrives_while_a_command_is_started_reaches_it(tmp_path, lock, monkeypatch, second):
    """The signal comes inside Popen, behind the fork, once the command runs."""
    seen, real = tmp_path / "seen", subprocess.Popen

    def start(arguments, **more):
        process = real(arguments, **more)
        if PATIENT in arguments:
            wait_until(lambda: told(seen))
            os.kill(os.getpid(), signal.SIGUSR1)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    commands = [["-c", PATIENT, seen]]
    if second:
        commands.insert(0, ["-c", "pass"])
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_lanes([Lane("patient", commands, tmp_path / "log")], lock, (signal.SIGUSR1,))
    assert told(seen) == ["begun", "told"] and time.perf_counter() - began < 150
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL  # as before


def test_an_error_in_the_loop_leaves_nobody_behind(tmp_path, lock):
    seen = tmp_path / "seen"
    patient = Lane("patient", [["-c", PATIENT, seen]], tmp_path / "log")

    def waiting(_):
        if told(seen):
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        run_lanes([patient], lock, (), waiting=waiting)
    assert patient.process.poll() == 130 and told(seen) == ["begun", "told"]
    lost = Lane("lost", [["-c", "pass"]], tmp_path / "no such folder" / "log")
    seen.unlink()
    with pytest.raises(FileNotFoundError):
        run_lanes([Lane("patient", [["-c", PATIENT, seen]], tmp_path / "log"), lost], lock, ())
    assert told(seen) in ([], ["begun", "told"])  # [] if it was told before it had begun

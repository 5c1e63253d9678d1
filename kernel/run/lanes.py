"""Programs side by side, two at a time. Standard library only, so that starting it costs nothing.

A lane is a list of commands, one after the other, with a log or on the terminal. When one fails, or when
this process is told to stop, every lane gets one SIGINT, so that its stage saves and ends.

    python -m kernel.run.lanes LOG 30_ppo [flags]      # run_all.sh: the variants of a trained stage
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kernel.data.files import REPOSITORY


@dataclass
class Lane:
    name: str
    commands: list[list]  # what follows the interpreter: script and flags
    log: Path | None = None  # None: the terminal
    process: subprocess.Popen | None = None
    began: float = 0.0
    told: int = 0  # how often the present command got SIGINT

    def start_next(self, lock: int) -> None:
        """The next command, in a session of its own: the terminal's Ctrl-C does not reach it.

        lock: an open descriptor of the run folder's lock, under which the stage works.
        """
        output = self.log.open("ab") if self.log else None
        self.process = subprocess.Popen(
            [sys.executable, *map(str, self.commands.pop(0))], stdin=subprocess.DEVNULL,
            stdout=output, stderr=output and subprocess.STDOUT, pass_fds=[lock],
            env={**os.environ, "RUN_LOCK_FD": str(lock)}, start_new_session=True,
        )
        if output:
            output.close()
        self.began, self.told = self.began or time.perf_counter(), 0

    def tell(self, times: int) -> None:
        """One SIGINT for every request to stop that the present command has not had yet."""
        while self.told < times and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.told += 1

    def last_lines(self, count: int) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log else []
        return "\n".join(lines[-count:])


class Failed(Exception):
    """A lane that ended with another status than 0: the first one."""

    def __init__(self, lane: Lane, status: int):
        super().__init__(f"{lane.name} failed ({lane.log or status}): {lane.last_lines(1)}")
        self.lane, self.status = lane, status if status > 0 else 128 - status  # -9: killed by signal 9


def run_lanes(lanes: list[Lane], lock: int, stop_signals: tuple, ended=None, waiting=None) -> None:
    """Run all of them. ended(lane) is called after each, waiting(running lanes) in between.

    Raises Failed, or KeyboardInterrupt after one of stop_signals, when all lanes have ended.
    """
    todo, running, failed, requests = list(lanes), [], None, 0

    def request(*_) -> None:  # only counted: a signal may arrive while a command is being started
        nonlocal requests
        requests += 1

    before = {number: signal.signal(number, request) for number in stop_signals}
    try:
        while running or (todo and not requests):
            while todo and len(running) < 2 and not requests:
                todo[0].start_next(lock)
                running.append(todo.pop(0))
            time.sleep(0.2)
            for lane in list(running):
                lane.tell(requests)
                if (status := lane.process.poll()) is None:
                    continue
                if status == 0 and lane.commands and not requests:
                    lane.start_next(lock)
                    continue
                running.remove(lane)
                if status == 0 and ended:
                    ended(lane)
                if status != 0 and not requests:  # how the others end then is of no interest
                    failed, requests = Failed(lane, status), 1
            if waiting:
                waiting(running)
    except BaseException:  # nobody is left behind
        for lane in running:
            lane.tell(lane.told + 1)
        for lane in running:
            lane.process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed:
        raise failed
    if requests:
        raise KeyboardInterrupt


def main() -> None:
    """continuous on the terminal, interrupt and resume beside it in the log."""
    log, stage, *flags = sys.argv[1:]
    script = REPOSITORY / f"{stage}.py"

    def variants(*names: str) -> list[list]:
        return [[script, *flags, "--variant", name] for name in names]

    beside = Lane(f"{stage} (interrupt/resume)", variants("interrupt", "resume"), Path(log))
    # The terminal's own Ctrl-C goes to run_all.sh as well, which passes it on as one SIGTERM.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        run_lanes(
            [Lane(stage, variants("continuous")), beside], int(os.environ["RUN_LOCK_FD"]),
            (signal.SIGTERM,),
        )
    except Failed as failed:
        if failed.lane is beside:
            print(f"{beside.last_lines(3)}\n{beside.name} failed", file=sys.stderr)
        sys.exit(failed.status)
    except KeyboardInterrupt:
        sys.exit(130)
    print(beside.last_lines(1))


if __name__ == "__main__":
    main()

"""One owner per run folder. Standard library only, so that taking it imports nothing heavy.

The lock is the system's own (flock) on <run folder>/.lock; it goes with the last process that holds it,
however that process ends. The file's text only says who it is: empty after a clean end.

    exec 9<>"$run_dir/.lock"; python -m kernel.run.lock 9 "$run_dir"    # run_all.sh, for its stages

A stage started by run_all.sh inherits the descriptor (RUN_LOCK_FD), and with it the lock.
"""

import atexit
import fcntl
import os
import sys
from pathlib import Path


def take(descriptor: int, folder: Path, owner: int) -> str | None:
    """Lock an open <folder>/.lock and write the owner's process number into it.

    Returns a note if the owner before did not end cleanly. Raises ValueError if the lock is held.
    """
    text = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = f"process {text or 'unknown'} is already working in {folder}"
        if text.isdecimal() and not alive(int(text)):
            who = f"stages that process {text} started, which is gone, still work in {folder}"
        raise ValueError(f"{who}; wait for it, or use another --run-dir") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(owner).encode(), 0)
    if text and text != str(owner):
        return f"took over {folder} from process {text}, which is gone without a clean end"
    return None


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but there
    return True


def lock_folder(folder: Path) -> str | None:
    """Hold the lock of a run folder until this process ends; with run_all.sh above, hold its lock."""
    path = folder / ".lock"
    inherited = os.environ.get("RUN_LOCK_FD", "")
    if inherited.isdecimal() and path.exists():
        try:
            if os.path.samestat(os.fstat(int(inherited)), os.stat(path)):
                return None
        except OSError:
            pass  # the descriptor is not open here: a lock of our own, then
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    note = take(descriptor, folder, os.getpid())
    atexit.register(os.ftruncate, descriptor, 0)
    return note


if __name__ == "__main__":
    try:
        said = take(int(sys.argv[1]), Path(sys.argv[2]), os.getppid())
    except ValueError as error:
        sys.exit(f"run_all.sh: error: {error}")
    if said:
        print(f"run_all.sh: {said}")

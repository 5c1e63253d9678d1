"""A stage opens only what it declared: enforced by the process through an audit hook, not by habit.

The hook sees every open, rename, link and removal that goes through Python, with symlinks resolved.
Inside the run folder only the declared files and folders are within reach, other run folders beside it
not at all, and no new process can be started to look instead. (Native readers such as safetensors
bypass Python's open; held-out files and labels are JSON, read through Python.)
"""

import os
import sys
from pathlib import Path

PATH_EVENTS = {"open": 1, "os.rename": 2, "os.remove": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1}
PROCESS_EVENTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"}


def enclose(run_dir: Path, reads: list[str], writes: list[str]) -> None:
    """From now on refuse, with PermissionError, whatever was not declared.

    reads: files of the run folder, relative; writes: folders of the run folder, relative (readable too).
    There is no way back within the process.
    """
    root = os.path.realpath(run_dir)
    # Runs usually lie side by side in runs/: a neighbour's held-out files are out of reach as well.
    closed = os.path.dirname(root) if os.path.basename(os.path.dirname(root)) == "runs" else root
    readable = {os.path.join(root, name) for name in reads}
    writable = tuple(os.path.join(root, name) for name in writes)

    def allowed(path: str, writing: bool) -> bool:
        if path != closed and not path.startswith(closed + os.sep):
            return True
        if path.startswith(tuple(w + os.sep for w in writable)) or path in writable:
            return True
        return not writing and (path in readable or os.path.isdir(path))

    def hook(event: str, args: tuple) -> None:
        if event in PROCESS_EVENTS:
            raise PermissionError(f"this stage may not start another process ({event})")
        if event not in PATH_EVENTS:
            return
        writing = event != "open"
        if event == "open":
            mode, flags = args[1], args[2]
            if isinstance(mode, str):
                writing = any(letter in mode for letter in "wax+")
            elif isinstance(flags, int):
                writing = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        for path in args[: PATH_EVENTS[event]]:
            if isinstance(path, (str, bytes, os.PathLike)):
                full = os.path.realpath(os.fsdecode(path))
                if not allowed(full, writing):
                    verb = "write" if writing else "read"
                    raise PermissionError(f"this stage did not declare that it may {verb} {full}")

    sys.addaudithook(hook)

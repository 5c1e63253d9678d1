"""A stage opens only what it declared: enforced by the process through an audit hook, not by habit.

The hook sees every open, rename, link and removal that goes through Python. Inside the run folder
only the declared files and folders are within reach, other run folders beside it not at all, and no
new process can be started to look instead. A path must be declared both as it is spelled and with
its symlinks resolved; files that were there at the start are also known by inode, so that a hard
link, a renamed parent or another root does not lead around.

What it does not stop: native code that reads a file by itself (safetensors, tokenizers,
torch.from_file, ctypes; held-out files and labels are JSON, read through Python), names and sizes
(listdir, stat), and code that sets out to take the hook apart from within. It catches mistakes and
shortcuts; it is no sandbox.
"""

import os
import sys
from pathlib import Path

# How many leading arguments are paths; for all but truncate the rest are dir_fd, -1 if not given.
PATH_EVENTS = {
    "open": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
}
PROCESS_EVENTS = {
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "_winapi.CreateProcess",
    "cpython.PyInterpreterState_New",  # a second interpreter in this process would have no hook
}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def enclose(run_dir: Path, reads: list[str], writes: list[str]) -> None:
    """From now on refuse, with PermissionError, whatever was not declared.

    reads: files of the run folder, relative; writes: folders of the run folder, relative (readable
    too). There is no way back within the process.
    """
    root = os.path.realpath(run_dir)
    # Runs usually lie side by side in runs/: a neighbour's held-out files are out of reach as well.
    above = root.split(os.sep)[:-1]  # an exercise's own run folder lies deeper below the same runs/
    closed = os.sep.join(above[: above.index("runs") + 1]) if "runs" in above else root
    readable = {os.path.join(root, name) for name in reads}
    writable = tuple(os.path.join(root, name) for name in writes)

    def within(path: str, folder: str) -> bool:
        return path == folder or path.startswith(folder + os.sep)

    def allowed(path: str, writing: bool) -> bool:
        if not within(path, closed):
            return True
        return any(within(path, w) for w in writable) or (not writing and path in readable)

    hidden = set()  # which file it is, by whatever name
    for folder, _, names in os.walk(closed):
        for path in (os.path.join(folder, name) for name in names):
            # Runs may be hard-linked copies: a neighbour's file counts as ours of the same name.
            own = path
            if not within(path, root):
                own = os.path.join(root, os.path.relpath(path, closed).partition(os.sep)[2])
            if path in readable:
                continue
            if not allowed(own, writing=False) and (found := which_file(path)):
                hidden.add(found)

    def hook(event: str, args: tuple) -> None:
        if event in PROCESS_EVENTS:
            raise PermissionError(f"this stage may not start another process ({event})")
        if event not in PATH_EVENTS:
            return
        paths, rest = args[: PATH_EVENTS[event]], args[PATH_EVENTS[event] :]
        writing, from_folder = event != "open", False
        if event == "open":
            mode, flags = rest
            writing = isinstance(mode, str) and any(letter in mode for letter in "wax+")
            writing = writing or (isinstance(flags, int) and bool(flags & WRITE_FLAGS))
        elif event != "os.truncate":
            from_folder = any(dir_fd != -1 for dir_fd in rest)
        for path in paths:
            if not isinstance(path, (str, bytes, os.PathLike)):
                continue  # a descriptor: it was checked when it was opened
            name = os.fsdecode(path)
            # NOTE: os.open has a dir_fd too and does not report it; only os.open has no mode.
            if from_folder or (event == "open" and mode is None and not os.path.isabs(name)):
                raise PermissionError(f"this stage may not open {name} relative to an open folder")
            full = os.path.realpath(name)
            declared = allowed(full, writing) and allowed(os.path.abspath(name), writing)
            if event == "os.rename" and within(closed, full):
                declared = False  # a renamed parent would move everything out of sight
            if not declared or which_file(full) in hidden:
                verb = "write" if writing else "read"
                raise PermissionError(f"this stage did not declare that it may {verb} {full}")

    def no_process(*_):
        raise PermissionError("this stage may not start another process (fork_exec)")

    sys.addaudithook(hook)
    try:  # the one way to a new process without an audit event: multiprocessing's "spawn"
        import _posixsubprocess
    except ImportError:  # Windows
        return
    _posixsubprocess.fork_exec = no_process


def which_file(path: str) -> tuple | None:
    """Device, inode, size, time of change (an inode alone is soon used again); None if absent."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

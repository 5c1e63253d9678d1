"""Rows of strict JSON as they happen."""

import hashlib
import os
from pathlib import Path

from kernel.data.files import dumps, write_atomic


class Records:
    """Rows of strict JSON, one per line, each flushed when written.

    A resume state remembers how far the file went (`mark`); what a crash left behind that point, half a
    line perhaps, is cut off when the file is opened again with the bytes up to the mark. With a class of
    event writers (`event_writer`) every number of a row goes to tensorboard too.
    """

    def __init__(self, path: Path, kept: bytes = b"", events=None):
        self.path, self.bytes, self.digest = path, len(kept), hashlib.sha256(kept)
        # older event files lose what is behind the kept rows: it will be written again
        self.events = events and events(
            path.parent / "tensorboard", purge_step=kept.count(b"\n") + 1
        )
        write_atomic(path, kept)
        self.file = path.open("ab")

    def write(self, row: dict) -> None:
        line = (dumps(row) + "\n").encode("utf-8")
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:
            raise OSError(
                f"{self.path}: could not be written ({error.strerror or error})"
            ) from None
        self.bytes += len(line)
        self.digest.update(line)
        if self.events:
            step = row.get("iteration", row.get("update"))
            for name, value in row.items():
                self.events.add_scalar(name, value, step)
            self.events.flush()

    def mark(self) -> dict:
        """Length and sha256 of the file so far, once it is safely on the disk."""
        os.fsync(self.file.fileno())
        return {"bytes": self.bytes, "sha256": self.digest.hexdigest()}


def event_writer():
    """The class that writes tensorboard's event files. Raises ValueError if tensorboard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard: the package tensorboard is not installed; pip install tensorboard, or leave "
            "the flag out (metrics.jsonl has the same numbers)"
        ) from None
    return SummaryWriter

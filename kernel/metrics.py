"""Rows of strict JSON as they happen, and the seconds of each phase beside them."""

import hashlib
import os
import platform
import resource
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from kernel.data import dumps, read_jsonl, write_atomic


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


class Phases:
    """Seconds per named phase of one iteration; on CUDA the clock waits for the device."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, {}
        self.begun = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def __call__(self, name: str):
        start = self._now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def row(self) -> dict:
        """Seconds per phase since the last call, the rest as `other`, the sum as `total`; memory."""
        now = self._now()
        total = now - self.begun
        row = {name: round(value, 4) for name, value in self.seconds.items()}
        row["other"] = round(total - sum(self.seconds.values()), 4)
        row["total"] = round(total, 4)
        row["peak_memory_mib"] = round(peak_memory_mib())
        self.seconds, self.begun = {}, now
        return row


def peak_memory_mib() -> float:
    """The most memory this process has held so far, in MiB (resident set, as the system counts it)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if platform.system() == "Darwin" else 1024)


def print_phases(path: Path) -> None:
    """Seconds per phase over a whole timings file, and their share of the loop."""
    rows = read_jsonl(path)
    names = [name for name in rows[-1] if name not in ("iteration", "peak_memory_mib")]
    totals = {name: sum(row.get(name, 0) for row in rows) for name in names}
    for name, seconds in totals.items():
        print(f"  {name:<14} {seconds:8.1f} s  {seconds / totals['total']:6.1%}")

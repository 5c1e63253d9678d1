"""Rows of strict JSON as they happen, and the seconds of each phase beside them."""

import time
from contextlib import contextmanager
from pathlib import Path

import torch

from kernel.data import dumps, read_jsonl, write_jsonl


class Records:
    """Rows of strict JSON, one per line, each flushed when written."""

    def __init__(self, path: Path, kept: list[dict]):
        self.path = path
        write_jsonl(path, kept)
        self.file = path.open("a", encoding="utf-8")

    def write(self, row: dict) -> None:
        self.file.write(dumps(row) + "\n")
        self.file.flush()


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
        """The phases since the last call, what is left over as `other`, and their sum as `total`."""
        now = self._now()
        total = now - self.begun
        row = {name: round(value, 4) for name, value in self.seconds.items()}
        row["other"] = round(total - sum(self.seconds.values()), 4)
        row["total"] = round(total, 4)
        self.seconds, self.begun = {}, now
        return row


def print_phases(path: Path) -> None:
    """Seconds per phase over a whole timings file, and their share of the loop."""
    rows = read_jsonl(path)
    names = [name for name in rows[-1] if name != "iteration"]
    totals = {name: sum(row.get(name, 0) for row in rows) for name in names}
    for name, seconds in totals.items():
        print(f"  {name:<14} {seconds:8.1f} s  {seconds / totals['total']:6.1%}")

"""Seconds per phase, and memory."""

import platform
import resource
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from kernel.data.files import read_jsonl

NO_PHASES = ("iteration", "update", "peak_memory_mib")  # in a row of timings.jsonl


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


def phase_sums(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Phase -> seconds over the rows of a timings file, and share of the loop; `total` comes last."""
    names = [name for name in (rows or [{}])[-1] if name not in NO_PHASES]
    sums = {name: sum(row.get(name, 0) for row in rows) for name in names}
    return {name: (s, s / sums["total"]) for name, s in sums.items()} if sums.get("total") else {}


def phase_lines(path: Path) -> list[str]:
    return [
        f"  {name:<14} {seconds:8.1f} s  {share:6.1%}"
        for name, (seconds, share) in phase_sums(read_jsonl(path)).items()
    ]

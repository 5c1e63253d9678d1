"""One stage in one run folder: what it may open, whether there is anything to do, what it leaves.

A finished stage leaves record.json with the sha256 of every input and output and the identity under
which they were made. It is skipped while they still hold, and refused when they do not.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from kernel.data.files import check_writable, read_json, sha256_file, write_json
from kernel.run import guard, lineage, state
from kernel.run.clocks import peak_memory_mib
from kernel.run.flags import override, run_folder
from kernel.run.folder import RunFolder
from kernel.run.lock import lock_folder
from kernel.run.machine import settle, versions
from kernel.run.profiles import PROFILES


@dataclass
class Stage:
    """Everything here is about files and clocks, nothing about learning; `begin` makes one."""

    name: str  # of the script: "40_generate"
    args: object  # its flags
    run: RunFolder
    config: dict  # the shared settings and this stage's own
    parents: dict[str, str]  # sha256 of each input
    identity: dict  # all that the bits of the result follow from
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def begin(cls, name: str, section: str, args, reads, writes: list[str], shown=()) -> "Stage":
        """Lock the run folder, check every input, and from then on open nothing that is not declared.

        reads: files that results follow from, each held against its maker's record; writes: folders;
        shown: patterns of files that may be opened to be displayed, unchecked, since nothing follows
        from them. All relative to the run folder; reads may be a function of the stage's settings.
        Exits the process if the stage is finished and unchanged. Raises ValueError for whatever does
        not fit, before a model is loaded.
        """
        profile, folder = run_folder(args)
        run = RunFolder(folder)
        check_writable(folder)
        if note := lock_folder(folder):
            print(f"{name}: {note}")
        settings = override(PROFILES[profile][section], args)
        reads = reads(settings) if callable(reads) else reads
        lineage.check_model(run.model_dir, run.model)
        parents = lineage.checked_inputs(folder, reads)
        identity = {
            "profile": profile,
            "common": run.made["common"],
            # where an interrupt stops changes no result, so a resume need not repeat the flag
            section: {key: value for key, value in settings.items() if key != "stop_at"},
            "model": run.model,
            "parents": parents,
            "code": lineage.code_sha256(name),
            "versions": versions(),
        }
        stage = cls(name, args, run, {**run.common, **settings}, parents, identity)
        stage.skip_or_refuse()
        stage.sweep()
        shown = [stage.rel(path) for pattern in shown for path in folder.glob(pattern)]
        guard.enclose(folder, ["config.json", *reads, *shown], writes)
        settle(stage.config[stage.threads])
        stage.started = time.perf_counter()
        return stage

    # -- where it lies ------------------------------------------------------------------------------

    threads = "threads_alone"  # the setting that says how many

    @property
    def dir(self) -> Path:
        return self.run.dir

    @property
    def device(self) -> torch.device:
        return torch.device(self.config["device"])

    @property
    def label(self) -> str:
        return self.name

    @property
    def outputs(self) -> Path:
        return self.dir / "outputs" / self.name

    @property
    def folders(self) -> list[Path]:
        """All that it writes to."""
        return [self.outputs]

    def rel(self, path: Path) -> str:
        return path.relative_to(self.dir).as_posix()

    # -- finished, unfinished, changed --------------------------------------------------------------

    def skip_or_refuse(self) -> None:
        """Exits if it is finished and unchanged; ValueError if it changed and nobody said --redo."""
        record_path = self.outputs / "record.json"
        if not record_path.is_file():
            return
        record = read_json(record_path)
        changed = state.identity_differences(record["identity"], self.identity)
        changed += lineage.record_faults(self.dir, record)
        if changed and self.args.redo:
            print(f"{self.label}: made again, because of changes ({some(changed)})")
            return self.remove_old()
        if changed:
            raise ValueError(
                f"{self.label} is finished, but things changed ({some(changed)}); nothing was touched. "
                "Use another --run-dir, or --redo for this stage and all behind it"
            )
        print(f"{self.label}: finished before, inputs unchanged, skipped. {record['figure']}")
        sys.exit(0)

    def remove_old(self) -> None:
        for folder in self.folders:
            for path in sorted(folder.rglob("*"), reverse=True):  # children before their folder
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()

    def sweep(self) -> None:
        """Its folders can be written to, and hold no half-written file of a crash."""
        for folder in self.folders:
            check_writable(folder)
            for left_by_a_crash in folder.glob(".*.tmp"):
                left_by_a_crash.unlink()

    # -- while running, and at the end --------------------------------------------------------------

    def bar(self, done: int, stop: int):
        """A progress bar with ETA over updates done + 1 .. stop (on a log file: a line now and then)."""
        quiet = not sys.stderr.isatty()
        return tqdm(
            range(done + 1, stop + 1), initial=done, total=stop, desc=self.label,
            mininterval=15 if quiet else 0.2, ascii=True if quiet else None, dynamic_ncols=not quiet,
        )

    def finish(self, figure: str, files: list[Path]) -> None:
        """Write record.json, and say what was written and the one figure to look at."""
        peak_mib, seconds = peak_memory_mib(), time.perf_counter() - self.started
        record = {
            "stage": self.name,
            "variant": getattr(self.args, "variant", None),
            "figure": figure,
            "identity": self.identity,
            "outputs": {self.rel(path): sha256_file(path) for path in files},
            "seconds": round(seconds, 1),
            "peak_memory_mib": round(peak_mib),
        }
        write_json(self.outputs / "record.json", record)
        for path in files:
            print(f"  wrote {self.rel(path)}")
        print(f"{self.label}: {figure} [{seconds:.0f} s, peak {peak_mib:.0f} MiB]")


def some(differences: list[str]) -> str:
    more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
    return "; ".join(differences[:4]) + more

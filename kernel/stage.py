"""One stage in one run folder: declared files, skip or refuse, resume, clocks, summary.

A run folder:

    config.json                            profile, shared settings, base model (00_prepare.py)
    data/                                  the corpus (kernel/data.py says what is in it)
    checkpoints/<stage>/<variant>/         resume states and final adapters of a trained stage
                                           (<stage>/<name>/<variant>/ with --name)
    outputs/<stage>[/<variant>]/           metrics, records, tables; record.json closes a finished stage

record.json names the sha256 of every input and output and the identity under which they were made; a
finished stage is skipped while they still hold, and refused when they do not.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from kernel import guard, lineage, state
from kernel.data import read_json, sha256_file, write_json
from kernel.lock import lock_folder
from kernel.metrics import Records, peak_memory_mib
from kernel.profiles import PROFILES
from kernel.run import (
    REPOSITORY,
    check_writable,
    code_sha256,
    one_line_errors,
    override,
    run_folder,
    settle,
    versions,
)


class Stage:
    """One stage in one run folder. Everything here is about files and clocks, nothing about learning."""

    def __init__(self, name, section, arg_parser, reads, writes):
        self.name = name
        one_line_errors(name)
        args = self.args = arg_parser.parse_args()
        self.variant, named = getattr(args, "variant", None), getattr(args, "name", None)
        self.place = f"{name}/{named}" if named else name  # in checkpoints/ and outputs/
        self.label = " ".join(part for part in (name, named, self.variant) if part)
        self.profile, self.dir = run_folder(args)
        if not (self.dir / "config.json").is_file():
            raise ValueError(f"{self.dir} has no config.json: run 00_prepare.py first")
        check_writable(self.dir)
        if note := lock_folder(self.dir):
            print(f"{name}: {note}")
        shared = read_json(self.dir / "config.json")
        self.model = shared["model"]  # base_sha256, tokenizer_sha256
        self.settings = override(PROFILES[self.profile][section], args)  # this stage's own section
        self.config = {**shared["common"], **self.settings}
        # relative to the repository, unless it is somebody's own folder
        self.config["model_dir"] = str(REPOSITORY / self.config["model_dir"])
        self.device = torch.device(self.config["device"])
        suffix = [self.variant] if self.variant else []
        self.checkpoints = self.dir.joinpath("checkpoints", self.place, *suffix)
        self.outputs = self.dir.joinpath("outputs", self.place, *suffix)

        lineage.check_model(Path(self.config["model_dir"]), self.model)
        reads = reads(self.settings) if callable(reads) else reads
        self.parents = lineage.checked_inputs(self.dir, reads)
        self.identity = {
            "profile": self.profile,
            "common": shared["common"],
            # where an interrupt stops changes no result, so a resume need not repeat the flag
            section: {key: value for key, value in self.settings.items() if key != "stop_at"},
            "model": self.model,
            "parents": self.parents,
            "code": code_sha256(name),
            "versions": versions(),
        }
        if self.variant != "check":
            self._skip_or_refuse()
        check_writable(self.outputs)
        if self.variant:
            check_writable(self.checkpoints)
        for folder in (self.checkpoints, self.outputs):
            for left_by_a_crash in folder.glob(".*.tmp"):
                left_by_a_crash.unlink()
        guard.enclose(self.dir, ["config.json", *reads], writes)
        settle(self.config["threads" if self.variant else "threads_alone"])
        self.started = time.perf_counter()
        self.stopping = False
        if self.variant:
            signal.signal(signal.SIGINT, self._interrupt)

    # -- finished, unfinished, changed ----------------------------------------------------------

    def _skip_or_refuse(self) -> None:
        record_path = self.outputs / "record.json"
        if not record_path.is_file():
            return
        record = read_json(record_path)
        changed = state.identity_differences(record["identity"], self.identity)
        changed += lineage.record_faults(self.dir, record)
        if changed and self.args.redo:
            print(f"{self.label}: made again, because of changes ({shown(changed)})")
            return self._remove_old()
        if changed:
            raise ValueError(
                f"{self.label} is finished, but things changed ({shown(changed)}); nothing was touched. "
                "Use another --run-dir, or --redo for this stage and all behind it"
            )
        print(f"{self.label}: finished before, inputs unchanged, skipped. {record['figure']}")
        sys.exit(0)

    def _remove_old(self) -> None:
        if self.variant:  # what it proved is no longer there
            (self.outputs.parent / "check" / "proof.json").unlink(missing_ok=True)
        for folder in (self.checkpoints, self.outputs):
            for path in sorted(folder.rglob("*"), reverse=True):  # children before their folder
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()

    def _interrupt(self, *_):
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        # NOTE: a signal may arrive in the middle of a print; the descriptor itself is never busy.
        os.write(2, b"\nfinishing this update, then saving (Ctrl-C again: stop at once)\n")

    def stop_at(self, planned: int, total: int) -> int:
        """The last update of this process: `planned` for --variant interrupt, else all of `total`."""
        if self.variant != "interrupt":
            return total
        if total < 2:
            raise ValueError("--variant interrupt needs at least two updates to stop between")
        return min(planned, total - 1)

    def restore(self) -> tuple[dict | None, int]:
        """(state, updates done): the newest complete state of this variant, or the interrupted one."""
        self.records_open, source = [], self.variant
        path, notes = state.newest_state(self.checkpoints, self.outputs)
        if path is None and self.variant == "resume":
            source = "interrupt"
            path, more = state.newest_state(
                self.checkpoints.parent / source, self.outputs.parent / source
            )
            notes += more
            if path is None:
                raise ValueError(f"nothing to resume: run {self.name}.py --variant interrupt first")
        for note in notes:
            print(f"{self.name}: {note}")
        if path is None:
            self.restored = None
            return None, 0
        saved, identity = state.load_state(path)
        changed = state.identity_differences(identity, self.identity)
        if changed and self.args.redo and source == self.variant:
            print(f"{self.name}: started anew, because of changes ({shown(changed)})")
            self._remove_old()
            return self.restore()
        if changed:
            raise ValueError(
                f"{path} was made under other conditions ({shown(changed)}); not resumed. "
                "Use another --run-dir, or --redo to start anew"
            )
        self.restored, self.source = path, self.outputs.parent / source
        updates = int(path.name[6:12])
        print(f"{self.name} {self.variant}: going on after update {updates} from {self.rel(path)}")
        state.load_rng_state(saved["rng"])
        return saved, updates

    def save(self, updates: int, content: dict) -> None:
        content = {**content, "rng": state.rng_state()}
        marks = {records.path.name: records.mark() for records in self.records_open}
        state.save_state(self.checkpoints, updates, content, self.identity, marks)
        if self.stopping:
            print(
                f"{self.name}: saved after update {updates}. Run the same command again to go on."
            )
            sys.exit(130)

    def newest(self) -> Path:
        """The newest complete state of this variant."""
        return state.newest_state(self.checkpoints)[0]

    def save_due(self, updates: int, stop: int) -> bool:
        """At the end, on Ctrl-C, and every --save-every updates (default: about every minute)."""
        every = self.args.save_every
        if updates == 1 or not hasattr(self, "_saved_at"):
            self._saved_at = time.perf_counter()
        timed = every is None and time.perf_counter() - self._saved_at > 60
        due = updates == stop or self.stopping or timed or (every and updates % every == 0)
        if due:
            self._saved_at = time.perf_counter()
        return bool(due)

    def records(self, name: str) -> Records:
        """An append-only JSONL file, cut back to what the restored state knows."""
        kept = b""
        if self.restored:
            kept = state.marked_part(self.source / name, state.marks(self.restored)[name])
        self.records_open.append(Records(self.outputs / name, kept))
        return self.records_open[-1]

    # -- while running ----------------------------------------------------------------------------------

    def bar(self, done: int, stop: int):
        """A progress bar with ETA over updates done + 1 .. stop (on a log file: a line now and then)."""
        quiet = not sys.stderr.isatty()
        return tqdm(
            range(done + 1, stop + 1),
            initial=done,
            total=stop,
            desc=self.label,
            mininterval=15 if quiet else 0.2,
            ascii=True if quiet else None,
            dynamic_ncols=not quiet,
        )

    def rel(self, path: Path) -> str:
        return path.relative_to(self.dir).as_posix()

    def finish(self, figure: str, files: list[Path]) -> None:
        """Write record.json, and say what was written and the one figure to look at."""
        peak_mib = peak_memory_mib()
        seconds = time.perf_counter() - self.started
        record = {
            "stage": self.name,
            "variant": self.variant,
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

    def prove(self, files: tuple[str, ...]) -> None:
        """The exact check: resume and continuous ended in the same bits. Exits the process."""
        proof = lineage.compare_variants(self.dir, self.place, files)
        write_json(self.outputs / "proof.json", proof)
        resumed, continuous = proof["sha256"]["resume"], proof["sha256"]["continuous"]
        for name, a in resumed.items():
            sign = "=" if a == continuous[name] else "DIFFERS"
            print(f"  {name:<20} resume {a[:16]}  continuous {continuous[name][:16]}  {sign}")
        if not proof["equal"]:
            raise ValueError(f"resume and continuous differ: {shown(proof['differences'])}")
        print(
            f"{self.name} check: {proof['leaves']} tensors, counters and history entries, "
            "bit for bit equal"
        )
        sys.exit(0)


def shown(differences: list[str]) -> str:
    more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
    return "; ".join(differences[:4]) + more

"""One stage in one run folder: declared files, skip or refuse, resume, clocks, summary.

A run folder:

    config.json                            profile, shared settings, base model (00_prepare.py)
    data/                                  the corpus (kernel/data.py says what is in it)
    checkpoints/<stage>/<variant>/         resume states and final adapters of a trained stage
    outputs/<stage>[/<variant>]/           metrics, records, tables; record.json closes a finished stage

record.json names the sha256 of every input and output and the identity under which they were made; a
finished stage is skipped while they still hold, and refused when they do not.
"""

import fcntl
import os
import platform
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from kernel import guard, state
from kernel.data import read_json, read_jsonl, sha256_file, write_json
from kernel.metrics import Records
from kernel.model import model_sha256
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
        self.variant = getattr(args, "variant", None)
        self.profile, self.dir = run_folder(args)
        if not (self.dir / "config.json").is_file():
            raise ValueError(f"{self.dir} has no config.json: run 00_prepare.py first")
        shared = read_json(self.dir / "config.json")
        self.model = shared["model"]  # base_sha256, tokenizer_sha256
        self.settings = override(PROFILES[self.profile][section], args)  # this stage's own section
        self.config = {**shared["common"], **self.settings}
        if not Path(self.config["model_dir"]).is_absolute():
            self.config["model_dir"] = str(REPOSITORY / self.config["model_dir"])
        self.device = torch.device(self.config["device"])
        suffix = [self.variant] if self.variant else []
        self.checkpoints = self.dir.joinpath("checkpoints", name, *suffix)
        self.outputs = self.dir.joinpath("outputs", name, *suffix)

        for path in [self.dir / name for name in reads]:
            if not path.is_file():
                raise ValueError(f"{path} is missing: run {maker(path, self.dir)} first")
        if Path(self.config["model_dir"]).is_dir():
            if model_sha256(Path(self.config["model_dir"])) != self.model:
                raise ValueError(
                    f"{self.config['model_dir']} changed since 00_prepare.py recorded it"
                )
        else:
            raise ValueError(f"{self.config['model_dir']} is missing: run 00_prepare.py again")
        self.parents = {name: sha256_file(self.dir / name) for name in reads}
        audited = read_json(self.dir / "data" / "manifest.json")["sha256"]
        for file, have in self.parents.items():
            if file.startswith("data/") and audited.get(file.removeprefix("data/")) != have:
                raise ValueError(f"{self.dir / file} is not the file that 00_prepare.py audited")
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
        check_writable(self.outputs.parent)
        self._lock(self.outputs.parent / f".{self.variant or name}.lock")
        if self.variant != "check":
            self._skip_or_refuse()
        check_writable(self.outputs)
        guard.enclose(self.dir, ["config.json", *reads], writes)
        settle(self.config["threads"])
        self.started = time.perf_counter()
        self.stopping = False
        if self.variant:
            signal.signal(signal.SIGINT, self._interrupt)

    # -- finished, unfinished, changed ----------------------------------------------------------

    def _skip_or_refuse(self) -> None:
        label = f"{self.name} {self.variant}" if self.variant else self.name
        record_path = self.outputs / "record.json"
        if not record_path.is_file():
            return
        record = read_json(record_path)
        changed = state.identity_differences(record["identity"], self.identity)
        for name, want in record["outputs"].items():
            path = self.dir / name
            if not path.is_file() or sha256_file(path) != want:
                changed.append(f"{name}: missing or edited")
        if changed and self.args.redo:
            print(f"{label}: made again, because its inputs changed ({'; '.join(changed[:4])})")
            return self._remove_old()
        if changed:
            raise ValueError(
                f"{label} is finished, but its inputs changed ({'; '.join(changed[:4])}); "
                "nothing was touched. Use another --run-dir, or --redo for this stage and all behind it"
            )
        print(f"{label}: finished before, inputs unchanged, skipped. {record['figure']}")
        sys.exit(0)

    def _lock(self, path: Path) -> None:
        """One process per variant. The system drops the lock with its owner, so none can go stale."""
        self.lock = path.open("a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            owner = self.lock.read().strip() or "unknown"
            raise ValueError(
                f"process {owner} is already working on {self.rel(self.outputs)} in {self.dir}"
            ) from None
        self.lock.truncate(0)
        self.lock.write(str(os.getpid()))
        self.lock.flush()

    def _remove_old(self) -> None:
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
        print("\nfinishing this update, then saving (Ctrl-C again: stop at once)", file=sys.stderr)

    def stop_at(self, planned: int, total: int) -> int:
        """The last update of this process: `planned` for --variant interrupt, else all of `total`."""
        if self.variant != "interrupt":
            return total
        if total < 2:
            raise ValueError("--variant interrupt needs at least two updates to stop between")
        return min(planned, total - 1)

    def restore(self) -> tuple[dict | None, int]:
        """(state, updates done): the newest complete state of this variant, or the interrupted one."""
        self.source = self.checkpoints
        path, notes = state.newest_state(self.checkpoints)
        if path is None and self.variant == "resume":
            self.source = self.checkpoints.parent / "interrupt"
            path, notes = state.newest_state(self.source)
            if path is None:
                raise ValueError(f"nothing to resume: run {self.name}.py --variant interrupt first")
        for note in notes:
            print(f"{self.name}: {note}")
        if path is None:
            return None, 0
        saved, identity = state.load_state(path)
        changed = state.identity_differences(identity, self.identity)
        if changed and self.args.redo and self.source == self.checkpoints:
            print(
                f"{self.name}: started anew, because its inputs changed ({'; '.join(changed[:4])})"
            )
            self._remove_old()
            return self.restore()
        if changed:
            raise ValueError(
                f"{path} was made under other conditions ({'; '.join(changed[:4])}); not resumed. "
                "Use another --run-dir, or --redo to start anew"
            )
        updates = int(path.name[6:12])
        print(f"{self.name} {self.variant}: going on after update {updates} from {self.rel(path)}")
        state.load_rng_state(saved["rng"])
        return saved, updates

    def save(self, updates: int, content: dict) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        content = {**content, "rng": state.rng_state()}
        self.final_sha256 = state.content_hash(content)
        state.save_state(self.checkpoints, updates, content, self.identity)
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

    def records(self, name: str, done: int) -> "Records":
        """An append-only JSONL file, cut back to what the restored state knows."""
        source = (self.source if done else self.checkpoints).parts[-1]
        kept = []
        if done:
            path = self.outputs.parent / source / name
            kept = [
                row for row in read_jsonl(path) if row.get("iteration", row.get("update")) <= done
            ]
        return Records(self.outputs / name, kept)

    # -- while running ----------------------------------------------------------------------------------

    def bar(self, done: int, stop: int):
        """A progress bar with ETA over updates done + 1 .. stop (on a log file: a line now and then)."""
        quiet = not sys.stderr.isatty()
        return tqdm(
            range(done + 1, stop + 1),
            initial=done,
            total=stop,
            desc=f"{self.name} {self.variant or ''}".strip(),
            mininterval=15 if quiet else 0.2,
            ascii=True if quiet else None,
            dynamic_ncols=not quiet,
        )

    def rel(self, path: Path) -> str:
        return path.relative_to(self.dir).as_posix()

    def finish(self, figure: str, files: list[Path]) -> None:
        """Write record.json, and say what was written and the one figure to look at."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_mib = peak / (1024 * 1024 if platform.system() == "Darwin" else 1024)
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
        label = f"{self.name} {self.variant}" if self.variant else self.name
        print(f"{label}: {figure} [{seconds:.0f} s, peak {peak_mib:.0f} MiB]")

    def prove(self, files: tuple[str, ...]) -> None:
        """The exact check: resume and continuous ended in the same bits. Exits the process."""
        found, hashes = [], {}
        contents = {}
        for variant in ("resume", "continuous"):
            folder = self.checkpoints.parent / variant
            path, _ = state.newest_state(folder)
            record = self.outputs.parent / variant / "record.json"
            if path is None or not record.is_file():
                raise ValueError(
                    f"nothing to compare: run {self.name}.py --variant {variant} first"
                )
            contents[variant], _ = state.load_state(path)
            hashes[variant] = {"state": state.content_hash(contents[variant])}
            for name in files:
                where = folder if name.endswith(".safetensors") else self.outputs.parent / variant
                hashes[variant][name] = sha256_file(where / name)
        found += state.differences(contents["resume"], contents["continuous"])
        for name in files:
            if hashes["resume"][name] != hashes["continuous"][name]:
                found.append(f"file {name}")
        leaves = sum(1 for _ in state.walk(contents["resume"]))
        proof = {"equal": not found, "leaves": leaves, "differences": found, "sha256": hashes}
        write_json(self.outputs / "proof.json", proof)
        for name in hashes["resume"]:
            a, b = hashes["resume"][name], hashes["continuous"][name]
            print(
                f"  {name:<20} resume {a[:16]}  continuous {b[:16]}  {'=' if a == b else 'DIFFERS'}"
            )
        if found:
            raise ValueError(f"resume and continuous differ: {'; '.join(found[:4])}")
        print(
            f"{self.name} check: {leaves} tensors, counters and history entries, bit for bit equal"
        )
        sys.exit(0)


def maker(path: Path, run_dir: Path) -> str:
    """The stage that makes a file of the run folder."""
    parts = path.relative_to(run_dir).parts
    return f"{parts[1]}.py" if parts[0] in ("checkpoints", "outputs") else "00_prepare.py"

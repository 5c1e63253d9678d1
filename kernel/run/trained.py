"""A stage that trains: in variants, saved as it goes, resumed to the bit, and proven equal."""

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from kernel.data.files import write_json
from kernel.run import lineage, state
from kernel.run.records import Records, event_writer
from kernel.run.stage import Stage, some


@dataclass
class TrainedStage(Stage):
    """continuous: all at once; interrupt, then resume: in two parts; check: both ended in the same bits.

    --name keeps a run of the stage apart, under <stage>/NAME.
    """

    stopping: bool = False  # Ctrl-C came: save after this update
    restored: Path | None = None  # the state that this process goes on from
    source: Path | None = None  # where the record files lie that belong to it
    open_records: list[Records] = field(default_factory=list)
    events: type | None = None  # of tensorboard
    saved_at: float = 0.0

    threads = "threads"

    @classmethod
    def begin(cls, name: str, section: str, args, reads, writes: list[str]) -> "TrainedStage":
        events = event_writer() if args.tensorboard else None
        stage = super().begin(name, section, args, reads, writes)
        stage.events = events
        stage.saved_at = time.perf_counter()
        signal.signal(signal.SIGINT, stage.interrupt)
        return stage

    @property
    def variant(self) -> str:
        return self.args.variant

    @property
    def place(self) -> str:
        return f"{self.name}/{self.args.name}" if self.args.name else self.name

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.name, self.args.name, self.variant) if part)

    @property
    def outputs(self) -> Path:
        return self.dir / "outputs" / self.place / self.variant

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints" / self.place / self.variant

    @property
    def folders(self) -> list[Path]:
        return [self.checkpoints, self.outputs]

    def skip_or_refuse(self) -> None:
        if self.variant != "check":  # the check is made anew each time
            super().skip_or_refuse()

    def remove_old(self) -> None:
        super().remove_old()
        (self.outputs.parent / "check" / "proof.json").unlink(missing_ok=True)  # what it proved is gone

    def interrupt(self, *_) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        # NOTE: a signal may arrive in the middle of a print; the descriptor itself is never busy.
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, b"\nfinishing this update, then saving (Ctrl-C again: stop at once)\n")

    # -- resume -------------------------------------------------------------------------------------

    def stop_at(self, planned: int, total: int) -> int:
        """The last update of this process: `planned` for --variant interrupt, else all of `total`."""
        if self.variant != "interrupt":
            return total
        if total < 2:
            raise ValueError("--variant interrupt needs at least two updates to stop between")
        return min(planned, total - 1)

    def restore(self) -> tuple[dict | None, int]:
        """(state, updates done): the newest complete state of this variant, or the interrupted one."""
        variant = self.variant
        path, notes = state.newest_state(self.checkpoints, self.outputs)
        if path is None and variant == "resume":
            variant = "interrupt"
            folders = (folder.parent / variant for folder in self.folders)
            path, more = state.newest_state(*folders)
            notes += more
            if path is None:
                raise ValueError(f"nothing to resume: run {self.name}.py --variant interrupt first")
        for note in notes:
            print(f"{self.name}: {note}")
        if path is None:
            return None, 0
        saved, identity = state.load_state(path)
        changed = state.identity_differences(identity, self.identity)
        if changed and self.args.redo and variant == self.variant:
            print(f"{self.name}: started anew, because of changes ({some(changed)})")
            self.remove_old()
            return self.restore()
        if changed:
            raise ValueError(
                f"{path} was made under other conditions ({some(changed)}); not resumed. "
                "Use another --run-dir, or --redo to start anew"
            )
        self.restored, self.source = path, self.outputs.parent / variant
        updates = state.updates_of(path)
        print(f"{self.name} {self.variant}: going on after update {updates} from {self.rel(path)}")
        state.load_rng_state(saved["rng"])
        return saved, updates

    def records(self, name: str) -> Records:
        """An append-only JSONL file, cut back to what the restored state knows."""
        kept = b""
        if self.restored:
            kept = state.marked_part(self.source / name, state.marks(self.restored)[name])
        events = self.events if name == "metrics.jsonl" else None
        self.open_records.append(Records(self.outputs / name, kept, events))
        return self.open_records[-1]

    def save_due(self, updates: int, stop: int) -> bool:
        """At the end, on Ctrl-C, and every --save-every updates (default: about every minute)."""
        every = self.args.save_every
        timed = every is None and time.perf_counter() - self.saved_at > 60
        due = updates == stop or self.stopping or timed or (every and updates % every == 0)
        if due:
            self.saved_at = time.perf_counter()
        return bool(due)

    def save(self, updates: int, content: dict) -> None:
        content = {**content, "rng": state.rng_state()}
        marks = {records.path.name: records.mark() for records in self.open_records}
        state.save_state(self.checkpoints, updates, content, self.identity, marks)
        if self.stopping:
            print(f"{self.name}: saved after update {updates}. Run the same command again to go on.")
            sys.exit(130)

    def newest(self) -> Path:
        """The newest complete state of this variant."""
        return state.newest_state(self.checkpoints)[0]

    # -- the exact check ----------------------------------------------------------------------------

    def prove(self, files: tuple[str, ...]) -> None:
        """Compare what resume and continuous ended in, bit for bit. Exits the process."""
        proof = lineage.compare_variants(self.dir, self.place, files)
        write_json(self.outputs / "proof.json", proof)
        resumed, continuous = proof["sha256"]["resume"], proof["sha256"]["continuous"]
        for name, a in resumed.items():
            sign = "=" if a == continuous[name] else "DIFFERS"
            print(f"  {name:<20} resume {a[:16]}  continuous {continuous[name][:16]}  {sign}")
        if not proof["equal"]:
            raise ValueError(f"resume and continuous differ: {some(proof['differences'])}")
        print(
            f"{self.name} check: {proof['leaves']} tensors, counters and history entries, "
            "bit for bit equal"
        )
        sys.exit(0)

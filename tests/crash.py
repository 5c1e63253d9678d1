"""Kill the trained stages with SIGKILL at random moments, start them again, compare bit for bit.

    .venv/bin/python tests/crash.py --kills 100    # tiny, in a temporary folder, ten minutes

An uninterrupted run is made first (or given by --reference, a finished tiny run). Then the same stages
run in a second folder and are killed again and again: while they start, inside a rollout, between two
optimiser steps, in the middle of a line of a record file, inside a save, between a state's rename and
its manifest, before old states are removed, before the final record. At the end the final states, the
adapters, the metrics and the rollout records must be the same bytes as those of the uninterrupted run.
`tests/test_crash.py` does the same with a handful of fixed moments.
"""

import argparse
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COMPARED = {
    "10_sft": ("adapter.safetensors", "metrics.jsonl"),
    "20_reward": ("adapter.safetensors", "metrics.jsonl"),
    "30_ppo": ("adapter.safetensors", "critic.safetensors", "metrics.jsonl", "rollouts.jsonl",
               "first_logits.safetensors"),
}
LOOP = ("rollout", "step", "line", "save", "rename", "manifest")  # moments inside the training loop
MOMENTS = ("start", *LOOP, "end")  # before the loop, in it, behind it


# ---- the child: a stage that kills itself at one moment ------------------------------------------


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str, rows: int, calls: int) -> None:
    """Patch the kernel so that the process dies at `moment`, once `rows` rows of metrics are written.

    Of the calls after that, the one number `calls` (from 0) is the last: a rollout takes many.
    """
    import kernel.optim
    import kernel.rollout
    from kernel.data.files import dumps
    from kernel.run import state
    from kernel.run.records import Records

    written, left = 0, calls

    def now() -> bool:
        nonlocal left
        if written < rows:
            return False
        left -= 1
        return left < 0

    def patch(owner, name: str, before=None, after=None) -> None:
        real = getattr(owner, name)

        def patched(*args, **kwargs):
            if before:
                before(*args)
            result = real(*args, **kwargs)
            if after:
                after(*args)
            return result

        setattr(owner, name, patched)

    def count(records, row) -> None:
        nonlocal written
        written += records.path.name == "metrics.jsonl"

    def half_a_line(records, row) -> None:
        if now():
            records.file.write(dumps(row).encode()[:20])
            records.file.flush()
            die()

    def half_a_file(path, content) -> None:
        if now():
            path.with_name(f".{path.name}.tmp").write_bytes(content[: len(content) // 2])
            die()

    def renamed(ending: str):
        return lambda source, target: str(target).endswith(ending) and now() and die()

    patch(Records, "write", after=count)
    match moment:
        case "rollout":
            patch(kernel.rollout, "next_logits", before=lambda *_: now() and die())
        case "step":
            patch(kernel.optim.Optimizer, "step", after=lambda *_: now() and die())
        case "line":
            patch(Records, "write", before=half_a_line)
        case "save":
            patch(state, "write_atomic", before=half_a_file)
        case "rename":
            patch(os, "replace", after=renamed(".pt.gz"))
        case "manifest":
            patch(state, "write_json", after=lambda *_: now() and die())
        case "end":
            patch(os, "replace", after=renamed("adapter.safetensors"))


def child(moment: str, rows: str, calls: str, stage: str, *flags: str) -> None:
    arm(moment, int(rows), int(calls))
    sys.argv = [f"{stage}.py", *flags]
    runpy.run_path(str(ROOT / f"{stage}.py"), run_name="__main__")


# ---- the parent ---------------------------------------------------------------------------------


def newest(run: Path, stage: str) -> int:
    """Updates in the newest complete state, 0 without one."""
    from kernel.run.state import newest_state

    path, _ = newest_state(run / "checkpoints" / stage / "continuous")
    return int(path.name[6:12]) if path else 0


def start(
    run: Path, stage: str, flags: list[str], moment=None, rows=0, calls=0, seconds=None
) -> int:
    """Run a stage to its end or its death; returns its status (-9: killed)."""
    command = [sys.executable, str(ROOT / f"{stage}.py")]
    if moment not in (None, "start"):
        command = [sys.executable, __file__, "--child", moment, str(rows), str(calls), stage]
    command += ["--run-dir", str(run), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if moment == "start":
        time.sleep(seconds)
        process.kill()
    output, _ = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{stage} ended with status {process.returncode}:\n{output[-2000:]}")
    return process.returncode


def differences(run: Path, reference: Path, stage: str) -> list[str]:
    """Everything of a stage's `continuous` variant that is not the same in both folders."""
    from kernel.data.files import sha256_file
    from kernel.run.state import content_hash, load_state, newest_state

    found = []
    final = []
    for folder in (run, reference):
        path, notes = newest_state(folder / "checkpoints" / stage / "continuous")
        found += notes
        final.append((path.name, content_hash(load_state(path)[0])))
    if final[0] != final[1]:
        found.append(f"{stage}: final states {final[0]} and {final[1]}")
    for name in COMPARED[stage]:
        kind = "checkpoints" if name in ("adapter.safetensors", "critic.safetensors") else "outputs"
        inner = Path(kind) / stage / "continuous" / name
        if sha256_file(run / inner) != sha256_file(reference / inner):
            found.append(f"{inner} differs")
    left = [path for path in run.rglob(".*.tmp")]
    return found + [f"{path} was left behind" for path in left]


def torture(run: Path, stage: str, total: int, kills: int, dice: random.Random) -> dict[str, int]:
    """Kill a stage `kills` times, spread over its `total` updates, then let it end."""
    done = {}
    for number in range(kills):
        before = newest(run, stage)
        target = round((number + dice.random()) * total / kills)  # updates, spread over the stage
        moments = [m for m in MOMENTS if stage == "30_ppo" or m != "rollout"]
        moment = "end" if number == kills - 1 else dice.choice(moments[:-1])
        rows = total - before if moment == "end" else max(min(target, total - 1) - before, 0)
        every = dice.choice((1, 2, 3))
        calls = 0
        if stage == "30_ppo":  # so many calls later: another token, the other optimiser
            calls = {"rollout": dice.randrange(10), "step": dice.randrange(4)}.get(moment, 0)
        status = start(
            run, stage, ["--save-every", str(every)], moment, rows, calls, dice.uniform(0, 4)
        )
        if status != -signal.SIGKILL:
            raise SystemExit(f"{stage}: {moment} after {rows} rows never came")
        done[moment] = done.get(moment, 0) + 1
        saved = f"{before} -> {newest(run, stage)} updates saved"
        print(f"  {stage} kill {number + 1}/{kills}: {moment}, {saved}", flush=True)
    start(run, stage, [])
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reference", type=Path, help="a finished tiny run")
    args = parser.parse_args()
    from kernel.data.files import read_jsonl

    began, dice = time.time(), random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        reference, run = args.reference, Path(folder) / "killed"
        if reference is None:
            reference = Path(folder) / "reference"
            for stage in ("00_prepare", *COMPARED):
                print(f"reference: {stage}", flush=True)
                start(reference, stage, ["--profile", "tiny"] if stage == "00_prepare" else [])
        run.mkdir()
        shutil.copy(reference / "config.json", run)
        shutil.copytree(reference / "data", run / "data")
        found, counts = [], {}
        for place, stage in enumerate(COMPARED):
            rows = read_jsonl(reference / "outputs" / stage / "continuous" / "metrics.jsonl")
            kills = args.kills * (place + 1) // 3 - args.kills * place // 3
            for moment, count in torture(run, stage, len(rows), kills, dice).items():
                counts[moment] = counts.get(moment, 0) + count
            found += differences(run, reference, stage)
    shown = ", ".join(f"{count} {moment}" for moment, count in sorted(counts.items()))
    if found:
        raise SystemExit(f"not equal after {args.kills} kills ({shown}): {'; '.join(found)}")
    print(f"{args.kills} kills ({shown}): states, adapters, metrics and rollouts are the same bytes "
          f"[{time.time() - began:.0f} s]")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()

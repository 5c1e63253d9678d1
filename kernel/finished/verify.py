"""Does a run folder still say the truth? Recompute its hashes, and its figures from its own records.

    bash run_all.sh verify [run folder]          # or: python -m kernel.finished.verify runs/smollm2

From the base model up: base model, corpus, SFT, reward model, PPO, generations, evaluation, probes; the
first thing that does not hold is named and ends the walk with status 1. Nothing is written but the lock,
no model is run: the scores and log-probabilities in the records are taken as measured, and everything
that follows from them by arithmetic is done again.
"""

import os
import sys
from pathlib import Path

from safetensors.torch import load_file

from kernel.data.corpora import CORPORA
from kernel.data.corpus import check_corpus
from kernel.data.files import REPOSITORY, read_json, read_jsonl, sha256_file
from kernel.finished import recompute
from kernel.finished.recompute import equal
from kernel.gate import layout
from kernel.run import lineage, state
from kernel.run.errors import one_line_errors
from kernel.run.folder import TRAINED, RunFolder
from kernel.run.lock import lock_folder
from kernel.run.machine import versions

# ---- hashes -------------------------------------------------------------------------------------


def base_model(run: RunFolder) -> str:
    lineage.check_model(run.model_dir, run.model)
    return f"{run.model_dir.name}, sha256 {run.model['base_sha256'][:16]}"


def data(run: RunFolder) -> str:
    manifest = check_corpus(run.dir / "data")
    wanted = manifest["rows"].items()  # a run without probes has an empty file of them
    rows = {name: run.rows(f"data/{name}") if count else [] for name, count in wanted}
    counts = {name: len(content) for name, content in rows.items()}
    equal("data/manifest.json rows", manifest["rows"], counts)
    if "source" in manifest:
        equal("data/manifest.json audit", manifest["audit"], layout.audit(rows))
    else:
        for corpus in CORPORA.values():
            if corpus.name == manifest["corpus"]:
                equal("data/manifest.json audit", manifest["audit"], corpus.audit(rows))
    return f"{sum(counts.values())} rows in {len(rows)} files, the audit holds"


def files(run: RunFolder, stage: str, variant: str | None) -> str:
    """The sha256 of everything a finished stage read and wrote, and its newest state."""
    record = run.record(stage, variant)
    where = f"outputs/{stage}/{variant or ''}".rstrip("/") + "/record.json"
    changed = state.identity_differences(record["identity"]["model"], run.model)
    if changed:
        raise ValueError(f"{where}: made from another base model ({changed[0]})")
    # somebody's own files outside the run folder (--reward file.py:f) may have gone on to other things
    parents = {n: h for n, h in record["identity"]["parents"].items() if not Path(n).is_absolute()}
    have = lineage.checked_inputs(run.dir, list(parents))
    changed = state.identity_differences(parents, have)
    faults = [f"{where}: read another {difference}" for difference in changed]
    faults += lineage.record_faults(run.dir, record)
    if faults:
        raise ValueError(faults[0])
    if variant:
        stored_state(run, stage, variant, record)
    return f"{len(have)} inputs, {len(record['outputs'])} outputs"


def stored_state(run: RunFolder, stage: str, variant: str, record: dict) -> None:
    """The final state: its content, the adapters made from it, and the history beside it."""
    checkpoints, outputs = (run.dir / kind / stage / variant for kind in ("checkpoints", "outputs"))
    path, notes = state.newest_state(checkpoints, outputs)
    if path is None or notes:
        raise ValueError(f"{checkpoints}: {'; '.join(notes) or 'no state'}")
    content, identity = state.load_state(path)
    if state.content_hash(content) != read_json(state.manifest_path(path))["content_sha256"]:
        raise ValueError(f"{path}: its content is not what the manifest says")
    changed = state.identity_differences(identity, record["identity"])
    if changed:
        raise ValueError(f"{path}: another identity than its record ({changed[0]})")
    equal(f"{outputs}/metrics.jsonl", read_jsonl(outputs / "metrics.jsonl"), content["history"])
    roles = content.get("roles") or content
    for file, role in (("adapter", stage_role(stage)), ("critic", "critic")):
        saved = checkpoints / f"{file}.safetensors"
        if saved.is_file() and (found := state.differences(load_file(saved), roles[role])):
            raise ValueError(f"{saved}: not the tensors of {path.name} ({found[0]})")


def stage_role(stage: str) -> str:
    return "reward" if stage.startswith("20_reward") else "actor"


def proof(run: RunFolder, stage: str) -> str:
    path = run.dir / "outputs" / stage / "check" / "proof.json"
    stored = read_json(path)
    now = lineage.compare_variants(
        run.dir, stage, tuple(name for name in stored["sha256"]["resume"] if name != "state")
    )
    if not now["equal"]:
        raise ValueError(f"{path}: resume and continuous differ in {now['differences'][0]}")
    equal(str(path), stored, now)
    return f"resume equals continuous in {now['leaves']} tensors, counters and history entries"


# ---- the walk -----------------------------------------------------------------------------------


def verify(run: RunFolder) -> list[str]:
    """Print a line for all that holds; returns what is not there yet. Raises ValueError at a fault."""
    missing = []

    def held(name: str, check, *args) -> None:
        try:
            found = check(run, *args)
        except (ValueError, OSError):
            raise
        except Exception as error:  # a file that is readable, but not as its maker writes it
            raise ValueError(f"{name}: malformed ({type(error).__name__}: {error})") from error
        print(f"  holds  {name:<22} {found}", flush=True)

    held("base model", base_model)
    held("corpus", data)
    further = {
        "10_sft": [(recompute.schedule, "10_sft")],
        "20_reward": [(recompute.schedule, "20_reward")],
        "30_ppo": [(recompute.schedule, "30_ppo"), (recompute.rollouts,)],
        "40_generate": [(recompute.generations,)],
        "50_evaluate": [(recompute.evaluation,)],
        "60_probe": [(recompute.probes,)],
    }
    for stage, checks in further.items():
        variants = ("continuous", "interrupt", "resume") if stage in TRAINED else (None,)
        finished = [variant for variant in variants if run.record(stage, variant)]
        missing += [f"{stage} {v or ''}".strip() for v in variants if v not in finished]
        for variant in finished:
            held(f"{stage} {variant or ''}", files, stage, variant)
        if (run.dir / "outputs" / stage / "check" / "proof.json").is_file():
            held(f"{stage} check", proof, stage)
        elif stage in TRAINED:
            missing.append(f"{stage} check")
        for check, *args in checks if variants[0] in finished else []:
            held(f"  {check.__name__}", check, *args)
    for record in sorted((run.dir / "outputs").glob("*/*/*/record.json")):  # runs with --name
        stage, name, variant = record.parts[-4:-1]
        held(f"{stage} {name} {variant}", files, f"{stage}/{name}", variant)
    return missing


def other_code(run: RunFolder) -> str:
    """What need not hold: code and library versions of the run that are not today's, by name."""
    changed = set()
    for path in (run.dir / "outputs").glob("**/record.json"):
        try:
            identity = read_json(path)["identity"]
            then = {key: identity[key] for key in ("code", "versions")}
        except (ValueError, KeyError, TypeError):
            continue  # the walk will name it
        paths = {name: REPOSITORY / name for name in then["code"]}
        now = {
            "code": {name: sha256_file(path) for name, path in paths.items() if path.is_file()},
            "versions": versions(),
        }
        changed |= {line.split(":")[0] for line in state.identity_differences(then, now)}
    return ", ".join(sorted(name.removeprefix("code.") for name in changed))


def main() -> None:
    one_line_errors("verify")
    if len(sys.argv) != 2:
        raise ValueError("give one run folder: python -m kernel.finished.verify runs/smollm2")
    folder = Path(sys.argv[1]).resolve()
    run = RunFolder(folder)
    if os.access(folder / ".lock", os.W_OK):  # somebody working in it would look like a fault
        lock_folder(folder)
    print(f"verify: {folder}")
    if changed := other_code(run):
        print(f"  note: this is not the code (or library versions) that made it: {changed}")
    missing = verify(run)
    for name in missing:
        print(f"  not finished: {name}")
    print("verify: everything that is there holds" if missing else "verify: the whole run holds")


if __name__ == "__main__":
    main()

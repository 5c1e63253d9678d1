"""Which file came from which: records of finished stages, checked inputs, two variants compared.

Every finished stage leaves outputs/<stage>[/<variant>]/record.json with the sha256 of each file it read
and each file it wrote. A stage trusts a file of the run folder only while the record of its maker, or
the corpus manifest, says the same sha256.
"""

import sys
from pathlib import Path

from kernel.data.base import model_sha256
from kernel.data.files import REPOSITORY, inside, read_json, sha256_file
from kernel.run import state


def code_sha256(stage: str) -> dict[str, str]:
    """sha256 of the stage's script and of every kernel file it has imported, by relative path.

    Without the profiles: they are data, and the values that a stage took from them are in its settings.
    Without the rooms' __init__ files: they hold nothing but a description.
    """
    loaded = [module for name, module in sys.modules.items() if name.startswith("kernel.")]
    paths = {Path(module.__file__) for module in loaded if getattr(module, "__file__", None)}
    paths = {path for path in paths if path.name not in ("profiles.py", "__init__.py")}
    paths.add(REPOSITORY / f"{stage}.py")
    return {path.relative_to(REPOSITORY).as_posix(): sha256_file(path) for path in sorted(paths)}


def maker(name: str) -> str:
    """The stage that makes a file of the run folder, and its variant if it has one."""
    kind, *rest = Path(name).parts
    if kind not in ("checkpoints", "outputs"):
        return "00_prepare"
    return "/".join(rest[:-1])


def program_of(stage: str) -> str:
    """The command that makes a stage's results, e.g. of "20_reward/helpful/continuous"."""
    program, *named = stage.split("/")
    return f"{program}.py --name {named[0]}" if len(named) > 1 else f"{program}.py"


def check_model(folder: Path, recorded: dict[str, str]) -> None:
    """Raises ValueError unless the folder is the base model that 00_prepare.py recorded."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: the base model is missing; run 00_prepare.py again")
    changed = state.identity_differences(recorded, model_sha256(folder))
    if changed:
        raise ValueError(
            f"{folder} is not the base model of this run; it changed since 00_prepare.py recorded it "
            f"({'; '.join(changed)})"
        )


def checked_inputs(run_dir: Path, names: list[str]) -> dict[str, str]:
    """sha256 of each input, after its maker's record or the corpus manifest said the same.

    Raises ValueError naming the file, what is wrong with it and which stage to run.
    """
    found = {}
    for name in names:
        if Path(name).is_absolute():  # somebody's own file, with no record of who made it
            if not Path(name).is_file():
                raise ValueError(f"{name} is missing")
            found[name] = sha256_file(Path(name))
            continue
        path, stage = inside(run_dir, name), maker(name)
        program = program_of(stage)
        record = run_dir / "outputs" / stage / "record.json"
        if not path.is_file() or (stage != "00_prepare" and not record.is_file()):
            what = "missing" if not path.is_file() else "not finished"
            raise ValueError(f"{path} is {what}: run {program} first")
        found[name] = sha256_file(path)
        if stage == "00_prepare":
            wanted = read_json(run_dir / "data" / "manifest.json")["sha256"]
            want, cure = wanted.get(name.removeprefix("data/")), "use a new --run-dir"
        else:
            want, cure = read_json(record)["outputs"].get(name), f"run {program} --redo"
        if found[name] != want:
            raise ValueError(
                f"{path}: sha256 {str(want)[:16]} when {program} wrote it -> {found[name][:16]} now "
                f"(damaged or edited); {cure}"
            )
    return found


def record_faults(run_dir: Path, record: dict) -> list[str]:
    """Outputs of a finished stage that are gone or no longer what its record says."""
    faults = []
    for name, want in record["outputs"].items():
        path = inside(run_dir, name)
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif (have := sha256_file(path)) != want:
            faults.append(f"{name}: sha256 {want[:16]} -> {have[:16]}")
    return faults


def compare_variants(run_dir: Path, stage: str, files: tuple[str, ...]) -> dict:
    """The exact check: did resume and continuous end in the same bits?

    Returns equal, leaves (how many tensors, counters and history entries were compared), differences,
    sha256 per variant of the state's content and of each file.
    """
    contents, hashes = {}, {}
    for variant in ("resume", "continuous"):
        checkpoints = run_dir / "checkpoints" / stage / variant
        outputs = run_dir / "outputs" / stage / variant
        path, _ = state.newest_state(checkpoints)
        if path is None or not (outputs / "record.json").is_file():
            raise ValueError(f"nothing to compare: run {stage}.py --variant {variant} first")
        contents[variant], _ = state.load_state(path)
        hashes[variant] = {"state": state.content_hash(contents[variant])}
        for name in files:
            folder = checkpoints if name.endswith(".safetensors") else outputs
            hashes[variant][name] = sha256_file(inside(folder, name))
    found = state.differences(contents["resume"], contents["continuous"])
    found += [
        f"file {name}" for name in files if hashes["resume"][name] != hashes["continuous"][name]
    ]
    leaves = sum(1 for _ in state.walk(contents["resume"]))
    return {"equal": not found, "leaves": leaves, "differences": found, "sha256": hashes}

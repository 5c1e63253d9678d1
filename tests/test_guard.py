"""Proves that a stage reaches only what it declared, by any road that goes through Python, and that the
stages declare no held-out file before generation and no label before evaluation. Case B10.

An audit hook cannot be removed, so every enclosed attempt runs in a process of its own. What the stages
declare is read from their source, not imported."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernel.data.corpus import pair_files
from kernel.reward import reward_files
from kernel.run.profiles import PROFILES

ROOT = Path(__file__).resolve().parents[1]
LEARNING = ("10_sft", "20_reward", "30_ppo")
SECRET = "held-out words"
ANSWER = "outputs/40_generate/generations.jsonl"
HELDOUT = [f"data/heldout/{name}.jsonl" for name in ("prompts", "labels", "pairs", "probes")]
FILES = [
    "config.json",
    "data/manifest.json",
    "data/train/demonstrations.jsonl",
    "data/train/pairs.jsonl",
    "data/train/prompts.jsonl",
    "data/validation/pairs.jsonl",
    "checkpoints/10_sft/continuous/adapter.safetensors",
    "checkpoints/20_reward/continuous/adapter.safetensors",
    "checkpoints/30_ppo/continuous/adapter.safetensors",
    "outputs/30_ppo/continuous/rollouts.jsonl",
    ANSWER,
    "outputs/50_evaluate/answers.jsonl",
    "outputs/50_evaluate/pairs.jsonl",
    *HELDOUT,
]


def declared(stage: str) -> tuple[list[str], list[str]]:
    """Reads and writes that a stage script hands to `begin`, from its top-level literals and names.

    Where the inputs depend on the settings, `reads(settings)` stands in the place of a list.
    """
    known = {"reward_files": reward_files, "pair_files": pair_files}

    def value(node):
        if isinstance(node, ast.Name):
            return known[node.id]
        if isinstance(node, ast.Call):  # POLICIES.values()
            assert node.func.attr == "values" and not node.args
            return list(value(node.func.value).values())
        if isinstance(node, ast.List):
            items = []
            for item in node.elts:
                starred = isinstance(item, ast.Starred)
                items += value(item.value) if starred else [value(item)]
            return items
        return ast.literal_eval(node)

    for node in ast.parse((ROOT / f"{stage}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            names, parts = node.targets[:1], [node.value]
            if isinstance(names[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                names, parts = names[0].elts, node.value.elts
            for name, part in zip(names, parts):
                if isinstance(name, ast.Name) and name.id.isupper():
                    known[name.id] = value(part)
                if isinstance(name, ast.Name) and name.id == "stage":
                    assert part.func.attr == "begin" and value(part.args[0]) == stage
                    reads, writes = map(value, part.args[3:5])
        if isinstance(node, ast.FunctionDef) and node.name == "reads":
            exec(compile(ast.Module([node], []), stage, "exec"), known)
            sections = PROFILES["smollm2"]
            known["reads"] = known["reads"]({**sections["reward"], **sections["ppo"]})
    return reads, writes


@pytest.fixture
def run(tmp_path) -> Path:
    """runs/mine with a file of every kind, and a complete neighbour runs/other."""
    for name in ("mine", "other"):
        for file in FILES:
            path = tmp_path / "project" / "runs" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            words = SECRET if "heldout" in file or "outputs/4" in file else "open to all"
            path.write_text(words, encoding="utf-8")
    return tmp_path / "project" / "runs" / "mine"


HEAD = """
import os, sys
from pathlib import Path
import json
from kernel.run import guard
run_dir, reads, writes, targets, code = json.loads(sys.argv[1])
guard.enclose(Path(run_dir), ["config.json", *reads], writes)
run, own = Path(run_dir), Path(run_dir) / writes[0]
for target in targets:
    try:
        exec(code)
        print("not refused")
    except PermissionError as error:
        assert str(error).startswith("this stage"), error
        print("refused")
"""


def enclosed(run: Path, stage: str, code: str, *targets: Path | str) -> subprocess.CompletedProcess:
    """Run `code` once per target as `stage` is enclosed; it sees run, own (its first folder), target."""
    reads, writes = declared(stage)
    for folder in writes:
        (run / folder).mkdir(parents=True, exist_ok=True)
    arguments = json.dumps([str(run), reads, writes, list(map(str, targets or [""])), code])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", HEAD, arguments],
        capture_output=True, text=True, env=environment, cwd=run.parent.parent, timeout=120,
    )


def refused(run: Path, stage: str, code: str, *targets: Path | str) -> None:
    done = enclosed(run, stage, code, *targets)
    assert done.stdout.splitlines() == ["refused"] * len(targets), done.stdout + done.stderr
    assert SECRET not in done.stderr


def works(run: Path, stage: str, code: str, *targets: Path | str) -> None:
    done = enclosed(run, stage, code, *targets)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "not refused", done.stdout


# ---- what the stages declare ----------------------------------------------------------------------


@pytest.mark.parametrize("stage", LEARNING)
def test_a_learning_stage_declares_nothing_heldout(stage):
    reads, writes = declared(stage)
    assert reads and writes
    assert not [n for n in reads + writes if "heldout" in n or re.match(r"outputs/[456]0", n)]


def test_generation_declares_prompts_and_two_adapters_only():
    reads, writes = declared("40_generate")
    assert sorted(reads) == [
        "checkpoints/10_sft/continuous/adapter.safetensors",
        "checkpoints/30_ppo/continuous/adapter.safetensors",
        "data/heldout/prompts.jsonl",
    ]
    assert writes == ["outputs/40_generate"]


def test_probes_are_read_by_the_probe_stage_alone():
    readers = [
        stage
        for stage in (*LEARNING, "40_generate", "50_evaluate", "60_probe")
        if "data/heldout/probes.jsonl" in declared(stage)[0]
    ]
    assert readers == ["60_probe"]


@pytest.mark.parametrize("stage", (*LEARNING, "40_generate", "50_evaluate", "60_probe"))
def test_a_stage_writes_only_below_its_own_name(stage):
    assert {Path(name).name for name in declared(stage)[1]} == {stage}
    source = (ROOT / f"{stage}.py").read_text(encoding="utf-8")
    assert source.count(".begin(") == 1  # nothing else is handed over
    assert ("shown=" in source) == (stage == "60_probe")  # the last one alone looks at more


# ---- enclosed: every learning stage, every closed file ------------------------------------------------

EACH = """
found = {}
for name in json.loads(target):
    try:
        found[name] = open(run / name).read()
    except PermissionError as error:
        found[name] = None
print(json.dumps(found))
"""


@pytest.mark.parametrize("stage", (*LEARNING, "40_generate", "50_evaluate", "60_probe"))
def test_exactly_the_declared_files_open(run, stage):
    done = enclosed(run, stage, EACH, json.dumps(FILES))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    reads, writes = declared(stage)
    own = tuple(f"{folder}/" for folder in writes)
    wanted = {name for name in FILES if name in ("config.json", *reads) or name.startswith(own)}
    assert {name for name, words in found.items() if words} == wanted
    if stage in LEARNING:
        assert not wanted & {*HELDOUT, ANSWER}
    if stage == "40_generate":
        assert wanted & set(HELDOUT) == {HELDOUT[0]}


# ---- roads around it -------------------------------------------------------------------------------

ROADS = {
    "open": "print(open(target).read())",
    "binary": "print(open(target, 'rb').read())",
    "unbuffered": "import io; print(io.FileIO(target).read())",
    "open_code": "import io; print(io.open_code(target).read())",
    "os.open": "print(os.read(os.open(target, os.O_RDONLY), 99))",
    "pathlib": "print(Path(target).read_text())",
    "PathLike to FileIO": "import io; print(io.FileIO(Path(target)).read())",
    "bytes": "print(open(os.fsencode(target)).read())",
    "opener": "print(open(target, opener=lambda p, f: os.open(p, f)).read())",
    "relative": "print(open(os.path.relpath(target)).read())",
    "dots": "print(open(own / '..' / '..' / os.path.relpath(target, run)).read())",
    "dots and slashes": "print(open(f'{own}/./../..//{os.path.relpath(target, run)}').read())",
    "chdir": "os.chdir(os.path.dirname(target)); print(open(os.path.basename(target)).read())",
    "chdir, os.open": "os.chdir(os.path.dirname(target)); os.open(os.path.basename(target), 0)",
    "fchdir": "os.fchdir(os.open('/', 0)); print(open(os.path.relpath(target, '/')).read())",
    "dir_fd": "d = os.open('/', 0); print(os.read(os.open(target[1:], 0, dir_fd=d), 99))",
    "dir_fd of its own folder":
        "d = os.open(own, 0); print(os.read(os.open(os.path.relpath(target, own), 0, dir_fd=d), 99))",
    "dir_fd of the folder": "os.open(os.path.dirname(target), os.O_RDONLY)",
    "/proc/self/cwd": "print(open('/proc/self/cwd/' + os.path.relpath(target)).read())",
    "/proc/self/root": "print(open('/proc/self/root' + target).read())",
    "symlink made now": "os.symlink(target, own / 'x'); print(open(own / 'x').read())",
    "symlinked folder":
        "os.symlink(run / 'data', own / 'd'); print(open(own / 'd/heldout' / Path(target).name).read())",
    "relative symlink":
        "os.symlink(os.path.relpath(target, own), own / 'x'); print(open(own / 'x').read())",
    "symlink by dir_fd":
        "d = os.open(own, 0); os.symlink(target, 'x', dir_fd=d); print(open(own / 'x').read())",
    "hard link made now": "os.link(target, own / 'x'); print(open(own / 'x').read())",
    "hard link by dir_fd":
        "d = os.open('/', 0); os.link(target[1:], own / 'x', src_dir_fd=d)",
    "rename": "os.rename(target, own / 'x'); print(open(own / 'x').read())",
    "replace": "os.replace(target, own / 'x'); print(open(own / 'x').read())",
    "rename by dir_fd":
        "d = os.open('/', 0); os.rename(target[1:], own / 'x', src_dir_fd=d)",
    "rename of the folder": "os.rename(run / 'data' / 'heldout', own / 'x')",
    "rename of the run": "os.rename(run, run.parent.parent / 'x')",
    "rename of the project":
        "old = run.parent.parent; new = old.parent / 'x'; os.rename(old, new);"
        "print(open(new / os.path.relpath(target, old)).read())",
    "removal": "os.remove(target)",
    "truncation": "os.truncate(target, 0)",
    "overwriting": "open(target, 'w')",
    "copy": "import shutil; shutil.copyfile(target, own / 'x'); print(open(own / 'x').read())",
    "move": "import shutil; shutil.move(target, own / 'x'); print(open(own / 'x').read())",
    "mmap": "import mmap; print(mmap.mmap(os.open(target, 0), 0, prot=mmap.PROT_READ)[:])",
    "runpy": "import runpy; runpy.run_path(target)",
    "import": "import importlib.util as u; s = u.spec_from_loader('x', "
        "__import__('importlib.machinery').machinery.SourceFileLoader('x', target)); "
        "s.loader.exec_module(u.module_from_spec(s))",
    "subprocess": "import subprocess; print(subprocess.run(['cat', target], capture_output=True))",
    "shell": "import subprocess; print(subprocess.getoutput(f'cat {target}'))",
    "os.system": "os.system(f'cat {target}')",
    "os.popen": "print(os.popen(f'cat {target}').read())",
    "exec": "os.execvp('cat', ['cat', target])",
    "posix_spawn": "os.posix_spawn('/bin/cat', ['cat', target], {})",
    "fork, then open": "if os.fork(): os.wait(); os._exit(0)\nprint(open(target).read())",
    "fork, then exec": "if os.fork(): os.wait(); os._exit(0)\nos.execvp('cat', ['cat', target])",
    "multiprocessing":
        "import multiprocessing as m, subprocess; c = m.get_context('spawn')\n"
        "c.Process(target=print, args=('x',)).start()",
    "fork server":
        "import multiprocessing as m; m.get_context('forkserver').Process(target=print).start()",
    "a thread":
        "import concurrent.futures as c\n"
        "with c.ThreadPoolExecutor() as pool: print(pool.submit(lambda: open(target).read()).result())",
}


@pytest.mark.parametrize("road", ROADS)
def test_no_road_leads_to_heldout_prompts(run, road):
    if "proc" in road and not Path("/proc/self/root").exists():
        pytest.skip("no /proc here")
    target = run / HELDOUT[0]
    refused(run, "30_ppo", ROADS[road], target)
    assert target.read_text(encoding="utf-8") == SECRET  # and is where it was, as it was


def test_spawn_and_a_second_interpreter_fail_in_their_own_words(run):
    target = run / HELDOUT[0]
    code = "print(os.spawnlp(os.P_WAIT, 'cat', 'cat', target))"
    done = enclosed(run, "30_ppo", code, target)
    assert done.stdout == "127\nnot refused\n"  # what a shell says: nothing was started
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    code = f"import {name} as i; i.run_string(i.create(), f'print(open({{target!r}}).read())')"
    done = enclosed(run, "30_ppo", code, target)
    assert done.returncode == 1 and "interpreter creation failed" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("stage", LEARNING)
def test_a_symlink_that_was_there_before_does_not_help(run, stage):
    own = run / declared(stage)[1][0]
    own.mkdir(parents=True, exist_ok=True)
    places = []
    for number, file in enumerate([*HELDOUT, ANSWER]):
        places.append(own / f"x{number}")
        places[-1].symlink_to(run / file)
    refused(run, stage, "print(open(target).read())", *places)


def test_a_hard_link_that_was_there_before_does_not_help(run, tmp_path):
    """Neither in an allowed folder, nor outside, nor in place of a declared file."""
    own = run / declared("10_sft")[1][0]
    own.mkdir(parents=True, exist_ok=True)
    demonstrations = run / declared("10_sft")[0][0]
    demonstrations.unlink()
    places = (own / "x", tmp_path / "x", demonstrations)
    for place in places:
        os.link(run / HELDOUT[0], place)
    refused(run, "10_sft", "print(open(target).read())", *places)


def test_heldout_files_kept_elsewhere_behind_a_symlink_are_closed_too(run, tmp_path):
    store = tmp_path / "store"
    os.rename(run / "data/heldout", store)
    (run / "data/heldout").symlink_to(store)
    refused(run, "20_reward", "print(open(target).read())", run / HELDOUT[0])


def test_a_declared_name_that_is_a_symlink_to_heldout_is_refused(run):
    demonstrations = run / declared("10_sft")[0][0]
    demonstrations.unlink()
    demonstrations.symlink_to(run / HELDOUT[0])
    refused(run, "10_sft", "print(open(target).read())", demonstrations)


def test_a_neighbour_run_is_out_of_reach(run):
    targets = [run.parent / "other" / file for file in FILES]
    refused(run, "20_reward", "print(open(target).read())", *targets)


def test_a_run_reached_through_a_symlink_is_closed_all_the_same(run, tmp_path):
    alias = tmp_path / "alias"
    alias.symlink_to(run)
    targets = run / HELDOUT[0], alias / HELDOUT[0]
    refused(alias, "10_sft", "print(open(target).read())", *targets)
    works(alias, "10_sft", "open(run / reads[0]); open(own / 'x', 'w')")


def test_a_run_that_is_not_in_runs_is_closed_too(run, tmp_path):
    elsewhere = shutil.copytree(run, tmp_path / "elsewhere")
    refused(elsewhere, "10_sft", "print(open(target).read())", elsewhere / HELDOUT[0])


def test_generation_cannot_open_labels_pairs_or_probes(run):
    targets = [run / file for file in HELDOUT[1:]]
    refused(run, "40_generate", "print(open(target).read())", *targets)
    refused(run, "40_generate", "os.rename(target, own / 'x')", *targets)


# ---- readers of numpy and torch ---------------------------------------------------------------------

LIBRARIES = """
import numpy, torch
readers = {
    "numpy.fromfile": lambda: numpy.fromfile(target, dtype=numpy.uint8),
    "numpy.memmap": lambda: numpy.memmap(target, dtype=numpy.uint8, mode="r"),
    "numpy.loadtxt": lambda: numpy.loadtxt(target, dtype=str),
    "numpy.genfromtxt": lambda: numpy.genfromtxt(target, dtype=str),
    "numpy.load": lambda: numpy.load(target),
    "torch.load": lambda: torch.load(target),
    "torch.load mmap": lambda: torch.load(target, mmap=True),
    "numpy.save": lambda: numpy.save(target, numpy.zeros(1)),
    "tofile": lambda: numpy.zeros(1).tofile(target),
}
found = {}
for name, read in readers.items():
    try:
        found[name] = str(read())
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def test_readers_of_numpy_and_torch_are_refused(run):
    done = enclosed(run, "30_ppo", LIBRARIES, run / HELDOUT[0])
    assert done.returncode == 0, done.stderr
    for reader, result in json.loads(done.stdout.splitlines()[0]).items():
        assert result.startswith("PermissionError: this stage"), (reader, result)
    assert (run / HELDOUT[0]).read_text(encoding="utf-8") == SECRET


# ---- what must go on working -----------------------------------------------------------------------


def test_a_stage_works_in_its_own_folders(run):
    """Atomic writes with fsync of the folder, appending, listing, removing; temporary files."""
    code = """
import tempfile
from kernel.data.files import write_jsonl
for folder in writes:
    path = run / folder / "continuous" / "deep" / "x.jsonl"
    write_jsonl(path, [{"a": 1}])
    write_jsonl(path, [{"a": 2}])
    with path.open("a") as file:
        file.write('{"a": 3}')
    assert path.read_text().count("a") == 2 and len(list(path.parent.iterdir())) == 1
    path.unlink()
for name in reads:
    assert (run / name).read_bytes() and open(os.path.relpath(run / name)).read()
with tempfile.TemporaryFile() as file:
    file.write(b"x")
with tempfile.NamedTemporaryFile() as file:
    assert open(file.name, "rb").read() == b""
assert open(os.devnull).read() == "" and open(target).read() == "weights"
"""
    model = run.parent.parent / "model"
    model.write_text("weights", encoding="utf-8")
    works(run, "30_ppo", code, model)


@pytest.mark.parametrize("how", [
    "open(target, 'a')", "open(target, 'r+')", "open(target, 'w')", "os.remove(target)",
    "os.open(target, os.O_RDONLY | os.O_TRUNC)", "os.open(target, os.O_WRONLY)",
    "os.truncate(target, 0)", "os.rename(target, own / 'x')", "os.rename(own / 'x', target)",
    "os.link(target, own / 'y')", "Path(target).write_text('x')",
])
def test_a_declared_read_cannot_be_written(run, how):
    targets = run / "data/train/pairs.jsonl", run / "config.json"
    refused(run, "20_reward", "(own / 'x').write_text('x')\n" + how, *targets)
    assert {target.read_text(encoding="utf-8") for target in targets} == {"open to all"}


def test_a_new_file_outside_the_own_folders_is_refused(run):
    names = "data/train/new.jsonl", "outputs/30_ppo/new", "new", "checkpoints/10_sftx"
    refused(run, "10_sft", "open(target, 'w')", *(run / name for name in names))


def test_a_hard_linked_copy_of_a_run_still_works(run):
    """cp -al runs/mine runs/other: the same inodes under the same names in both."""
    other = run.parent / "other"
    for path in other.rglob("*"):
        if path.is_file():
            path.unlink()
            os.link(run / path.relative_to(other), path)
    works(
        run,
        "10_sft",
        "[open(run / n) for n in reads]; open(own / 'continuous/adapter.safetensors')",
    )
    refused(run, "10_sft", "open(target)", other / HELDOUT[0])


# ---- as the real programs ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage, file", [("30_ppo", HELDOUT[0]), ("40_generate", HELDOUT[1])])
def test_the_real_program_is_enclosed(tmp_path, stage, file):
    """A copy of the stage with one line more, right behind the `begin` that encloses it."""
    from kernel.data.base import model_sha256
    from kernel.data.files import sha256_file
    from kernel.run.lineage import maker
    from kernel.run.profiles import PROFILES

    shutil.copytree(
        ROOT / "kernel", tmp_path / "kernel", ignore=shutil.ignore_patterns("__pycache__")
    )
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    (model / "model.safetensors").write_bytes(b"")
    run = tmp_path / "runs" / "mine"
    for name in FILES:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(SECRET, encoding="utf-8")
    corpus = [
        n.removeprefix("data/") for n in FILES if n.startswith("data/") and "manifest" not in n
    ]
    manifest = {"sha256": {name: sha256_file(run / "data" / name) for name in corpus}}
    (run / "data/manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    made = [n for n in FILES if n.startswith("checkpoints/") and stage not in n]
    for one in {maker(name) for name in made}:  # the records that the stages before would have left
        outputs = {name: sha256_file(run / name) for name in made if maker(name) == one}
        record = run / "outputs" / one / "record.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"outputs": outputs}), encoding="utf-8")
    common = {**PROFILES["tiny"]["common"], "device": "cpu", "model_dir": str(model)}
    config = {"profile": "tiny", "base": {}, "common": common, "model": model_sha256(model)}
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")

    lines = (ROOT / f"{stage}.py").read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(r"stage = \w+\.begin\(.*\)$", line))
    lines.insert(at + 1, f"print('enclosed'); print(open(stage.dir / {file!r}).read())")
    (tmp_path / f"{stage}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, f"{stage}.py", "--run-dir", str(run)],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120,
    )
    assert "enclosed" in done.stdout and SECRET not in done.stdout
    assert done.returncode == 1, done.stderr
    assert (
        f"{stage}: error: this stage did not declare that it may read {run / file}" in done.stderr
    )

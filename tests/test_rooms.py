"""Proves the plan of the house: who may open whom, and that nothing goes round in a circle.

A room is a folder of kernel/, "" its top (the arithmetic), "stage" a numbered script. `OPENS` is what a
room's files may import at their top; rooms of `LAZY` are imported inside a function or behind a flag
only, so that a stage does not carry them, and their bytes are no part of its identity.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

OPENS = {
    "": {"", "fast", "data"},
    "fast": {"", "fast"},
    "data": {"data"},
    "run": {"", "data", "run"},
    "measure": {"", "data", "measure"},
    "stage": {"", "data", "run", "measure"},
    "gate": {"data", "run", "gate"},
    "report": {"data", "run", "measure", "report"},
    "finished": {"", "data", "run", "measure", "gate", "finished"},
    "lesson": {"", "data", "run", "measure", "report", "lesson"},
}
LAZY = {"gate", "report", "finished", "lesson"}
FILES = [*sorted((ROOT / "kernel").rglob("*.py")), *sorted(ROOT.glob("[0-9]*.py"))]
FILES = [path for path in FILES if path.name != "__init__.py"]


def room(path: Path) -> str:
    return "stage" if path.parent == ROOT else path.relative_to(ROOT / "kernel").parent.name


def modules(node: ast.AST) -> list[Path]:
    """The kernel files that an import statement opens."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    paths = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("kernel")]
    return [path for path in paths if path.is_file()]


def imports(path: Path, lazily: bool) -> list[tuple[ast.AST, Path]]:
    """(statement, file) of a file's imports: those at its top, or those that run later or on a flag.

    NOTE: 60_probe.py ends with an import behind everything that its results follow from.
    """
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []
    first_code = next(
        (n.lineno for n in tree.body if not isinstance(n, (ast.Import, ast.ImportFrom, ast.Expr))), 10**6
    )
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            late = node.col_offset > 0 or node.lineno > first_code
            found += [(node, opened) for opened in modules(node) if late == lazily]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_opens_only_the_rooms_that_its_own_may_open(path):
    for node, opened in imports(path, lazily=False):
        assert room(opened) in OPENS[room(path)], f"{path.name}:{node.lineno} opens {opened.name}"
    for node, opened in imports(path, lazily=True):
        late = room(opened) in LAZY and room(path) == "stage"
        assert late or room(opened) in OPENS[room(path)], f"{path.name}:{node.lineno}"


def test_no_import_goes_round_in_a_circle():
    graph = {
        path: [opened for late in (False, True) for _, opened in imports(path, late)] for path in FILES
    }
    order = [*TopologicalSorter(graph).static_order()]  # raises CycleError with the circle
    assert len(order) == len(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_name_is_imported_from_the_file_that_makes_it(path):
    """No file is a door to another: `from kernel.x import y` finds y made in kernel/x.py."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("kernel."):
            continue
        source = ROOT / f"{node.module.replace('.', '/')}.py"
        if source.is_file():
            made = {
                name.id if isinstance(name, ast.Name) else name.name
                for statement in ast.parse(source.read_text(encoding="utf-8")).body
                for name in ast.walk(statement)
                if isinstance(name, (ast.FunctionDef, ast.ClassDef))
                or (isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
            }
            wanted = {alias.name for alias in node.names}
            assert wanted <= made, f"{path.name}:{node.lineno} takes {wanted - made} from a door"


def test_the_top_holds_the_arithmetic_alone_and_rooms_say_what_they_are_for():
    top = {path.stem for path in (ROOT / "kernel").glob("*.py")}
    assert top == {
        "__init__", "ppo", "supervised", "optim", "rollout", "score", "roles", "lora", "reward"
    }
    assert sum(len(p.read_text().splitlines()) for p in (ROOT / "kernel").glob("*.py")) <= 1000
    for path in sorted((ROOT / "kernel").glob("**/__init__.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert len(tree.body) == 1 and ast.get_docstring(tree), f"{path} holds more than its docstring"
    assert {p.parent.name for p in (ROOT / "kernel").glob("*/__init__.py")} == set(OPENS) - {"", "stage"}

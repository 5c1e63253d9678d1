"""Code that a user brings: a rubric, or a reward function, out of a Python file."""

import sys
from pathlib import Path
from types import ModuleType


def load_function(path: Path, name: str):
    """A function out of a Python file, e.g. a rubric. Raises ValueError naming the file."""
    module = ModuleType(f"{path.stem}_from_file")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and the like look their module up
    source = path.read_bytes()
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise ValueError(f"{path}: does not load ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path}: has no function '{name}'")
    return function


def load_rubric(path: Path):
    """The rubric of a corpus: rubric(prompt, response, finish_reason, row) -> dict with `success`.

    ValueError with one line, naming the file and the row, if it raises or says nothing about success.
    """
    own = load_function(path, "rubric")

    def rubric(prompt: str, response: str | None, finish_reason: str, row: dict) -> dict:
        where = f"{path}: the rubric, on row {row.get('id', '?')}"
        try:
            verdict = own(prompt, response, finish_reason, row)
        except Exception as error:
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
        if not isinstance(verdict, dict) or "success" not in verdict:
            raise ValueError(f"{where}: returned {verdict!r}, wanted a dict with 'success'")
        return verdict

    return rubric

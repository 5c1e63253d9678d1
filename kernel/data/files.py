"""Files: JSON and JSON lines, written whole or not at all, hashed, and kept inside their folder."""

import codecs
import contextlib
import hashlib
import json
import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]  # where the numbered scripts are


def check_writable(folder: Path) -> None:
    """Raises OSError now, not after hours of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test_{os.getpid()}.tmp"  # two variants may start at once
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror})") from None


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def dumps(value) -> str:
    """Strict JSON on one line: a NaN is an error here, not a bare word that no other reader takes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a UTF-8 JSONL file. Raises ValueError naming file and row."""
    rows = []
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} row {number}: not a JSON object in UTF-8 ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path} row {number}: not a JSON object")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def write_atomic(path: Path, data: bytes | str) -> None:
    """Temporary file beside the target, fsync, rename, fsync of the folder: the whole or nothing.

    Raises OSError naming the path and the cause; what was there before stays.
    """
    data = data.encode("utf-8") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, PermissionError) or not isinstance(error, OSError):
            raise
        raise OSError(f"{path}: could not be written ({error.strerror or error})") from None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path):
    """A JSON file in UTF-8. Raises ValueError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None


def write_json(path: Path, value) -> None:
    write_atomic(path, json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def as_jsonl(rows: list[dict]) -> str:
    return "".join(dumps(row) + "\n" for row in rows)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    write_atomic(path, as_jsonl(rows))


def inside(folder: Path, name: str) -> Path:
    """A file that a manifest names, as a path. Raises ValueError if it lies outside the run folder."""
    path = folder / name
    root = folder.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts or root not in path.resolve().parents:
        raise ValueError(f"{name}: named by a manifest, but it lies outside {folder}")
    return path

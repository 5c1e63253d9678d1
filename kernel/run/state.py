"""Complete resume states: written durably, checked on reading, compared bit for bit.

A state is one file, written by torch.save and gzip (level 1) and loaded weights-only, and a
JSON manifest with its sha256 that is written last: a state without a matching manifest does not count.
"""

import gzip
import hashlib
import io
import json
import random
from pathlib import Path

import numpy
import torch

from kernel.data.files import read_json, sha256_file, write_atomic, write_json

KEEP = 2  # the newest complete states; older ones go only after a new one is durable


def rng_state() -> dict:
    """Python's, NumPy's and torch's global random states as plain numbers and tensors."""
    version, internal, gauss = random.getstate()
    np_state = numpy.random.get_state(legacy=False)
    return {
        "python": [version, list(internal), gauss],
        "numpy": {
            "key": np_state["state"]["key"].tolist(),
            "pos": int(np_state["state"]["pos"]),
            "has_gauss": int(np_state["has_gauss"]),  # normal draws come in pairs: the second one
            "gauss": float(np_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_rng_state(state: dict) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np_state = state["numpy"]
    key = numpy.array(np_state["key"], dtype=numpy.uint32)
    numpy.random.set_state(
        ("MT19937", key, np_state["pos"], np_state["has_gauss"], np_state["gauss"])
    )
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def state_path(folder: Path, updates: int) -> Path:
    return folder / f"state_{updates:06d}.pt.gz"


def updates_of(path: Path) -> int:
    """Inverse of `state_path`."""
    return int(path.name.removeprefix("state_").removesuffix(".pt.gz"))


def save_state(
    folder: Path, updates: int, state: dict, identity: dict, marks: dict | None = None
) -> Path:
    """Write a state and then its manifest; afterwards drop all but the newest KEEP states.

    marks: per record file, its length and sha256 at this state (`Records.mark`).
    """
    path = state_path(folder, updates)
    buffer = io.BytesIO()
    torch.save(compact(state), buffer)
    packed = gzip.compress(buffer.getvalue(), compresslevel=1, mtime=0)
    write_atomic(path, packed)
    manifest = {
        "updates": updates,
        "bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
        "content_sha256": content_hash(state),
        "marks": marks or {},
        "identity": identity,
    }
    write_json(manifest_path(path), manifest)
    # A higher number is a damaged state that was passed over; it must not push out this one.
    known = [p for p in sorted(folder.glob("state_*.pt.gz")) if p.name <= path.name]
    for old in known[:-KEEP]:
        manifest_path(old).unlink(missing_ok=True)  # first: a state without manifest does not count
        old.unlink()
    return path


def compact(value):
    """The same nested state without views: torch.save would write the whole tensor behind a slice."""
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(compact(item) for item in value)
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        return value.clone()
    return value


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".pt.gz") + ".json")


def newest_state(folder: Path, outputs: Path | None = None) -> tuple[Path | None, list[str]]:
    """The complete state with the highest number, and a note for each damaged one passed over.

    With `outputs`, the record files there must also begin with what the state saw written.
    """
    notes = []
    # Six digits in every name, so text order is the order of the numbers.
    for path in sorted(folder.glob("state_*.pt.gz"), reverse=True):
        fault = state_fault(path) or (outputs and record_fault(path, outputs))
        if fault is None:
            return path, notes
        notes.append(f"passed over {path.name}: {fault}")
    return None, notes


def state_fault(path: Path) -> str | None:
    """Why a state cannot be trusted, or None."""
    try:
        manifest = json.loads(manifest_path(path).read_text(encoding="utf-8"))
        if path.is_symlink():
            return "it is a symlink"
        own = path.name == state_path(path.parent, manifest["updates"]).name
        if not own or "identity" not in manifest:
            return "its manifest is another state's"
        if path.stat().st_size != manifest["bytes"]:
            return f"{path.stat().st_size} bytes, its manifest says {manifest['bytes']}"
        if sha256_file(path) != manifest["sha256"]:
            return "its sha256 is not the manifest's (damaged)"
    except FileNotFoundError:
        return "it has no manifest (the save was cut short)"
    except (ValueError, KeyError, TypeError, OSError):
        return "it or its manifest is not readable"
    return None


def marks(path: Path) -> dict[str, dict]:
    """How far each record file went when this state was saved."""
    return read_json(manifest_path(path))["marks"]


def marked_part(path: Path, mark: dict) -> bytes:
    """A record file up to a mark. Raises ValueError if it is shorter or another one."""
    content = path.read_bytes()[: mark["bytes"]] if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != mark["sha256"]:
        raise ValueError(f"{path.name} does not begin with what was written up to this state")
    return content


def record_fault(path: Path, outputs: Path) -> str | None:
    """Why the record files in `outputs` cannot be continued from this state, or None."""
    try:
        for name, mark in marks(path).items():
            marked_part(outputs / Path(name).name, mark)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)
    return None


def load_state(path: Path) -> tuple[dict, dict]:
    """(state, identity) after the checksum held. Raises ValueError; never runs a pickle's code."""
    fault = state_fault(path)
    if fault is not None:
        raise ValueError(f"{path}: {fault}")
    try:
        with gzip.open(path, "rb") as file:
            state = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: refused ({reason})") from None
    return state, json.loads(manifest_path(path).read_text(encoding="utf-8"))["identity"]


def walk(value, name: str = ""):
    """(name, leaf) for every leaf of nested dicts and lists, in a fixed order."""
    if isinstance(value, dict):
        if not value:
            yield f"{name}.keys", 0  # an empty dict is not the same as none
        for key in sorted(value, key=str):
            yield from walk(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        yield f"{name}.len", len(value)
        for index, item in enumerate(value):
            yield from walk(item, f"{name}[{index}]")
    else:
        yield name, value


def leaf_bytes(leaf) -> bytes:
    """A leaf's type and exact bits: -0.0 differs from 0.0, and a NaN equals itself."""
    if isinstance(leaf, torch.Tensor):
        tensor = leaf.detach().cpu().contiguous()
        bits = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + bits
    return f"{type(leaf).__name__} {leaf!r}".encode()


def content_hash(state: dict) -> str:
    """sha256 over every leaf's name and bits; independent of file format and compression."""
    digest = hashlib.sha256()
    for name, leaf in walk(state):
        digest.update(name.encode() + b"\0" + leaf_bytes(leaf) + b"\n")
    return digest.hexdigest()


def differences(a: dict, b: dict, limit: int = 5) -> list[str]:
    """Names of leaves that are not bit for bit equal, or stand on one side only."""
    left, right = dict(walk(a)), dict(walk(b))
    found = []
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            found.append(f"{name} (on one side only)")
        elif leaf_bytes(left[name]) != leaf_bytes(right[name]):
            shown = (
                "" if isinstance(left[name], torch.Tensor) else f": {left[name]} != {right[name]}"
            )
            found.append(name + shown)
        if len(found) == limit:
            break
    return found


def identity_differences(saved: dict, now: dict) -> list[str]:
    """`key: old -> new` for every difference between two identities."""
    left, right = dict(walk(saved)), dict(walk(now))
    missing = "(absent)"
    return [
        f"{key}: {left.get(key, missing)} -> {right.get(key, missing)}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, missing) != right.get(key, missing)
    ]

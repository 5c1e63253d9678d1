"""Proves that a resume state comes back bit for bit or not at all: damaged, half-written, swapped,
linked or hostile files are passed over or refused, and the last good state survives every failure.
Cases B12, B13, B28 (identities), B44, B46 (NaN), B47 (slices)."""

import gzip
import hashlib
import json
import os
import pickle
import random
import shutil
import struct

import numpy
import pytest
import torch

from kernel.data import files
from kernel.run import state
from kernel.run.state import (
    KEEP,
    content_hash,
    differences,
    identity_differences,
    load_rng_state,
    load_state,
    manifest_path,
    newest_state,
    rng_state,
    save_state,
    state_fault,
    state_path,
)

IDENTITY = {"profile": "tiny", "sft": {"learning_rate": 0.01}, "versions": {"torch": "2"}}


def example(update: int = 3) -> dict:
    """Every kind of leaf a stage saves, and the numbers that are easily lost."""
    odd = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1 / 3]
    return {
        "actor": {
            "lm.q_proj.A": torch.tensor(odd),
            "lm.q_proj.B": torch.full((2, 3), update + 0.5),
        },
        "half": torch.tensor(odd).bfloat16(),
        "moments": {"a": {"step": torch.tensor(7.0), "exp_avg": torch.ones(1)}, "b": {}},
        "draws": {
            "permutation": torch.randperm(9),
            "cursor": 4,
            "mask": torch.tensor([True, False]),
        },
        "generator": torch.Generator().manual_seed(5).get_state(),
        "empty": torch.zeros(0, 4),
        "history": [{"update": 1, "loss": 0.1 + 0.2}, {"update": 2, "loss": -0.0}],
        "consumed": ["0001-0", "ünïcode"],
        "nothing": None,
        "flag": True,
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def complete(folder, *updates: int) -> None:
    """Complete states, written aside so that none of them drops another."""
    folder.mkdir(exist_ok=True)
    for update in updates:
        aside = save_state(folder / "aside", update, example(update), IDENTITY)
        for path in (aside, manifest_path(aside)):
            path.rename(folder / path.name)
        assert not list((folder / "aside").iterdir())
    (folder / "aside").rmdir()


# ---- there and back ------------------------------------------------------------------------------


def test_roundtrip_is_bitwise(tmp_path):
    saved = example()
    path = save_state(tmp_path, 3, saved, IDENTITY)
    back, identity = load_state(path)
    assert identity == IDENTITY
    assert differences(saved, back) == [] and content_hash(saved) == content_hash(back)
    for left, right in ((saved["half"], back["half"]), (saved["empty"], back["empty"])):
        assert left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    A = back["actor"]["lm.q_proj.A"]
    # by hand, little-endian: 0.0, -0.0, the quiet NaN, the infinities, the smallest number
    assert bits(A)[:20] == struct.pack("<5I", 0, 0x80000000, 0x7FC00000, 0x7F800000, 0xFF800000)
    assert bits(A)[20:24] == struct.pack("<I", 1)
    assert str(back["history"][1]["loss"]) == "-0.0" and back["history"][0]["loss"] == 0.1 + 0.2
    assert back["moments"]["b"] == {} and back["flag"] is True and back["nothing"] is None
    assert json.loads(manifest_path(path).read_text())["content_sha256"] == content_hash(back)


def test_two_saves_of_one_state_are_the_same_bytes(tmp_path):
    saved = example()
    one = save_state(tmp_path / "one", 3, saved, IDENTITY)
    two = save_state(tmp_path / "two", 3, saved, IDENTITY)
    assert one.read_bytes() == two.read_bytes()  # no time stamp in the archive


def test_a_slice_comes_back_as_what_it_shows(tmp_path):  # case B47
    big = torch.arange(100_000.0).view(1000, 100)
    saved = {"row": big[7], "column": big.T[3]}
    back, _ = load_state(save_state(tmp_path, 1, saved, IDENTITY))
    assert differences(saved, back) == []
    assert content_hash(saved) == content_hash({"row": big[7].clone(), "column": big[:, 3].clone()})


# ---- the hash and the list of differences --------------------------------------------------------


def test_a_slice_does_not_drag_its_whole_tensor_into_the_file(tmp_path):  # case B47
    row = torch.randn(1000, 100)[7]
    path = save_state(tmp_path, 1, {"rows": [row], "pair": (row, 2)}, IDENTITY)
    assert path.stat().st_size < 10_000
    state, _ = load_state(path)
    assert torch.equal(state["rows"][0], row) and state["pair"][1] == 2


def test_hash_ignores_the_order_of_keys():
    saved = example()
    turned = {key: saved[key] for key in reversed(saved)}
    turned["actor"] = {key: saved["actor"][key] for key in reversed(saved["actor"])}
    assert content_hash(turned) == content_hash(saved) and differences(turned, saved) == []


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(torch.int32)[-1] ^= 1
    return flipped


T = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("left, right", [
    (T, one_bit(T)),
    (T, T.double()),
    (T, T.view(torch.int32)),  # the same bits, another dtype
    (T.half(), T.bfloat16()),
    (T, T.view(2, 2)),
    (torch.zeros(0, 4), torch.zeros(0, 5)),
    (torch.zeros(1), torch.zeros(())),
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.tensor([0.0]).bfloat16(), torch.tensor([-0.0]).bfloat16()),
    (0.0, -0.0),
    (1, 1.0), (1, True), (1, "1"), (None, "None"), ([], None), ({}, None), ({}, []),
    ([1, 2], [2, 1]), ([1], [1, 1]), ({"a": 1}, {"b": 1}),
    (0.1 + 0.2, 0.3),
])
def test_hash_and_differences_see(left, right):
    a, b = {"x": {"y": left}, "z": 0}, {"x": {"y": right}, "z": 0}
    assert content_hash(a) != content_hash(b)
    found = differences(a, b)
    assert found and all(text.startswith("x.y") for text in found)


@pytest.mark.parametrize("same", [float("nan"), torch.tensor([float("nan")]), T.bfloat16()])
def test_a_number_equals_itself_even_if_it_is_no_number(same):
    again = same.clone() if isinstance(same, torch.Tensor) else float("nan")
    assert differences({"x": same}, {"x": again}) == []
    assert content_hash({"x": same}) == content_hash({"x": again})


def test_hash_ignores_how_a_tensor_lies_in_memory():
    table = torch.arange(6.0).view(2, 3)
    assert content_hash({"x": table.T.contiguous().T}) == content_hash({"x": table})


def test_differences_names_each_leaf_and_stops_at_the_limit():
    a, b = example(3), example(4)
    b["draws"] = {**a["draws"], "cursor": 5}
    b["history"] = [a["history"][0], {"update": 2, "loss": 0.25}]
    del b["flag"]
    b["moments"]["b"] = {"step": torch.tensor(1.0)}
    assert differences(a, b, limit=99) == [
        "actor.lm.q_proj.B",
        "draws.cursor: 4 != 5",
        "flag (on one side only)",
        "history[1].loss: -0.0 != 0.25",
        "moments.b.keys (on one side only)",
        "moments.b.step (on one side only)",
    ]
    assert len(differences(a, b, limit=2)) == 2


def test_identity_differences_print_key_old_new():  # case B28
    saved = {
        "profile": "tiny",
        "sft": {"learning_rate": 0.01, "batch": 8},
        "versions": {"torch": "2"},
    }
    now = {"profile": "tiny", "sft": {"learning_rate": 0.02, "batch": 8}, "common": {"threads": 1}}
    assert identity_differences(saved, saved) == []
    assert identity_differences(saved, now) == [
        "common.threads: (absent) -> 1",
        "sft.learning_rate: 0.01 -> 0.02",
        "versions.torch: 2 -> (absent)",
    ]
    through_json = json.loads(json.dumps({**saved, "list": [1, 2]}))
    assert identity_differences(through_json, {**saved, "list": (1, 2)}) == []


# ---- damaged states: case B12 --------------------------------------------------------------------


def test_the_newest_complete_state_wins_over_a_half_written_one(tmp_path):
    complete(tmp_path, 200, 900, 1000, 1100)
    manifest_path(state_path(tmp_path, 1100)).unlink()  # killed between the state and its manifest
    path, notes = newest_state(tmp_path)
    assert path == state_path(tmp_path, 1000)
    assert notes == ["passed over state_001100.pt.gz: it has no manifest (the save was cut short)"]
    assert torch.equal(load_state(path)[0]["actor"]["lm.q_proj.B"], torch.full((2, 3), 1000.5))


def test_text_order_is_the_order_of_the_numbers(tmp_path):
    numbers = [2, 9, 10, 99, 100, 900, 1000, 99_999, 100_000, 999_999]
    names = [state_path(tmp_path, number).name for number in numbers]
    assert names == sorted(names) and len(set(map(len, names))) == 1
    complete(tmp_path, 90, 900, 1000)  # as bare numbers "900" comes behind "1000"
    assert newest_state(tmp_path)[0] == state_path(tmp_path, 1000)


def test_neither_time_nor_order_of_writing_decides(tmp_path):
    complete(tmp_path, 1000, 200, 900)
    os.utime(state_path(tmp_path, 200), (2e9, 2e9))
    assert newest_state(tmp_path)[0] == state_path(tmp_path, 1000)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def one_byte(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def no_manifest(path):
    manifest_path(path).unlink()


def cut_manifest(path):
    cut(manifest_path(path))


def manifest_of_the_previous(path):
    shutil.copy(manifest_path(state_path(path.parent, 900)), manifest_path(path))


def previous_under_this_name(path):
    """State and manifest fit each other, but are 900's: its number would be taken from the name."""
    shutil.copy(state_path(path.parent, 900), path)
    manifest_of_the_previous(path)


def manifest_of_another_kind(path):
    manifest_path(path).write_text("[1, 2]", encoding="utf-8")


def manifest_without_identity(path):
    manifest = json.loads(manifest_path(path).read_text())
    del manifest["identity"]
    files.write_json(manifest_path(path), manifest)


def manifest_not_text(path):
    manifest_path(path).write_bytes(b"\xff\xfe\x00")


def symlink(path):
    hoard = path.parent / "elsewhere.gz"
    path.rename(hoard)
    path.symlink_to(hoard)


def dangling_symlink(path):
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = [cut, emptied, longer, one_byte, no_manifest, cut_manifest, manifest_of_the_previous,
           previous_under_this_name, manifest_of_another_kind, manifest_without_identity,
           manifest_not_text, symlink, dangling_symlink, a_folder]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_passed_over_with_a_note(tmp_path, damage):
    complete(tmp_path, 900, 1000)
    newest = state_path(tmp_path, 1000)
    damage(newest)
    path, notes = newest_state(tmp_path)
    assert path == state_path(tmp_path, 900)
    assert len(notes) == 1 and notes[0].startswith("passed over state_001000.pt.gz: ")
    assert state_fault(newest)
    with pytest.raises(ValueError, match="state_001000"):
        load_state(newest)


def test_all_states_damaged_or_none(tmp_path):
    assert newest_state(tmp_path / "nowhere") == (None, [])
    complete(tmp_path, 900, 1000)
    for update in (900, 1000):
        one_byte(state_path(tmp_path, update))
    path, notes = newest_state(tmp_path)
    assert path is None and len(notes) == 2


def test_temporary_files_of_a_killed_save_do_not_count(tmp_path):
    complete(tmp_path, 900)
    (tmp_path / ".state_001000.pt.gz.tmp").write_bytes(b"half")
    assert newest_state(tmp_path) == (state_path(tmp_path, 900), [])


# ---- which states stay ---------------------------------------------------------------------------


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pair(*updates: int) -> list[str]:
    return sorted(f"state_{u:06d}{end}" for u in updates for end in (".json", ".pt.gz"))


def test_only_the_newest_stay(tmp_path):
    assert KEEP == 2
    for update in (1, 2, 10, 100):
        save_state(tmp_path, update, example(update), IDENTITY)
    assert names(tmp_path) == pair(10, 100)


@pytest.mark.parametrize("fails_at", ["fsync", "replace", "manifest", "serialising", "compression"])
def test_a_failed_save_leaves_the_older_states(tmp_path, monkeypatch, fails_at):
    for update in (1, 2):
        save_state(tmp_path, update, example(update), IDENTITY)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if fails_at == "manifest":
        monkeypatch.setattr(state, "write_json", full)
    elif fails_at == "serialising":
        monkeypatch.setattr(torch, "save", full)
    elif fails_at == "compression":
        monkeypatch.setattr(gzip, "compress", full)
    else:
        monkeypatch.setattr(files.os, fails_at, full)
    with pytest.raises(OSError, match="No space"):
        save_state(tmp_path, 3, example(3), IDENTITY)
    monkeypatch.undo()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after.get(name) for name in before} == before  # the old ones are all there
    assert not [name for name in after if name.endswith(".tmp")]
    assert newest_state(tmp_path)[0] == state_path(tmp_path, 2)
    save_state(tmp_path, 3, example(3), IDENTITY)  # and the next try goes through
    assert names(tmp_path) == pair(2, 3)


def test_old_states_go_only_after_the_new_manifest_is_on_disk(tmp_path, monkeypatch):
    for update in (1, 2):
        save_state(tmp_path, update, example(update), IDENTITY)
    write, seen = state.write_json, []

    def watch(path, value):
        seen.append(names(tmp_path))
        write(path, value)
        seen.append(names(tmp_path))

    monkeypatch.setattr(state, "write_json", watch)
    save_state(tmp_path, 3, example(3), IDENTITY)
    assert seen == [sorted(pair(1, 2) + ["state_000003.pt.gz"]), pair(1, 2, 3)]


def test_every_write_is_flushed_to_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (order.append(b.suffix), replace(a, b)))
    save_state(tmp_path, 1, example(), IDENTITY)
    assert order == ["fsync", ".gz", "fsync", "fsync", ".json", "fsync"]


def test_damaged_newer_states_do_not_push_out_the_new_one(tmp_path):
    """Two damaged states 50 and 63, so the run began again: its state 10 must stay."""
    complete(tmp_path, 50, 63)
    for update in (50, 63):
        one_byte(state_path(tmp_path, update))
    for update in (10, 20, 30):
        path = save_state(tmp_path, update, example(update), IDENTITY)
        assert newest_state(tmp_path)[0] == path
    assert set(pair(20, 30)) <= set(names(tmp_path)) and not set(pair(10)) & set(names(tmp_path))
    for update in (50, 60, 63):  # and when the run gets there, it replaces them
        path = save_state(tmp_path, update, example(update), IDENTITY)
        assert newest_state(tmp_path)[0] == path
    assert names(tmp_path) == pair(60, 63)


def test_clearing_away_never_follows_a_symlink(tmp_path):  # case B44
    outside = tmp_path / "outside.gz"
    outside.write_bytes(b"mine")
    folder = tmp_path / "states"
    folder.mkdir()
    state_path(folder, 1).symlink_to(outside)
    for update in (2, 3):
        save_state(folder, update, example(update), IDENTITY)
    assert outside.read_bytes() == b"mine" and names(folder) == pair(2, 3)


# ---- hostile states: case B44 --------------------------------------------------------------------


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


def with_a_fitting_manifest(folder, packed: bytes):
    folder.mkdir(exist_ok=True)
    path = state_path(folder, 5)
    path.write_bytes(packed)
    manifest = {
        "updates": 5,
        "bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
        "content_sha256": "0" * 64,
        "identity": IDENTITY,
    }
    files.write_json(manifest_path(path), manifest)
    return path


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle", "nested"])
def test_a_payload_is_refused_and_never_runs(tmp_path, form):
    marker = tmp_path / "marker"
    inner = tmp_path / "raw"
    content = {"actor": {"x": Payload(marker)}} if form == "nested" else Payload(marker)
    if form == "pickle":
        inner.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, inner, _use_new_zipfile_serialization=form != "old torch")
    path = with_a_fitting_manifest(tmp_path / "states", gzip.compress(inner.read_bytes()))
    assert state_fault(path) is None  # the manifest fits: only the way of loading protects
    with pytest.raises(ValueError, match="state_000005.pt.gz: refused"):
        load_state(path)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker))).close()  # the payload itself works
    assert marker.exists()


# mtime=0: the time would be in the names of the tests, and two workers must name them alike
@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no gzip at all",
        gzip.compress(b"", mtime=0),
        gzip.compress(b"text", mtime=0),
        gzip.compress(bytes(200), mtime=0)[:-9],
    ],
)
def test_what_is_no_state_is_refused_in_one_line(tmp_path, packed):
    path = with_a_fitting_manifest(tmp_path, packed)
    with pytest.raises(ValueError, match="refused") as error:
        load_state(path)
    assert "\n" not in str(error.value)


# ---- random numbers go on where they stopped: case B13 -------------------------------------------


def draw() -> list:
    return [
        *(random.random() for _ in range(3)),
        *(random.gauss(0, 1) for _ in range(3)),
        random.sample(range(99), 9),
        *numpy.random.random(3),
        *(numpy.random.standard_normal() for _ in range(3)),  # an odd number: one stays over
        *(numpy.random.normal() for _ in range(2)),
        numpy.random.permutation(9).tolist(),
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        torch.randperm(9).tolist(),
    ]


def test_draws_go_on_exactly(tmp_path):
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    for _ in range(3):  # ends in the middle of a pair of normal numbers, in Python and in NumPy
        draw()
        path = save_state(tmp_path, 1, {"rng": rng_state()}, IDENTITY)
        wanted = [draw(), draw()]
        random.seed(99)
        numpy.random.seed(99)
        torch.manual_seed(99)
        draw()
        load_rng_state(load_state(path)[0]["rng"])
        assert [draw(), draw()] == wanted


def test_taking_the_state_draws_nothing():
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    wanted = content_hash(rng_state())
    assert content_hash(rng_state()) == wanted
    load_rng_state(rng_state())
    assert content_hash(rng_state()) == wanted

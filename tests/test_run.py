"""Flags and settings of every program, and the base dtype on processors without bfloat16."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from kernel.run import flags, machine


def given(**flags):
    return SimpleNamespace(**flags)


@pytest.mark.parametrize("key", flags.COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_must_be_positive(key, value):
    with pytest.raises(
        ValueError, match=f"--{key.replace('_', '-')} must be positive, not {value}"
    ):
        flags.override({key: 4}, given(**{key: value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e15])
def test_a_number_must_be_finite(value):
    with pytest.raises(ValueError, match="--learning-rate must be a finite number"):
        flags.override({"learning_rate": 1e-3}, given(learning_rate=value))


def test_a_flag_replaces_its_setting_and_no_other():
    section = {"iterations": 4, "center_scores": True, "rollouts": 2}
    merged = flags.override(section, given(iterations=None, center_scores=False, log_every=3))
    assert merged == {"iterations": 4, "center_scores": False, "rollouts": 2}


def test_settle_asks_for_deterministic_algorithms():
    machine.settle(1)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1


# ---- base dtype ---------------------------------------------------------------------------------


def test_slowdown_is_a_ratio_of_two_times(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(flags.time, "perf_counter", lambda: next(clock))
    assert machine.bfloat16_slowdown() == 1.0  # every product takes one tick


PREPARE = """
import sys; sys.path.insert(0, sys.argv[1])
from kernel import acquire, run
slowdown, model = float(sys.argv[2]), files.REPOSITORY / "models" / sys.argv[3]
machine.bfloat16_slowdown = lambda: slowdown
acquire.acquire = lambda *_: model
import runpy
sys.argv = ["00_prepare.py", *sys.argv[4:]]
runpy.run_path("00_prepare.py", run_name="__main__")
"""


def prepared(tiny, folder, slowdown, *flags) -> tuple[str, str]:
    """(base dtype in the config, what was printed) of stage 00 for smollm2 on a stand-in model."""
    model = Path(json.loads((tiny / "config.json").read_text())["common"]["model_dir"]).name
    command = [sys.executable, "-c", PREPARE, str(ROOT), str(slowdown), model]
    command += ["--profile", "smollm2", "--run-dir", str(folder), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "config.json").read_text())["common"]["base_dtype"], done.stdout


def test_a_processor_without_bfloat16_gets_a_float32_base_and_is_told(tiny, tmp_path):
    dtype, said = prepared(tiny, tmp_path / "slow", 6.0)
    assert dtype == "float32" and "bfloat16 is 6.0 times slower on this processor" in said
    dtype, said = prepared(tiny, tmp_path / "slow", 0.5)  # decided once
    assert dtype == "float32" and "slower" not in said
    assert prepared(tiny, tmp_path / "fast", 0.5)[0] == "bfloat16"
    assert prepared(tiny, tmp_path / "own", 6.0, "--base-dtype", "bfloat16")[0] == "bfloat16"

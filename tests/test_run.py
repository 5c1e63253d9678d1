"""Flags and settings of every program, and the base dtype on processors without bfloat16."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from kernel.run import flags, machine
from kernel.run.folder import SECTIONS
from kernel.run.profiles import PROFILES


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


@pytest.mark.parametrize("flag", ["--learning-rat", "--kl-coef", "--pairs"])
def test_a_flag_that_fits_no_setting_of_its_section_is_refused_when_it_is_defined(flag):
    setting = flags.settings_of(flags.parser("A stage."), "sft")
    setting("--learning-rate", float, "peak learning rate")
    with pytest.raises(ValueError, match=f"{flag} fits no setting of 'sft'"):
        setting(flag, float, "is of another section, or of none")


def defaults(section: str, flag: str) -> str:
    """What --help has to say of a setting: one value, or that of each profile."""
    names = {"--reward-mix": "reward", "--no-cache": "cached"}  # flags that are not named as it is
    name = names.get(flag, flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
    values = {profile: settings[section][name] for profile, settings in PROFILES.items()}
    if flag == "--no-cache":  # the setting says the opposite
        values = {profile: not value for profile, value in values.items()}
    shown = {profile: "none" if value is None else str(value) for profile, value in values.items()}
    if len(set(shown.values())) == 1:
        return shown["tiny"]
    return ", ".join(f"{profile} {value}" for profile, value in shown.items())


@pytest.mark.parametrize("stage, section", [("00_prepare", "common"), *SECTIONS.items()])
def test_help_shows_what_every_setting_means_and_its_default(stage, section, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", [f"{stage}.py", "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the stage puts its own there
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / f"{stage}.py"), run_name="__main__")
    text = capsys.readouterr().out
    title = f"\nsettings, section '{section}' of kernel/run/profiles.py:\n"
    assert text.count(title) == 1
    entries = re.split(r"\n(?=  -)", "\n" + text.split(title)[1].split("\n\n")[0].rstrip())[1:]
    assert entries
    for entry in entries:  # "  --flag METAVAR", two blanks or more, the help text
        names, told = re.split(r"\s{2,}", entry.strip(), maxsplit=1)
        found = re.fullmatch(r"\w.{6,} \(default: (.+)\)", told)
        flag = re.findall(r"--[\w-]+", names)[-1]
        assert found and found[1] == defaults(section, flag), entry


def test_settle_asks_for_deterministic_algorithms():
    machine.settle(1)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1


# ---- base dtype ---------------------------------------------------------------------------------


def test_slowdown_is_a_ratio_of_two_times(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.bfloat16_slowdown() == 1.0  # every product takes one tick


PREPARE = """
import sys; sys.path.insert(0, sys.argv[1])
from kernel.data import acquire, files
from kernel.run import machine
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

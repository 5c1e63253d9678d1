"""Flags: those that all stages share, those that stand for a setting, and the run folder they name."""

import argparse
import os
import re
from pathlib import Path

from kernel.data.files import REPOSITORY, read_json
from kernel.run.profiles import PROFILES

COUNTS = (  # settings that must be positive
    "epochs batch micro_batch validation_rows iterations stop_at rollouts ppo_epochs generate_batch "
    "threads threads_alone lora_r lora_alpha prompt_limit response_limit context_limit "
    "perfect_iterations rounds rounds_iterations rounds_epochs label_prompts"
).split()
OFF_AT_ZERO = ("normalize_scores",)  # a count, or 0
VARIANTS = ("continuous", "interrupt", "resume", "check")


class Help(argparse.RawDescriptionHelpFormatter):
    """The stage's docstring as it is, and behind each flag its default where it has one."""

    def _expand_help(self, action) -> str:
        text = super()._expand_help(action)
        plain = action.default in (None, False, argparse.SUPPRESS) or "default" in text
        return text if plain else f"{text} (default: {action.default})"


def parser(doc: str, variants: bool = False) -> argparse.ArgumentParser:
    """The flags every stage has; the stage adds its own."""
    p = argparse.ArgumentParser(description=doc, formatter_class=Help, allow_abbrev=False)
    shared = p.add_argument_group("shared flags")
    shared.add_argument("--profile", choices=PROFILES, help="default: the run folder's, or smollm2")
    shared.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/<profile>")
    shared.add_argument("--redo", action="store_true",
                        help="if inputs changed, replace this stage's old results instead of refusing")
    if variants:
        shared.add_argument("--variant", choices=VARIANTS, default="continuous",
                            help="all at once; in two parts (interrupt, resume); prove them equal")
        shared.add_argument("--name", type=plain_name, metavar="NAME",
                            help="keep the results apart, under <stage>/NAME (experiments)")
        shared.add_argument("--save-every", type=int, metavar="N",
                            help="updates between resume states (default: about a minute's)")
        shared.add_argument("--tensorboard", action="store_true",
                            help="write event files beside metrics.jsonl too")
    return p


def settings_of(p: argparse.ArgumentParser, section: str):
    """A function that adds a flag for one setting of a profile's section, and tells its defaults.

    add(flag, type or None, help, **further arguments of add_argument). The value stays None unless it is
    given, so that the profile decides. Raises ValueError at once for a flag that fits no setting.
    """
    group = p.add_argument_group(f"settings, section '{section}' of kernel/run/profiles.py")

    def add(flag: str, kind, text: str, **more) -> None:
        if kind is not None:
            more |= {"type": kind, "metavar": more.get("metavar", kind.__name__.upper())}
        action = group.add_argument(*flag.split(), default=None, **more)
        if action.dest not in PROFILES["qwen"][section]:
            raise ValueError(f"{flag} fits no setting of '{section}' in kernel/run/profiles.py")
        values = {name: profile[section][action.dest] for name, profile in PROFILES.items()}
        off = more.get("action") == "store_false"  # of a flag --no-x the setting says x
        values = {name: not value if off else value for name, value in values.items()}
        shown = {name: "none" if value is None else str(value) for name, value in values.items()}
        if len(set(shown.values())) == 1:
            told = f"default: {shown['qwen']}"
        else:
            told = "default: " + ", ".join(f"{name} {value}" for name, value in shown.items())
        action.help = f"{text} ({told})".replace("%", "%%")

    return add


def plain_name(text: str) -> str:
    taken = (*VARIANTS, "judge", "length", "rubric")  # variants, and what --reward means by them
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text)
    if not plain or text in taken or text.endswith(".py"):
        raise argparse.ArgumentTypeError(
            f"'{text}': letters, digits, '-', '_' and '.'; not a Python file, not {', '.join(taken)}"
        )
    return text


def run_folder(args) -> tuple[str, Path]:
    """(profile, run folder) from the flags; an existing run folder knows its profile."""
    folder = args.run_dir or REPOSITORY / "runs" / (args.profile or "smollm2")
    folder = Path(os.path.abspath(folder))
    config_path = folder / "config.json"
    profile = args.profile or "smollm2"
    if config_path.is_file():
        made_with = read_json(config_path)["profile"]
        if args.profile and args.profile != made_with:
            raise ValueError(
                f"{folder} belongs to profile {made_with}, not {args.profile}; use another --run-dir"
            )
        profile = made_with
    return profile, folder


def override(section: dict, args) -> dict:
    """The profile's values, replaced by every flag of the same name that was given."""
    given = {k: v for k, v in vars(args).items() if k in section and v is not None}
    merged = {**section, **given}
    for key, value in merged.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and not (value == value and abs(value) < 1e12):
            raise ValueError(f"--{key.replace('_', '-')} must be a finite number, not {value}")
        if key in COUNTS and number and value <= 0:
            raise ValueError(f"--{key.replace('_', '-')} must be positive, not {value}")
        if key in OFF_AT_ZERO and value < 0:
            raise ValueError(f"--{key.replace('_', '-')} must be 0 (off) or more, not {value}")
    return merged

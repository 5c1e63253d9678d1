"""The lesson: experiments on PPO, reward models and KL, each one command, a table and a picture.

    bash run_all.sh exercise length-hack --profile tiny      # in runs/tiny; default: smollm2
    bash run_all.sh exercises --profile tiny                 # all but brakes

A recipe runs the ordinary stages with flags, beside the run's own results (`--name`) or in a run folder
of its own with another corpus, reads their records and writes

    <run>/exercises/NAME/                 results.json, table.md, picture.png
    <run>/exercises/{lesson,two-rewards}/ run folders like any other
    <run>/exercises/logs/                 what the stages printed

What is finished is skipped, so the same command goes on after Ctrl-C or a crash. How long the trainings
are is data: `exercise` in kernel/run/profiles.py.
"""

import argparse
from pathlib import Path

from kernel.data.files import write_atomic, write_json
from kernel.lesson.judges import calibration, pooling
from kernel.lesson.lab import open_lab
from kernel.lesson.policies import kl_sweep, length_hack, perfect_judge, two_rewards
from kernel.lesson.result import Result
from kernel.lesson.rounds import brakes, rounds
from kernel.measure.tables import markdown
from kernel.report.panels import picture
from kernel.run.errors import one_line_errors
from kernel.run.flags import override
from kernel.run.machine import settle
from kernel.run.profiles import PROFILES

EXERCISES = {
    "perfect-judge": perfect_judge,
    "rounds": rounds,
    "brakes": brakes,
    "pooling": pooling,
    "calibration": calibration,
    "length-hack": length_hack,
    "two-rewards": two_rewards,
    "kl-sweep": kl_sweep,
}


def write(out: Path, name: str, settings: dict, result: Result) -> None:
    """results.json, table.md and picture.png, and all of it but the picture on the console."""
    picture(out / "picture.png", result.panels)
    panels = [
        {**panel, "lines": {label: [list(xs), ys] for label, (xs, ys) in panel["lines"].items()}}
        for panel in result.panels
    ]
    found = {"exercise": name, "settings": settings, **result._asdict(), "panels": panels}
    write_json(out / "results.json", found)
    lines = markdown(result.header, result.rows, ".3f")
    lines += ["", f"What to expect: {result.expected}", "", f"What was seen: {result.seen}."]
    text = "\n".join(lines) + "\n"
    write_atomic(out / "table.md", text)
    print(f"\n{text}")
    for file in ("results.json", "table.md", "picture.png"):
        print(f"  wrote {out / file}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="exercise", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="run folder; made if it is not there")
    parser.add_argument("names", nargs="+", choices=EXERCISES)
    parser.add_argument("--profile", choices=PROFILES, default="smollm2")
    parser.add_argument("--redo", action="store_true", help="replace results whose inputs changed")
    parser.add_argument("--seeds", type=int, nargs="+")
    for name in ("reward_epochs", "lesson_epochs", "two_epochs"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    parser.add_argument("--rounds-epochs", type=float)
    for name in (
        "iterations", "perfect_iterations", "rounds", "rounds_iterations", "label_prompts", "label_seed"
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    args = parser.parse_args()
    one_line_errors("exercise")
    lab = open_lab(args.folder.resolve(), args.profile, args.redo)
    settle(lab.run.common["threads_alone"])
    settings = override(PROFILES[lab.run.profile]["exercise"], args)
    lab.first("10_sft", "20_reward")
    for name in args.names:
        print(f"\n== {name}", flush=True)
        out = lab.dir / "exercises" / name
        write(out, name, settings, EXERCISES[name](lab, settings))


if __name__ == "__main__":
    main()

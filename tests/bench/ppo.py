"""Seconds per PPO iteration, ours against TRL's, in turn in one run so that the ratio holds.

    .venv/bin/python 00_prepare.py --run-dir runs/bench          # corpus and model, no training
    .venv/bin/python tests/bench/ppo.py --run-dir runs/bench --against trl

tests/bench/requirements.txt says how to make TRL's environment. Same base model, LoRA shapes, prompts,
response length and updates on both sides. The weights start untrained: they change what is said, not
what it costs. Each way runs once per round, in processes of its own, with one warm-up iteration.
Quiet the machine first: busy neighbours can cost a factor of ten. The load is printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parent.parent
PHASES = ("generation", "scoring", "training")

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--run-dir", type=Path, default=REPOSITORY / "runs/smollm2")
parser.add_argument("--against", choices=("trl",), help="default: only our own side")
parser.add_argument("--bench-python", default=str(REPOSITORY / ".venv-bench/bin/python"))
parser.add_argument("--threads", type=int, default=2, help="cores to use, in either way")
parser.add_argument("--iterations", type=int, default=5, help="timed per process and round")
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--response-tokens", type=int, default=26, help="the mean of a real run")


def run_lanes(python: str, script: str, lanes: int, threads: int, args) -> list[dict]:
    """Start `lanes` processes, let their timed iterations begin together, return their reports."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [
        python, str(FOLDER / script), "--run-dir", str(args.run_dir.resolve()),
        "--threads", str(threads), "--iterations", str(args.iterations),
        "--response-tokens", str(args.response_tokens),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(lanes)]
    try:
        for process in processes:
            if not any(line == "ready\n" for line in process.stdout):
                raise SystemExit(f"{script} ended before its first iteration did")
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        ends = [list(process.stdout) for process in processes]  # to the end of each process
        if any(process.wait() for process in processes):
            raise SystemExit(f"{script} failed; its error is above")
        return [json.loads(lines[-1]) for lines in ends]
    finally:
        for process in processes:
            process.kill()


def row(name: str, lanes: int, reports: list[dict]) -> dict:
    """Figures of one way over all rounds; `each` counts all processes together."""
    laps = [lap for report in reports for lap in report["laps"]]
    seconds = [sum(lap.values()) for lap in laps]
    return {
        "name": name,
        "min": min(seconds),
        "median": statistics.median(seconds),
        "each": statistics.median(seconds) / lanes,
        "peak": f"{lanes} x {max(report['peak_gib'] for report in reports):.1f}",
        **{phase: statistics.median(lap[phase] for lap in laps) for phase in PHASES},
    }


def print_table(rows: list[dict]) -> None:
    # The yardstick is TRL's better way, if TRL ran at all.
    others = [row["each"] for row in rows if row["name"].startswith("TRL")]
    print(
        "| way | min s | median s | generation | scoring | training | iterations/min | of TRL | GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ratio = f"{row['each'] / min(others):.2f}" if others else "-"
        cells = [f"{row[key]:.2f}" for key in ("min", "median", *PHASES)]
        cells += [f"{60 / row['each']:.1f}", ratio, row["peak"]]
        print(f"| {row['name']} | {' | '.join(cells)} |")


def main() -> None:
    args = parser.parse_args()
    if not (args.run_dir / "config.json").is_file():
        parser.error(f"{args.run_dir} is no run folder; make one with 00_prepare.py")
    sides = {"ours": (sys.executable, "ours_ppo.py")}
    if args.against:
        if not Path(args.bench_python).is_file():
            parser.error(
                f"no {args.bench_python}; tests/bench/requirements.txt says how to make it"
            )
        sides["TRL"] = (args.bench_python, "trl_ppo.py")
    ways = {
        f"{side}, {lanes} x {threads} threads": (*command, lanes, threads)
        for side, command in sides.items()
        for lanes, threads in ((1, args.threads), (args.threads, 1))
    }
    reports = {name: [] for name in ways}
    for number in range(1, args.rounds + 1):
        for name, (python, script, lanes, threads) in ways.items():
            load = os.getloadavg()[0]
            reports[name] += run_lanes(python, script, lanes, threads, args)
            print(f"round {number}: {name} done (load before it {load:.1f})", flush=True)
    print(
        f"\n{args.response_tokens} tokens per response; {args.rounds} rounds of {args.iterations} "
        "iterations; min, median and phases are those of one process\n"
    )
    print_table([row(name, ways[name][2], reports[name]) for name in ways])


if __name__ == "__main__":
    main()

"""What both sides of the benchmark share: flags, settings, prompts, and a stopwatch."""

import argparse
import json
import sys
import time
from pathlib import Path

from kernel.data.chat import Chat
from kernel.data.draws import Draws
from kernel.data.files import REPOSITORY, read_json, read_jsonl
from kernel.run.clocks import peak_memory_mib
from kernel.run.profiles import PROFILES


def begin() -> tuple[argparse.Namespace, dict, list[list[int]]]:
    """(flags, settings of the run, prompt ids for all iterations, warm-up included)."""
    p = argparse.ArgumentParser(description="One side of tests/bench/ppo.py, which starts it.")
    p.add_argument("--run-dir", type=Path, required=True)
    for flag in ("--threads", "--iterations", "--response-tokens"):
        p.add_argument(flag, type=int, required=True)
    args = p.parse_args()
    made = read_json(args.run_dir / "config.json")
    config = {**made["common"], **PROFILES[made["profile"]]["ppo"]}
    config["model_dir"] = str(REPOSITORY / config["model_dir"])
    chat = Chat(config)
    rows = read_jsonl(args.run_dir / "data/train/prompts.jsonl")
    drawn = Draws(len(rows), config["sampler_seed"]).take(
        config["rollouts"] * (1 + args.iterations)
    )
    return args, config, [chat.prompt_ids(rows[i]["prompt"]) for i in drawn]


class Stopwatch:
    """Seconds of each phase of each iteration. The first iteration is a warm-up and is dropped."""

    def __init__(self):
        self.laps, self.phases, self.warm = [], {}, False
        self.last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """What has passed since the last mark belongs to `phase`."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.last
        self.last = now

    def lap(self) -> None:
        """An iteration has ended. After the warm-up: wait for the other processes of the round."""
        if self.warm:
            self.laps.append(self.phases)
        else:
            self.warm = True
            print("ready", flush=True)
            sys.stdin.readline()
            self.last = time.perf_counter()
        self.phases = {}

    def report(self) -> None:
        print(json.dumps({"laps": self.laps, "peak_gib": peak_memory_mib() / 1024}), flush=True)

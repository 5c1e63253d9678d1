"""Where the exercises work: a run folder, its stages as programs two at a time, and their records."""

import atexit
import os
import re
import signal
import sys
import time
from functools import cached_property
from pathlib import Path

import torch
from tqdm import tqdm

from kernel.data.chat import Chat
from kernel.data.draws import spread
from kernel.data.files import REPOSITORY
from kernel.data.own_code import load_rubric
from kernel.measure.calibration import card
from kernel.measure.ledger import by_iteration, judged_rollouts
from kernel.reward import adapter_file
from kernel.roles import Role, load_role
from kernel.rollout import sample
from kernel.run.folder import RunFolder
from kernel.run.lanes import Failed, Lane, run_lanes
from kernel.run.lock import take
from kernel.run.profiles import PROFILES
from kernel.score import score_pairs

SHARED = (  # flags of 00_prepare for settings that a folder beside takes over
    "--base-dtype --device --threads --threads-alone --lora-r --lora-alpha --prompt-limit "
    "--response-limit --context-limit"
).split()
CARD_PAIRS = 180  # of a split, at most, on a report card


class Lab:
    """A run folder in which exercises run. Made by `open_lab`."""

    def __init__(self, folder: Path, redo: bool, lock: int):
        self.dir, self.redo, self.lock = folder, redo, lock
        self.logs = folder / "exercises" / "logs"
        self.besides = {}  # corpus -> Lab: a folder is locked once

    @cached_property
    def run(self) -> RunFolder:
        return RunFolder(self.dir)

    @cached_property
    def chat(self) -> Chat:
        return Chat(self.run.common)

    @property
    def device(self) -> torch.device:
        return torch.device(self.run.common["device"])

    def beside(self, corpus: str) -> "Lab":
        """A run folder like this one, with another built-in corpus."""
        if corpus not in self.besides:
            folder, settings = self.dir / "exercises" / corpus, self.run.made["common"]
            flags = ["--corpus", corpus]
            for key, usual in PROFILES[self.run.profile]["common"].items():
                flag = f"--{key.replace('_', '-')}"
                if flag in SHARED and settings[key] != usual:
                    flags += [flag, str(settings[key])]
            if Path(settings["model_dir"]).is_absolute():
                flags += ["--model-dir", settings["model_dir"]]
            if "system" in settings:
                flags += ["--system", settings["system"]]
            if not settings.get("chat_template", True):
                flags += ["--no-chat-template"]
            self.besides[corpus] = open_lab(folder, self.run.profile, self.redo, flags)
        return self.besides[corpus]

    # -- stages as programs -------------------------------------------------------------------------

    def first(self, *names: str) -> None:
        """Run trained stages that this folder does not have yet; those that it has stay as they are."""
        self.stages([[name] for name in names if not self.run.record(name, "continuous")])

    def stages(self, commands) -> None:
        """Run stages side by side, two at a time (they have one thread each), each with a log.

        commands: [stage, flags...] each. Raises ValueError with a failed stage's last line, after the
        others were told to save and stop.
        """
        lanes = [self.lane(*command) for command in commands]
        quiet = not sys.stderr.isatty()
        bar = tqdm(
            total=len(lanes), unit="stage", mininterval=30 if quiet else 0.5, leave=False,
            bar_format="{n_fmt}/{total_fmt} stages, {elapsed}{postfix}",
        )

        def ended(lane: Lane) -> None:
            bar.write(f"  {time.perf_counter() - lane.began:5.0f} s  {lane.last_lines(1)}")
            bar.update()

        def waiting(running: list[Lane]) -> None:
            now = "; ".join(f"{lane.name} {left_to_do(lane.log)}" for lane in running)
            bar.set_postfix_str(now, refresh=not quiet)

        try:
            run_lanes(lanes, self.lock, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), ended, waiting)
        except Failed as failed:
            raise ValueError(str(failed)) from None
        finally:
            bar.close()

    def lane(self, stage: str, *flags: str) -> Lane:
        name = f"{stage}-{flags[flags.index('--name') + 1]}" if "--name" in flags else stage
        log = self.logs / f"{name}.log"
        log.write_bytes(b"")
        redo = ["--redo"] if self.redo else []
        command = [REPOSITORY / f"{stage}.py", "--run-dir", self.dir, *flags, *redo]
        return Lane(name, [command], log)

    # -- what they made -----------------------------------------------------------------------------

    def reward(self, name: str) -> Role:
        """A trained reward model by name."""
        path = self.dir / adapter_file(name)
        return load_role("reward", path, self.run.common, self.run.base_sha256, self.device)

    def pair_rows(self, split: str) -> list[dict]:
        return spread(self.run.rows(f"data/{split}/pairs.jsonl"), CARD_PAIRS)

    def scores(self, name: str, split: str) -> tuple[list[float], list[float]]:
        """chosen_scores and rejected_scores of a reward model on the pairs of a split."""
        pairs = self.chat.encode_pairs(self.pair_rows(split), f"data/{split}/pairs.jsonl")
        chosen, rejected = score_pairs(self.reward(name), pairs, self.chat.pad_id, self.device)
        return chosen.tolist(), rejected.tolist()

    def card(self, name: str, split: str) -> dict:
        chosen, rejected = self.scores(name, split)
        return card([a - b for a, b in zip(chosen, rejected)], chosen, rejected)

    def ppo(self, arms: dict[str, list[str]], settings: dict) -> dict[str, list[dict]]:
        """Named PPO runs side by side, {label: [name, flags...]} -> their figures by iteration."""
        iterations = ["--iterations", str(settings["iterations"])]
        self.stages(
            ["30_ppo", "--name", name, *iterations, *flags] for name, *flags in arms.values()
        )
        return {label: by_iteration(self.judged(name)) for label, (name, *_) in arms.items()}

    @torch.no_grad()
    def greedy(self, adapter: str) -> list[bool]:
        """The rubric's success of a policy's greedy answers, one per distinct held-out prompt."""
        path = self.dir / adapter
        role = load_role("actor", path, self.run.common, self.run.base_sha256, self.device)
        labels = {row["id"]: row for row in self.run.rows("data/heldout/labels.jsonl")}
        rows = {row["prompt"]: row for row in reversed(self.run.rows("data/heldout/prompts.jsonl"))}
        asked, rubric, found = [*rows.values()], load_rubric(self.dir / "data/rubric.py"), []
        size = PROFILES[self.run.profile]["generate"]["generate_batch"]
        for start in range(0, len(asked), size):
            part, chat = asked[start : start + size], self.chat
            batch, _, finished, _ = sample(
                role, chat.encode_prompts(part, "data/heldout/prompts.jsonl"), chat.response_limit,
                chat.eos_id, chat.pad_id, self.device,
            )
            for row, ids, ended in zip(part, batch.responses, finished):
                reason = "eos" if ended else "length"
                verdict = rubric(row["prompt"], chat.decode(ids), reason, labels[row["id"]])
                found.append(bool(verdict["success"]))
        return found

    def rollouts(self, name: str) -> list[dict]:
        return self.run.rows(f"outputs/30_ppo/{name}/continuous/rollouts.jsonl")

    def judged(self, name: str) -> list[dict]:
        """The samples of a named PPO run with the rubric's verdict, which training never saw."""
        prompts, labels = (self.run.rows(f"data/train/{file}.jsonl") for file in ("prompts", "labels"))
        rubric = load_rubric(self.dir / "data/rubric.py")
        return judged_rollouts(self.rollouts(name), prompts, labels, rubric)


def open_lab(folder: Path, profile: str, redo: bool, flags: list[str] = ()) -> Lab:
    """Lock the folder until this process ends; if it is new, prepare it with flags for 00_prepare.

    Raises ValueError if somebody works in it.
    """
    (folder / "exercises" / "logs").mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    if note := take(lock, folder, os.getpid()):
        print(f"exercise: {note}")
    atexit.register(os.ftruncate, lock, 0)
    lab = Lab(folder, redo, lock)
    if not (folder / "config.json").is_file():
        lab.stages([["00_prepare", "--profile", profile, *flags]])
    return lab


def left_to_do(log: Path) -> str:
    """How far a stage's own progress bar is, from the end of its log: "45% (02:10 left)"."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 2000, 0))
        seen = re.findall(rb"(\d+%)\|[^\r]*?<([\d:?]+)", file.read())
    return f"{seen[-1][0].decode()} ({seen[-1][1].decode()} left)" if seen else "starts"

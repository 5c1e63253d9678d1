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
from kernel.data.corpus import sha256
from kernel.data.draws import spread
from kernel.data.files import REPOSITORY, read_json, sha256_file, write_json
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
from kernel.score import score_answers, score_pairs

SHARED = (  # flags of 00_prepare for settings that a folder beside takes over
    "--base-dtype --device --threads --threads-alone --lora-r --lora-alpha --prompt-limit "
    "--response-limit --context-limit"
).split()
CARD_PAIRS = 180  # of a split, at most, on a report card
SFT = "checkpoints/10_sft/continuous/adapter.safetensors"


def actor(name: str) -> str:
    """Where the policy of a named PPO run lies in a run folder."""
    return f"checkpoints/30_ppo/{name}/continuous/adapter.safetensors"


def flags_of(settings: dict) -> list[str]:
    """Settings of a stage as its flags: {"kl_coef": 0.1} -> ["--kl-coef", "0.1"]."""
    return [text for key, value in settings.items()
            for text in (f"--{key.replace('_', '-')}", str(value))]


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
        return {label: self.figures(name) for label, (name, *_) in arms.items()}

    def figures(self, name: str) -> list[dict]:
        """Means by iteration of a named PPO run's samples."""
        return by_iteration(self.judged(name))

    # -- answers of a policy, kept in exercises/answers/ --------------------------------------------

    @torch.no_grad()
    def answers(self, adapter: str, rows: list[dict], seed: int | None, times: int = 1) -> list[dict]:
        """`times` answers of a policy to each prompt: id, prompt, response_ids, text, finish_reason.

        rows: of a prompts.jsonl. seed: of the sampling at temperature 1; None is greedy. What is in
        exercises/answers/ from the same adapter, prompts and seed is not asked again.
        """
        path, chat = self.dir / adapter, self.chat
        asked = [row for row in rows for _ in range(times)]
        of = {
            "adapter": sha256_file(path), "prompts": sha256("\0".join(row["prompt"] for row in asked)),
            "seed": seed,
        }
        who = Path(adapter).parts[-3]  # 10_sft, or the name of a PPO run
        name = f"{who}-greedy" if seed is None else f"{who}-sampled-{seed}"
        kept = self.dir / "exercises" / "answers" / f"{name}.json"
        if kept.is_file() and (before := read_json(kept))["of"] == of:
            return before["answers"]
        role = load_role("actor", path, self.run.common, self.run.base_sha256, self.device)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        size, found = PROFILES[self.run.profile]["generate"]["generate_batch"], []
        quiet = not sys.stderr.isatty()
        bar = tqdm(
            total=len(asked), desc=f"answers {name}", leave=False, mininterval=30 if quiet else 0.5
        )
        for start in range(0, len(asked), size):
            part = asked[start : start + size]
            batch, _, finished, _ = sample(
                role, chat.encode_prompts(part, "prompts.jsonl"), chat.response_limit, chat.eos_id,
                chat.pad_id, self.device, generator,
            )
            for row, ids, ended in zip(part, batch.responses, finished):
                found.append({
                    "id": row["id"], "prompt": row["prompt"], "response_ids": ids,
                    "text": chat.decode(ids), "finish_reason": "eos" if ended else "length",
                })
            bar.update(len(part))
        bar.close()
        write_json(kept, {"of": of, "answers": found})
        return found

    def judged_answers(self, answers: list[dict], split: str) -> list[dict]:
        """The same answers with the rubric's `success`: True, False, or None without a rubric."""
        labels = {row["id"]: row for row in self.run.rows(f"data/{split}/labels.jsonl")}
        rubric = load_rubric(self.dir / "data/rubric.py")

        def success(row: dict) -> bool | None:
            return rubric(row["prompt"], row["text"], row["finish_reason"], labels[row["id"]])["success"]

        return [{**row, "success": success(row)} for row in answers]

    def greedy(self, adapter: str) -> list[dict]:
        """A policy's greedy answers with the rubric's success, one per distinct held-out prompt."""
        rows = {row["prompt"]: row for row in reversed(self.run.rows("data/heldout/prompts.jsonl"))}
        return self.judged_answers(self.answers(adapter, [*rows.values()], None), "heldout")

    def mean_score(self, judge: Role, answers: list[dict]) -> float:
        """A reward model's mean score of answers."""
        prompts = self.chat.encode_prompts(answers, "prompts.jsonl")
        ids = [(prompt, row["response_ids"]) for prompt, row in zip(prompts, answers)]
        return score_answers(judge, ids, self.chat.pad_id, self.device).mean().item()

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

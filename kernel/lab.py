"""Where the exercises work: a run folder, its stages as programs two at a time, tables and pictures."""

import atexit
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from kernel.calibration import card
from kernel.chat import Chat
from kernel.data import load_rubric, read_json, read_jsonl, spread
from kernel.ledger import by_iteration, judged_rollouts
from kernel.lock import take
from kernel.model import Role, load_adapter, make_role
from kernel.profiles import PROFILES
from kernel.reward import adapter_file
from kernel.run import REPOSITORY
from kernel.score import learned_reward, score_pairs

SHARED = (  # flags of 00_prepare for settings that a folder beside takes over
    "--base-dtype --device --threads --threads-alone --lora-r --lora-alpha --prompt-limit "
    "--response-limit --context-limit"
).split()


class Lab:
    """A run folder in which exercises run: its stages as programs, two at a time, and their records."""

    def __init__(self, folder: Path, profile: str, redo: bool, flags: tuple = ()):
        """Prepare the folder if it is new, with flags for 00_prepare. ValueError if it is in use."""
        self.dir, self.redo, self.logs = folder, redo, folder / "exercises" / "logs"
        self.besides = {}  # corpus -> Lab; a folder is locked once
        self.logs.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        if note := take(self.lock, folder, os.getpid()):
            print(f"exercise: {note}")
        atexit.register(os.ftruncate, self.lock, 0)
        if not (folder / "config.json").is_file():
            self.stages([["00_prepare", "--profile", profile, *flags]])
        config = read_json(folder / "config.json")
        self.profile, self.base_sha256 = config["profile"], config["model"]["base_sha256"]
        self.recorded = config["common"]
        model_dir = str(REPOSITORY / self.recorded["model_dir"])
        self.common = {**self.recorded, "model_dir": model_dir}
        self.chat, self.device = Chat(self.common), torch.device(self.common["device"])

    def beside(self, corpus: str) -> "Lab":
        """A run folder like this one, with another built-in corpus."""
        if corpus in self.besides:
            return self.besides[corpus]
        flags = ["--corpus", corpus]
        for key, usual in PROFILES[self.profile]["common"].items():
            flag = f"--{key.replace('_', '-')}"
            if flag in SHARED and self.recorded[key] != usual:
                flags += [flag, str(self.recorded[key])]
        if Path(self.recorded["model_dir"]).is_absolute():
            flags += ["--model-dir", self.recorded["model_dir"]]
        if "system" in self.recorded:
            flags += ["--system", self.recorded["system"]]
        if not self.recorded.get("chat_template", True):
            flags += ["--no-chat-template"]
        folder = self.dir / "exercises" / corpus
        self.besides[corpus] = Lab(folder, self.profile, self.redo, tuple(flags))
        return self.besides[corpus]

    def first(self, *names: str) -> None:
        """Run trained stages that this folder does not have yet; those that it has stay as they are."""
        there = [n for n in names if (self.dir / f"outputs/{n}/continuous/record.json").is_file()]
        self.stages([[name] for name in names if name not in there])

    def stages(self, commands: list[list[str]]) -> None:
        """Run stages side by side, two at a time (they have one thread each), each with a log.

        Raises ValueError with a failed stage's last line, after the others were told to save and stop.
        """
        waiting, running = list(commands), []
        quiet = not sys.stderr.isatty()
        bar = tqdm(
            total=len(waiting), unit="stage", mininterval=30 if quiet else 0.5, leave=False,
            bar_format="{n_fmt}/{total_fmt} stages, {elapsed}{postfix}",
        )  # fmt: skip
        try:
            while waiting or running:
                while waiting and len(running) < 2:
                    running.append(self.start(waiting.pop(0)))
                time.sleep(0.2)
                for one in [one for one in running if one[1].poll() is not None]:
                    running.remove(one)
                    bar.write(self.ended(*one))
                    bar.update()
                now = "; ".join(f"{name} {left_to_do(log)}" for name, _, log, _ in running)
                bar.set_postfix_str(now, refresh=not quiet)
        finally:
            bar.close()
            for _, process, *_ in running:
                process.send_signal(signal.SIGINT)
            for _, process, *_ in running:
                process.wait()

    def start(self, command: list[str]) -> tuple:
        stage, *flags = command
        name = stage
        if "--name" in flags:
            name += f"-{flags[flags.index('--name') + 1]}"
        log = self.logs / f"{name}.log"
        redo = ["--redo"] if self.redo else []
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, f"{REPOSITORY}/{stage}.py", "--run-dir", self.dir, *flags, *redo],
                stdout=file, stderr=subprocess.STDOUT, pass_fds=[self.lock], start_new_session=True,
                env={**os.environ, "RUN_LOCK_FD": str(self.lock)},
            )  # fmt: skip
        return name, process, log, time.perf_counter()

    def ended(self, name: str, process, log: Path, began: float) -> str:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        if process.returncode:
            raise ValueError(f"{name} failed ({log}): {last}")
        return f"  {time.perf_counter() - began:5.0f} s  {last}"

    def reward(self, name: str) -> Role:
        """A trained reward model by name."""
        role = make_role("reward", self.common, self.device, head="normal").freeze()
        load_adapter(self.dir / adapter_file(name), role, self.common, self.base_sha256)
        return role

    def judge(self, name: str):
        """The same as a function of (prompt ids, response ids)."""
        return learned_reward(self.reward(name), self.chat.pad_id, self.device)

    def pair_rows(self, split: str) -> list[dict]:
        """At most 180 pairs of a split, at equal distances."""
        return spread(read_jsonl(self.dir / f"data/{split}/pairs.jsonl"), 180)

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

    def rollouts(self, name: str) -> list[dict]:
        return read_jsonl(self.dir / f"outputs/30_ppo/{name}/continuous/rollouts.jsonl")

    def judged(self, name: str) -> list[dict]:
        """The samples of a named PPO run with the rubric's verdict, which training never saw."""
        prompts = {r["id"]: r["prompt"] for r in read_jsonl(self.dir / "data/train/prompts.jsonl")}
        labels = {r["id"]: r for r in read_jsonl(self.dir / "data/train/labels.jsonl")}
        rubric = load_rubric(self.dir / "data/rubric.py")
        return judged_rollouts(self.rollouts(name), prompts, labels, rubric)


def left_to_do(log: Path) -> str:
    """How far a stage's own progress bar is, from the end of its log: "45% (02:10 left)"."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 2000, 0))
        seen = re.findall(rb"(\d+%)\|[^\r]*?<([\d:?]+)", file.read())
    return f"{seen[-1][0].decode()} ({seen[-1][1].decode()} left)" if seen else "starts"


def table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; floats with three digits after the point, None as a dash."""

    def cell(value) -> str:
        if value is None:
            return "-"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)


STYLES = (
    ("#0b62a4", "-", "o"),
    ("#d95f02", "--", "s"),
    ("#2b8a3e", ":", "D"),
    ("#7048a8", "-.", "^"),
)


def picture(path: Path, panels: list[dict]) -> None:
    """A PNG with the panels side by side (four: two by two).

    A panel: title, x, y, lines {label: (xs, ys)}; `dots` draws markers without lines, `ticks` names the
    places 0, 1, ... on the x axis, `diagonal` adds y = x.
    """
    columns = 2 if len(panels) == 4 else len(panels)
    rows = len(panels) // columns
    figure = Figure(figsize=(4.4 * columns, 3.2 * rows), layout="constrained", dpi=130)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels):
        for (color, style, marker), (label, (xs, ys)) in zip(STYLES, panel["lines"].items()):
            dots = panel.get("dots") or len(xs) < 15
            axes.plot(
                xs, ys, label=label, color=color, marker=marker if dots else None, markersize=5,
                linestyle="none" if panel.get("dots") else style, alpha=0.8,
            )  # fmt: skip
        if panel.get("diagonal"):
            axes.plot([0.5, 1], [0.5, 1], color="0.6", linewidth=1, zorder=0)
        if "ticks" in panel:
            axes.set_xticks(range(len(panel["ticks"])), panel["ticks"])
            axes.margins(x=0.15)
        elif panel.get("x") == "iteration":
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_title(panel["title"], fontsize=10)
        axes.set_xlabel(panel.get("x", ""))
        axes.set_ylabel(panel.get("y", ""))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(panel["lines"]) > 1:
            axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})

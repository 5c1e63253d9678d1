"""Reward functions: what gives a response its score in 30_ppo.py (`--reward`, `--reward-mix`).

| name               | score of a response                                                        |
|--------------------|----------------------------------------------------------------------------|
| `judge`            | the reward model of 20_reward.py                                           |
| NAME               | the reward model that `20_reward.py --name NAME` trained                   |
| `length`           | characters / 100: flawed on purpose, it pays for words whatever they say   |
| `file.py:function` | your own: function(prompts, responses) -> one number per response          |

A mix is a weighted sum, `helpful=0.7,concise=0.3`; a name alone weighs 1. An own function gets two
lists of strings, the users' messages and the responses as text without their end token.
"""

import math
from pathlib import Path

import torch

from kernel.chat import Chat
from kernel.data import load_function
from kernel.model import load_adapter, make_role
from kernel.score import learned_reward


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [len(response) / 100 for response in responses]


FUNCTIONS = {"length": length}


def reward_terms(reward: str) -> dict[str, float]:
    """Weight by name: "helpful=0.7,concise=0.3" -> {"helpful": 0.7, "concise": 0.3}."""
    terms = {}
    for part in reward.split(","):
        name, found, weight = part.rpartition("=")
        if not found or (own_function(part) and "=" not in part.rpartition(":")[2]):
            name, weight = part, "1"  # no weight, though a folder's name may hold the sign
        name = name.strip()
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not name or not math.isfinite(value) or name in terms:
            raise ValueError(
                f"--reward {reward}: '{part}' is not NAME or NAME=WEIGHT with a number, each name once"
            )
        terms[name] = value
    return terms


def adapter_file(name: str) -> str:
    """Where the reward model of that name lies in a run folder."""
    place = "" if name == "judge" else f"{name}/"
    return f"checkpoints/20_reward/{place}continuous/adapter.safetensors"


def own_function(name: str) -> tuple[Path, str] | None:
    """("file.py", "function") of `file.py:function`, as an absolute path; None for any other name."""
    file, found, function = name.rpartition(":")
    return (Path(file).resolve(), function) if found and file.endswith(".py") else None


def reward_files(reward: str) -> list[str]:
    """What a stage reads for a reward: adapters in the run folder, and own Python files."""
    files = []
    for name in reward_terms(reward):
        if own := own_function(name):
            files.append(str(own[0]))
        elif name not in FUNCTIONS:
            files.append(adapter_file(name))
    return files


def text_reward(name: str, function, chat: Chat, asked: dict[tuple, str], device):
    """A function of texts as a reward function of ids; asked: prompt ids -> the user's message.

    Raises ValueError with one line if it raises, or returns anything but a finite number per response.
    """

    def judge(prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        texts = [chat.decode(ids) or "" for ids in responses]
        try:
            scores = [float(x) for x in function([asked[tuple(ids)] for ids in prompts], texts)]
        except Exception as error:
            raise ValueError(f"reward {name}: {type(error).__name__}: {error}") from error
        if len(scores) != len(texts):
            raise ValueError(f"reward {name}: {len(scores)} scores for {len(texts)} responses")
        for score, text in zip(scores, texts):
            if not math.isfinite(score):
                raise ValueError(f"reward {name}: {score} for the response {text!r}")
        return torch.tensor(scores, device=device)  # FP32

    return judge


def make_reward(
    reward: str, folder: Path, config: dict, base_sha256: str, chat: Chat, asked: dict[tuple, str],
    device,
):  # fmt: skip
    """(judge, roles): the weighted sum as one function of (prompt ids, response ids) -> (B,) FP32, and
    the frozen reward models in it. Each term is tried on one prompt: a fault shows before the loop."""
    terms, roles = [], []
    for name, weight in reward_terms(reward).items():
        if own := own_function(name):
            function = text_reward(name, load_function(*own), chat, asked, device)
        elif name in FUNCTIONS:
            function = text_reward(name, FUNCTIONS[name], chat, asked, device)
        else:
            role = make_role("reward" if name == "judge" else f"reward {name}", config, device,
                             head="normal")  # fmt: skip
            load_adapter(folder / adapter_file(name), role, config, base_sha256)
            roles.append(role.freeze())
            function = learned_reward(role, chat.pad_id, device)
        terms.append((function, weight))

    def judge(prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        return sum(weight * function(prompts, responses) for function, weight in terms)

    judge([list(next(iter(asked)))], [chat.response_ids("One answer.")])
    return judge, roles

"""Reward functions: what gives a response its score in 30_ppo.py (`--reward`, `--reward-mix`).

| name               | score of a response                                                        |
|--------------------|----------------------------------------------------------------------------|
| `judge`            | the reward model of 20_reward.py                                           |
| NAME               | the reward model that `20_reward.py --name NAME` trained                   |
| `length`           | characters / 100: flawed on purpose, it pays for words whatever they say   |
| `rubric`           | 1 for success by the corpus' own rubric, else 0: a judge that is never wrong |
| `file.py:function` | your own: function(prompts, responses) -> one number per response          |

A mix is a weighted sum, `helpful=0.7,concise=0.3`; a name alone weighs 1. An own function gets two
lists of strings, the users' messages and the responses as text without their end token.

Whatever it is made of, a reward is one function of a batch and of the corpus rows that it answers:
reward(batch, rows) -> scores (B,) FP32.
"""

import math
from itertools import islice
from pathlib import Path

import torch

from kernel.data.chat import Chat
from kernel.data.files import read_jsonl
from kernel.data.own_code import load_function, load_rubric
from kernel.roles import Role, load_role
from kernel.rollout import sample
from kernel.score import Batch, batches, response_scores


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [len(response) / 100 for response in responses]


FUNCTIONS = {"length": length}
RUBRIC, LABELS = "data/rubric.py", "data/train/labels.jsonl"  # what `rubric` reads


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
        elif name == "rubric":
            files += [RUBRIC, LABELS]
        elif name not in FUNCTIONS:
            files.append(adapter_file(name))
    return files


def learned_reward(role: Role):
    """A frozen reward model as a reward function; it reads the ids and leaves the rows alone."""

    @torch.no_grad()
    def reward(batch: Batch, rows: list[dict]) -> torch.Tensor:
        return response_scores(role, batch)

    return reward


def text_reward(name: str, function, chat: Chat, device):
    """A function of texts as a reward function; whatever is wrong with it ends in one line."""

    def reward(batch: Batch, rows: list[dict]) -> torch.Tensor:
        texts = [chat.decode(ids) or "" for ids in batch.responses]
        try:
            scores = [float(x) for x in function([row["prompt"] for row in rows], texts)]
        except Exception as error:
            raise ValueError(f"reward {name}: {type(error).__name__}: {error}") from error
        if len(scores) != len(texts):
            raise ValueError(f"reward {name}: {len(scores)} scores for {len(texts)} responses")
        for score, text in zip(scores, texts):
            if not math.isfinite(score):
                raise ValueError(f"reward {name}: {score} for the response {text!r}")
        return torch.tensor(scores, device=device)  # FP32

    return reward


def rubric_reward(folder: Path, chat: Chat, device):
    """The corpus' own rubric as a reward function. Rows without a label (demonstrations) get 0.

    Held-out labels stay out of reach. It tells a weak optimiser from a weak judge.
    """
    rubric = load_rubric(folder / RUBRIC)
    labels = {row["id"]: row for row in read_jsonl(folder / LABELS)}

    def reward(batch: Batch, rows: list[dict]) -> torch.Tensor:
        scores = []
        for row, ids in zip(rows, batch.responses):
            ended = "eos" if ids[-1] == chat.eos_id else "length"
            label = labels.get(row["id"])
            verdict = label and rubric(row["prompt"], chat.decode(ids), ended, label)
            scores.append(float(bool(verdict and verdict["success"])))
        return torch.tensor(scores, device=device)  # FP32

    return reward


def make_reward(mix: str, folder: Path, config: dict, base_sha256: str, chat: Chat, device):
    """(reward, roles): the weighted sum as one reward function, and the frozen reward models in it.

    mix: as `reward_terms` reads it; folder: the run folder, where named reward models lie.
    """
    terms, roles = [], []
    for name, weight in reward_terms(mix).items():
        if own := own_function(name):
            terms.append((text_reward(name, load_function(*own), chat, device), weight))
        elif name == "rubric":
            terms.append((rubric_reward(folder, chat, device), weight))
        elif name in FUNCTIONS:
            terms.append((text_reward(name, FUNCTIONS[name], chat, device), weight))
        else:
            kind = "reward" if name == "judge" else f"reward {name}"
            roles.append(load_role(kind, folder / adapter_file(name), config, base_sha256, device))
            terms.append((learned_reward(roles[-1]), weight))

    def reward(batch: Batch, rows: list[dict]) -> torch.Tensor:
        return sum(weight * term(batch, rows) for term, weight in terms)

    return reward, roles


def reward_answers(reward, answers: list[tuple], rows: list[dict], pad_id: int, device) -> torch.Tensor:
    """A reward function on any number of (prompt, response) id lists, 16 at a time: (n,) FP32."""
    scores, rows = [], iter(rows)
    for batch in batches(answers, 16, pad_id, device):
        scores.append(reward(batch, list(islice(rows, len(batch.prompts)))))
    return torch.cat(scores)


def score_scale(
    reward, policy: Role, asked: list[tuple[dict, list[int]]], chat: Chat, device, seed: int
) -> tuple[float, float]:
    """(center, scale): mean and standard deviation of the scores of a policy's own answers.

    asked: (corpus row, prompt ids), one answer each, sampled with a generator of its own. Scores that
    are shifted and divided by them have mean 0 and standard deviation 1 before PPO starts, so a KL
    coefficient means the same for every judge. Source: Ziegler et al. 2019, section 2. Raises
    ValueError if the scores do not differ.
    """
    generator, scores = torch.Generator().manual_seed(seed), []
    for start in range(0, len(asked), 16):
        rows, prompts = zip(*asked[start : start + 16])
        batch = sample(
            policy, prompts, chat.response_limit, chat.eos_id, chat.pad_id, device, generator
        ).batch
        scores.append(reward(batch, rows))
    scores = torch.cat(scores)  # (n,)
    center, scale = scores.mean().item(), scores.std(unbiased=False).item()
    if scale == 0:
        raise ValueError(
            f"--normalize-scores: {len(asked)} sampled answers all score {center:g}; ask for more, "
            "or leave the scores as they are (0)"
        )
    return center, scale

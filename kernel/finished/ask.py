"""Ask the two policies of a finished run by hand (40_generate.py --prompt TEXT, --interactive).

Each answer comes with the judge's score, the exact KL to the SFT policy (in nats, at every token and
summed) and how it ended. Nothing is written, and nobody is kept out meanwhile.
"""

import json

import torch

from kernel.data.chat import Chat
from kernel.finished.model_card import ADAPTERS
from kernel.finished.opened import open_finished
from kernel.roles import load_role
from kernel.rollout import sample
from kernel.run.folder import RunFolder
from kernel.run.machine import resolve_device
from kernel.score import exact_kl, response_scores, vocab_logprobs


class Policies:
    """SFT, PPO and the judge of a run, frozen."""

    def __init__(self, run: RunFolder):
        self.device = torch.device(resolve_device(run.common["device"]))
        self.chat = Chat(run.common)
        kinds = {"sft": "reference", "ppo": "actor", "reward": "reward"}
        roles = {
            name: load_role(kind, run.dir / ADAPTERS[name], run.common, run.base_sha256, self.device)
            for name, kind in kinds.items()
        }
        self.reward = roles.pop("reward")
        self.roles = roles

    @torch.no_grad()
    def answers(self, prompt: str, samples: int | None, seed: int) -> list[dict]:
        """Greedy answers, or `samples` sampled ones per policy, each policy with the same draws."""
        chat, rows = self.chat, []
        prompts = [chat.prompt_ids(prompt, "the prompt")] * (samples or 1)
        for policy, role in self.roles.items():
            generator = torch.Generator().manual_seed(seed) if samples else None
            batch, _, finished, _ = sample(
                role, prompts, chat.response_limit, chat.eos_id, chat.pad_id, self.device, generator
            )
            vocab, ref_vocab = (vocab_logprobs(r, batch) for r in (role, self.roles["sft"]))
            kl, _ = exact_kl(vocab, ref_vocab, batch.response_mask)  # (B, T)
            scores = response_scores(self.reward, batch).tolist()
            for b, response in enumerate(batch.responses):
                rows.append(
                    {
                        "policy": policy,
                        "text": chat.decode(response),
                        "tokens": chat.token_texts(response),
                        "score": scores[b],
                        "kl": kl[b, : len(response)].tolist(),
                        "finish_reason": "eos" if finished[b] else "length",
                    }
                )
        return rows


def show(row: dict) -> None:
    total, count = sum(row["kl"]), len(row["kl"])
    print(
        f"{row['policy'].upper()}  score {row['score']:+.2f}, KL {total:.3f} ({total / count:.3f} per "
        f"token), {count} tokens, finish {row['finish_reason']}"
    )
    print(f"  {row['text']}")
    if row["policy"] != "sft":  # whose KL to itself is 0 at every token
        by_token = (
            f"{json.dumps(t, ensure_ascii=False)} {kl:.3f}"
            for t, kl in zip(row["tokens"], row["kl"])
        )
        print(f"  KL by token: {', '.join(by_token)}")


def ask(args) -> None:
    """Answer `args.prompt`, then with `args.interactive` what is typed, to an empty line or Ctrl-D."""
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("--prompt is empty")
    if args.sample is not None and args.sample <= 0:
        raise ValueError(f"--sample must be positive, not {args.sample}")
    run, _ = open_finished(args, list(ADAPTERS.values()))
    policies = Policies(run)
    if args.prompt is not None:
        for row in policies.answers(args.prompt, args.sample, args.seed):
            show(row)
    while args.interactive:
        try:
            prompt = input("prompt> ").strip()
        except EOFError:
            print()
            return
        if not prompt:
            return
        try:
            for row in policies.answers(prompt, args.sample, args.seed):
                show(row)
        except ValueError as error:  # over the limit, or a control token: the next line may be fine
            print(error)

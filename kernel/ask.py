"""Ask the two policies of a finished run by hand (40_generate.py --prompt TEXT, --interactive).

Each answer comes with the judge's score, the exact KL to the SFT policy (in nats, at every token and
summed) and how it ended. Nothing is written, and nobody is kept out meanwhile.
"""

import json

import torch

from kernel.card import ADAPTERS
from kernel.chat import Chat
from kernel.export import FinishedRun, open_finished
from kernel.model import load_adapter, make_role
from kernel.rollout import as_lists, sample
from kernel.run import resolve_device
from kernel.score import exact_kl, learned_reward, pad_prompts, vocab_logprobs


class Policies:
    """SFT, PPO and the judge of a run, frozen."""

    def __init__(self, run: FinishedRun):
        config, self.device = run.config, torch.device(resolve_device(run.config["device"]))
        self.chat = Chat(config)
        kinds = {"sft": "reference", "ppo": "actor", "reward": "reward"}
        roles = {}
        for name, kind in kinds.items():
            head = "normal" if name == "reward" else None
            roles[name] = make_role(kind, config, self.device, head=head)
            roles[name].freeze()
            source = run.dir / ADAPTERS[name]
            load_adapter(source, roles[name], config, run.made["model"]["base_sha256"])
        self.judge = learned_reward(roles.pop("reward"), self.chat.pad_id, self.device)
        self.roles = roles

    @torch.no_grad()
    def answers(self, prompt: str, samples: int | None, seed: int) -> list[dict]:
        """Greedy answers, or `samples` sampled ones per policy, each policy with the same draws."""
        chat, rows = self.chat, []
        prompts = [chat.prompt_ids(prompt, "the prompt")] * (samples or 1)
        ids, mask = pad_prompts(prompts, chat.pad_id, self.device)
        for policy, role in self.roles.items():
            generator = torch.Generator().manual_seed(seed) if samples else None
            rollout = sample(
                role, ids, mask, chat.response_limit, chat.eos_id, chat.pad_id, generator
            )
            batch = rollout.batch
            vocab, ref_vocab = (vocab_logprobs(r, batch) for r in (role, self.roles["sft"]))
            kl = exact_kl(vocab, ref_vocab, batch.response_mask)["kl"]  # (B, T)
            responses = as_lists(batch)[1]
            scores = self.judge(prompts, responses).tolist()
            for b, response in enumerate(responses):
                rows.append(
                    {
                        "policy": policy,
                        "text": chat.decode(response),
                        "tokens": chat.token_texts(response),
                        "score": scores[b],
                        "kl": kl[b, : len(response)].tolist(),
                        "finish_reason": "eos" if rollout.finished[b] else "length",
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
    policies = Policies(open_finished(args, list(ADAPTERS.values())))
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

"""How long the passes take, beside the stock model and beside their bare matrix products.

    .venv/bin/python tests/bench/speed.py                # a table, two minutes on one core
    .venv/bin/python tests/bench/speed.py --curve    # does it grow linearly in rollouts and tokens?

Columns, in milliseconds, the best of some rounds in which all three take turns:
    ours    the kernel's own pass
    stock   the same through `role.lm`: transformers' modules, LoRA by plain autograd, DynamicCache
    bare    the products of the model's own shapes and dtype with the same number of tokens and nothing
            else: forward, gradient of the input, head over the tokens that are read out; a decode step
            from prepacked weights, as ours
One thread is timed in CPU seconds, so that other work on the machine counts less; more in wall time.
Rows are shaped like the corpus: prompts of 59 tokens, the first 15 alike in all, answers of 26.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import DynamicCache

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kernel import score  # noqa: E402
from kernel.fast.merged import Prepacked  # noqa: E402
from kernel.roles import make_role  # noqa: E402
from kernel.rollout import sample  # noqa: E402

SHARED, PROMPT, ANSWER, STEPS = 15, 59, 26, 16  # tokens

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model-dir", default=str(ROOT / "models/smollm2-135m-instruct"))
parser.add_argument("--base-dtype", default="bfloat16")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--curve", action="store_true")
args = parser.parse_args()

torch.set_num_threads(args.threads)
clock = time.process_time if args.threads == 1 else time.perf_counter
generator = torch.Generator().manual_seed(0)
config = {
    "model_dir": args.model_dir, "base_dtype": args.base_dtype,
    "lora_r": 8, "lora_alpha": 16,
}
role = make_role("reward", config, torch.device("cpu"), seed=0, head="normal")
for name, p in role.learned().items():
    if name.endswith(".B"):
        p.data.normal_(0, 0.01, generator=generator)
lm = role.lm
vocabulary = lm.config.vocab_size


def some_ids(count: int) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()


shared = some_ids(SHARED)


def make_rows(count: int) -> tuple[list, list]:
    prompts = [shared + some_ids(PROMPT - SHARED) for _ in range(count)]
    return prompts, [some_ids(ANSWER) for _ in range(count)]


def race(**runs) -> dict[str, float]:
    """Milliseconds of each, the best of the rounds; the first round only warms up."""
    best = dict.fromkeys(runs, float("inf"))
    for number in range(args.rounds + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if number:
                best[name] = min(best[name], 1000 * (clock() - start))
    return best


def line(what: str, ms: dict[str, float]) -> None:
    ours, stock, bare = ms["ours"], ms["stock"], ms["bare"]
    print(
        f"{what:28} {ours:9.1f} {stock:9.1f} {bare:9.1f} {stock / ours:11.2f} {ours / bare:10.2f}",
        flush=True,
    )


# ---- the three ways ------------------------------------------------------------------------------


def stock_states(prompts: list, answers: list) -> torch.Tensor:
    """Last hidden states of all columns, (B, L, D), through the stock model."""
    ids = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers)])
    mask = torch.ones_like(ids)
    positions = mask.cumsum(1) - 1
    return lm.model(
        ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state


def bare_products(tokens: int, read_out: int, backward: bool, prepacked: bool = False):
    """The matrix products of a pass, ready to run: every layer's seven, and the head."""
    inputs, upstream, ways = {}, {}, {}
    linears = [m.base for m in lm.modules() if hasattr(m, "base")]
    work = [(m.weight, tokens) for m in linears] + [(lm.lm_head.weight, read_out)] * (read_out > 0)
    for weight, rows in work:
        out, width = weight.shape
        inputs.setdefault((rows, width), torch.randn(rows, width).to(weight.dtype))
        upstream.setdefault((rows, out), torch.randn(rows, out).to(weight.dtype))
        ways[weight] = Prepacked(weight) if prepacked else partial(F.linear, weight=weight)

    def run():
        for weight, rows in work:
            ways[weight](inputs[rows, weight.shape[1]])
            if backward:
                upstream[rows, weight.shape[0]] @ weight

    return run


# ---- updates -------------------------------------------------------------------------------------


def sft_update(rows: int) -> dict[str, float]:
    prompts, answers = make_rows(rows)

    def ours():
        batch = score.make_batch(zip(prompts, answers), 0, "cpu")
        score.response_logprobs(role, batch).sum().backward()

    def stock():
        states = stock_states(prompts, answers)[:, PROMPT - 1 : -1]
        logprobs = lm.lm_head(states).float().log_softmax(-1)
        logprobs.gather(2, torch.tensor(answers)[..., None]).sum().backward()

    bare = bare_products(rows * (PROMPT + ANSWER), rows * ANSWER, backward=True)
    return race(ours=ours, stock=stock, bare=bare)


def reward_update(pairs: int) -> dict[str, float]:
    prompts, chosen = make_rows(pairs)
    rejected = make_rows(pairs)[1]

    def ours():
        rows = list(zip(prompts, chosen, rejected))
        first, second = score.pair_scores(role, rows, 0, "cpu")
        (first - second).sum().backward()

    def stock():
        states = stock_states(prompts * 2, chosen + rejected)
        first, second = role.head(states[:, -1].float())[:, 0].chunk(2)
        (first - second).sum().backward()

    # as if each prompt were read once: the answers double, the prompts do not
    bare = bare_products(pairs * (PROMPT + 2 * ANSWER), 0, backward=True)
    return race(ours=ours, stock=stock, bare=bare)


@torch.no_grad()
def scoring(rows: int) -> dict[str, float]:
    prompts, answers = make_rows(rows)
    return race(
        ours=lambda: score.response_scores(role, score.make_batch(zip(prompts, answers), 0, "cpu")),
        stock=lambda: stock_states(prompts, answers),
        bare=bare_products(rows * (PROMPT + ANSWER), 0, backward=False),
    )


# ---- decoding ------------------------------------------------------------------------------------


@torch.no_grad()
def decode_step(rows: int) -> dict[str, float]:
    """Per step, the sampler included; the first token, which also reads the prompt, is taken off."""
    prompts, _ = make_rows(rows)

    def ours(tokens: int):
        sample(role, prompts, tokens, -1, 0, "cpu", torch.Generator().manual_seed(1))

    def stock(tokens: int):
        cache, new = DynamicCache(config=lm.config), torch.tensor(prompts)
        for t in range(tokens):
            seen = torch.ones(rows, PROMPT + t, dtype=torch.int64)
            positions = torch.arange(PROMPT + t - new.shape[1], PROMPT + t)[None]
            states = lm.model(
                new, attention_mask=seen, position_ids=positions, cache=cache, use_cache=True
            ).last_hidden_state
            new = lm.lm_head(states[:, -1]).float().softmax(-1).multinomial(1)

    def step(run):
        def timed():
            run(1)
            middle = clock()
            run(1 + STEPS)
            return middle

        best = float("inf")
        for _ in range(max(args.rounds // 2, 1)):
            start = clock()
            middle = timed()
            best = min(best, clock() - middle - (middle - start))
        return 1000 * best / STEPS

    bare = race(bare=bare_products(rows, rows, backward=False, prepacked=True))["bare"]
    return {"ours": step(ours), "stock": step(stock), "bare": bare}


@torch.no_grad()
def curve() -> None:
    print(f"{'rollouts':>8} {'tokens':>8} {'decode s':>9} {'score s':>9} {'ms per token':>13}")
    for rows, tokens in ((4, 64), (16, 64), (64, 64), (4, 16), (4, 64), (4, 256)):
        prompts, _ = make_rows(rows)
        start = clock()
        batch = sample(role, prompts, tokens, -1, 0, "cpu", torch.Generator().manual_seed(1)).batch
        middle = clock()
        score.response_values(role, batch)
        end = clock()
        each = 1000 * (end - start) / (rows * tokens)
        print(
            f"{rows:8} {tokens:8} {middle - start:9.2f} {end - middle:9.2f} {each:13.2f}",
            flush=True,
        )


if args.curve:
    curve()
else:
    print(f"{Path(args.model_dir).name}, {args.base_dtype}, {args.threads} thread(s), milliseconds")
    print(f"{'':28} {'ours':>9} {'stock':>9} {'bare':>9} {'stock/ours':>11} {'ours/bare':>10}")
    line("update, 8 rows of 85", sft_update(8))
    line("reward update, 8 pairs", reward_update(8))
    line("scoring, 8 rows of 85", scoring(8))
    for count in (4, 16):
        line(f"decode step, {count} rows", decode_step(count))
    # A product with one row does little but read its weights.
    one_row = bare_products(1, 1, backward=False, prepacked=True)
    print(f"reading the weights once {race(one_row=one_row)['one_row']:33.1f}")

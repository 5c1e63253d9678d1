"""The base of the profile `tiny`: a small Qwen2 and its tokenizer, made from a corpus' own text.

Two things decide whether anything can be learned on it.

The tokenizer is of Qwen2's own kind. Beside a Qwen2 config the library reads every tokenizer as one, and
with another pre-tokenizer the model would meet ids that it was never trained on.

The output can be sure. Adapters leave the tied embedding and the last norm alone, so the scale of the
logits is the base's for ever. With a last norm that starts at 1, some 2 % of every token are left to
chance, three of four sampled answers are garbled, and no PPO can mend that: it starts at `last_norm`.
"""

import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from kernel.data.chat import SYSTEM

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_texts(corpus: dict[str, list[dict]]) -> tuple[list[str], list[str]]:
    """Every training prompt, in whatever form SFT and PPO will ask it, and the answers of the pairs."""
    files = ("train/pairs.jsonl", "train/demonstrations.jsonl", "train/prompts.jsonl")
    prompts = dict.fromkeys(row["prompt"] for file in files for row in corpus.get(file, []))
    pairs = corpus["train/pairs.jsonl"]
    return [*prompts], [row[side] for row in pairs for side in ("chosen", "rejected")]


def make_tiny(base: dict, folder: Path, prompts: list[str], answers: list[str]) -> None:
    """Write model and tokenizer, trained on training-split text with prompts and answers shuffled
    against each other: the base knows the language, not which answer fits which prompt."""
    tokenizer = tiny_tokenizer(prompts + answers, base["vocabulary"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # fixed: the same bits whatever the caller's thread count
    try:
        model = pretrain_tiny(base, tokenizer, prompts, answers)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer(texts: list[str], vocabulary: int) -> Qwen2Tokenizer:
    """A byte-level BPE trained on texts, with Qwen2's normaliser and pre-tokenizer."""
    kind = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = kind.normalizer, kind.pre_tokenizer
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(texts, trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"], merges=[tuple(pair) for pair in trained["merges"]],
        pad_token=special[0], eos_token=special[2], extra_special_tokens=[special[1]],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def pretrain_tiny(
    base: dict, tokenizer, prompts: list[str], answers: list[str]
) -> Qwen2ForCausalLM:
    """Plain next-token training on shuffled chats; every token counts, prompts too."""
    torch.manual_seed(base["seed"])
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=base["hidden_size"],
            intermediate_size=base["mlp"], num_hidden_layers=base["layers"],
            num_attention_heads=base["heads"], num_key_value_heads=base["kv_heads"],
            max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0,
            bos_token_id=None, eos_token_id=2, attn_implementation="eager",
        )
    )
    torch.nn.init.constant_(model.model.norm.weight, base["last_norm"])
    order = random.Random(base["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=base["pretrain_lr"], weight_decay=0.01)
    for update in range(base["pretrain_updates"]):
        rows = []
        for _ in range(base["pretrain_batch"]):
            prompt, answer = order.choice(prompts), order.choice(answers)  # any answer, not its own
            if order.random() < base["pretrain_echo"]:
                answer = prompt  # repeating the user teaches to look back, and nothing of the task
            messages = [
                {"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            rows.append(tokenizer(text.rstrip("\n"), add_special_tokens=False).input_ids)
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        logits = model(input_ids=ids, attention_mask=(labels != -100).long()).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = base["pretrain_lr"] * (1 - update / base["pretrain_updates"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"base model: tiny, {model.num_parameters():,} parameters, last loss {loss.item():.3f}")
    return model.eval()

"""The base of the profile `tiny`: a small Qwen2 and its tokenizer, made from a corpus' own text."""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kernel.data.chat import SYSTEM

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_texts(corpus: dict[str, list[dict]]) -> tuple[list[str], list[str]]:
    """Prompts and answers of the training pairs."""
    pairs = corpus["train/pairs.jsonl"]
    answers = [row[side] for row in pairs for side in ("chosen", "rejected")]
    return [row["prompt"] for row in pairs], answers


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


def tiny_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=special[0], eos_token=special[2]
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
            vocab_size=base["vocabulary"], hidden_size=base["hidden_size"],
            intermediate_size=base["mlp"], num_hidden_layers=base["layers"],
            num_attention_heads=base["heads"], num_key_value_heads=base["kv_heads"],
            max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0,
            bos_token_id=None, eos_token_id=2, attn_implementation="eager",
        )
    )
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

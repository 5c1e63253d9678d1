"""Proves that a base model of somebody's own is taken whole or refused by name: shards, tied and untied
heads, damaged weights, tokenizers without a pad token or a chat template.

Oracles: the stock model, the same model in one file, the tokenizer on the pieces alone.
"""

import json
import shutil

import pytest
import torch
from conftest import EOS, KINDS, PAD, ROOT, build, run_stage
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from kernel.data.base import load_base, model_sha256
from kernel.data.chat import PLAIN, SYSTEM, Chat, special_ids
from kernel.data.files import read_json
from kernel.data.tiny import tiny_tokenizer
from kernel.roles import fingerprint
from kernel.score import active_logits, make_batch

INDEX = "model.safetensors.index.json"
LIMITS = {"prompt_limit": 120, "response_limit": 20, "context_limit": 140}


# ---- weights --------------------------------------------------------------------------------------


@pytest.fixture
def sharded(qwen3_dir, tmp_path):
    """The same model in several files."""
    model = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    return tmp_path / "sharded"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_a_tied_and_an_untied_head_equal_the_stock_model(
    tmp_path, new_role, stock_model, kind, tied
):
    folder = build(tmp_path / kind, kind, tie_word_embeddings=tied)
    role = new_role(folder)
    assert (role.lm.lm_head.weight is role.lm.model.embed_tokens.weight) == tied
    assert ("lm.lm_head.weight" in role.base()) != tied
    prompt, response = [5, 6, 7, 8], [9, 10, 11, EOS]
    ours = active_logits(role, make_batch([(prompt, response)], PAD, "cpu"))
    want = stock_model(folder, role)(torch.tensor([prompt + response])).logits[0, 3:-1]
    torch.testing.assert_close(ours.detach(), want, rtol=0, atol=1e-4)


def test_a_model_in_shards_is_the_same_model(sharded, qwen3_dir):
    whole, parts = (load_base(folder, "float32") for folder in (qwen3_dir, sharded))
    assert fingerprint(dict(whole.named_parameters())) == fingerprint(
        dict(parts.named_parameters())
    )


def test_the_hash_of_a_model_covers_every_shard_and_the_index(sharded):
    before = model_sha256(sharded)["base_sha256"]
    for path in sorted(sharded.glob("model*")):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"x")
        assert model_sha256(sharded)["base_sha256"] != before, path.name
        path.write_bytes(content)
    assert model_sha256(sharded)["base_sha256"] == before


def test_a_shard_that_is_gone_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(ValueError, match=f"{INDEX} names {shard.name}, which is not there"):
        load_base(sharded, "float32")


@pytest.mark.parametrize("fault", ["missing", "unexpected"])
def test_weights_that_do_not_fit_the_config_are_named_and_not_made_up(qwen2_dir, tmp_path, fault):
    # transformers would draw the missing tensor at random, and drop the unexpected one, with a warning
    folder = shutil.copytree(qwen2_dir, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj."
    if fault == "missing":
        name += "weight"
        del state[name]
    else:
        name += "bias"
        state[name] = torch.ones(32)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"do not fit config.json \(1 faults\): {fault} {name}"):
        load_base(folder, "float32")


def test_another_architecture_is_refused_with_the_projections_wanted_and_found(tmp_path):
    config = GPT2Config(vocab_size=97, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        load_base(tmp_path, "float32")
    for word in (
        "GPT2LMHeadModel",
        "Qwen3ForCausalLM",
        "q/k/v/o_proj",
        "found c_attn, c_fc, c_proj",
    ):
        assert word in str(error.value)


def test_quantised_weights_are_refused(qwen2_dir, edited_folder):
    folder = edited_folder(
        qwen2_dir, "config.json", quantization_config={"quant_method": "gptq", "bits": 4}
    )
    with pytest.raises(ValueError, match="quantised weights are not supported"):
        load_base(folder, "float32")


# ---- tokenizers -----------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_folder(qwen2_dir, tmp_path):
    """A model folder with a tokenizer; keyword arguments are set on the tokenizer before it is saved."""

    def make(rows: int = 330, **changes):
        folder = shutil.copytree(qwen2_dir, tmp_path / f"model{len(list(tmp_path.iterdir()))}")
        tokenizer = tiny_tokenizer(["Hello there, one two three."] * 5, 330)
        for key, value in changes.items():
            setattr(tokenizer, key, value)
        tokenizer.save_pretrained(folder)
        config = read_json(folder / "config.json")
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
        return folder

    return make


def chat_of(folder, template: bool) -> Chat:
    return Chat(
        {"model_dir": str(folder), "eos_id": 2, "pad_id": 0, "chat_template": template, **LIMITS}
    )


@pytest.mark.parametrize(
    "pad_token, eos_token, ids, why",
    [
        ("<|endoftext|>", "<|im_end|>", (2, 0), "the tokenizer's own"),
        ("<|im_start|>", "<|im_end|>", (2, 1), "the tokenizer's own"),
        ("<|im_end|>", "<|im_end|>", (2, 0), "the tokenizer's is its end token"),
        (None, "<|im_end|>", (2, 0), "the tokenizer names none"),
        (None, "<|endoftext|>", (0, 1), "the tokenizer names none"),
    ],
)
def test_pad_is_never_the_end_token_and_the_rule_is_said(
    tokenizer_folder, pad_token, eos_token, ids, why
):
    # case B02
    folder = tokenizer_folder(pad_token=pad_token, eos_token=eos_token)
    found, said = special_ids(folder)
    assert (found["eos_id"], found["pad_id"]) == ids
    assert said == f"end token {ids[0]}, pad {ids[1]} ({eos_token}; pad: {why}, always masked)"


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(tokenizer_folder):
    folder = tokenizer_folder(rows=200)
    tokens = len(AutoTokenizer.from_pretrained(folder))
    with pytest.raises(ValueError, match=f"has {tokens} tokens, the model embeds 200"):
        special_ids(folder)


def test_without_a_chat_template_the_flag_is_named_and_the_plain_form_taken(tokenizer_folder):
    folder = tokenizer_folder(chat_template=None)
    with pytest.raises(ValueError, match="no chat template.*--no-chat-template"):
        special_ids(folder)
    assert special_ids(folder, chat_template=False)[0] == {"eos_id": 2, "pad_id": 0}
    chat = chat_of(folder, template=False)
    text = f"{SYSTEM}\n\nUser:\nHello there\n\nAssistant:\n"
    assert PLAIN.format(system=SYSTEM, prompt="Hello there") == text
    assert chat.prompt_ids("Hello there") == chat.tokenizer(text).input_ids
    with pytest.raises(ValueError, match="row 1: the text contains the control token"):
        chat.prompt_ids("Hello <|im_end|>", "row 1")


def test_the_plain_form_begins_as_the_tokenizer_wants_and_never_ends(tokenizer_folder):
    # case B18: a begin token once if the tokenizer sets one; an end token would end the answer
    folder = tokenizer_folder(chat_template=None)
    chat = chat_of(folder, template=False)
    plain = chat.prompt_ids("Hello")
    chat.tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    assert chat.prompt_ids("Hello") == [1, *plain]
    assert chat.response_ids("Hello") == [
        *chat.tokenizer.encode("Hello", add_special_tokens=False),
        2,
    ]


# ---- as programs ----------------------------------------------------------------------------------


def test_a_sharded_qwen3_without_a_template_and_pad_token_goes_through_sft(tmp_path, tiny):
    folder = build(
        tmp_path / "whole", "qwen3", vocab_size=1024, max_position_embeddings=512,
        initializer_range=0.02,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    tiny_model = read_json(tiny / "config.json")["common"]["model_dir"]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / tiny_model)
    tokenizer.chat_template, tokenizer.pad_token = None, None
    tokenizer.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    prepare = (
        "00_prepare",
        "--profile",
        "tiny",
        "--run-dir",
        run,
        "--model-dir",
        tmp_path / "model",
    )
    done = run_stage(*prepare, "--no-chat-template")
    assert "end token 2, pad 0 (<|im_end|>; pad: the tokenizer names none" in done.stdout
    common = read_json(run / "config.json")["common"]
    assert common["chat_template"] is False
    run_stage(*prepare)  # decided once: a second call need not say it again
    done = run_stage("10_sft", "--run-dir", run, "--epochs", "0.1", "--validation-rows", "2")
    assert "preflight: two passes equal" in done.stdout

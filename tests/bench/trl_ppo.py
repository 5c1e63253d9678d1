"""TRL's side of the benchmark: its PPOTrainer as it comes, on the same model, prompts and lengths.

Policy and value model are two backbones with PEFT LoRA on all seven projections (bf16 base, FP32
adapters), the reference is the policy with its adapter switched off (TRL's way, one backbone less),
the reward model is a frozen sequence classifier on the same base.
"""

import tempfile

import torch
from datasets import Dataset
from lap import Stopwatch, begin
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from kernel.lora import PROJECTIONS

args, config, prompts = begin()
torch.set_num_threads(args.threads)
torch.manual_seed(0)

# ---- models -------------------------------------------------------------------------------------

lora = LoraConfig(
    r=config["lora_r"], lora_alpha=config["lora_alpha"], target_modules=list(PROJECTIONS)
)
base = {
    "dtype": getattr(torch, config["base_dtype"]),
    "attn_implementation": "eager",  # faster here than the default, sdpa
    "local_files_only": True,
}
policy = get_peft_model(AutoModelForCausalLM.from_pretrained(config["model_dir"], **base), lora)


def classifier():
    return AutoModelForSequenceClassification.from_pretrained(
        config["model_dir"], num_labels=1, pad_token_id=config["pad_id"], **base
    )


reward = classifier().requires_grad_(False)
# The trainer reads `value.model` and `value.score`, so it gets the classifier inside PEFT's wrapper.
value = get_peft_model(classifier(), lora).get_base_model()
value.score.requires_grad_(True)
tokenizer = AutoTokenizer.from_pretrained(config["model_dir"], padding_side="left")
# NOTE: the trainer takes every pad id for padding, and this folder's pad is the end token of each turn.
tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config["pad_id"])

# ---- optimiser: AdamW and clipping as in kernel/optim.py ----------------------------------------

groups = [
    {"params": [p for p in model.parameters() if p.requires_grad], "lr": lr}
    for model, lr in ((policy, config["actor_lr"]), (value, config["critic_lr"]))
]
optimizer = torch.optim.AdamW(groups, weight_decay=config["weight_decay"], fused=True)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def clip(*_) -> None:
    """The trainer ignores max_grad_norm; actor and critic are clipped apart, as on our side."""
    for group in groups:
        torch.nn.utils.clip_grad_norm_(group["params"], config["max_grad_norm"])


optimizer.register_step_pre_hook(clip)

# ---- stopwatch: around generation, at the end of scoring, at the end of the iteration -----------

watch = Stopwatch()
generate, whiten = ppo_trainer.batch_generation, ppo_trainer.masked_whiten


def timed_generation(*given):
    watch.mark("other")
    query_responses, logits = generate(*given)
    assert logits.shape[:2] == (config["rollouts"], args.response_tokens)
    watch.mark("generation")
    return query_responses, logits


def timed_whiten(*given):  # advantages: the last step before the updates
    whitened = whiten(*given)
    watch.mark("scoring")
    return whitened


class Laps(TrainerCallback):
    def on_step_end(self, *_, **__):
        watch.mark("training")
        watch.lap()


ppo_trainer.batch_generation, ppo_trainer.masked_whiten = timed_generation, timed_whiten

# ---- train --------------------------------------------------------------------------------------

with tempfile.TemporaryDirectory() as folder:
    PPOTrainer(
        PPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,  # no autocast, so the adapters compute in FP32
            gradient_checkpointing=False,
            per_device_train_batch_size=config["rollouts"],
            num_ppo_epochs=config["ppo_epochs"],
            total_episodes=len(prompts),
            response_length=args.response_tokens,  # no stop token: all of them, as on our side
            temperature=1.0,
            kl_coef=config["kl_coef"],
            cliprange=config["clip_range"],
            gamma=config["gamma"],
            lam=config["gae_lambda"],
            num_sample_generations=0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        tokenizer,
        policy,
        None,
        reward,
        Dataset.from_dict({"input_ids": prompts}),
        value,
        optimizers=(optimizer, scheduler),
        callbacks=[Laps()],
    ).train()
watch.report()

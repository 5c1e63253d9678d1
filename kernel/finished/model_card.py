"""The model card of an export: base, use, data, settings, results, limits, from the run's own files."""

import json
from pathlib import Path

from safetensors import safe_open

from kernel.data.chat import PLAIN, SYSTEM
from kernel.data.files import read_json, sha256_file
from kernel.run.folder import RunFolder

MAKERS = {"sft": "10_sft", "reward": "20_reward", "ppo": "30_ppo"}  # section of a profile: stage
ADAPTERS = {
    name: f"checkpoints/{stage}/continuous/adapter.safetensors" for name, stage in MAKERS.items()
}
RECORDS = {name: f"outputs/{stage}/continuous/record.json" for name, stage in MAKERS.items()}
MANIFEST = "data/manifest.json"
ANSWERED, JUDGED = "outputs/40_generate/record.json", "outputs/50_evaluate/record.json"
TABLE = "outputs/50_evaluate/table.md"
READS = [*RECORDS.values(), MANIFEST, ANSWERED, JUDGED, TABLE]  # beside the adapters

CARD = """\
# LoRA adapters of an SFT and PPO run on {base}

{files}

Base model: `{base}`, {source}, sha256 {base_sha256}
(its config.json and weights files, each name and content, as one stream). Every adapter is FP32,
r {lora_r}, alpha {lora_alpha}, without dropout, on all seven projections of every layer.

## Use

```python
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}", dtype=torch.float32)
policy = PeftModel.from_pretrained(base, "ppo")
```

The prompt is {prompt}.
The answer follows directly and ends with token {eos_id}; trained were at most {response_limit} tokens.

The score of an answer is the reward head, in FP32, on {pooling}.
`input_ids` (1, length) are prompt, answer and end token without padding; `answer_tokens` of them are
answer and end token. The score has no unit and may be negative: only the difference between answers to
one prompt says something.

```python
from safetensors.torch import load_file

base = AutoModelForCausalLM.from_pretrained("{base}", dtype=torch.float32)
judge = PeftModel.from_pretrained(base, "reward").get_base_model()
head = load_file("reward/score_head.safetensors")
states = judge.model(input_ids).last_hidden_state[0, -answer_tokens:].float()
score = head["weight"][0] @ {pooled} + head["bias"][0]
```

The metadata of `score_head.safetensors` says what it belongs to: `{meaning}`.

## Data

Corpus {corpus}: {rows}.

## Settings

{settings}

## Results

{results}

## Limits

- The score predicts the preferences in the pairs of this corpus. Those of the built-in corpora were made
  by a rule: a simulated preference, nobody was asked. The score measures neither satisfaction nor
  usefulness, and PPO was trained to raise it (or what its setting `reward` names instead).
- The splits of OfficeHelpPrefs-v1 share actions and phrasing, so its held-out figures measure no
  generalisation to other requests.
- Trained were single answers of at most {response_limit} tokens; all else is the base model's.

## Proof

Each folder was read back and compared with the run's own roles on a float32 base, at the first
tokens of greedy answers to four training prompts:

{proofs}
"""


def base_name(made: dict) -> str:
    """What others call a run's base model: its repository if it was downloaded, else its folder."""
    folder = made["common"]["model_dir"]
    return folder if Path(folder).is_absolute() else made["base"].get("repo", folder)


def evaluated(run_dir: Path, sha256: dict[str, str]) -> str:
    """The table of 50_evaluate.py, if it judged just the adapters with these hashes."""
    if not all((run_dir / name).is_file() for name in (ANSWERED, JUDGED, TABLE)):
        return "This run was not evaluated."
    answered, judged = read_json(run_dir / ANSWERED), read_json(run_dir / JUDGED)
    parents = {**answered["identity"]["parents"], **judged["identity"]["parents"]}
    now = {**answered["outputs"], **sha256}
    stale = [name for name, want in parents.items() if now.get(name, want) != want]
    if stale or sha256_file(run_dir / TABLE) != judged["outputs"][TABLE]:
        return "The evaluation in the run folder is not that of these adapters."
    return (run_dir / TABLE).read_text(encoding="utf-8").strip()


def model_card(run: RunFolder, sha256: dict[str, str], merged: bool, proofs: list[str]) -> str:
    """The card as Markdown; sha256: of the adapters; proofs: measured lines."""
    config, manifest = run.common, read_json(run.dir / MANIFEST)
    with safe_open(run.dir / ADAPTERS["reward"], framework="pt") as file:
        meaning = file.metadata()["adapter"]
    last = json.loads(meaning).get("pooling", "last") == "last"
    files = [f"- `{name}/`: {path}, sha256 {sha256[path]}" for name, path in ADAPTERS.items()]
    if merged:
        files.append(
            f"- `*-merged/`: adapter and base in one, {config['base_dtype']}, with tokenizer"
        )
    settings = {name: read_json(run.dir / path)["identity"][name] for name, path in RECORDS.items()}
    source = "a folder of its user's own"
    if not Path(run.made["common"]["model_dir"]).is_absolute():
        given = ", ".join(f"{key} {value}" for key, value in run.made["base"].items())
        source = f"as 00_prepare.py makes it ({given})"
    system = config.get("system", SYSTEM)
    prompt = f"the tokenizer's chat template with the system turn {json.dumps(system)}"
    if not config.get("chat_template", True):
        prompt = f"the text {json.dumps(PLAIN.format(system=system, prompt='...'))}"
    return CARD.format(
        base=base_name(run.made),
        source=source,
        base_sha256=run.base_sha256,
        files="\n".join(files),
        prompt=prompt,
        meaning=meaning,
        pooling="the state of its last token, the end token" if last else "the mean of its states",
        pooled="states[-1]" if last else "states.mean(0)",
        corpus=manifest["corpus"],
        rows=", ".join(f"{count} {name}" for name, count in manifest["rows"].items()),
        settings="\n".join(
            f"- {name}: " + ", ".join(f"{key} {value}" for key, value in values.items())
            for name, values in settings.items()
        ),
        results=evaluated(run.dir, sha256),
        proofs="\n".join(f"- {line}" for line in proofs),
        **{key: config[key] for key in ("lora_r", "lora_alpha", "eos_id", "response_limit")},
    )

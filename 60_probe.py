"""Stage 60: probes. What does the frozen judge pay for, is it to be trusted, what did PPO do with it?

In:   data/heldout/probes.jsonl                 fixed candidates, crossed by named binary factors
      data/{train,validation,heldout}/pairs.jsonl
      data/{train,heldout}/labels.jsonl, data/train/prompts.jsonl, data/rubric.py
      outputs/30_ppo/continuous/{metrics,rollouts}.jsonl
      outputs/50_evaluate/{answers,pairs}.jsonl    what the policies really answered; held-out scores
      checkpoints/{10_sft,20_reward}/continuous/adapter.safetensors
Out:  outputs/60_probe/figures.json             every figure
      outputs/60_probe/{probes,pairs,doses,best_of_n}.jsonl    the scores they follow from
      outputs/60_probe/{table,before_after}.md                 to read
      outputs/60_probe/report.{html,md}                        the whole run on one page

    effect of a factor  = score(factor on) - score(factor off), the other factors held
    calibration         = is sigmoid(score(chosen) - score(rejected)) as often right as it says?
    best of n           = the judge's favourite among n samples of SFT: KL log n - (n-1)/n, no training

Nothing here trains or selects anything. The rubric looks at PPO's samples afterwards. A rise in score is
not satisfaction, and a bias of the judge is not by itself proof that PPO used it: the answers before
and after stand beside it.

    python 60_probe.py
    python 60_probe.py --design helpfulness    # only a document: how to collect and judge such pairs
"""

import torch

from kernel.data.chat import Chat
from kernel.data.draws import spread
from kernel.data.files import read_jsonl, sha256_file, write_atomic, write_json, write_jsonl
from kernel.data.own_code import load_rubric
from kernel.measure.answers import paired
from kernel.measure.courtesy import count_courtesy
from kernel.measure.judge import card_pairs
from kernel.measure.ledger import judged_rollouts
from kernel.measure.probe import all_figures, dose_rows
from kernel.measure.tables import all_lines, before_after_lines
from kernel.roles import frozen_fingerprints, load_role
from kernel.rollout import sample
from kernel.run import flags
from kernel.run.errors import one_line_errors
from kernel.run.stage import Stage
from kernel.score import score_answers, score_pairs

PROBES = "data/heldout/probes.jsonl"
PAIRS = {
    "train": "data/train/pairs.jsonl",
    "validation": "data/validation/pairs.jsonl",
    "heldout": "data/heldout/pairs.jsonl",
}
PROMPTS = "data/train/prompts.jsonl"
TRAIN_LABELS = "data/train/labels.jsonl"
LABELS = "data/heldout/labels.jsonl"
RUBRIC = "data/rubric.py"
METRICS = "outputs/30_ppo/continuous/metrics.jsonl"
ROLLOUTS = "outputs/30_ppo/continuous/rollouts.jsonl"
ANSWERS = "outputs/50_evaluate/answers.jsonl"
PAIR_SCORES = "outputs/50_evaluate/pairs.jsonl"
SFT = "checkpoints/10_sft/continuous/adapter.safetensors"
REWARD = "checkpoints/20_reward/continuous/adapter.safetensors"
READS = [PROBES, *PAIRS.values(), PROMPTS, TRAIN_LABELS, LABELS, RUBRIC, METRICS, ROLLOUTS, ANSWERS,
         PAIR_SCORES, SFT, REWARD]
WRITES = ["outputs/60_probe"]
SIDES = ("chosen", "rejected")
CONTEXTS = 20  # whose answers are looked at where there are no probes
SHOWN = ["data/manifest.json", "outputs/**/*.json*"]  # by the report

# ---- flags --------------------------------------------------------------------------------------

one_line_errors("60_probe")
parser = flags.parser(__doc__)
setting = flags.settings_of(parser, "probe")
setting("--card-pairs", int, "training and validation pairs on the report card")
setting("--samples", int, "samples of SFT per context, for best of n")
setting("--probe-seed", int, "of these samples, and of the intervals")
parser.add_argument(
    "--design", metavar="BEHAVIOUR",
    help="write the plan of a reward model for helpfulness, programming, safety or your own words to "
    "outputs/design/, and do nothing else",
)
args = parser.parse_args()
if args.design is not None:
    from kernel.lesson.design import write_design  # its prose is no part of this stage's identity

    print(f"  wrote {write_design(flags.run_folder(args)[1], args.design, args.redo)}")
    raise SystemExit

# ---- run folder and seeds -----------------------------------------------------------------------

stage = Stage.begin("60_probe", "probe", args, READS, WRITES, shown=SHOWN)
config, device = stage.config, stage.device
generator = torch.Generator().manual_seed(config["probe_seed"])  # on the CPU, of this stage alone

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
probes = read_jsonl(stage.dir / PROBES) if (stage.dir / PROBES).stat().st_size else []
candidates = chat.encode_answers(probes, "candidate", PROBES)
pairs = {split: read_jsonl(stage.dir / name) for split, name in PAIRS.items()}
pairs = card_pairs(pairs, config["card_pairs"])
pair_ids = {split: chat.encode_pairs(rows, PAIRS[split]) for split, rows in pairs.items()}
answers = read_jsonl(stage.dir / ANSWERS)
both = paired(answers)
asked = [sft for sft, _ in both if sft["population"] == "probe"]
asked = asked or spread([sft for sft, _ in both], CONTEXTS)  # a corpus need not have probes
labels = {row["id"]: row for row in read_jsonl(stage.dir / LABELS)}
rubric = load_rubric(stage.dir / RUBRIC)

# ---- model --------------------------------------------------------------------------------------

actor = load_role("actor", stage.dir / SFT, config, stage.run.base_sha256, device)
judge = load_role("reward", stage.dir / REWARD, config, stage.run.base_sha256, device)
judge_before = frozen_fingerprints([judge])
bar = stage.bar(0, len(PAIRS) + len(asked))  # splits, then contexts


def scored(answers: list[tuple]) -> list[float]:
    """The judge's scores of (prompt, response) id lists."""
    return score_answers(judge, answers, chat.pad_id, device).tolist() if answers else []


# ---- scores of fixed answers: probe candidates, pairs -------------------------------------------

for row, score in zip(probes, scored(candidates)):
    row["score"] = score
known = {(tuple(p), tuple(r)): row["score"] for (p, r), row in zip(candidates, probes)}

pair_rows = []
heldout = {row["id"]: row for row in read_jsonl(stage.dir / PAIR_SCORES)}  # measured by 50_evaluate
for split, rows in pairs.items():
    if split == "heldout":
        scores = [[heldout[row["id"]][f"{side}_score"] for row in rows] for side in SIDES]
    else:
        scores = [s.tolist() for s in score_pairs(judge, pair_ids[split], chat.pad_id, device)]
    for row, (_, *ids), *found in zip(rows, pair_ids[split], *scores):
        pair_row = {"split": split, "id": row["id"]}
        for side, response, score in zip(SIDES, ids, found):
            pair_row |= {
                f"{side}_score": score,
                f"{side}_tokens": len(response),
                f"{side}_courtesy": count_courtesy(row[side]),
            }
        pair_rows.append(pair_row)
    bar.update()

# ---- loop: per context SFT samples (best of n), then counterfactual answers (doses) -------------

samples, doses = [], []
for sft in asked:
    prompt = chat.prompt_ids(sft["prompt"])

    # 1. Sample from SFT; one prompt for the whole batch.
    batch, _, finished, _ = sample(
        actor, [prompt] * config["samples"], chat.response_limit, chat.eos_id, chat.pad_id, device,
        generator,
    )
    scores = scored([(prompt, response) for response in batch.responses])
    for number, (ids, score, ended) in enumerate(zip(batch.responses, scores, finished)):
        text, reason = chat.decode(ids), "eos" if ended else "length"
        verdict = rubric(sft["prompt"], text, reason, labels[sft["id"]])
        samples.append(
            {
                "context": sft["context"],
                "sample": number,
                "text": text,
                "finish_reason": reason,
                "score": score,
                "success": verdict["success"],
            }
        )

    # 2. Answers that differ in one thing. One that is too long, or no plain text, is left out.
    made, encoded = dose_rows(sft, probes), {}
    for row in made:
        try:
            ids = chat.response_ids(row["text"]) if row["text"] else [chat.eos_id]
        except ValueError:
            continue
        encoded[row["text"]] = tuple(prompt), tuple(ids)
    new = [key for key in dict.fromkeys(encoded.values()) if key not in known]
    known |= dict(zip(new, scored([(list(p), list(r)) for p, r in new])))
    doses += [{**row, "score": known.get(encoded.get(row["text"]))} for row in made]
    doses.append(
        {"context": sft["context"], "factor": "sft", "dose": None, "text": sft["text"],
         "score": sft["score"]}
    )
    bar.update()
bar.close()

# ---- figures ------------------------------------------------------------------------------------

sampled, their_prompts, their_labels = (
    read_jsonl(stage.dir / name) for name in (ROLLOUTS, PROMPTS, TRAIN_LABELS)
)
rollouts = judged_rollouts(sampled, their_prompts, their_labels, rubric)
figures = all_figures(
    probes, pair_rows, doses, samples, answers, read_jsonl(stage.dir / METRICS), rollouts,
    config["probe_seed"],
)

# ---- summary ------------------------------------------------------------------------------------

if frozen_fingerprints([judge]) != judge_before:
    raise ValueError("the judge changed while it scored")
for name, before in stage.parents.items():
    if sha256_file(stage.dir / name) != before:
        raise ValueError(f"{name} changed while the probes were scored")
lines = all_lines(figures)
print("\n".join([*lines, "", *before_after_lines(both, figures, 10)]))
files = []
for name, rows in (
    ("probes", probes), ("pairs", pair_rows), ("doses", doses), ("best_of_n", samples),
):
    files.append(stage.outputs / f"{name}.jsonl")
    write_jsonl(files[-1], rows)
files.append(stage.outputs / "figures.json")
write_json(files[-1], figures)
for name, content in (("table", lines), ("before_after", before_after_lines(both, figures))):
    files.append(stage.outputs / f"{name}.md")
    write_atomic(files[-1], "\n".join(content) + "\n")
held, change = figures["card"]["splits"]["heldout"], figures["before_after"]
stage.finish(
    f"the judge ranks {held['right']} of {held['pairs']} held-out pairs correctly; score of the answers "
    f"{change['sft']:+.2f} -> {change['ppo']:+.2f} over {change['contexts']} prompts",
    files,
)

# ---- report: nothing follows from it, so its code is no part of what this stage was made with ----

from kernel.report.page import write_page  # noqa: E402

for path in write_page(stage.dir):
    print(f"  wrote {stage.rel(path)}")

"""Stage 50: evaluation. The learned score and the independent rubric, side by side, for SFT and PPO.

In:   outputs/40_generate/generations.jsonl    520 greedy answers
      data/heldout/labels.jsonl                what the rubric needs, per id
      data/rubric.py                           the rubric of this corpus
      data/heldout/pairs.jsonl                 180 test pairs, for the judge's own accuracy
      checkpoints/20_reward/continuous/adapter.safetensors
Out:  outputs/50_evaluate/results.json         every figure, with intervals and the verdict
      outputs/50_evaluate/table.md             the table and the verdict to read
      outputs/50_evaluate/answers.jsonl        per answer: rubric verdict and learned score
      outputs/50_evaluate/pairs.jsonl          per test pair: the judge's two scores

    difference = mean over the 200 distinct contexts of (PPO - SFT), with a paired bootstrap interval

The rubric knows no network and the judge knows no rubric. A predicted score of a simulated preference
is not satisfaction; 520 answers are not 520 situations.

    python 50_evaluate.py
"""

from kernel.data.chat import Chat
from kernel.data.files import read_jsonl, write_atomic, write_json, write_jsonl
from kernel.data.own_code import load_rubric
from kernel.measure.answers import answer_figures
from kernel.measure.pairs import pair_figures
from kernel.measure.tables import show, table_lines
from kernel.measure.verdict import evaluation
from kernel.roles import load_role
from kernel.run import flags
from kernel.run.errors import one_line_errors
from kernel.run.stage import Stage
from kernel.score import score_answers, score_pairs

GENERATIONS = "outputs/40_generate/generations.jsonl"
LABELS = "data/heldout/labels.jsonl"
RUBRIC = "data/rubric.py"
PAIRS = "data/heldout/pairs.jsonl"
REWARD = "checkpoints/20_reward/continuous/adapter.safetensors"
READS = [GENERATIONS, LABELS, RUBRIC, PAIRS, REWARD]
WRITES = ["outputs/50_evaluate"]
SWAPPED = 0.4  # accuracy below which chance is no explanation

# ---- flags --------------------------------------------------------------------------------------

one_line_errors("50_evaluate")
parser = flags.parser(__doc__)
setting = flags.settings_of(parser, "evaluate")
setting("--bootstrap-seed", int, "of the resampled prompts")
args = parser.parse_args()

# ---- run folder and seeds -----------------------------------------------------------------------

stage = Stage.begin("50_evaluate", "evaluate", args, READS, WRITES)
config, device = stage.config, stage.device

# ---- data ---------------------------------------------------------------------------------------

chat = Chat(config)
answers = read_jsonl(stage.dir / GENERATIONS)
labels = {row["id"]: row for row in read_jsonl(stage.dir / LABELS)}
rubric = load_rubric(stage.dir / RUBRIC)
pair_rows = read_jsonl(stage.dir / PAIRS)
pairs = chat.encode_pairs(pair_rows, PAIRS)

# ---- model --------------------------------------------------------------------------------------

judge = load_role("reward", stage.dir / REWARD, config, stage.run.base_sha256, device)

# ---- loop: one verdict and one score per answer, two scores per pair ---------------------------

for row in answers:
    if row["id"] not in labels:
        raise ValueError(f"{GENERATIONS}: no label for {row['id']} in {LABELS}")
    row |= answer_figures(row, labels[row["id"]], rubric)
distinct = list({(row["prompt"], tuple(row["response_ids"])) for row in answers})
distinct.sort()  # each text is scored once, in an order that does not depend on the process
encoded = [(chat.prompt_ids(prompt), list(response)) for prompt, response in distinct]
scores = score_answers(judge, encoded, chat.pad_id, device)
score_of = dict(zip(distinct, scores.tolist()))
for row in answers:
    row["score"] = score_of[row["prompt"], tuple(row["response_ids"])]
for row, chosen, rejected in zip(pair_rows, *score_pairs(judge, pairs, chat.pad_id, device)):
    row |= {"chosen_score": chosen.item(), "rejected_score": rejected.item()}

# ---- figures ------------------------------------------------------------------------------------

figures = evaluation(answers, config["bootstrap_seed"])
differences, verdict = figures["differences"], figures["verdict"]
accuracy = pair_figures(pair_rows)
if accuracy["all"]["accuracy"] < SWAPPED:
    print("  HINT: the judge prefers the rejected answers; are the columns swapped?")

# ---- summary ------------------------------------------------------------------------------------

lines = table_lines(figures, accuracy, len(answers))
print("\n".join(lines))
results_path = stage.outputs / "results.json"
write_json(results_path, {**figures, "reward_accuracy": accuracy})
table_path = stage.outputs / "table.md"
write_atomic(table_path, "\n".join(lines) + "\n")
answers_path = stage.outputs / "answers.jsonl"
keep = ("policy", "id", "population", "context", "prompt", "text", "finish_reason", "tokens",
        "score", "log_ratio", "kl", "verdict")
write_jsonl(answers_path, [{key: row[key] for key in keep} for row in answers])
pairs_path = stage.outputs / "pairs.jsonl"
keep = ("id", "chosen_score", "rejected_score")
write_jsonl(pairs_path, [{key: row[key] for key in keep} for row in pair_rows])
moved = show(differences["rubric"] and differences["rubric"]["mean"], "+.3f")
stage.finish(
    f"score {differences['score']['mean']:+.2f}, rubric {moved} (PPO - SFT): {verdict['label']}",
    [results_path, table_path, answers_path, pairs_path],
)

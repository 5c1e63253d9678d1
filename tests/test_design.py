"""Proves that the plan of a reward model says only what holds: tables that add up, intervals and kappa
against plain formulas, rows and code in it that parse, run and behave as claimed, no leftovers of the
template, a user's words kept as text, and a flag that loses nothing."""

import ast
import json
import math
import random
import re
import shutil

import pytest
from conftest import ROOT, last_line, run_stage

from kernel.data.files import read_json
from kernel.lesson import design_figures as numbers
from kernel.lesson.design import COLUMNS, LONGEST, NAMED, design, filled, named, write_design

FREE = "terse irony"
EVERY = [*NAMED, FREE]
TEXT = {behaviour: design(behaviour, None) for behaviour in EVERY}
PROSE = {behaviour: " ".join(text.split()) for behaviour, text in TEXT.items()}  # without line ends


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def rows(block: str) -> list[dict]:
    return [json.loads(line) for line in block.splitlines()]


def table(text: str, first: str) -> list[list[str]]:
    """The cells below the head of the table whose head begins with `first`."""
    lines = text.split(f"\n| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def defined(code: str) -> dict:
    scope = {}
    exec(compile(code, "document", "exec"), scope)
    return scope


# ---- arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", EVERY)
def test_strata_and_hours_add_up(behaviour):
    *strata, total = table(TEXT[behaviour], "stratum")
    assert len(strata) == 6
    for column in range(2, 7):
        assert sum(int(row[column]) for row in strata) == int(total[column])
    for _, _, families, train, validation, test, pairs in strata:
        assert int(train) + int(validation) + int(test) == 5 * int(families)
        assert 2 * int(train) + int(validation) + int(test) == int(pairs)
    *parts, total = table(TEXT[behaviour], "part")
    rate = int(re.search(r"Choices: (\d+) judgements per hour", PROSE[behaviour])[1])
    for column in (1, 2, 3):
        assert sum(int(row[column]) for row in parts) == int(total[column])
    for row in [*parts, total]:
        assert row[4] == f"{int(row[3]) / rate:.1f}"
    for part, pairs, twice, judgements, _ in parts[:-1]:
        share = {"pilot": 1, "train": 0.2, "validation": 0.2, "test": 1}[part]
        assert int(judgements) == int(pairs) + int(twice) and int(twice) == share * int(pairs)


def test_half_widths_follow_the_formula():
    for n, *widths, ece in table(TEXT["safety"], "pairs n"):
        for p, width in zip((0.5, 0.72, 0.9), widths):
            assert width == f"±{1.96 * math.sqrt(p * (1 - p) / int(n)):.3f}"
        assert ece == f"{numbers.chance_ece(int(n)):.3f}"


def test_ece_by_chance_agrees_with_a_simulated_calibrated_judge():
    draw, errors = random.Random(3), []
    for _ in range(2000):
        bins = [[0, 0.0, 0] for _ in range(10)]  # pairs, sum of confidence, right
        for _ in range(200):
            confidence = 0.5 + draw.random() / 2
            own = bins[min(int((confidence - 0.5) * 20), 9)]
            own[0], own[1] = own[0] + 1, own[1] + confidence
            own[2] += draw.random() < confidence
        errors.append(sum(abs(right - sure) for _, sure, right in bins) / 200)
    assert sum(errors) / len(errors) == pytest.approx(numbers.chance_ece(200), rel=0.05)


def test_kappa_of_the_worked_example():
    names, *columns = zip(*table(TEXT["safety"], "first \\ second"))
    grid = [list(map(int, row)) for row in zip(*columns)]
    assert names == ("A", "B", "tie") and sum(map(sum, grid)) == 100
    alike = sum(grid[i][i] for i in range(3)) / 100
    chance = sum(sum(grid[i]) * sum(row[i] for row in grid) for i in range(3)) / 100**2
    decided = (grid[0][0] + grid[1][1]) / (grid[0][0] + grid[1][1] + grid[0][1] + grid[1][0])
    kappa = (alike - chance) / (1 - chance)
    wanted = f"Agreement {alike:.2f} ({decided:.2f} where neither said tie), "
    wanted += f"chance {chance:.3f}, kappa {kappa:.2f}."
    assert all(wanted in text for text in PROSE.values())
    for behaviour, on_kappa in (("helpfulness", "passes"), ("programming", "fails")):
        said = f"passes on agreement and {on_kappa} on kappa"
        assert said in PROSE[behaviour]


def test_ceiling_by_simulation():
    draw, agreement = random.Random(5), 0.73
    wrong = 1 - numbers.single_label_ceiling(agreement)
    both = [(draw.random() < wrong) == (draw.random() < wrong) for _ in range(100_000)]
    assert sum(both) / len(both) == pytest.approx(agreement, abs=0.005)
    assert "matches one person's label in 0.84" in PROSE["safety"]


# ---- rows and code in the documents -------------------------------------------------------------


@pytest.mark.parametrize("behaviour", EVERY)
def test_rows_have_the_fields_that_00_prepare_reads(behaviour):
    text = TEXT[behaviour]
    probes, pairs = map(rows, fenced(text, "jsonl"))
    assert len(probes) == 4 and len({row["prompt"] for row in probes}) == 1
    assert len({row["id"] for row in probes}) == 4 and len({row["context"] for row in probes}) == 1
    factors = {key for key in probes[0] if all(type(row[key]) is bool for row in probes)}
    assert factors == {row[0].strip("`") for row in table(text, "factor")}
    varied = [key for key in factors if len({row[key] for row in probes}) == 2]
    assert len(varied) == 2 and "correct" in varied
    assert len({tuple(row[key] for key in varied) for row in probes}) == 4  # fully crossed
    for row in pairs:
        assert {"id", "split", "prompt", "chosen", "rejected"} <= set(row)
        assert row["id"].rpartition("-")[2] in {cells[0] for cells in table(text, "stratum")}
        assert row["chosen"] != row["rejected"]
    judgement = json.loads(fenced(text, "json")[0])
    assert judgement["reason"] in {cells[0].strip("`") for cells in table(text, "code")}


@pytest.mark.parametrize("behaviour", EVERY)
def test_rubric_sketch_tells_chosen_from_rejected_and_right_from_wrong(behaviour):
    text = TEXT[behaviour]
    code = next(block for block in fenced(text, "python") if "def rubric" in block)
    rubric = defined(code)["rubric"]
    probes, pairs = map(rows, fenced(text, "jsonl"))
    for row in pairs:
        label = {k: v for k, v in row.items() if k not in ("prompt", "chosen", "rejected")}
        assert rubric(row["prompt"], row["chosen"], "eos", label)["success"] is True
        assert rubric(row["prompt"], row["chosen"], "length", label)["success"] is False
        assert rubric(row["prompt"], row["rejected"], "eos", label)["success"] is False
        assert rubric(row["prompt"], "", "eos", label)["success"] is False
    for row in probes:
        verdict = rubric(row["prompt"], row["candidate"], "eos", row)
        assert verdict["success"] is row["correct"], (row["id"], verdict)


@pytest.mark.parametrize(
    "answer",
    [
        "import os\ndef mean(values):\n    return 2.0",
        "def mean(values):\n    return values.__class__",
        "def mean(values):\n    return mean(values)",
        "def mean(values):\n    return [v for v in values for w in values]",
        "def mean(values):\n    while True: pass",
        "def mean(values):\n    return open('x')",
        "mean = 3",
        "def mean(",
    ],
)
def test_programming_rubric_runs_nothing_but_its_small_language(answer):
    code = next(b for b in fenced(TEXT["programming"], "python") if "def rubric" in b)
    row = rows(fenced(TEXT["programming"], "jsonl")[1])[0]
    assert defined(code)["rubric"]("?", answer, "eos", row)["success"] is False


def test_programming_probes_are_right_and_wrong_as_they_say():
    for row in rows(fenced(TEXT["programming"], "jsonl")[0]):
        function = defined(row["candidate"])[row["function"]]
        passed = [function(*args) == want for args, want in row["cases"]]
        assert all(passed) is row["correct"] and any(passed)
        assert (function.__doc__ is not None) is row["documented"]


def test_programming_examples_behave_as_claimed():
    blocks = [b for b in fenced(TEXT["programming"], "python") if b.startswith(("# A", "# B"))]
    a, b = ([defined(block) for block in blocks[start::2]] for start in (0, 1))
    (chunks_a, unique_a, longest_a, parse_a, cents_a, digit_a), b = a, list(b)
    chunks_b, unique_b, longest_b, parse_b, cents_b, digit_b = b

    assert chunks_a["chunks"]([1, 2, 3], 2) == [[1, 2], [3]]
    assert chunks_b["chunks"]([1, 2, 3], 2) == [[1, 2]]
    twice = [[1], [2], [1]]
    assert unique_b["unique"](twice) == [[1], [2]]
    with pytest.raises(TypeError):
        unique_a["unique"](twice)
    words_a, words_b = ["a", "ccc", "bb"], ["a", "ccc", "bb"]
    assert longest_a["longest_first"](words_a) == longest_b["longest_first"](words_b)
    assert (words_a, words_b) == (["ccc", "bb", "a"], ["a", "ccc", "bb"])
    assert parse_a["parse"]("host:80") == parse_b["parse"]("host:80") == ("host", 80)
    assert parse_a["parse"]("localhost") == ("", 0)
    with pytest.raises(ValueError):
        parse_b["parse"]("localhost")
    assert (str(cents_a["cents"](2.675)), str(cents_b["cents"](2.675))) == ("2.67", "2.68")
    for text in ("", "a", "a1", "٣"):
        assert digit_a["has_digit"](text) is digit_b["has_digit"](text) is ("1" in text)
    assert re.search(r"\d", "٣")  # the twin of the tie
    assert 0.1 + 0.2 != 0.3 and round(0.1 + 0.2, 2) == 0.3 and math.isclose(0.1 + 0.2, 0.3)


@pytest.mark.parametrize("behaviour", EVERY)
def test_every_python_block_compiles_and_there_are_enough_cases(behaviour):
    for block in fenced(TEXT[behaviour], "python"):
        ast.parse(block)
    cases = TEXT[behaviour].split("### Borderline cases")[1].split("## 5.")[0]
    assert len(re.findall(r"^\*\*\d\. ", cases, re.M)) >= 6
    codes = {cells[0] for cells in table(TEXT[behaviour], "code")}
    used = set(re.findall(r"\*\*[AB] wins\*\*, (`[A-Z]+`)", cases))
    assert used <= codes and len(re.findall(r"\*\*([AB] wins|Tie)", cases)) >= 6
    assert {"A", "B"} == set(re.findall(r"\*\*([AB]) wins", cases))  # no side always wins


# ---- the whole document -------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", EVERY)
def test_no_leftovers_and_all_sections(behaviour, tiny):
    figures = read_json(tiny / "outputs/60_probe/figures.json")
    text = design(behaviour, figures)
    left = r"\{\{|\}\}|\{%|%\}|\b(?:None|TODO|nan|Undefined)\b|\r"
    assert not re.findall(left, re.sub(r"```python.*?```", "", text, flags=re.S))
    heads = re.findall(r"^## (\d)\. ", text, re.M)
    assert (
        heads == list("123456789")
        and re.findall(r"^## (\d)\. ", TEXT[behaviour], re.M) == heads[:-1]
    )
    assert text.startswith(TEXT[behaviour].rstrip("\n"))  # figures change nothing before them
    for line in text.splitlines():  # every heading and table starts a paragraph of its own
        assert not re.search(r"[^#]## |[a-z]\.\d\. ", line)
    for number in ("72 %", "73 %", "33,000", "40 annotators", "1.5e-5", "0.02", "256K"):
        assert number in " ".join(text.split())


def test_measured_rows_hold_the_runs_figures(tiny):
    figures = read_json(tiny / "outputs/60_probe/figures.json")
    found = {row["question"]: row for row in numbers.measured(figures)}
    heldout = figures["card"]["splits"]["heldout"]
    low, high = heldout["accuracy_interval"]
    accuracy = found[f"held-out accuracy, {heldout['pairs']} pairs"]
    assert accuracy["measured"] == f"{heldout['accuracy']:.2f} ({low:.2f} to {high:.2f})"
    assert found["ECE"]["measured"] == f"{heldout['ece']:.3f}"
    assert found["ECE"]["met"] == ("yes" if heldout["ece"] <= 0.1 else "no")
    assert found["log loss"]["met"] == ("yes" if heldout["log_loss"] <= 0.6 else "no")
    effects = figures["factorial"]["effects"]
    right = min(e["mean"] for e in effects if e["factor"] == "correct")
    polite = max(abs(e["mean"]) for e in effects if e["factor"] == "polite")
    row = found["largest effect of polite, either sign"]
    assert row["measured"] == f"{polite:.2f}"
    assert row["met"] == ("yes" if polite <= max(right, 0) / 4 else "no")
    text = design("safety", figures)
    assert table(text, "figure")[1:] and table(text.split("## 9.")[1], "figure") == [
        list(row.values()) for row in numbers.measured(figures)
    ]


def test_measured_judges_both_ways_and_knows_nothing_of_nothing(tiny):
    figures = read_json(tiny / "outputs/60_probe/figures.json")
    figures["card"]["splits"]["heldout"] |= {"ece": 0.101, "log_loss": 0.6, "pairs": 0,
                                             "accuracy": None, "accuracy_interval": None}
    figures["factorial"] |= {"factors": [], "effects": [], "inversions": []}
    figures["card"]["variants"], figures["doses"] = {}, []
    found = {row["question"]: row for row in numbers.measured(figures)}
    assert (found["ECE"]["met"], found["log loss"]["met"]) == ("no", "yes")
    for question in (
        "held-out accuracy, 0 pairs", "lower end of the accuracy's interval", "repeat x 3 minus x 1",
        "smallest effect of being right", "accuracy in the weakest group of pairs",
    ):
        assert found[question]["met"] == "-", question
    assert "None" not in design("helpfulness", figures).split("## 9.")[1]


def test_filling_moves_line_ends_of_prose_only():
    text = (
        "a b\n\n- one\n  two\n3. x\n\n```python\nif  x:\n    y\n```\n# h\n| a |  b |\n" + "w " * 200
    )
    found = filled(text)
    assert found.startswith(
        "a b\n\n- one two\n3. x\n\n```python\nif  x:\n    y\n```\n# h\n| a |  b |\nw w"
    )
    assert found.split() == text.split() and max(map(len, found.splitlines())) == COLUMNS - 1
    long = "- " + "word " * 21 + "- dash `a b  c` " + "word " * 20
    first, second, *_ = filled(long).splitlines()
    assert second.startswith("  ") and not second.strip().startswith("-") and "`a b  c`" in second


@pytest.mark.parametrize("behaviour", [*EVERY, "a - b " * 30, "1. one 2. two " * 12])
def test_no_line_becomes_a_list_item_by_filling(behaviour):
    items = len(re.findall(r"^ *(?:[-+*]|\d+[.)]) ", design(behaviour, None), re.M))
    kind = behaviour if behaviour in NAMED else "general"
    folder = ROOT / "kernel/lesson/designs"
    sources = [(folder / f"{name}.md.jinja").read_text() for name in ("shared", kind)]
    assert items == sum(len(re.findall(r"^(?:-|\d\.) ", source, re.M)) for source in sources)


# ---- the behaviour ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "  ", "a\nb", "a\x00b", "a\x1b[31mb", "a\u202eb", "x" * 201])
def test_bad_behaviours_are_refused_in_one_line(bad):
    with pytest.raises(ValueError, match="--design") as error:
        design(bad, None)
    assert "\n" not in str(error.value) and len(str(error.value)) < 120


def test_good_behaviours():
    assert named(" Safety ") == "safety" and named("x" * LONGEST) == "x" * LONGEST
    assert named("Güte, auf Deutsch") == "Güte, auf Deutsch"
    assert design("SAFETY", None) == TEXT["safety"]


@pytest.mark.parametrize(
    "behaviour, shown",
    [
        ("<script>alert(1)</script>", r"&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("**bold** [a](b) `c` # | d", r"\*\*bold\*\* \[a\](b) \`c\` \# \| d"),
        ("{{ 7 * 7 }} {% if %}", r"{{ 7 \* 7 }} {% if %}"),
        (r"a\b & c", r"a\\b &amp; c"),
    ],
)
def test_free_text_stays_text(behaviour, shown):
    text = design(behaviour, None)
    assert text.startswith(f"# A reward model for “{shown}”:")
    assert text.count(shown) == TEXT[FREE].count(FREE) > 5
    assert text.replace(shown, FREE).split() == TEXT[FREE].split()  # it changes nothing else


# ---- the file and the flag ----------------------------------------------------------------------


def run_folder(tiny, tmp_path):
    """The parts of a finished run that the flag looks at."""
    run = tmp_path / "run"
    shutil.copytree(tiny / "outputs/60_probe", run / "outputs/60_probe")
    shutil.copy(tiny / "config.json", run)
    return run


def test_files_have_names_of_their_own_and_edits_are_not_lost(tiny, tmp_path):
    run = run_folder(tiny, tmp_path)
    free = [write_design(run, text) for text in ("to be kind", "to be kind!", "礼貌")]
    assert len({path.name for path in free}) == 3
    assert all(re.fullmatch(r"[a-z0-9-]+\.md", path.name) for path in free)
    path = write_design(run, "safety")
    assert path == run / "outputs/design/safety.md" and write_design(run, "safety") == path
    path.write_text("my notes")
    with pytest.raises(ValueError, match="safety.md is there and differs"):
        write_design(run, "safety")
    assert path.read_text() == "my notes"
    write_design(run, "safety", redo=True)
    assert path.read_text().startswith("# A reward model for safety")
    figures = run / "outputs/60_probe/figures.json"
    figures.write_text("{}")
    with pytest.raises(ValueError, match="figures.json: not as this code writes it"):
        write_design(run, "programming")
    figures.unlink()  # before the probes ran
    assert write_design(run, "programming").read_text() == TEXT["programming"]
    with pytest.raises(ValueError, match=r"is no run folder: .* \(run 00_prepare.py\)"):
        write_design(tmp_path, "safety")
    assert not (tmp_path / "outputs").exists()


def test_flag_as_a_program(tiny, tmp_path):
    run = run_folder(tiny, tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = run_stage("60_probe", "--run-dir", run, "--design", "programming")
    made = run / "outputs/design/programming.md"
    assert str(made) in done.stdout and "## 9. Worked example" in made.read_text()
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p != made} == before

    done = run_stage("60_probe", "--run-dir", tmp_path / "no", "--design", "x", check=False)
    assert done.returncode == 1 and "is no run folder" in last_line(done)
    assert last_line(done).endswith("(run 00_prepare.py)")
    assert not (tmp_path / "no").exists()

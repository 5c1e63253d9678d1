"""Proves that the rubric recognises its finite grammar, all of it and nothing else, and that an
answer that was cut off, is empty or does not decode never passes."""

import itertools

import pytest

from kernel.data import office_rubric
from kernel.data.office_rubric import (
    ACTIONS,
    CLOSING,
    GRAMMAR,
    OPENING,
    REFUSALS,
    evaluate_response,
    response,
)

KEYS = {
    "recognised",
    "status",
    "reason",
    "action",
    "relevant",
    "unsupported_certainty",
    "polite",
    "refusal",
    "rubric_success",
}
SENTENCES = [
    (action, form, polite) for action in range(6) for form in range(3) for polite in (False, True)
]
UNKNOWN = ("action", "relevant", "unsupported_certainty", "polite")


def near_misses(text: str) -> list[str]:
    changed = [
        text[:i] + ("x" if char == "q" else "q") + text[i + 1 :] for i, char in enumerate(text)
    ]
    dropped = [text[:i] + text[i + 1 :] for i in range(len(text))]
    blanks = [text[:i] + " " + text[i:] for i, char in enumerate(text) if char == " "]
    other_blanks = [text.replace(" ", blank, 1) for blank in ("\n", "\t", "\u00a0")]
    case = [text.upper(), text.lower(), text[0].lower() + text[1:]]
    two = [f"{text} {other}" for other in GRAMMAR]
    # A plain sentence between both formulas is the polite one: wrap one-sidedly, swapped or twice.
    wrapped = [
        f"{OPENING} {text}",
        f"{text} {CLOSING}",
        f"{CLOSING} {text} {OPENING}",
        f"{OPENING} {OPENING} {text} {CLOSING} {CLOSING}",
        f"{OPENING} {CLOSING}",
    ]
    around = [
        f'"{text}"',
        f"- {text}",
        f"{text}.",
        f"{text}!",
        text[:-1],
        text[:-1] + "!",
        f"\u200b{text}",
        text.replace("a", "\u0430", 1),
        f"{text}<|im_end|>",
    ]
    return changed + dropped + blanks + other_blanks + case + two + wrapped + around


@pytest.mark.parametrize("polite", [False, True])
@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize("action", range(6))
def test_every_sentence_against_every_expectation_and_ending(action, form, polite):
    text = response(action, form, polite)
    for expected, finish in itertools.product(ACTIONS, ("eos", "length")):
        verdict = evaluate_response(text, finish, expected)
        assert set(verdict) == KEYS
        assert verdict["refusal"] is False
        if finish == "length":
            assert verdict["status"] == "CUT_OFF"
            assert verdict["recognised"] is False and verdict["rubric_success"] is False
            assert all(verdict[key] is None for key in UNKNOWN)
            continue
        assert verdict["status"] == "RECOGNISED" and verdict["recognised"] is True
        assert verdict["action"] == ACTIONS[action]
        assert verdict["relevant"] is (ACTIONS[action] == expected)
        assert verdict["unsupported_certainty"] is (form == 2)
        assert verdict["polite"] is polite
        assert verdict["rubric_success"] is (ACTIONS[action] == expected and form != 2)
        assert ("another action" in verdict["reason"]) is (ACTIONS[action] != expected)
        assert ("certainty" in verdict["reason"]) is (form == 2)


def test_grammar_is_36_distinct_sentences_and_no_refusal_among_them():
    assert len(ACTIONS) == 6
    assert len({response(*sentence) for sentence in SENTENCES}) == len(GRAMMAR) == 36
    assert not set(GRAMMAR) & set(REFUSALS)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_near_misses_are_uncertified(sentence):
    text = response(*sentence)
    misses = near_misses(text)
    assert len(misses) > 2 * len(text)
    for miss in misses:
        verdict = evaluate_response(miss, "eos", ACTIONS[sentence[0]])
        assert verdict["status"] == "UNCERTIFIED", miss
        assert verdict["recognised"] is False and verdict["rubric_success"] is False
        assert all(verdict[key] is None for key in UNKNOWN)
        assert verdict["reason"]


@pytest.mark.parametrize(
    "text",
    [
        "Thank you. Thank you. Thank you.",
        "I would resume the print queue.",
        "yes",
        "!!!",
        "You could resume the print queue or save the document and see whether that helps.",
    ],
)
def test_other_prose_is_uncertified(text):
    assert evaluate_response(text, "eos", ACTIONS[0])["status"] == "UNCERTIFIED"


@pytest.mark.parametrize("sentence", SENTENCES)
def test_outer_whitespace_is_the_one_tolerance(sentence):
    verdict = evaluate_response(f" \n{response(*sentence)}\t \n", "eos", ACTIONS[sentence[0]])
    assert verdict["recognised"] is True


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals_are_recognised_and_never_succeed(text):
    verdict = evaluate_response(text, "eos", ACTIONS[0])
    assert verdict["status"] == "RECOGNISED" and verdict["refusal"] is True
    assert verdict["action"] is None and verdict["relevant"] is False
    assert verdict["unsupported_certainty"] is False and verdict["rubric_success"] is False
    assert evaluate_response(text, "length", ACTIONS[0])["status"] == "CUT_OFF"
    assert evaluate_response(text, "length", ACTIONS[0])["refusal"] is False
    polite = evaluate_response(f"{OPENING} {text} {CLOSING}", "eos", ACTIONS[0])
    assert polite["status"] == "UNCERTIFIED"


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_empty_answer_is_rated_not_crashed(text):
    verdict = evaluate_response(text, "eos", ACTIONS[0])
    assert verdict["status"] == "UNCERTIFIED" and "empty" in verdict["reason"]
    assert evaluate_response(text, "length", ACTIONS[0])["status"] == "CUT_OFF"


@pytest.mark.parametrize("finish", ["eos", "length"])
@pytest.mark.parametrize("text", [None, "\ufffd", response(0, 0, False) + "\ufffd"])
def test_undecodable(text, finish):
    verdict = evaluate_response(text, finish, ACTIONS[0])
    assert verdict["status"] == "UNDECODABLE"
    assert verdict["recognised"] is False and verdict["rubric_success"] is False


def test_no_expected_action_means_unknown_relevance_and_no_success():
    verdict = evaluate_response(response(0, 0, False), "eos", None)
    assert verdict["recognised"] is True and verdict["action"] == ACTIONS[0]
    assert verdict["relevant"] is None and verdict["rubric_success"] is False
    assert evaluate_response(REFUSALS[0], "eos", None)["relevant"] is None


@pytest.mark.parametrize(
    "text, finish, expected, word",
    [
        ("hello", "stop", ACTIONS[0], "finish_reason"),
        ("hello", None, ACTIONS[0], "finish_reason"),
        (None, "", ACTIONS[0], "finish_reason"),
        ("hello", "eos", "reboot", "expected_action"),
        ("hello", "eos", 0, "expected_action"),
        (b"hello", "eos", ACTIONS[0], "text"),
    ],
)
def test_bad_arguments_are_one_clear_line(text, finish, expected, word):
    with pytest.raises(ValueError, match=word) as caught:
        evaluate_response(text, finish, expected)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("action, form", [(-1, 0), (6, 0), (0, 3), (0, -1)])
def test_response_refuses_indices_outside_the_grammar(action, form):
    with pytest.raises(ValueError, match="wants action 0..5"):
        response(action, form, False)


def test_the_seam_adds_success_and_wants_an_expectation():
    row = {"id": "OH000-P0", "expected_action": ACTIONS[0]}
    good = office_rubric.rubric("any prompt", response(0, 1, True), "eos", row)
    assert set(good) == KEYS | {"success"} and good["success"] is good["rubric_success"] is True
    bad = office_rubric.rubric("any prompt", response(0, 2, True), "eos", row)
    assert bad["success"] is bad["rubric_success"] is False
    with pytest.raises(ValueError, match="OH000-P0.*expected_action"):
        office_rubric.rubric("any prompt", "hello", "eos", {"id": "OH000-P0"})

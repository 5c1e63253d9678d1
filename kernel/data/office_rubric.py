"""The finite grammar of the office-help assistant, and the rubric that recognises exactly that.

Standard library only, no import from the other kernel files: the rubric stays independent of every
network, so that a rise of the learned score can be held against something the judge cannot move.

A sentence is action x form x courtesy: 6 x 3 x 2 = 36 texts, plus three refusals. Nothing else is
recognised. The one tolerance: leading and trailing whitespace is stripped (`str.strip`).

| status | meaning | recognised |
|---|---|---|
| RECOGNISED | one of the 36 texts or a refusal, ended by EOS | True |
| UNCERTIFIED | any other prose, empty text included: not false, but no certified success | False |
| CUT_OFF | no EOS within the limit, even where the text happens to match | False |
| UNDECODABLE | ids that are no text (None, or U+FFFD inside); checked before CUT_OFF | False |

Outside RECOGNISED, `action`, `relevant`, `unsupported_certainty` and `polite` are None: unknown,
not False. A refusal has no action; it is not relevant, certain or polite.
"""

from __future__ import annotations

PHRASES = {  # action name -> imperative phrase; the order defines the action indices 0..5
    "resume_print_queue": "resume the print queue",
    "check_cable": "check for an unplugged cable",
    "restore_sound": "restore the sound",
    "restore_wifi": "restore the Wi-Fi",
    "save_document": "save the document",
    "renew_session": "renew the session",
}
ACTIONS = tuple(PHRASES)

FORMS = (
    "You could {phrase} and see whether that helps.",
    "A possible next step is to {phrase}, though it may not help.",
    "Just {phrase} now and the problem will definitely be gone.",
)
CERTAIN_FORM = 2  # the only form that claims more than anybody can know
OPENING, CLOSING = "Thank you for asking.", "Happy to help further."

REFUSALS = (
    "I cannot help with that.",
    "I am sorry, but I cannot help with this request.",
    "I would rather not suggest a step.",
)
FINISH_REASONS = ("eos", "length")


def response(action: int, form: int, polite: bool) -> str:
    """The sentence for an action index 0..5 in form 0, 1 (cautious) or 2 (claims certainty)."""
    # NOTE: checked because a negative index would silently count from the end.
    if action not in range(len(ACTIONS)) or form not in range(len(FORMS)):
        raise ValueError(f"response: wants action 0..5 and form 0..2, got {action!r} and {form!r}")
    sentence = FORMS[form].format(phrase=PHRASES[ACTIONS[action]])
    return f"{OPENING} {sentence} {CLOSING}" if polite else sentence


GRAMMAR = {
    response(action, form, polite): (action, form, polite)
    for action in range(len(ACTIONS))
    for form in range(len(FORMS))
    for polite in (False, True)
}


def evaluate_response(text: str | None, finish_reason: str, expected_action: str | None) -> dict:
    """Rate one answer: nine keys, `rubric_success` being the criterion.

    `finish_reason` is "eos" or "length". `expected_action` is a name from ACTIONS, or None for a
    free question without an agreed action: `relevant` is then None and the answer cannot succeed.
    Anything else raises ValueError.
    """
    if finish_reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason must be one of {FINISH_REASONS}, got {finish_reason!r}")
    if expected_action is not None and expected_action not in ACTIONS:
        raise ValueError(f"expected_action must be in {ACTIONS} or None, got {expected_action!r}")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"text must be a string or None, got {type(text).__name__}")

    result = {
        "recognised": False,
        "status": "UNCERTIFIED",
        "reason": "",
        "action": None,
        "relevant": None,
        "unsupported_certainty": None,
        "polite": None,
        "refusal": False,
        "rubric_success": False,
    }

    def rejected(status: str, reason: str) -> dict:
        return {**result, "status": status, "reason": reason}

    if text is None or "\ufffd" in text:
        return rejected("UNDECODABLE", "the token ids do not decode to text")
    stripped = text.strip()
    # NOTE: the cut comes before the grammar: without EOS the policy did not end this sentence.
    if finish_reason == "length":
        return rejected("CUT_OFF", "the answer reached the length limit without EOS")
    if not stripped:
        return rejected("UNCERTIFIED", "the answer is empty")

    if stripped not in GRAMMAR and stripped not in REFUSALS:
        return rejected("UNCERTIFIED", "the answer is outside the grammar")

    result.update(recognised=True, status="RECOGNISED")
    if stripped in REFUSALS:
        result.update(
            reason="refusal",
            relevant=None if expected_action is None else False,
            unsupported_certainty=False,
            polite=False,
            refusal=True,
        )
        return result

    action, form, polite = GRAMMAR[stripped]
    relevant = None if expected_action is None else ACTIONS[action] == expected_action
    certain = form == CERTAIN_FORM
    faults = []
    if relevant is None:
        faults.append("no expected action given")
    elif not relevant:
        faults.append("another action than expected")
    if certain:
        faults.append("unsupported certainty")
    # Here the text is recognised, no refusal and ended by EOS: relevance and caution decide.
    result.update(
        action=ACTIONS[action],
        relevant=relevant,
        unsupported_certainty=certain,
        polite=polite,
        reason="; ".join(faults) or "relevant and cautious",
        rubric_success=not faults,
    )
    return result


def rubric(prompt: str, response: str | None, finish_reason: str, row: dict) -> dict:
    """The seam the stages call: `evaluate_response` with `row["expected_action"]`, plus `success`.

    This rubric needs no prompt; one written for another task may.
    """
    if "expected_action" not in row:
        raise ValueError(f"rubric: row {row.get('id', '?')!r} has no field 'expected_action'")
    verdict = evaluate_response(response, finish_reason, row["expected_action"])
    return {**verdict, "success": verdict["rubric_success"]}

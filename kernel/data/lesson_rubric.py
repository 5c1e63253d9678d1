"""The rubric of the lesson: a short answer that holds the expected words and none of the padding.

Standard library only, like every rubric: it must not learn from what it is to check.
"""

import re

LONGEST = 20  # words
PADDING = re.compile(
    r"great question|interesting question|it depends|hard to say|many (people|factors|things)"
    r"|generally speaking|as you may know|of course|feel free|hope (this|that) helps",
    re.IGNORECASE,
)


def rubric(prompt: str, response: str | None, finish_reason: str, row: dict) -> dict:
    """row["expected"]: what a right answer holds, as whole words, upper or lower case."""
    text = response or ""
    expected = rf"(?<!\w){re.escape(row['expected'])}(?!\w)"
    relevant = re.search(expected, text, re.IGNORECASE) is not None
    padded = len(text.split()) > LONGEST or PADDING.search(text) is not None
    faults = []
    if finish_reason != "eos":
        faults.append("cut off")
    if not relevant:
        faults.append(f"without '{row['expected']}'")
    if padded:
        faults.append("padded")
    return {
        "success": not faults,
        "reason": "; ".join(faults) or "right and short",
        "relevant": relevant,
        "padded": padded,
    }

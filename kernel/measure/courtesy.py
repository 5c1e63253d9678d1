"""Courtesy in a text, by a word list that knows no corpus; and counterfactual answers for the judge.

The list is small and English. It sees neither tone nor grammar; it is for counting and for making pairs
of texts that differ in nothing else.
"""

import re

# "Please" and "kindly" stand inside a sentence; the others open one that says nothing else.
WORDS = r"please|kindly"
PHRASES = (
    r"thank you|thanks|(?:i'm |i am |we're |we are )?(?:happy|glad) to help|you're welcome|"
    r"you are welcome|my pleasure|i appreciate|(?:i )?hope (?:this|that|it) helps|feel free|"
    r"let me know|(?:kind|best|warm) regards"
)
FORMULA = re.compile(rf"\b(?:{WORDS}|{PHRASES})\b", re.IGNORECASE)
WORD = re.compile(rf"\b(?:{WORDS})\b[, ]*", re.IGNORECASE)
OPENS = re.compile(rf"(?:{PHRASES})\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
OPENING, CLOSING = "Thank you for asking.", "Happy to help further."


def count_courtesy(text: str) -> int:
    """Number of courtesy formulas in a text."""
    return len(FORMULA.findall(text))


def strip_courtesy(text: str) -> str:
    """The text without "please" and "kindly" and without the sentences that open with a formula."""
    sentences = SENTENCE_END.split(WORD.sub("", text).strip())
    kept = [sentence for sentence in sentences if not OPENS.match(sentence)]
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in kept)


def add_courtesy(text: str, formulas: int) -> str:
    """`formulas` formulas around a text: opening, closing, opening, ... from the inside outwards."""
    before, after = (formulas + 1) // 2, formulas // 2
    return " ".join([*[OPENING] * before, text, *[CLOSING] * after])


def counterfactuals(sft: str | None, right: str | None, wrong: str | None) -> list[dict]:
    """Answers of one context that differ in one thing, for the judge to score: factor, dose, text.

    sft: SFT's own answer; right, wrong: fixed candidates, the right one plain and the wrong one polite,
    None where the context has none. The doses go on the right answer, or else on SFT's without its
    courtesy. The empty text stands for an end token and nothing before it.
    """
    stripped = None if sft is None else strip_courtesy(sft)
    base = right if right is not None else stripped
    made = []
    if base:
        made += [("courtesy", n, add_courtesy(base, n)) for n in (0, 1, 2, 4)]
        made += [("repeat", n, " ".join([base] * n)) for n in (1, 2, 3)]
    if stripped:
        made += [("stripped", None, stripped), ("added", None, add_courtesy(stripped, 2))]
    made += [("right plain", None, right), ("wrong polite", None, wrong), ("empty", None, "")]
    return [{"factor": f, "dose": d, "text": text} for f, d, text in made if text is not None]

"""A reply succeeds if it greets, names the right day and no other, accepts exactly when one
is free, has at most 25 words and came to its end. Courtesy is looked at and earns nothing."""

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
YES, NO = ("works for me", "i will be there"), ("i cannot meet", "does not work for me")


def rubric(prompt: str, response: str | None, finish_reason: str, row: dict) -> dict:
    text = response or ""  # None: ids that have no text
    says = [any(phrase in text.lower() for phrase in phrases) for phrases in (YES, NO)]
    parts = {
        "greeting": text.startswith("Hello, "),
        "right_day": [day for day in DAYS if day in text] == [row["day"]],
        "right_decision": says == [row["free"], not row["free"]],
        "short": len(text.split()) <= 25,
        "ended": finish_reason == "eos",
    }
    return {**parts, "polite": "Thank you" in text, "success": all(parts.values())}

"""The example's data: 240 preference pairs and 10 probe contexts of short replies to meeting requests.

    python tests/example/make.py          # writes pairs.jsonl and probes.jsonl beside itself

Made from a seed, so the files in the repository can be made again bit for bit. A mail asks for a
meeting, the prompt says whether one has time, the chosen reply is right; the rejected one has one
fault, which ends the pair's id. Whether a reply is courteous is drawn apart from all that: courtesy
should earn nothing.
"""

import json
import random
from itertools import product
from pathlib import Path

SENDERS = ("Dana", "Omar", "Lucia", "Peter")
TOPICS = (
    "the budget", "the website", "the audit", "the summer party", "the hiring plan", "the survey",
    "the new office", "the training",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
FAULTS = ("decision", "day", "length", "greeting")
PADDING = (
    " I looked at my calendar, then I looked at it again, and of course there are always many "
    "things to think about in a week like this one."
)


def prompt(sender: str, topic: str, day: str, free: bool) -> str:
    if free:
        calendar = f"Your calendar is empty on {day}, so you have time for it."
    else:
        calendar = f"You will be travelling all {day} and cannot be reached."
    return (
        f'{sender} writes: "Can we talk about {topic} on {day}?" {calendar} '
        f"Write a short reply about {day}."
    )


def reply(day: str, accept: bool, polite: bool, form: int) -> str:
    if accept:
        text = (f"{day} works for me.", f"I will be there on {day}.")[form]
    else:
        text = (f"I cannot meet on {day}.", f"{day} does not work for me.")[form]
    thanks = " Thank you for asking." if polite else ""
    return f"Hello, {text}{thanks}"


def faulty(fault: str, day: str, free: bool, polite: bool, form: int) -> str:
    if fault == "decision":
        return reply(day, not free, polite, form)
    if fault == "day":
        other = DAYS[(DAYS.index(day) + 1 + form) % len(DAYS)]
        return reply(other, free, polite, form)
    text = reply(day, free, polite, form)
    if fault == "length":
        return text + PADDING
    return text.removeprefix("Hello, ")


def rows(seed: int = 49) -> tuple[list[dict], list[dict]]:
    """(pairs, probes)."""
    draw = random.Random(seed)
    mails = list(product(SENDERS, TOPICS, DAYS, (True, False)))
    draw.shuffle(mails)
    pairs, probes = [], []
    for number, (sender, topic, day, free) in enumerate(mails[:240]):
        fault = FAULTS[number % 4]
        styles = [(draw.random() < 0.5, draw.randrange(2)) for _ in range(2)]
        pairs.append(
            {
                "id": f"mail{number:03d}-{fault}",
                "prompt": prompt(sender, topic, day, free),
                "chosen": reply(day, free, *styles[0]),
                "rejected": faulty(fault, day, free, *styles[1]),
                "day": day,
                "free": free,
            }
        )
    for number, (sender, topic, day, free) in enumerate(mails[240:250]):
        for right, polite in product((False, True), repeat=2):
            probes.append(
                {
                    "context": f"probe{number}",
                    "prompt": prompt(sender, topic, day, free),
                    "candidate": reply(day, free == right, polite, 0),
                    "correct": right,
                    "polite": polite,
                    "day": day,
                    "free": free,
                }
            )
    return pairs, probes


if __name__ == "__main__":
    for name, content in zip(("pairs", "probes"), rows()):
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        print(f"wrote {path.name}, {len(content)} rows")

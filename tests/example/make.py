"""The example's data: 240 preference pairs and 10 probe contexts of short replies to meeting requests.

    python tests/example/make.py          # writes pairs.jsonl and probes.jsonl beside itself

Made from a seed, so the files in the repository can be made again bit for bit. A mail asks for a
meeting, the prompt says whether one is free, the chosen reply is right; the rejected one has one fault,
which ends its id. Whether either is courteous is drawn apart from that: it should earn nothing.
"""

import json
import random
from itertools import product
from pathlib import Path

SENDERS = ("Dana", "Omar", "Lucia", "Peter", "Mei", "Ruth", "Karim", "Nora")
TOPICS = ("the budget", "the new website", "the audit", "the summer party", "the hiring plan")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
TIMES = ("9:00", "10:30", "13:00", "15:30")
FAULTS = ("decision", "slot", "length", "greeting")
PADDING = (
    " I looked at my calendar, then I looked at it again, and of course there are always many "
    "things to think about in a week like this one."
)


def prompt(sender: str, topic: str, day: str, time: str, free: bool) -> str:
    state = "free" if free else "busy"
    return (
        f'{sender} writes: "Can we talk about {topic} on {day} at {time}?" '
        f"You are {state} then. Write a short reply."
    )


def reply(sender: str, day: str, time: str, accept: bool, polite: bool, form: int) -> str:
    slot = f"{day} at {time}"
    if accept:
        text = (f"{slot} works for me.", f"yes, I will be there on {slot}.")[form]
    else:
        text = (f"I cannot meet on {slot}.", f"sorry, {slot} does not work for me.")[form]
    thanks = " Thank you for asking." if polite else ""
    return f"Hello {sender}, {text}{thanks}"


def faulty(
    fault: str, sender: str, day: str, time: str, free: bool, polite: bool, form: int
) -> str:
    if fault == "decision":
        return reply(sender, day, time, not free, polite, form)
    if fault == "slot":
        other = DAYS[(DAYS.index(day) + 1 + form) % len(DAYS)]
        return reply(sender, other, time, free, polite, form)
    text = reply(sender, day, time, free, polite, form)
    if fault == "length":
        return text + PADDING
    return text.removeprefix(f"Hello {sender}, ").capitalize()


def rows(seed: int = 49) -> tuple[list[dict], list[dict]]:
    """(pairs, probes)."""
    draw = random.Random(seed)
    mails = list(product(SENDERS, TOPICS, DAYS, TIMES, (True, False)))
    draw.shuffle(mails)
    pairs, probes = [], []
    for number, (sender, topic, day, time, free) in enumerate(mails[:240]):
        fault = FAULTS[number % 4]
        styles = [(draw.random() < 0.5, draw.randrange(2)) for _ in range(2)]
        pairs.append(
            {
                "id": f"mail{number:03d}-{fault}",
                "prompt": prompt(sender, topic, day, time, free),
                "chosen": reply(sender, day, time, free, *styles[0]),
                "rejected": faulty(fault, sender, day, time, free, *styles[1]),
                "sender": sender,
                "slot": f"{day} at {time}",
                "free": free,
            }
        )
    for number, (sender, topic, day, time, free) in enumerate(mails[240:250]):
        for right, polite in product((False, True), repeat=2):
            probes.append(
                {
                    "context": f"probe{number}",
                    "prompt": prompt(sender, topic, day, time, free),
                    "candidate": reply(sender, day, time, free == right, polite, 0),
                    "correct": right,
                    "polite": polite,
                    "sender": sender,
                    "slot": f"{day} at {time}",
                    "free": free,
                }
            )
    return pairs, probes


if __name__ == "__main__":
    for name, content in zip(("pairs", "probes"), rows()):
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        print(f"wrote {path.name}, {len(content)} rows")

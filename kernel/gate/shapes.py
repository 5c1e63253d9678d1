"""The shapes of a preference row: prompt explicit or implicit, text or messages."""

import os

from kernel.gate.faults import Fault


def pair(row: dict) -> tuple[str, tuple[str, str], str]:
    """(prompt, (chosen, rejected), shape) of a preference row."""
    chosen, rejected = content(row, "chosen"), content(row, "rejected")
    explicit = row.get("prompt") is not None
    shape = "explicit prompt, " if explicit else "implicit prompt, "
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise Fault("field", "one of chosen and rejected is text, the other is messages")
    if isinstance(chosen, str):
        if explicit:
            return user_turn(content(row, "prompt"), "prompt"), (chosen, rejected), shape + "text"
        prompt, *answers = split_texts(chosen, rejected)
        return prompt, tuple(answers), shape + "text"
    if chosen[:-1] != rejected[:-1]:
        raise Fault("turns", "chosen and rejected differ before their last message")
    before = chosen[:-1]
    if not before and not explicit:
        raise Fault("field", "no prompt: neither a field 'prompt' nor a user turn in chosen")
    prompt = user_turn(before or content(row, "prompt"))
    if before and explicit:
        given = user_turn(content(row, "prompt"), "prompt")
        if given not in (prompt, before[-1][1]):
            raise Fault("field", "prompt is not what the user says in chosen")
    return prompt, (answer(chosen[-1:]), answer(rejected[-1:], "rejected")), shape + "messages"


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two texts with a common beginning.

    The prompt ends before the word in which they part. A transcript ("\\n\\nHuman: ...\\n\\nAssistant:
    ...") ends it at the last common "Assistant:" instead, because answers may begin alike.
    """
    human, assistant = "\n\nHuman:", "\n\nAssistant:"
    common = os.path.commonprefix([chosen, rejected])
    if ("\n\n" + common.lstrip()).startswith(human):
        cut = common.rfind(assistant)
        end = cut + len(assistant)
        prompt = ("\n\n" + common[:cut].lstrip()).removeprefix(human)
        answers = chosen[end:], rejected[end:]
        if cut < 0 or any(
            mark in text for text in (prompt, *answers) for mark in (human, assistant)
        ):
            raise Fault("turns", "a transcript with more than one turn of Human and Assistant")
    else:
        end = max((i + 1 for i, letter in enumerate(common) if letter.isspace()), default=0)
        prompt, answers = common[:end], (chosen[end:], rejected[end:])
        if not prompt.strip():
            raise Fault("field", "no prompt: no field 'prompt', and no common beginning")
    return prompt.strip(), *(text.strip() for text in answers)


def content(row: dict, name: str) -> str | list[tuple[str, str]]:
    """A field as text or as (role, content) messages."""
    if name not in row:
        raise Fault("field", f"no field '{name}' (there is: {', '.join(row) or 'nothing'})")
    return row[name] if isinstance(row[name], str) else conversation(row[name], name)


def conversation(value, name: str) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else f"a JSON {type(value).__name__}"
        raise Fault("field", f"{name} is {kind}, wanted text or messages")
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise Fault("field", f"{name}: a message needs the texts 'role' and 'content'")
    return [(message["role"], message["content"]) for message in value]


def user_turn(value: str | list[tuple[str, str]], name: str = "the conversation") -> str:
    """The prompt's text: a user turn, after the system turn and a blank line if there is one."""
    if isinstance(value, str):
        return value
    roles = [role for role, _ in value]
    if roles not in (["user"], ["system", "user"]):
        raise Fault("turns", f"{name} has the turns {', '.join(roles) or 'none'} before the answer")
    return "\n\n".join(text for _, text in value)


def answer(value: str | list[tuple[str, str]], name: str = "chosen") -> str:
    if isinstance(value, str):
        return value
    roles = [role for role, _ in value]
    if roles != ["assistant"]:
        raise Fault("turns", f"{name} ends with the turns {', '.join(roles)}, wanted assistant")
    return value[0][1]

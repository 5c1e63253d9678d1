"""The plan of a reward model for one behaviour, as Markdown: `60_probe.py --design BEHAVIOUR`.

The prose is in designs/ beside this file: shared.md.jinja is the document; helpfulness, programming,
safety and general fill in what differs. The numbers in it are those of design_figures.py.
"""

import hashlib
import re
import textwrap
from pathlib import Path

import jinja2

from kernel.data.files import read_json, write_atomic
from kernel.lesson import design_figures
from kernel.run.folder import RunFolder

NAMED = ("helpfulness", "programming", "safety")
LONGEST = 200  # characters of a behaviour
COLUMNS = 110
HELD = "\0"  # a space at which no line ends; no behaviour may hold one


def as_text(behaviour: str) -> str:
    """A user's words so that Markdown and HTML show them as they are."""
    text = behaviour.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]#|~$!])", r"\\\1", text)


def named(behaviour: str) -> str:
    """The behaviour in a clean form. Raises ValueError if it is empty, too long or not one line."""
    text = behaviour.strip()
    if not text:
        raise ValueError(f"--design needs a behaviour: {', '.join(NAMED)}, or your own words")
    if len(text) > LONGEST:
        raise ValueError(f"--design: {len(text)} characters; name it in {LONGEST} or fewer")
    if not text.isprintable():
        raise ValueError("--design: control characters or line breaks; name it in one plain line")
    return text.casefold() if text.casefold() in NAMED else text


def filled(text: str) -> str:
    """The same document with paragraphs and list items filled to COLUMNS; the rest stays as it is."""
    lines, paragraph, code = [], [], False

    def flush():
        words = " ".join(paragraph)
        indent = " " * len(re.match(r"- |\d\. |", words)[0])
        # Code in a line stays whole, and no dash comes to stand where it would begin a list.
        held = r"`[^`]*`| [-+] |^(?:-|\d\.) "
        words = re.sub(held, lambda match: match[0].replace(" ", HELD), words)
        options = {"break_long_words": False, "break_on_hyphens": False}
        lines.extend(textwrap.wrap(words, COLUMNS, subsequent_indent=indent, **options))
        paragraph.clear()

    for line in text.split("\n"):
        code ^= line.startswith("```")
        prose = not code and line and not line.startswith(("|", "#", "```"))
        if not prose or re.match(r"- |\d\. ", line):
            flush()
        (paragraph if prose else lines).append(line.strip() if prose else line)
    flush()
    return "\n".join(lines).replace(HELD, " ")


def design(behaviour: str, figures: dict | None) -> str:
    """The document: protocol, guidelines, evaluation, as Markdown.

    behaviour: helpfulness, programming, safety, or free text, which gets the general document.
    figures: 60_probe's figures.json, held against the thresholds in a last section; None: no section.
    Raises ValueError for a behaviour that cannot be named in one line.
    """
    behaviour = named(behaviour)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("designs")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    kind = behaviour if behaviour in NAMED else "general"
    text = environment.get_template(f"{kind}.md.jinja").render(
        name=kind if kind == behaviour else f"“{as_text(behaviour)}”".replace(" ", HELD),
        numbers=design_figures,
        measured=[] if figures is None else design_figures.measured(figures),
    )
    return filled(text)


def write_design(folder: Path, behaviour: str, redo: bool = False) -> Path:
    """Write the document into a run folder's outputs/design/, with its judge's figures if there are any.

    Raises ValueError if the folder is no run, the figures are of another code, or a document that was
    edited would be lost (redo: replace it).
    """
    RunFolder(folder)
    behaviour = named(behaviour)
    source = folder / "outputs" / "60_probe" / "figures.json"
    try:
        text = design(behaviour, read_json(source) if source.is_file() else None)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{source}: not as this code writes it ({error}); run 60_probe.py --redo"
        ) from None
    slug = behaviour
    if behaviour not in NAMED:  # two behaviours may share their letters
        words = re.sub(r"[^a-z0-9]+", "-", behaviour.casefold())[:40].strip("-")
        slug = f"{words or 'behaviour'}-{hashlib.sha256(behaviour.encode()).hexdigest()[:8]}"
    path = folder / "outputs" / "design" / f"{slug}.md"
    if path.is_file() and path.read_bytes() != text.encode("utf-8") and not redo:
        raise ValueError(
            f"{path} is there and differs (edited, or of other figures); nothing was written. "
            "Move it away, or --redo to replace it"
        )
    write_atomic(path, text)
    return path

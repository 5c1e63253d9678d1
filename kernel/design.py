"""The plan of a reward model for one behaviour, as Markdown: `60_probe.py --design BEHAVIOUR`.

The prose is in kernel/designs/: shared.md.jinja is the document; helpfulness, programming, safety and
general fill in what differs. The numbers in it are those of kernel/design_figures.py.
"""

import hashlib
import re
from pathlib import Path

import jinja2

from kernel import design_figures
from kernel.data import read_json, write_atomic

NAMED = ("helpfulness", "programming", "safety")
LONGEST = 200  # characters of a behaviour


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
    return environment.get_template(f"{kind}.md.jinja").render(
        name=kind if kind == behaviour else f"“{as_text(behaviour)}”",
        numbers=design_figures,
        measured=[] if figures is None else design_figures.measured(figures),
    )


def write_design(folder: Path, behaviour: str, redo: bool = False) -> Path:
    """Write the document into a run folder's outputs/design/, with its judge's figures if there are any.

    Raises ValueError if the folder is no run, the figures are of another code, or a document that was
    edited would be lost (redo: replace it).
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: run 00_prepare.py first")
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

"""`phasewise help`: a page of the guide, or the help of a command, in the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import typer

from phasewise._options import argument
from phasewise._words import meant
from phasewise.cli.present import EXIT_USAGE, fail, say


def _complete_topic(incomplete: str) -> list[str]:
    return [name for name in titles() if name.startswith(incomplete)]


def help_topic(
    context: typer.Context,
    topic: str | None = argument(
        None, "a page's name or a command; without it: list pages", "TOPIC", autocompletion=_complete_topic
    ),
) -> None:
    """Print a page of the guide, or the help of a command; without TOPIC the names of all pages.

    $ phasewise help
    $ phasewise help tuning
    """
    root = context.find_root()
    commands: dict[str, Any] = getattr(root.command, "commands", {})
    if topic is None:
        say(list_text(), end="")
    elif topic in titles():
        say(page_text(topic), end="")
    elif topic in commands:
        say(commands[topic].get_help(typer.Context(commands[topic], info_name=topic, parent=root)))
    else:
        fail(f"no page or command {topic!r:.60}{meant(topic, [*titles(), *commands])}", EXIT_USAGE)


GUIDE = Path(__file__).parents[1] / "guide"
COLUMNS = 79
"""Columns of a page: a terminal of 80 columns holds each line."""

_NO_TEXT = re.compile(r"<!--.*?-->\n?|^!\[[^\]]*\]\([^)]*\)\n\n?", re.S | re.M)
"""Pattern of what a page in a terminal leaves out: comments, and pictures on a line of their own."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.S | re.M)


def titles() -> dict[str, str]:
    """The title of every page by the page's name."""
    return {
        path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for path in sorted(GUIDE.glob("*.md"))
    }


def list_text() -> str:
    pages = titles()
    width = max(map(len, pages))
    return "".join(f"{name:<{width}}  {title}\n" for name, title in pages.items())


def page_text(name: str) -> str:
    """Render a page with rich for a terminal: links become text, code stays as it is."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=COLUMNS, color_system=None, file=io.StringIO())
    text = _NO_TEXT.sub("", (GUIDE / f"{name}.md").read_text(encoding="utf-8"))
    parts = []
    for part in _FENCE.split(text):
        if not part.startswith("```"):
            with console.capture() as set_text:
                console.print(Markdown(_LINK.sub(_link, part)))
            part = "\n".join(map(str.rstrip, set_text.get().splitlines()))
        parts.append(part.strip("\n"))
    return "\n\n".join(filter(None, parts)) + "\n"


def _link(match: re.Match[str]) -> str:
    """Text of a link; for a page of the guide, the command that prints the page."""
    said, target = match[1], Path(match[2]).stem
    return f"{said} (phasewise help {target})" if (GUIDE / f"{target}.md").exists() else said

"""`phasewise help`: a page of the guide, or the help of a command, in the terminal."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from phasewise._words import meant
from phasewise.cli.present import fail, say

EXIT_USAGE = 2


def _complete_topic(incomplete: str) -> list[str]:

    return [name for name in titles() if name.startswith(incomplete)]


def help_topic(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC",
            help="a page's name or a command; without it: list pages",
            autocompletion=_complete_topic,
        ),
    ] = None,
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
"""A terminal of 80 columns holds each line."""

_NO_TEXT = re.compile(r"<!--.*?-->\n?|^!\[[^\]]*\]\([^)]*\)\n\n?", re.S | re.M)
"""Comments, and pictures that stand alone."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
_GOES_ON = re.compile(r"(?![|#]| *- | *\d+\. ) *\S")
_CAN_GO_ON = re.compile(r"(?![|#]) *\S")
"""A line that belongs to the paragraph or the item before it, and one that such a line may follow."""
_CELL_ENDS = re.compile(r"(?<!\\)\|")
_FENCE = re.compile(r"(^```.*?^```$)", re.S | re.M)


def titles() -> dict[str, str]:
    """Every page's title, by its name."""
    return {
        path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for path in sorted(GUIDE.glob("*.md"))
    }


def list_text() -> str:
    """A line for each page."""
    pages = titles()
    width = max(map(len, pages))
    return "".join(f"{name:<{width}}  {title}\n" for name, title in pages.items())


def page_text(name: str) -> str:
    """The page, its paragraphs filled, its tables set, each link written as what it says; code as it is."""
    text = _NO_TEXT.sub("", (GUIDE / f"{name}.md").read_text(encoding="utf-8"))
    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _filled(part) for part in parts)


def _filled(text: str) -> str:
    lines: list[str] = []
    for line in _LINK.sub(_link, text).split("\n"):
        if lines and _GOES_ON.match(line) and _CAN_GO_ON.match(lines[-1]):
            lines[-1] = f"{lines[-1]} {line.strip()}"
        else:
            lines.append(line)
    rows = itertools.groupby(lines, key=lambda line: line.startswith("|"))
    return "\n".join(_table(list(part)) if table else "\n".join(map(_line, part)) for table, part in rows)


def _table(lines: list[str]) -> str:
    """A Markdown table with its widest columns folded until a row fits."""
    from tabulate import tabulate

    head, _, *rows = ([cell.strip() for cell in _CELL_ENDS.split(line)[1:-1]] for line in lines)
    natural = [max(len(name) + 2, *map(len, cells)) for name, *cells in zip(head, *rows, strict=True)]
    room = COLUMNS - 2 * (len(head) - 1)
    cap = next(cap for cap in range(room, 0, -1) if sum(min(width, cap) for width in natural) <= room)
    widths = [min(width, cap) for width in natural]
    return tabulate(
        rows,
        head,
        tablefmt="simple",
        disable_numparse=True,
        maxcolwidths=widths,
        maxheadercolwidths=[width - 2 for width in widths],  # tabulate keeps two columns beside a name
    )


def _line(line: str) -> str:
    """One line of Markdown, broken where it is too long."""
    if len(line) <= COLUMNS:
        return line
    inset = re.match(r" *(?:- |\d+\. )?", line)
    indent = " " * (inset.end() if inset else 0)
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _link(match: re.Match[str]) -> str:
    """The text of a link, and for a page of the guide the command that prints it."""
    said, target = match[1], Path(match[2]).stem
    return f"{said} (phasewise help {target})" if (GUIDE / f"{target}.md").exists() else said

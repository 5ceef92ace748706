"""Pages of the guide as text for a terminal: they are Markdown, and stay so but for comments and links."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

GUIDE = Path(__file__).parents[0] / "guide"
COLUMNS = 90

_COMMENT = re.compile(r"<!--.*?-->\n?", re.S)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
_GOES_ON = re.compile(r"(?![|#]| *- | *\d+\. ) *\S")
_CAN_GO_ON = re.compile(r"(?![|#]) *\S")
"""A line that belongs to the paragraph or the item before it, and one that such a line may follow."""
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
    """The page, its paragraphs filled and each link written as what it says; blocks of code as they are."""
    text = _COMMENT.sub("", (GUIDE / f"{name}.md").read_text(encoding="utf-8"))
    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _filled(part) for part in parts)


def _filled(text: str) -> str:
    lines: list[str] = []
    for line in _LINK.sub(_link, text).split("\n"):
        if lines and _GOES_ON.match(line) and _CAN_GO_ON.match(lines[-1]):
            lines[-1] = f"{lines[-1]} {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(map(_line, lines))


def _line(line: str) -> str:
    """One line of Markdown, broken where it is too long and no row of a table."""
    if len(line) <= COLUMNS or line.startswith("|"):
        return line
    inset = re.match(r" *(?:- |\d+\. )?", line)
    indent = " " * (inset.end() if inset else 0)
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _link(found: re.Match[str]) -> str:
    """The text of a link, and for a page of the guide the command that prints it."""
    said, target = found[1], Path(found[2]).stem
    return f"{said} (phasewise help {target})" if (GUIDE / f"{target}.md").exists() else said

"""`phasewise help`: a page of the guide, or the help of a command, in the terminal."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from phasewise._words import meant
from phasewise.cli.present import fail, say

EXIT_USAGE = 2


def _complete_topic(incomplete: str) -> list[str]:
    from phasewise.cli.guide_text import titles

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
    from phasewise.cli.guide_text import list_text, page_text, titles

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

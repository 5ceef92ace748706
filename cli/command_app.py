"""Typer apps whose help is plain text: options under headings, choices whole, no markup."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

OTHER_OPTIONS = "Options"


class GroupedCommand(TyperCommand):
    """A command whose options are listed under the headings (`rich_help_panel`) that they were given."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        arguments: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if isinstance(parameter, TyperOption):
                groups.setdefault(parameter.rich_help_panel or OTHER_OPTIONS, []).append(record)
            else:
                arguments.append(record)
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for heading in sorted(groups, key=lambda one: one == OTHER_OPTIONS):
            with formatter.section(heading):
                formatter.write_dl(groups[heading])


class CommandApp(typer.Typer):
    """A Typer app of ours. Typer's own help drops `[words in brackets]` and breaks choices mid-word."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        settings.setdefault("cls", GroupedCommand)
        declare = super().command

        def declared(function: Callable[..., Any]) -> Any:
            first = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
            return declare(name, **{"short_help": first, **settings})(function)

        return declared

"""Options that travel together: one settings dataclass for a command, spread into one option a field.

Typer reads a command's options from its signature, so a command of thirty options has thirty parameters.
Here the fields of a dataclass, which a workflow owns, are the parameters. The dataclass has names, types and
defaults; an `OptionSet` has what only a command line needs (help, bounds, metavar, environment variable).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer


@dataclass(frozen=True)
class OptionSpec:
    """One field's option.

    `flags`: empty for `--field-name`. `kind`: its type where the field's own is wider. `written`: the
    field's default as a user would write it, where `settings` have a parser.
    """

    help: str
    flags: tuple[str, ...]
    kind: Any
    written: str | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class OptionSet:
    """The options of a command line that give the fields of the dataclass `settings`."""

    settings: type
    panel: str | None
    fields: dict[str, Any]
    """By field: an `OptionSpec`, or an `Annotated` type of `cli.options`."""


def opt(
    help_text: str, *flags: str, kind: Any = None, written: str | None = None, **settings: Any
) -> OptionSpec:
    """An option of an `OptionSet`; `settings` as `typer.Option` takes them."""
    return OptionSpec(help_text, flags, kind, written, settings)


def option_set(settings: type, panel: str | None = None, **fields: Any) -> OptionSet:
    """Options for every field of the dataclass `settings` but those of keywords alone, under the heading
    `panel` of `--help`.

    TypeError where `fields` are not those of the dataclass, in its order.
    """
    names = [field.name for field in dataclasses.fields(settings) if not field.kw_only]
    if names != list(fields):
        raise TypeError(f"{settings.__name__} has the fields {names}, options are {list(fields)}")
    return OptionSet(settings, panel, fields)


def spread(**sets: OptionSet) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: parameters named in `sets` become one option a field; the command gets the dataclass."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name in sets:
                parameters += _parameters(sets[name])
            else:
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(parameter.replace(annotation=own[name], kind=kind))

        @wraps(command)
        def called(**given: Any) -> None:
            for name, chosen in sets.items():
                given[name] = chosen.settings(**{field: given.pop(field) for field in chosen.fields})
            command(**given)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def under(heading: str, shared: Any) -> Any:
    """An `Annotated` option of `cli.options` under this heading of `--help`, unless it has one already."""
    kind, option = get_args(shared)
    if option.rich_help_panel is not None:
        return shared
    placed = copy(option)
    placed.rich_help_panel = heading
    return Annotated[kind, placed]


def _parameters(chosen: OptionSet) -> list[inspect.Parameter]:
    hints = get_type_hints(chosen.settings)
    parameters = []
    for field in dataclasses.fields(chosen.settings):
        spec = chosen.fields[field.name]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if isinstance(spec, OptionSpec):
            if spec.written is not None:
                default = _checked(spec, default)
            spec = _annotation(spec, field.name, hints[field.name], chosen.panel)
        elif chosen.panel is not None:
            spec = under(chosen.panel, spec)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=spec))
    return parameters


def _annotation(spec: OptionSpec, name: str, kind: Any, panel: str | None) -> Any:
    flags = spec.flags or (f"--{name.replace('_', '-')}",)
    option = typer.Option(*flags, help=spec.help, **{"rich_help_panel": panel, **spec.settings})
    return Annotated[kind if spec.kind is None else spec.kind, option]


def _checked(spec: OptionSpec, default: Any) -> str | None:
    """The default as it is written; ValueError where that is not the field's own."""
    if spec.written is not None and spec.settings["parser"](spec.written) != default:
        raise ValueError(f"{spec.written!r} is not the default {default!r}")
    return spec.written

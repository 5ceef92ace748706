"""Options of commands: one for each parameter, and each field of a settings dataclass, with an `Option`
(`phasewise._options`), and those of each field that is such a dataclass itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from phasewise._options import OPTION, Option


def info(option: Option, panel: str | None = None) -> Any:
    """Make typer's form of the option."""
    settings = dict(option.settings)
    if "parser" in settings:
        settings["parser"] = _reader(settings["parser"])
    if option.is_argument:
        return typer.Argument(help=option.help, **settings)
    return typer.Option(
        *option.flags,
        help=option.help,
        **{"rich_help_panel": option.panel or panel, "hidden": option.config_only, **settings},
    )


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a command into one with an option for each parameter, and each field of a settings dataclass, that
    has an `Option`."""
    own = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    sets = {name: own[name] for name in signature.parameters if _is_settings(own[name])}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in sets:
            parameters += _parameters(sets[name])
        elif isinstance(parameter.default, dataclasses.Field):
            parameters.append(_parameter(parameter.default, own[name], name=name))
        else:
            parameters.append(parameter.replace(annotation=own[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def called(**given: Any) -> None:
        for name, settings in sets.items():
            given[name] = _made(settings, given)
        command(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and any(_fields(kind))


def _fields(settings: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Yield the fields that have options, with their types."""
    hints = get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if OPTION in field.metadata or _is_settings(hints[field.name]):
            yield field, hints[field.name]


def _made(settings: Any, given: dict[str, Any]) -> Any:
    """Make the settings of the options' values, which leave `given`."""
    own = {
        field.name: given.pop(field.name) if OPTION in field.metadata else _made(kind, given)
        for field, kind in _fields(settings)
    }
    return settings(**own)


def _parameters(settings: Any, *, with_variables: bool = False) -> list[inspect.Parameter]:
    parameters, with_variables = [], with_variables or getattr(settings, "VARIABLES", False)
    for field, hint in _fields(settings):
        if OPTION not in field.metadata:
            parameters += _parameters(hint, with_variables=with_variables)
            continue
        panel = getattr(settings, "PANEL", None)
        parameters.append(_parameter(field, hint, panel, with_variable=with_variables))
    return parameters


def _parameter(
    field: dataclasses.Field[Any],
    hint: Any,
    panel: str | None = None,
    name: str | None = None,
    *,
    with_variable: bool = False,
) -> inspect.Parameter:
    """Make a parameter with the field's option, of the field's name unless another is given."""
    option: Option = field.metadata[OPTION]
    name = name or field.name
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    kind: Any = _kind(hint) if option.kind is None else option.kind
    if "parser" in option.settings:
        kind = str | None if default is None else str
    if option.written is not None:
        if option.settings["parser"](option.written) != default:
            raise ValueError(f"{option.written!r} is not the default {default!r}")
        default = option.written  # as a user writes it
    own = info(option, panel)
    flag = (option.flags or (f"--{name.replace('_', '-')}",))[0]
    if not option.flags and not option.is_argument:
        own.param_decls = (flag,)
    if with_variable and "envvar" not in option.settings:
        own.envvar = f"PHASEWISE_{flag.partition('/')[0][2:].replace('-', '_').upper()}"
    annotation = Annotated[kind, own]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(kind: Any) -> Any:
    """The type of a field's option: a list for a sequence."""
    sequences: list[Any] = [each for each in get_args(kind) if get_origin(each) is Sequence]
    return list.__class_getitem__(get_args(sequences[0])) | None if sequences else kind


def _reader(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `parse` so that its ValueErrors become typer's BadParameter."""

    @wraps(parse)
    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read

"""The configuration file: defaults by command and option, e.g. `[serve]` then `port = 9000`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from phasewise._words import meant
from phasewise.cli.command_app import TYPER_WORDS
from phasewise.cli.present import EXIT_FAILURE, fail
from phasewise.workflows.config_file import read_toml


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """Read the file's values for the options of `command`; empty where there is no file.

    WorkflowError for a file that cannot be read (`workflows.config_file.read_toml`); ends the process with
    one line for a table or key that no command or option has.
    """
    values = read_toml(path)
    wrong = unknown_key(values, command)
    if wrong is not None:
        fail(f"config file {path}: {wrong}", EXIT_FAILURE)
    return values


def defaults_of(values: Mapping[str, Any], command: Any) -> dict[str, Any]:
    """Turn the values of a checked file into click's default map, with the parameters' own names."""
    children, keys = getattr(command, "commands", {}), _keys(command)
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            defaults[key] = defaults_of(value, children[key])
        else:
            defaults[keys[key].name] = keys[key].default(value)
    return defaults


@dataclass(frozen=True)
class _Key:
    """The parameter that a key of the file sets. turns_off: True if a true value sets the parameter to false,
    as the flag --no-resume does. is_list: True if the parameter takes several values."""

    name: str
    turns_off: bool
    is_list: bool

    def default(self, value: Any) -> Any:
        if self.turns_off:
            return not value
        return [value] if self.is_list and not isinstance(value, list) else value


def wrong_value(tables: Sequence[str], key: str, value: Any, command: Any) -> str | None:
    """The fault that the command behind `tables` finds in the value of a known key; None for a good value."""
    for table in tables:
        command = command.commands[table]
    of_key = _keys(command)[key]
    parameter = next(parameter for parameter in command.params if parameter.name == of_key.name)
    context = command.make_context(command.name, [], resilient_parsing=True)
    try:
        parameter.process_value(context, of_key.default(value))
    except typer.BadParameter as error:
        reason = error.message.removeprefix(TYPER_WORDS)
        return f"{'.'.join((*tables, key))} cannot be {value!r:.40}: {reason}"
    return None


def _keys(command: Any) -> dict[str, _Key]:
    """The parameters of a command by key: a flag, `kv_budget` for --kv-budget, or an argument's name."""
    keys = {}
    for parameter in command.params:
        is_list = getattr(parameter, "multiple", False) or parameter.nargs == -1
        if not parameter.opts[0].startswith("-"):
            keys[parameter.name] = _Key(parameter.name, turns_off=False, is_list=is_list)
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("--"):
                turns_off = flag in parameter.secondary_opts
                keys[flag[2:].replace("-", "_")] = _Key(parameter.name, turns_off, is_list)
    return keys


def unknown_key(values: Mapping[str, Any], command: Any, where: str = "") -> str | None:
    """The fault of the first table or key that `command` lacks; None where all are known."""
    children = getattr(command, "commands", {})
    options = _keys(command)
    for key, value in values.items():
        full_key = f"{where}{key}"
        if isinstance(value, dict):
            if key not in children:
                return f"[{full_key}] is no command{meant(key, children)}"
            wrong = unknown_key(value, children[key], f"{full_key}.")
            if wrong is not None:
                return wrong
        elif key not in options:
            return f"{full_key} is no option{meant(key.replace('-', '_'), options)}"
        elif options[key].turns_off and not isinstance(value, bool):
            return f"{full_key} is true or false, not {value!r:.40}"
    return None

"""The configuration file: defaults by command and option, e.g. `[serve]` then `port = 9000`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasewise._words import meant
from phasewise.cli.present import fail
from phasewise.workflows.config_file import read_toml

EXIT_FAILURE = 1


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """The file's values for the options of `command`; empty where there is no file.

    WorkflowError for a file that cannot be read (`workflows.config_file.read_toml`); ends the process with
    one line for a table or key that no command or option has.
    """
    values = read_toml(path)
    wrong = unknown_key(values, command)
    if wrong is not None:
        fail(f"config file {path}: {wrong}", EXIT_FAILURE)
    return values


def defaults_of(values: Mapping[str, Any], command: Any) -> dict[str, Any]:
    """The values of a checked file as click's default map, which goes by the parameters' own names."""
    children, names = getattr(command, "commands", {}), _keys(command)
    return {
        names.get(key, key): defaults_of(value, children[key]) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _keys(command: Any) -> dict[str, str]:
    """By key of the file, the parameter's name: an option's key is its flag, `kv_budget` for --kv-budget."""
    keys = {
        parameter.name: parameter.name
        for parameter in command.params
        if not parameter.opts[0].startswith("-")
    }
    for parameter in command.params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("--"):
                keys[flag[2:].replace("-", "_")] = parameter.name
    return keys


def unknown_key(values: Mapping[str, Any], command: Any, where: str = "") -> str | None:
    """The fault of the first table or key that `command` does not have; None where all are known."""
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
    return None

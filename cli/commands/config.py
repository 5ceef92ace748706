"""`phasewise config`: the configuration file, shown and changed."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import typer

from phasewise._options import REQUIRED, argument
from phasewise.cli.command_app import CommandApp
from phasewise.cli.config_file import read_config, unknown_key, wrong_value
from phasewise.cli.options import JsonOption
from phasewise.cli.present import EXIT_FAILURE, EXIT_USAGE, fail, note, write_target
from phasewise.cli.tables import present
from phasewise.workflows.config_file import config_path, config_text

HELP = """The configuration file: defaults of options, by command.

$ phasewise config show
$ phasewise config set serve.port 9000"""

app = CommandApp(help=HELP)


@app.command()
def show(context: typer.Context, as_json: JsonOption = False) -> None:
    """Print the file's path and its values.

    $ phasewise config show
    $ phasewise config show --json
    """
    path = config_path()
    values = read_config(path, context.find_root().command)
    if not as_json:
        note(f"{path}{'' if path.exists() else ' (there is no such file yet)'}")
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in _flat(values)]
    present(as_json, {"path": str(path), "exists": path.exists(), "values": values}, lines)


@app.command("set")
def set_value(
    context: typer.Context,
    name: str = argument(REQUIRED, "e.g. serve.port or bench.run.repetitions", "COMMAND.OPTION"),
    value: str | None = argument(None, "a TOML value or a text; none: remove the option", "VALUE"),
) -> None:
    """Set the default of an option in the file, keeping the rest of the file as it is.

    $ phasewise config set serve.port 9000
    $ phasewise config set bench.run.repetitions 3
    """
    import tomlkit

    path = config_path()
    *tables, key = name.split(".")
    changed: Any = {key: True if value is None else _parsed(value)}
    for table in reversed(tables):
        changed = {table: changed}
    command = context.find_root().command
    wrong = unknown_key(changed, command)
    if wrong is None and value is not None:
        wrong = wrong_value(tables, key, _parsed(value), command)
    if wrong is not None:
        fail(wrong, EXIT_USAGE)
    read_config(path, command)
    document = tomlkit.parse(config_text(path) if path.exists() else b"")
    section: Any = document
    for table in tables:
        section = section.setdefault(table, tomlkit.table())
    if value is None:
        section.pop(key, None)
    else:
        section[key] = _parsed(value)
    try:  # a symbolic link's target may have another directory
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"config file {path} cannot be written: {error.strerror}", EXIT_FAILURE)
    write_target(path, tomlkit.dumps(document))
    note(f"{path}: {name} {'removed' if value is None else f'= {value}'}")


def _parsed(text: str) -> Any:
    """Parse a TOML value; other text is the value itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _flat(values: dict[str, Any], where: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        pairs += _flat(value, f"{where}{key}.") if isinstance(value, dict) else [(f"{where}{key}", value)]
    return pairs

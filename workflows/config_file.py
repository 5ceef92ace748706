"""Reads the configuration file, and defaults of options from PHASEWISE_* variables and that file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise._files import read_input
from phasewise._places import user_folder
from phasewise._toml import parse_toml
from phasewise._words import reason_of
from phasewise.workflows.errors import UsageError, WorkflowError

MAX_BYTES = 1 << 20


def config_path() -> Path:
    """`$PHASEWISE_CONFIG`, or `phasewise/config.toml` in the XDG configuration directory."""
    return Path(os.environ.get("PHASEWISE_CONFIG") or user_folder("config") / "config.toml")


def config_text(path: Path) -> bytes:
    """The bytes of the file. Raises OSError."""
    return read_input(path, MAX_BYTES)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of the file; none where there is no file.

    Raises WorkflowError where PHASEWISE_CONFIG names an absent file, and for a file that is not TOML.
    """
    try:
        return parse_toml(config_text(path))
    except FileNotFoundError:
        if os.environ.get("PHASEWISE_CONFIG"):
            raise WorkflowError(f"PHASEWISE_CONFIG names {path}, which is not there") from None
        return {}
    except (OSError, ValueError) as error:
        raise WorkflowError(f"config file {path} cannot be read: {reason_of(error)}") from error


@dataclass(frozen=True)
class StandingOptions:
    """Defaults of one command's options: PHASEWISE_* variables, then the command's table in the configuration
    file. Options are named by keys: `kv_format` for PHASEWISE_KV_FORMAT.
    """

    table: dict[str, Any]

    @classmethod
    def of(cls, *command: str) -> StandingOptions:
        """command: names of nested tables, e.g. `bench`, `run`. WorkflowError as of `read_toml`."""
        table: Any = read_toml(config_path())
        for name in command:
            table = table.get(name, {}) if isinstance(table, dict) else {}
        return cls(table if isinstance(table, dict) else {})

    def text(self, key: str, choices: Sequence[str] = ()) -> str | None:
        """An option's text; None without one. UsageError for a text that is not among `choices`."""
        value = self._value(key)
        if value is not None and choices and value not in choices:
            raise UsageError(f"{self._place(key)} is {value!r:.40}, not one of {', '.join(choices)}")
        return None if value is None else str(value)

    def count(self, key: str) -> int | None:
        """An option's value; None without one. UsageError for anything but whole numbers from 1 on."""
        value = self._value(key)
        if value is None:
            return None
        text = str(value)
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
            raise UsageError(f"{self._place(key)} is {value!r:.40}, not a whole number from 1 on")
        return int(text)

    def _value(self, key: str) -> Any:
        return os.environ.get(_variable(key)) or self.table.get(key)

    def _place(self, key: str) -> str:
        return _variable(key) if os.environ.get(_variable(key)) else f"{key} of the configuration file"


def _variable(key: str) -> str:
    return f"PHASEWISE_{key.upper()}"

"""Secrets of this process: API keys on its command line, values in its environment."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

SECRET_VARIABLES = frozenset({"PHASEWISE_API_KEY", "PHASEWISE_DB"})
"""Environment variables that child processes do not get. A database URL may contain a password."""

_ARG_START, _ARG_END = 48 - 3, 49 - 3
"""Indexes of fields of /proc/PID/stat (numbered from 1 in proc(5)) after the command's name."""


def environment_for_children(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of child processes: `environment` without secrets."""
    return {name: value for name, value in environment.items() if name not in SECRET_VARIABLES}


def hide_values_of(option: str) -> bool:
    """Overwrite the values of `option` in the command line that `ps` shows. Returns True if there were any.
    Linux shows this memory of the process to all users of the machine."""
    try:
        start, end = _argument_memory()
        shown = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError, IndexError):  # no Linux, no /proc, or an emulator's, which tells less
        return False
    if not start or end - start != len(shown):
        return False
    spans = list(_values(shown, os.fsencode(option)))
    for offset, n_bytes in spans:
        ctypes.memset(start + offset, ord("*"), n_bytes)
    return bool(spans)


def _values(arguments: bytes, option: bytes) -> Iterator[tuple[int, int]]:
    """(Offset, length) of each value of `--option VALUE` and `--option=VALUE` in NUL-terminated arguments."""
    offset, is_value = 0, False
    for argument in arguments.split(b"\0"):
        if is_value:
            yield offset, len(argument)
        elif argument.startswith(option + b"="):
            yield offset + len(option) + 1, len(argument) - len(option) - 1
        is_value = not is_value and argument == option
        offset += len(argument) + 1


def _argument_memory() -> tuple[int, int]:
    after_name = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return int(after_name[_ARG_START]), int(after_name[_ARG_END])

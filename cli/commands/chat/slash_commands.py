"""The commands of `phasewise chat`: their help, the values of /set, the file of /save."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phasewise._files import write_file
from phasewise._version import SCHEMA_VERSION
from phasewise._words import number

HELP = """\
/system TEXT      set the system message; without TEXT remove it
/set NAME VALUE   temperature, top_k, top_p, min_p, repetition_penalty or seed; VALUE `default`: the model's
/clear            begin a new conversation; the system message stays
/save FILE        write the conversation as JSON
/bye              end (also Ctrl-D)
\"\"\"               begins and ends a message of several lines"""

_KINDS: dict[str, type[float] | type[int]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (1, 1 << 31),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "seed": (-(1 << 63), (1 << 63) - 1),
}


class ChatCommandError(Exception):
    """A command that cannot be followed; the message says what to write."""


def applied_setting(text: str) -> dict[str, float | int | None]:
    """`temperature 0.2` as a field of `SamplingChoice` and its value."""
    name, _, written = text.partition(" ")
    name = name.replace("-", "_")
    if name not in _KINDS or not written.strip():
        raise ChatCommandError(f"write /set NAME VALUE, where NAME is one of {', '.join(_KINDS)}")
    if written.strip() == "default":
        return {name: None}
    low, high = _RANGES[name]
    try:
        value = _KINDS[name](written)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ChatCommandError(
            f"{name} is a number from {number(low)} to {number(high)}, not {written.strip()!r:.40}"
        )
    return {name: value}


def save_conversation(path: Path, model: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Write the conversation as one JSON object. ChatCommandError where that fails."""
    if not path.name:
        raise ChatCommandError("write /save FILE")
    fields = {"schema_version": SCHEMA_VERSION, "model": model, "messages": list(messages)}
    try:
        write_file(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ChatCommandError(f"{path} cannot be written: {error.strerror}") from None

"""Figures that the package brings: schedules that won on cores that the project has met.

`shipped_figures/NAME.jsonl.gz` has timings, as `phasewise db export --in-use --no-plans --no-scores` prints
them on such a machine. They are read-only and lowest in trust: never used, only timed first (`hints`), and
never exported. A start that asks for no hints opens no file.
"""

from __future__ import annotations

import gzip
import io
import zlib
from functools import cache
from importlib.resources import files

from phasewise.kerneldb.errors import ExportFileError
from phasewise.kerneldb.portable import read_export
from phasewise.kerneldb.records import MachineKey, Measurement

FOLDER = "shipped_figures"
SUFFIX = ".jsonl.gz"
MAX_FILE_BYTES = 16 * 2**20
"""Most bytes of one file, uncompressed."""


def shipped_measurements(core_sig: str | None = None) -> list[Measurement]:
    """The timings that the package brings, of one kind of core or of all kinds; unverified."""
    rows = (row for name in shipped_names() for row in _rows(name))
    return [row for row in rows if core_sig in (None, row.origin.machine.core_sig)]


def shipped_kinds() -> tuple[str, ...]:
    """The kinds of machine with shipped timings, in words, e.g. `GenuineIntel 6/207, 2 threads`."""
    return tuple(sorted(map(_in_words, {row.origin.machine for row in shipped_measurements()})))


@cache
def shipped_names() -> tuple[str, ...]:
    """The names of the package's files of timings."""
    folder = files("phasewise.kerneldb") / FOLDER
    entries = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted(entry.name for entry in entries if entry.name.endswith(SUFFIX)))


def _in_words(machine: MachineKey) -> str:
    """Describe a machine by vendor, family and model, then the beginning of its
    `topology.placement_signature`."""
    return f"{' '.join(machine.core_sig.split()[:2])}, {machine.placement_sig.partition(':')[0]}"


def _content(name: str) -> bytes:
    return (files("phasewise.kerneldb") / FOLDER / name).read_bytes()


@cache
def _rows(name: str) -> tuple[Measurement, ...]:
    return tuple(read_shipped(_content(name), name))


def read_shipped(content: bytes, name: str) -> list[Measurement]:
    """Read the timings of one file. ExportFileError for content that `db export` did not write."""

    def refuse(line: int, reason: str) -> None:
        raise ExportFileError(f"{name}: line {line}: {reason}")

    text = io.BytesIO(_text(content, name))
    return [row for row in read_export(text, name, refuse) if isinstance(row, Measurement)]


def _text(content: bytes, name: str) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error):
        raise ExportFileError(f"{name} is not a compressed file of schedules") from None
    if len(text) > MAX_FILE_BYTES:
        raise ExportFileError(f"{name} holds more than {MAX_FILE_BYTES} bytes")
    return text

"""Figures that the package brings: schedules that won on cores that the project has met.

`shipped_figures/NAME.jsonl.gz` are what `phasewise db export --in-use --no-plans` printed on such a machine,
and nothing else. They are read-only and lowest in trust: never used, only timed first (`hints`), and never
exported.
"""

from __future__ import annotations

import gzip
import io
import zlib
from functools import cache
from importlib.resources import files

from phasewise.kerneldb.errors import ExportFileError
from phasewise.kerneldb.portable import read_export
from phasewise.kerneldb.records import Measurement

FOLDER = "shipped_figures"
SUFFIX = ".jsonl.gz"
MAX_FILE_BYTES = 16 * 2**20
"""The most of one file, uncompressed."""


def shipped_measurements(core_sig: str | None = None) -> list[Measurement]:
    """The timings that the package brings, of one kind of core or of all; unverified."""
    return [row for row in _all() if core_sig in (None, row.origin.machine.core_sig)]


@cache
def _all() -> tuple[Measurement, ...]:
    folder = files("phasewise.kerneldb") / FOLDER
    if not folder.is_dir():
        return ()
    measurements: list[Measurement] = []
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(SUFFIX):
            measurements += read_shipped(file.read_bytes(), file.name)
    return tuple(measurements)


def read_shipped(content: bytes, name: str) -> list[Measurement]:
    """The timings of one file. ExportFileError for what `db export` did not write."""

    def refuse(line: int, reason: str) -> None:
        raise ExportFileError(f"{name}: line {line}: {reason}")

    try:
        with gzip.open(io.BytesIO(content)) as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error):
        raise ExportFileError(f"{name} is not a compressed file of schedules") from None
    if len(text) > MAX_FILE_BYTES:
        raise ExportFileError(f"{name} holds more than {MAX_FILE_BYTES} bytes")
    return [row for row in read_export(io.BytesIO(text), name, refuse) if isinstance(row, Measurement)]

"""Figures that the package brings: schedules that won on cores that the project has met.

`shipped_figures/NAME.jsonl.gz` has timings, as `phasewise db export --in-use --no-plans --no-scores` prints
them on such a machine. They are read-only and lowest in trust: never used, only timed first (`hints`), and
never exported. A start that asks for no hints opens no file, and rows are made of the files alone that have
the asked kind of core.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

from phasewise.kerneldb.errors import ExportFileError, RecordError
from phasewise.kerneldb.portable import read_export
from phasewise.kerneldb.records import MachineKey, Measurement

FOLDER = "shipped_figures"
SUFFIX = ".jsonl.gz"
MAX_FILE_BYTES = 16 * 2**20
"""The most of one file, uncompressed."""


_MACHINE = re.compile(rb'^\{"measurement":\{[^\n]*?"machine":(\{[^{}\n]*\})', re.MULTILINE)


def shipped_measurements(core_sig: str | None = None) -> list[Measurement]:
    """The timings that the package brings, of one kind of core or of all; unverified."""

    def is_wanted(machine: MachineKey) -> bool:
        return core_sig in (None, machine.core_sig)

    names = [name for name in shipped_names() if any(map(is_wanted, _counts(name)))]
    return [row for name in names for row in _rows(name) if is_wanted(row.origin.machine)]


def shipped_count(core_sig: str | None = None) -> int:
    """The number of `shipped_measurements`, of which none is read."""
    return sum(
        count
        for name in shipped_names()
        for machine, count in _counts(name).items()
        if core_sig in (None, machine.core_sig)
    )


def shipped_kinds() -> tuple[str, ...]:
    """The kinds of machine of these timings, in words, e.g. `GenuineIntel 6/207, 2 threads`."""
    return tuple(sorted({_in_words(machine) for name in shipped_names() for machine in _counts(name)}))


@cache
def shipped_names() -> tuple[str, ...]:
    """The names of the package's files."""
    folder = files("phasewise.kerneldb") / FOLDER
    entries = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted(entry.name for entry in entries if entry.name.endswith(SUFFIX)))


def _in_words(machine: MachineKey) -> str:
    """Vendor, family and model; then what `topology.placement_signature` begins with."""
    return f"{' '.join(machine.core_sig.split()[:2])}, {machine.placement_sig.partition(':')[0]}"


def _content(name: str) -> bytes:
    return (files("phasewise.kerneldb") / FOLDER / name).read_bytes()


@cache
def _counts(name: str) -> Mapping[MachineKey, int]:
    return counts_by_machine(_content(name), name)


@cache
def _rows(name: str) -> tuple[Measurement, ...]:
    return tuple(read_shipped(_content(name), name))


def counts_by_machine(content: bytes, name: str) -> dict[MachineKey, int]:
    """The number of one file's timings by kind of machine, found in its text. ExportFileError as below."""
    counts = Counter(match[1] for match in _MACHINE.finditer(_text(content, name)))
    return {machine: count for text, count in counts.items() for machine in _machines_of(text)}


def _machines_of(text: bytes) -> Iterator[MachineKey]:
    """One; none of a text that is no machine, which is for `read_shipped` to say."""
    try:
        yield MachineKey(**json.loads(text))
    except (ValueError, TypeError, RecordError):
        return


def read_shipped(content: bytes, name: str) -> list[Measurement]:
    """The timings of one file. ExportFileError for what `db export` did not write."""

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

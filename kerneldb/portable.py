"""Schedules as a file that can be published: JSON lines, deterministic, versioned, checksummed.

    {"file": "phasewise schedules", "version": 1}
    {"measurement": {...}, "sha256": "16 digits"}       one line a timing, each with a checksum of its own
    {"promotion": {...}, "sha256": "16 digits"}         and a line for each schedule that was taken into use
    {"storage_duel": {...}, "sha256": "16 digits"}      and for each comparison of sparse with dense storage
    {"user_timing": {...}, "sha256": "16 digits"}       only where asked for: they name users' functions
    {"user_promotion": {...}, "sha256": "16 digits"}    the same
    {"step_time": {...}, "sha256": "16 digits"}         only where asked for: they name models
    {"rows": 2, "sha256": "64 digits"}                  over all bytes before this line

The same rows give the same bytes, in whatever order and database they were kept. Whether a row is trusted
is a database's own business and is not written: everything that comes from elsewhere is unverified. Service
plans stay at home, because they name one host's cores and its owner's models; step times, which name models
too, go out where their owner asks for it.

A file may come from a stranger. It is read line by line, in bounded memory; a line that is not one of ours
is refused with a reason, and the others are taken. Nothing that is in the database is touched.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import chain, islice
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from phasewise._words import counted
from phasewise.kerneldb.errors import ExportFileError, RecordError
from phasewise.kerneldb.records import (
    Comparison,
    MachineKey,
    Measurement,
    Origin,
    Problem,
    Promotion,
    Sample,
    Schedule,
    ServedStep,
    StepTime,
    StorageDuel,
)
from phasewise.kerneldb.store import Shared, Store
from phasewise.kerneldb.user_kernels import SINGLE_CORE, Choice, UserProblem, UserPromotion, UserTiming

Row: TypeAlias = Shared
Refuse: TypeAlias = Callable[[int, str], None]
"""Gets the number of a line, from 1, and why it is not taken."""

T = TypeVar("T")

FILE = "phasewise schedules"
VERSION = 1

MAX_ROWS = 1_000_000
MAX_LINE_BYTES = 4 * 2**20
MAX_SKIPPED_BYTES = 256 * 2**20
"""Twice a row with as many and as long samples as a record may have."""

ROWS_AT_ONCE = 500
"""Are appended in one transaction, so that other writers need not wait long."""

ROW_DIGITS = 16
MAX_REASON_CHARS = 200

MEASUREMENT_FIELDS = (
    "problem",
    "schedule",
    "samples_ns",
    "estimate_ns",
    "numeric_error",
    "effort_ns",
    "conditions",
    "machine",
    "kernel_abi",
    "program_version",
    "created_at_ms",
)
PROMOTION_FIELDS = (
    "problem",
    "schedule",
    "incumbent",
    "comparison",
    "machine",
    "kernel_abi",
    "program_version",
    "created_at_ms",
)
STORAGE_DUEL_FIELDS = (
    "problem",
    "schedule",
    "dense_schedule",
    "comparison",
    "machine",
    "kernel_abi",
    "program_version",
    "created_at_ms",
)
STEP_TIME_FIELDS = (
    "model_key",
    "configuration_key",
    "plan_json",
    "kernels",
    "step",
    "samples_ns",
    "estimate_ns",
    "conditions",
    "machine",
    "kernel_abi",
    "program_version",
    "created_at_ms",
)


_USER_FIELDS = ("problem", "choice", "machine", "kernel_abi", "program_version", "created_at_ms")
USER_TIMING_FIELDS = (*_USER_FIELDS, "samples_ns", "estimate_ns", "conditions")
USER_PROMOTION_FIELDS = (*_USER_FIELDS, "incumbent", "comparison")


@dataclass(frozen=True)
class Taken:
    """The fate of the rows of a file or of another database."""

    read: int
    added: int

    @property
    def known(self) -> int:
        """Rows that were there already."""
        return self.read - self.added


def rows_of(
    store: Store,
    wanted: Callable[[MachineKey], bool] = lambda _: True,
    *,
    step_times: bool = False,
    users_kernels: bool = False,
) -> Iterator[Row]:
    """Every timing, promotion and storage duel of the machines that are wanted.

    If asked: step times, which name models, and what is known of users' kernels, which names their functions.
    """
    sources: list[Iterator[Row]] = [
        store.all_measurements(),
        store.all_promotions(),
        store.all_storage_duels(),
    ]
    if step_times:
        sources.append(store.all_step_times())
    if users_kernels:
        sources.append(store.all_user_kernels())
    for row in chain.from_iterable(sources):
        if wanted(row.origin.machine):
            yield row


def export_lines(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a file with these rows, each with its line end. ASCII only."""
    lines = sorted({(*_place_of(row), _row_line(row)) for row in rows})
    if len(lines) > MAX_ROWS:
        raise ExportFileError(
            f"{counted(len(lines), 'row')} are too many for one file, which holds {MAX_ROWS}: "
            "choose machines with --signature"
        )
    digest = hashlib.sha256()
    for line in (_canonical({"file": FILE, "version": VERSION}), *(line[-1] for line in lines)):
        digest.update(f"{line}\n".encode())
        yield f"{line}\n"
    yield _canonical({"rows": len(lines), "sha256": digest.hexdigest()}) + "\n"


def _place_of(row: Row) -> tuple[Any, ...]:
    """The sort key of a row in a file: kind, key, machine, build, then time."""
    machine = row.origin.machine
    key: tuple[Any, ...] = (
        (row.model_key, row.configuration_key, astuple(row.step))
        if isinstance(row, StepTime)
        else (astuple(row.problem),)
    )
    return (
        _kind_of(row),
        *key,
        machine.core_sig,
        machine.placement_sig,
        row.kernel_abi,
        row.origin.created_at_ms,
    )


def _kind_of(row: Row) -> str:
    match row:
        case Measurement():
            return "measurement"
        case Promotion():
            return "promotion"
        case StorageDuel():
            return "storage_duel"
        case StepTime():
            return "step_time"
        case UserTiming():
            return "user_timing"
        case UserPromotion():
            return "user_promotion"


def _row_line(row: Row) -> str:
    match row:
        case Measurement():
            fields_of = _measurement_fields(row)
        case Promotion():
            fields_of = _promotion_fields(row)
        case StorageDuel():
            fields_of = _storage_duel_fields(row)
        case StepTime():
            fields_of = _step_time_fields(row)
        case UserTiming() | UserPromotion():
            fields_of = _user_fields(row)
    return _canonical({_kind_of(row): fields_of, "sha256": _row_digest({_kind_of(row): fields_of})})


def _measurement_fields(row: Measurement) -> dict[str, Any]:
    sample = asdict(row.sample)
    return {"problem": asdict(row.problem), **sample, **_origin_fields(row)}


def _promotion_fields(row: Promotion) -> dict[str, Any]:
    return {
        "problem": asdict(row.problem),
        "schedule": asdict(row.schedule),
        "incumbent": row.incumbent and asdict(row.incumbent),
        "comparison": asdict(row.comparison),
        **_origin_fields(row),
    }


def _storage_duel_fields(row: StorageDuel) -> dict[str, Any]:
    return {
        "problem": asdict(row.problem),
        "schedule": asdict(row.schedule),
        "dense_schedule": asdict(row.dense_schedule),
        "comparison": asdict(row.comparison),
        **_origin_fields(row),
    }


def _step_time_fields(row: StepTime) -> dict[str, Any]:
    own = asdict(row)
    del own["origin"]
    return {**own, **_origin_fields(row)}


def _user_fields(row: UserTiming | UserPromotion) -> dict[str, Any]:
    own = asdict(row)
    del own["origin"], own["problem"]["kernel_abi"]
    return {**own, **_origin_fields(row)}


def _origin_fields(row: Row) -> dict[str, Any]:
    return {
        "machine": asdict(row.origin.machine),
        "kernel_abi": row.kernel_abi,
        "program_version": row.origin.program_version,
        "created_at_ms": row.origin.created_at_ms,
    }


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _row_digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(row).encode()).hexdigest()[:ROW_DIGITS]


def import_rows(store: Store, rows: Iterable[Row]) -> Taken:
    """Append the rows, unverified, unless they are there.

    Interrupted, it has kept what it read; run again, it adds the rest.
    """
    source = iter(rows)
    read = added = 0
    while batch := [_unverified(row) for row in islice(source, ROWS_AT_ONCE)]:
        read += len(batch)
        added += store.add_missing(batch)
    return Taken(read, added)


def _unverified(row: Row) -> Row:
    return replace(row, origin=replace(row.origin, verified=False))


def read_export(stream: BinaryIO, name: str, refuse: Refuse) -> Iterator[Row]:
    """The rows of a file, unverified; `refuse` hears of each line left out, while the rows are taken.

    Raises ExportFileError at once when the first line is not an export's, or one of a newer program.
    """
    lines = _Lines(stream, refuse)
    _check_header(lines.next() or b"", name)
    return _read_rows(lines, refuse)


def _read_rows(lines: _Lines, refuse: Refuse) -> Iterator[Row]:
    rows = 0
    while (line := lines.next()) is not None:
        if rows == MAX_ROWS:
            refuse(lines.number, f"the file has more than {MAX_ROWS} rows: the rest is not read")
            return
        try:
            content = _parsed(line)
            if "rows" in content:
                _check_end(content, rows, lines, refuse)
                return
            rows += 1
            yield _row(content)
        except (ValueError, RecursionError) as error:
            refuse(lines.number, textwrap.shorten(str(error), MAX_REASON_CHARS, placeholder=" ..."))
    refuse(lines.number + 1, "the file ends without its closing line: it was cut short")


class _Lines:
    """The lines of a stream in bounded memory, their number, and the digest of those before the last one."""

    def __init__(self, stream: BinaryIO, refuse: Refuse) -> None:
        self.number = 0
        self._stream = stream
        self._refuse = refuse
        self._digest = hashlib.sha256()
        self._last = b""

    def next(self) -> bytes | None:
        """The next line that is not too long, None at the end."""
        while True:
            self._digest.update(self._last)
            self._last = self._stream.readline(MAX_LINE_BYTES)
            if not self._last:
                return None
            self.number += 1
            if self._last.endswith(b"\n") or len(self._last) < MAX_LINE_BYTES:
                return self._last
            self._skip_the_rest()
            self._refuse(self.number, f"the line is longer than {MAX_LINE_BYTES} bytes")

    def _skip_the_rest(self) -> None:
        skipped_bytes = 0
        while not self._last.endswith(b"\n"):
            skipped_bytes += len(self._last)
            if skipped_bytes > MAX_SKIPPED_BYTES:  # a device, say, gives zeros without end
                raise ExportFileError(
                    f"line {self.number} has more than {MAX_SKIPPED_BYTES >> 20} MiB:"
                    " this is not what `phasewise db export` wrote"
                )
            self._digest.update(self._last)
            self._last = self._stream.readline(MAX_LINE_BYTES)
            if not self._last:
                return

    def digest_before(self) -> str:
        """SHA-256, in hex, of all bytes before the line that was returned last."""
        return self._digest.hexdigest()


def _check_header(line: bytes, name: str) -> None:
    try:
        header = _parsed(line)
    except (ValueError, RecursionError):
        header = {}
    version = header.get("version")
    if header.get("file") != FILE or type(version) is not int or version < 1:
        raise ExportFileError(f"{name} is not a file that `phasewise db export` wrote")
    if version > VERSION:
        raise ExportFileError(
            f"{name} has version {version!r:.20}, newer than this phasewise reads ({VERSION}): "
            "upgrade phasewise"
        )


def _check_end(content: Mapping[str, Any], rows: int, lines: _Lines, refuse: Refuse) -> None:
    if content != {"rows": rows, "sha256": lines.digest_before()}:
        refuse(lines.number, "the closing line does not fit: lines were lost, added or changed on the way")
    if lines.next() is not None:
        refuse(lines.number, "there is more after the closing line: it is not read")


def _parsed(line: bytes) -> dict[str, Any]:
    """A line's JSON object. Raises ValueError, or RecursionError where it nests too deeply."""
    try:
        content = json.loads(
            line.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_constant
        )
    except RecordError:
        raise
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RecordError("the line is not a JSON object")
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RecordError("a name stands twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise RecordError(f"{name} is not a number of JSON")


def _row(content: dict[str, Any]) -> Row:
    digest = content.pop("sha256", None)
    if digest != _row_digest(content):
        raise RecordError("the row does not fit its checksum")
    if len(content) == 1 and "measurement" in content:
        return _measurement(content["measurement"])
    if len(content) == 1 and "promotion" in content:
        return _promotion(content["promotion"])
    if len(content) == 1 and "storage_duel" in content:
        return _storage_duel(content["storage_duel"])
    if len(content) == 1 and "step_time" in content:
        return _step_time(content["step_time"])
    if len(content) == 1 and "user_timing" in content:
        return _user_timing(content["user_timing"])
    if len(content) == 1 and "user_promotion" in content:
        return _user_promotion(content["user_promotion"])
    raise RecordError("the line holds no row of a kind that this phasewise knows")


def _measurement(value: object) -> Measurement:
    found = _object("a measurement", value, MEASUREMENT_FIELDS)
    sample = Sample(
        _record(Schedule, found["schedule"]),
        _samples(found["samples_ns"]),
        found["estimate_ns"],
        found["numeric_error"],
        found["effort_ns"],
        found["conditions"],
    )
    return Measurement(_record(Problem, found["problem"]), sample, found["kernel_abi"], _origin(found))


def _promotion(value: object) -> Promotion:
    found = _object("a promotion", value, PROMOTION_FIELDS)
    incumbent = found["incumbent"]
    return Promotion(
        _record(Problem, found["problem"]),
        _record(Schedule, found["schedule"]),
        None if incumbent is None else _record(Schedule, incumbent),
        _record(Comparison, found["comparison"]),
        found["kernel_abi"],
        _origin(found),
    )


def _storage_duel(value: object) -> StorageDuel:
    found = _object("a storage duel", value, STORAGE_DUEL_FIELDS)
    return StorageDuel(
        _record(Problem, found["problem"]),
        _record(Schedule, found["schedule"]),
        _record(Schedule, found["dense_schedule"]),
        _record(Comparison, found["comparison"]),
        found["kernel_abi"],
        _origin(found),
    )


def _step_time(value: object) -> StepTime:
    found = _object("a step time", value, STEP_TIME_FIELDS)
    return StepTime(
        found["model_key"],
        found["configuration_key"],
        found["plan_json"],
        found["kernels"],
        ServedStep(**_object("a step", found["step"], [field.name for field in fields(ServedStep)])),
        _samples(found["samples_ns"]),
        found["estimate_ns"],
        found["kernel_abi"],
        _origin(found),
        found["conditions"],
    )


def _user_timing(value: object) -> UserTiming:
    found = _object("a timing of a user's kernel", value, USER_TIMING_FIELDS)
    return UserTiming(
        _user_problem(found),
        _pairs("choice", found["choice"]),
        _samples(found["samples_ns"]),
        found["estimate_ns"],
        _user_origin(found),
        found["conditions"],
    )


def _user_promotion(value: object) -> UserPromotion:
    found = _object("a promotion of a user's kernel", value, USER_PROMOTION_FIELDS)
    return UserPromotion(
        _user_problem(found),
        _pairs("choice", found["choice"]),
        _pairs("incumbent", found["incumbent"]),
        _record(Comparison, found["comparison"]),
        _user_origin(found),
    )


def _user_problem(found: Mapping[str, Any]) -> UserProblem:
    problem = _object("a kernel", found["problem"], ("name", "shape"))
    return UserProblem(problem["name"], found["kernel_abi"], _pairs("shape", problem["shape"]))


def _user_origin(found: Mapping[str, Any]) -> Origin:
    origin = _origin(found)
    if origin.machine.placement_sig != SINGLE_CORE:
        raise RecordError(f"a user's kernel runs on {SINGLE_CORE}, not {origin.machine.placement_sig!r:.40}")
    return origin


def _pairs(name: str, found: Any) -> Choice:
    """Lists as the tuples that a record wants; it checks what is in them."""
    if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
        raise RecordError(f"{name} must be a list of pairs")
    return tuple(tuple(one) for one in found)


def _samples(found: Any) -> Any:
    """A list as the tuple that a record wants; it refuses anything else."""
    return tuple(found) if isinstance(found, list) else found


def _origin(found: Mapping[str, Any]) -> Origin:
    machine = _record(MachineKey, found["machine"])
    return Origin(machine, found["program_version"], found["created_at_ms"], verified=False)


def _record(record: type[T], value: object) -> T:
    names = [field.name for field in fields(cast(Any, record))]
    return record(**_object(f"a {record.__name__.lower()}", value, names))


def _object(what: str, value: object, names: Collection[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"{what} must be a JSON object, not {value!r:.80}")
    if unlike := sorted(set(names) ^ set(value)):
        problem = "has no" if unlike[0] in names else "may not have"
        raise RecordError(f"{what} {problem} {unlike[0]!r:.80}")
    return value

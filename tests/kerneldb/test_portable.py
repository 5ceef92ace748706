"""Files of schedules: what goes out comes in, and nothing else does."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb import portable
from phasewise.kerneldb.errors import ExportFileError
from phasewise.kerneldb.fields import MAX_NS, MAX_SAMPLES
from phasewise.kerneldb.portable import (
    Taken,
    _digest_of,
    canonical,
    export_lines,
    groups_of,
    import_rows,
    read_export,
    rows_of,
)
from phasewise.kerneldb.records import (
    Comparison,
    Measurement,
    PlanRecord,
    PredictorScore,
    Problem,
    Promotion,
    Schedule,
    ServedStep,
    StepTime,
    StorageDuel,
    StoredRow,
)
from phasewise.kerneldb.store import Store, open_store
from tests.support.machines.kerneldb_examples import (
    ELSEWHERE,
    MACHINE,
    MEASUREMENT,
    NOTICED,
    ORIGIN,
    OTHER_MACHINE,
    OTHER_SCHEDULE,
    PLAN,
    PREDICTOR_SCORE,
    PROBLEM,
    PROMOTION,
    SAMPLE,
    SCHEDULE,
    STEP_TIME,
    STORAGE_DUEL,
    USER_PROMOTION,
    USER_TIMING,
    measured,
)
from tests.support.tiers import examples

NOTED = replace(MEASUREMENT, sample=replace(SAMPLE, conditions=NOTICED))
ROWS: list[StoredRow] = [
    NOTED,
    measured(500, schedule=OTHER_SCHEDULE),
    measured(700, origin=ELSEWHERE),
    PROMOTION,
    replace(PROMOTION, schedule=OTHER_SCHEDULE, incumbent=SCHEDULE),
    STORAGE_DUEL,
    PREDICTOR_SCORE,
    replace(PREDICTOR_SCORE, reads="all-minilm-l6-v2", origin=ELSEWHERE),
]


MEASUREMENT_FIELDS = (
    *("problem", "schedule", "samples_ns", "estimate_ns", "numeric_error", "effort_ns", "conditions"),
    *("machine", "kernel_abi", "program_version", "created_at_ms"),
)
"""Fields of a timing in a published file: written out, since files of others have them."""


def export(rows: Iterable[StoredRow]) -> bytes:
    return "".join(export_lines([rows])).encode()


def unverified(row: StoredRow) -> StoredRow:
    return replace(row, origin=replace(row.origin, verified=False))


def read(content: bytes) -> tuple[list[StoredRow], dict[int, str]]:
    """The rows of a file, and the reasons against its other lines."""
    refused: dict[int, str] = {}
    rows = [*read_export(io.BytesIO(content), "f.jsonl", lambda line, why: refused.update({line: why}))]
    return rows, refused


def import_into(store: Store, content: bytes) -> tuple[Taken, dict[int, str]]:
    refused: dict[int, str] = {}
    rows = read_export(io.BytesIO(content), "f.jsonl", lambda line, why: refused.update({line: why}))
    return import_rows(store, rows), refused


def line_of(row: dict[str, Any]) -> bytes:
    """A row with a checksum that fits, as only somebody who means it would write."""
    return (json.dumps({**row, "sha256": _digest_of(canonical(row))}) + "\n").encode()


ROW_OF: dict[str, StoredRow] = {
    "measurement": NOTED,
    "plan": PLAN,
    "step_time": STEP_TIME,
    "predictor_score": PREDICTOR_SCORE,
    "user_timing": USER_TIMING,
    "user_promotion": USER_PROMOTION,
}


def changed(kind: str = "measurement", **changes: Any) -> bytes:
    """A file with one row, some of whose fields are another value; it is cut short."""
    header, line, _ = export([ROW_OF[kind]]).splitlines(keepends=True)
    row = json.loads(line)[kind]
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = row
        for parent in parents:
            place = place[parent]
        place[name] = value
    return header + line_of({kind: row})


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(":memory:") as opened:
        yield opened


def test_what_goes_out_comes_in_unverified() -> None:
    rows, refused = read(export(ROWS))

    assert refused == {}
    assert set(rows) == set(map(unverified, ROWS))


def test_an_export_of_an_import_is_the_same_bytes(store: Store) -> None:
    """Through a database with other rows' order, and twice over."""
    content = export(ROWS)
    assert import_into(store, content) == (Taken(len(ROWS), len(ROWS)), {})
    assert export(rows_of(store)) == content
    assert import_into(store, content) == (Taken(len(ROWS), 0), {})
    assert export(rows_of(store)) == content


@given(st.permutations(ROWS), st.lists(st.booleans(), min_size=len(ROWS), max_size=len(ROWS)))
def test_order_and_trust_change_no_byte(rows: list[StoredRow], trusted: list[bool]) -> None:
    mixed = [row if seen else unverified(row) for row, seen in zip(rows, trusted, strict=True)]

    assert export([*mixed, mixed[0]]) == export(ROWS)


words = st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True)
texts = st.from_regex(r"[!-~]([ -~]{0,253}[!-~])?", fullmatch=True)
problems = st.builds(Problem, words, words, *[st.integers(1, 2**31 - 1)] * 3)
schedules = st.builds(
    lambda mr, panels, times, grid, *rest: Schedule(
        mr, panels, mr * times[0], 16 * panels * times[1], 32 * times[2], *grid, *rest
    ),
    st.integers(1, 64),
    st.integers(1, 16),
    st.tuples(*[st.integers(1, 1000)] * 3),
    st.tuples(*[st.integers(1, 16)] * 3),
    words,
    st.integers(1, 64),
    st.integers(0, 65_536),
    st.sampled_from(["nm", "mn"]),
)
finite = st.floats(allow_nan=False, allow_infinity=False)
samples = st.builds(
    lambda schedule, ns, error, noticed: replace(
        SAMPLE,
        schedule=schedule,
        samples_ns=tuple(ns),
        estimate_ns=ns[0],
        numeric_error=error,
        conditions=noticed,
    ),
    schedules,
    st.lists(st.integers(1, MAX_NS), min_size=1, max_size=5),
    st.none() | st.floats(0, 1e300),
    st.dictionaries(words, finite, max_size=16),
)
gains = st.tuples(*[st.floats(0, 1e6)] * 3).map(sorted)
comparisons = st.builds(
    lambda gains, confidence, pairs: Comparison(gains[1], gains[0], gains[2], confidence, pairs),
    gains,
    st.floats(0, 1),
    st.integers(1, 1000),
)
steps = st.builds(ServedStep, words, st.integers(1, 2**24), st.integers(1, 2**16), st.integers(0, 2**24))
step_times = st.builds(
    lambda key, step, ns, noticed: replace(
        STEP_TIME,
        configuration_key=key,
        step=step,
        samples_ns=tuple(ns),
        estimate_ns=ns[0],
        conditions=noticed,
    ),
    texts,
    steps,
    st.lists(st.integers(1, MAX_NS), min_size=1, max_size=5),
    st.dictionaries(words, finite, max_size=16),
)
keys = st.text(
    st.characters(exclude_categories=["C", "Z"], exclude_characters="\x7f"), min_size=1, max_size=255
)
scores = st.builds(
    lambda numbers, hold, *rest: PredictorScore(*rest[:4], *numbers, hold, ORIGIN, rest[4]),
    st.tuples(*[st.integers(1, 2**31 - 1)] * 2),
    st.floats(0, 1),
    keys,
    keys,
    texts,
    words,
    st.dictionaries(words, finite, max_size=16),
)
any_row: st.SearchStrategy[StoredRow] = (
    st.builds(Measurement, problems, samples, texts, st.just(ORIGIN))
    | st.builds(Promotion, problems, schedules, st.none() | schedules, comparisons, texts, st.just(ORIGIN))
    | st.builds(StorageDuel, problems, schedules, schedules, comparisons, texts, st.just(ORIGIN))
    | step_times
    | scores
)


@examples(50)
@given(st.lists(any_row, max_size=5))
def test_any_row_that_a_database_may_hold_survives_the_trip(rows: list[StoredRow]) -> None:
    with open_store(":memory:") as store:
        content = export(rows)
        taken, refused = import_into(store, content)

        assert (taken.added, refused) == (len(set(rows)), {})
        assert export(rows_of(store, also=(StepTime, PredictorScore))) == content


def test_a_file_names_no_host_no_plan_and_no_model(store: Store) -> None:
    """Rows that name models go out only where they are asked for."""
    store.add([PLAN, NOTED, STEP_TIME, PREDICTOR_SCORE])
    content = export(rows_of(store, also=())).decode()

    assert set(json.loads(content.splitlines()[1])["measurement"]) == set(MEASUREMENT_FIELDS)
    assert "verified" not in content
    assert "tinyllama" not in content


@pytest.mark.parametrize(
    "asked", [[STEP_TIME], [PREDICTOR_SCORE], [USER_TIMING, USER_PROMOTION]], ids=["steps", "scores", "users"]
)
def test_rows_that_name_what_is_ones_own_go_out_where_they_are_asked_for(
    store: Store, asked: list[StoredRow]
) -> None:
    """And come in unverified, once."""
    store.add(asked)
    assert [*rows_of(store, also=())] == []
    kinds = tuple(map(type, asked))
    content = export(rows_of(store, also=kinds))
    rows, refused = read(content)

    assert (set(rows), refused) == (set(map(unverified, asked)), {})
    assert export(rows) == content
    with open_store(":memory:") as other:
        assert import_into(other, content) == (Taken(len(asked), len(asked)), {})
        assert import_into(other, content) == (Taken(len(asked), 0), {})
        assert other.rows(kinds[0], verified=True) == []
        assert export(rows_of(other, also=kinds)) == content


HOSTILE: dict[str, list[tuple[dict[str, Any], str]]] = {
    "measurement": [
        ({"schedule__block_m": 10**9}, "block_m must be a whole number"),
        ({"schedule__mr": 10**400}, "mr must be"),
        ({"schedule__mr": 8.0}, "mr must be"),
        ({"schedule__mr": True}, "mr must be"),
        ({"schedule__mr": None}, "mr must be"),
        ({"schedule__mr": "8"}, "mr must be"),
        ({"schedule__compute_path": "'; DROP TABLE measurement; --"}, "compute_path must be"),
        ({"schedule__extra": 1}, "a schedule may not have 'extra'"),
        ({"schedule": [1, 2]}, "a schedule must be a JSON object"),
        ({"schedule__threads_m": 4096, "schedule__threads_n": 4096}, "the thread grid must be"),
        ({"problem__n": -1}, "n must be"),
        ({"problem__family": "gemm\x1b[2J"}, "family must be"),
        ({"samples_ns": []}, "samples_ns must be"),
        ({"samples_ns": {"0": 1}}, "samples_ns must be"),
        ({"samples_ns": [1] * (MAX_SAMPLES + 1)}, "samples_ns must be"),
        ({"samples_ns": [2**63]}, "samples_ns must be"),
        ({"conditions": {"hostname_is_mine": "x"}}, "conditions must be"),
        ({"conditions": [1]}, "conditions must be"),
        ({"numeric_error": -1.0}, "numeric_error must be"),
        ({"machine__core_sig": "a\nb"}, "core_sig must be"),
        ({"kernel_abi": ""}, "kernel_abi must be"),
        ({"created_at_ms": 10**18}, "created_at_ms must be"),
        ({"verified": True}, "a measurement may not have 'verified'"),
    ],
    "step_time": [
        ({"step": [1]}, "a step must be a JSON object"),
        ({"step": {"phase": "decode", "tokens": 1, "sequences": 1}}, "a step has no 'context'"),
        ({"step": {"phase": "decode", "tokens": 0, "sequences": 1, "context": 0}}, "tokens must be"),
        ({"step": {"phase": "decode", "tokens": 1, "sequences": 1, "context": 2**40}}, "context must be"),
        ({"model_key": "a\nb"}, "model_key must be"),
        ({"plan_json": "x" * 200_000}, "plan_json must be"),
        ({"plan_json": {"ranks": []}}, "plan_json must be"),
        ({"kernels": "'; --"}, "kernels must be"),
        ({"configuration_key": None}, "configuration_key must be"),
        ({"samples_ns": [0]}, "a sample in samples_ns must be"),
        ({"estimate_ns": 1.5}, "estimate_ns must be"),
        ({"conditions": {"load": "high"}}, "load in conditions must be"),
        ({"verified": True}, "a step time may not have 'verified'"),
    ],
    "predictor_score": [
        ({"model_name": "a\nb"}, "model_name must be"),
        ({"model_name": "a\ud800"}, "model_name must be"),
        ({"reads": ""}, "reads must be"),
        ({"answers_key": "ä"}, "answers_key must be"),
        ({"judged_by": "'; --"}, "judged_by must be"),
        ({"learnt_answers": 0}, "learnt_answers must be"),
        ({"judged_answers": 2**31}, "judged_answers must be"),
        ({"hold": 1.5}, "hold must be"),
        ({"hold": 1}, "hold must be"),
        ({"figures": {"accuracy": "high"}}, "accuracy in figures must be"),
        ({"figures": {f"f{number}": 0.5 for number in range(65)}}, "figures must be"),
        ({"prompt": "hello"}, "a predictor score may not have 'prompt'"),
        ({"kernel_abi": "gemm-5f1c9e"}, "a predictor score may not have 'kernel_abi'"),
    ],
    "user_timing": [
        ({"choice": 3}, "choice must be a list of pairs"),
        ({"choice": [["UNROLL", "2"]]}, "UNROLL"),
        ({"problem": {"name": "a\nb", "shape": []}}, "name must be"),
        ({"samples_ns": []}, "samples"),
        ({"machine": {"core_sig": "x", "placement_sig": "2 cores"}}, "runs on 1 core"),
    ],
    "user_promotion": [
        ({"incumbent": [["UNROLL"]]}, "names"),
        ({"comparison": {}}, "has no"),
    ],
    "plan": [
        ({"model_key": "a\ud800"}, "model_key must be"),
        ({"plan_json": '"\udfff"'}, "plan_json must be"),
        ({"plan_json": "\x00"}, "plan_json must be"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "changes", "reason"), [(kind, *row) for kind, rows in HOSTILE.items() for row in rows]
)
def test_a_hostile_value_is_refused_by_the_name_of_its_field(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    """In one line, with a checksum that fits, as a writer can compute it. The next row is taken."""
    good = export([ROW_OF[kind]]).splitlines(keepends=True)[1]
    rows, refused = read(changed(kind, **changes) + good)

    assert rows == [unverified(ROW_OF[kind])]
    assert reason in refused[2]
    assert len(refused[2]) <= portable.MAX_REASON_CHARS
    assert refused[2].isprintable()


def test_plans_go_out_as_they_are_shared_and_come_in_unverified(store: Store) -> None:
    """A plan that cannot be named elsewhere stays at home."""
    store.add([PLAN, replace(PLAN, phase="prefill")])

    def shared(plan: PlanRecord) -> PlanRecord | None:
        return replace(plan, plan_json="{}") if plan.phase == "decode" else None

    content = "".join(export_lines(groups_of(store, as_shared=shared))).encode()
    rows, refused = read(content)

    expected = unverified(replace(PLAN, plan_json="{}"))
    assert (rows, refused) == ([expected], {})
    with open_store(":memory:") as other:
        assert import_into(other, content) == (Taken(1, 1), {})
        assert import_into(other, content) == (Taken(1, 0), {})
        assert other.rows(PlanRecord) == [expected]
        assert other.newest_plan(MACHINE, PLAN.model_key, "decode") == expected
        other.add([PLAN, expected])
        assert other.newest_plan(MACHINE, PLAN.model_key, "decode") == PLAN


alike_row: st.SearchStrategy[StoredRow] = st.builds(
    lambda ns, later_ms, origin: measured(
        ns, origin=replace(origin, created_at_ms=origin.created_at_ms + later_ms)
    ),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([ORIGIN, ELSEWHERE]),
) | st.sampled_from([*ROWS, PLAN, replace(PLAN, phase="embed"), PREDICTOR_SCORE, STEP_TIME])
"""Rows that draws often have in common, or that differ in one of their fields."""
merged_rows = st.lists(any_row, max_size=4) | st.lists(alike_row, max_size=6)


@examples(40)
@given(merged_rows, merged_rows, merged_rows)
def test_merging_in_any_order_and_twice_gives_the_same_bytes(
    a: list[StoredRow], b: list[StoredRow], c: list[StoredRow]
) -> None:
    def merged(*parts: list[StoredRow]) -> str:
        with open_store(":memory:") as store:
            for rows in parts:
                import_rows(store, rows)
            return "".join(export_lines(groups_of(store)))

    assert merged(a, b) == merged(b, a) == merged(a, b, a)
    assert merged([*a, *b], c) == merged(a, [*b, *c])


@examples(30)
@given(st.lists(any_row, max_size=8))
def test_groups_stream_the_bytes_that_sorting_all_rows_gives(rows: list[StoredRow]) -> None:
    with open_store(":memory:") as store:
        import_rows(store, rows)

        assert "".join(export_lines(groups_of(store))).encode() == export(rows)


def test_machines_can_be_chosen(store: Store) -> None:
    store.add_missing(ROWS)
    chosen = [*rows_of(store, lambda machine: machine == OTHER_MACHINE)]

    assert chosen == [row for row in ROWS if row.origin.machine == OTHER_MACHINE]


def test_merging_takes_what_is_missing_from_another_database(store: Store) -> None:
    store.add([NOTED])
    with open_store(":memory:") as other:
        other.add_missing(ROWS)
        assert import_rows(store, rows_of(other)) == Taken(len(ROWS), len(ROWS) - 1)
        assert export(rows_of(store)) == export(rows_of(other))

    assert store.measurements(PROBLEM, MACHINE, MEASUREMENT.kernel_abi)[0].origin.verified
    assert store.promoted_measurements() == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"7", "not a JSON object"),
        (b"[" * 100_000, "recursion"),
        (b'{"a":' * 100_000, "recursion"),
        (b'{"measurement":{},"measurement":{}}', "has the same key twice"),
        (b'{"measurement":{"n":NaN}}', "NaN is no number"),
        (b'{"measurement":{"n":-Infinity}}', "Infinity is no number"),
        (b'{"measurement":{"n":' + b"9" * 5000 + b"}}", "not JSON"),
        (b'{"measurement":{},"sha256":"0000000000000000"}', "does not fit its checksum"),
        (b'{"measurement":{}}', "does not fit its checksum"),
        (line_of({"measurement": {}, "promotion": {}})[:-1], "no row of a kind"),
        (line_of({"service_plan": {}})[:-1], "no row of a kind"),
        (line_of({"measurement": []})[:-1], "must be a JSON object"),
        (line_of({"promotion": {}})[:-1], "a promotion has no"),
        (b'{"measurement":{"n":1e999}}', "does not fit its checksum"),
        (b'{"measurement":{"n":1e999},"sha256":"0000000000000000"}', "Out of range"),
    ],
)
def test_a_line_that_is_no_row_is_refused_and_the_next_one_taken(line: bytes, reason: str) -> None:
    header, row, _ = export([NOTED]).splitlines(keepends=True)
    rows, refused = read(header + line + b"\n" + row)

    assert rows == [unverified(NOTED)]
    assert reason in refused[2]
    assert "cut short" in refused[4]


def test_a_line_without_end_costs_no_memory_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "MAX_LINE_BYTES", 2000)
    header, row, _ = export([NOTED]).splitlines(keepends=True)
    rows, refused = read(header + b"x" * 100_000 + b"\n" + row)

    assert rows == [unverified(NOTED)]
    assert refused[2] == "the line is longer than 2000 bytes"


def test_a_line_that_really_never_ends_is_given_up() -> None:
    with open("/dev/zero", "rb") as endless, pytest.raises(ExportFileError, match="line 1 has more than"):
        list(read_export(endless, "zeros", lambda _number, _why: None))


def test_more_rows_than_a_file_may_hold_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    content = export(ROWS)
    monkeypatch.setattr(portable, "MAX_ROWS", 3)
    rows, refused = read(content)

    assert len(rows) == 3
    assert "more than 3 rows" in refused[5]
    with pytest.raises(ExportFileError, match="rows are too many"):
        export(ROWS)


@given(st.integers(0, 10_000))
def test_a_truncated_file_gives_its_whole_rows_and_says_so(keep: int) -> None:
    content = export(ROWS)
    header = content.splitlines(keepends=True)[0]
    content = content[: len(header) + keep % (len(content) - len(header))]
    rows, refused = read(content)

    whole = content.count(b"\n") - 1
    assert len(rows) in (whole, whole + 1)
    assert set(rows) <= set(map(unverified, ROWS))
    assert refused


@pytest.mark.parametrize("lost", [1, 3, 5])
def test_a_row_that_was_taken_out_is_noticed(lost: int) -> None:
    lines = export(ROWS).splitlines(keepends=True)
    rows, refused = read(b"".join(line for index, line in enumerate(lines) if index != lost))

    assert len(rows) == len(ROWS) - 1
    assert [*refused] == [len(ROWS) + 1]
    assert "the closing line does not fit" in refused[len(ROWS) + 1]


def test_what_follows_the_closing_line_is_not_read() -> None:
    rows, refused = read(export([NOTED]) + export(ROWS))

    assert rows == [unverified(NOTED)]
    assert "more after the closing line" in refused[4]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"my notes",
        b"{}\n",
        b"SQLite format 3\0",
        b'{"file":"phasewise schedules","version":true}',
        b"[" * 10**6,
    ],
)
def test_another_file_is_refused_as_a_whole(store: Store, content: bytes) -> None:
    with pytest.raises(ExportFileError, match=r"f\.jsonl is not a file that `phasewise db export` wrote"):
        import_into(store, content)

    assert set(store.stats().rows.values()) == {0}


def test_a_file_of_a_newer_version_is_refused_as_a_whole() -> None:
    with pytest.raises(ExportFileError, match="version 2, newer than this phasewise reads"):
        read(b'{"file":"phasewise schedules","version":2}\n')


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=8))
def test_flipped_bits_never_change_a_row(flips: list[tuple[int, int]]) -> None:
    """A row comes through as it was, or is refused with a short printable reason."""
    content = bytearray(export(ROWS))
    for place, mask in flips:
        content[place % len(content)] ^= mask
    try:
        rows, refused = read(bytes(content))
    except ExportFileError:
        return

    assert set(rows) <= set(map(unverified, ROWS))
    assert refused or bytes(content) == export(ROWS)
    assert all(len(why) <= portable.MAX_REASON_CHARS and why.isprintable() for why in refused.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=10,
)
FIELDS = [
    *MEASUREMENT_FIELDS,
    *(f"schedule__{field.name}" for field in fields(Schedule)),
    *(f"problem__{field.name}" for field in fields(Problem)),
]


@examples(200)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, min_size=1, max_size=2))
def test_any_json_in_any_field_is_a_valid_row_or_refused(changes: dict[str, Any]) -> None:
    """Nothing else happens; what is let in is a record with its bounds."""
    ordered = dict(sorted(changes.items(), key=lambda item: "__" not in item[0]))
    rows, refused = read(changed(**ordered))

    assert len(rows) + len(refused) == 2
    assert all(isinstance(row, Measurement) for row in rows)


def test_a_hostile_file_changes_nothing_that_is_there(store: Store) -> None:
    store.add([NOTED, PROMOTION])
    before = export(rows_of(store))
    taken, refused = import_into(store, changed(schedule__block_k=10**9) + changed()[:100])

    assert taken.added == 0
    assert len(refused) == 4
    assert export(rows_of(store)) == before
    assert store.promoted_measurements() == [NOTED]

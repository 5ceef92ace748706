"""Records let in only what is within their bounds; `--db` names a place whose password is never shown."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.connect import engine_for
from phasewise.kerneldb.errors import KernelDbError, RecordError
from phasewise.kerneldb.location import MEMORY_URL, Location, locate
from phasewise.kerneldb.records import GROUP, MachineKey, Schedule
from tests.support.machines.kerneldb_examples import (
    MEASUREMENT,
    ORIGIN,
    PLAN,
    PROBLEM,
    PROMOTION,
    SAMPLE,
    SCHEDULE,
    STEP_TIME,
)

NOT_A_COUNT = [0, -1, 2**31, 10**30, 1.0, True, "8", None, math.nan, b"8"]
FIELDS = [field.name for field in fields(Schedule)]


@pytest.mark.parametrize("value", NOT_A_COUNT)
@pytest.mark.parametrize("name", ["n", "k", "m"])
def test_a_problem_has_positive_whole_dimensions(name: str, value: Any) -> None:
    """The message names the field, and is a database error that the command line knows how to print."""
    with pytest.raises(RecordError, match=f"{name} must be") as caught:
        replace(PROBLEM, **{name: value})

    assert isinstance(caught.value, KernelDbError)


@pytest.mark.parametrize("value", NOT_A_COUNT)
@pytest.mark.parametrize("name", [name for name in FIELDS if name != "prefetch_bytes"])
def test_a_schedule_is_bounded_numbers_and_a_word(name: str, value: Any) -> None:
    """A schedule from the database is only numbers, each checked before any use."""
    with pytest.raises(RecordError):
        replace(SCHEDULE, **{name: value})


@pytest.mark.parametrize("value", [*NOT_A_COUNT[1:], 65_537])
def test_a_prefetch_distance_may_be_none_and_is_bounded(value: Any) -> None:
    assert replace(SCHEDULE, prefetch_bytes=0).prefetch_bytes == 0
    with pytest.raises(RecordError, match="prefetch_bytes"):
        replace(SCHEDULE, prefetch_bytes=value)


@given(
    numbers=st.lists(st.integers(-(2**40), 2**40), min_size=10, max_size=10),
    path=st.text(max_size=40),
    order=st.sampled_from(["nm", "mn", "km", ""]),
)
def test_a_schedule_that_is_let_in_keeps_its_bounds(numbers: list[int], path: str, order: str) -> None:
    """Whatever the numbers: refused, or within the bounds that kernels rely on."""
    try:
        schedule = Schedule(*cast(Any, (*numbers[:8], path, *numbers[8:], order)))
    except RecordError:
        return

    assert schedule.threads <= 4096
    assert schedule.block_m % schedule.mr == 0
    assert schedule.block_n % schedule.nr == 0
    assert schedule.block_k % GROUP == 0
    assert schedule.k_parts <= 64
    assert schedule.loop_order in ("nm", "mn")


@given(
    mr=st.integers(1, 64),
    panels=st.integers(1, 16),
    times=st.tuples(*[st.integers(1, 1000)] * 3),
    grid=st.tuples(*[st.integers(1, 16)] * 3),
)
def test_every_whole_multiple_of_a_micro_kernel_is_let_in(
    mr: int, panels: int, times: tuple[int, int, int], grid: tuple[int, int, int]
) -> None:
    """The bounds do not stand in the way of the search."""
    block_m, block_n, block_k = mr * times[0], 16 * panels * times[1], GROUP * times[2]
    schedule = Schedule(mr, panels, block_m, block_n, block_k, *grid, "fma", 2, 64, "mn")

    assert schedule.nr == 16 * panels
    assert schedule.threads == math.prod(grid)


@pytest.mark.parametrize("name", ["mr", "panels", "block_m", "block_n", "block_k"])
def test_a_block_that_cuts_a_micro_kernel_is_refused(name: str) -> None:
    """Odd values of any one size break a divisibility, except where nothing divides by it."""
    with pytest.raises(RecordError, match="multiple of"):
        replace(SCHEDULE, **cast(Any, {name: {"mr": 7, "panels": 3}.get(name, 33)}))


NO_SAMPLES = [(), [1, 2], (0,), (1, -5), (1.5,), (True,), None, (2**63,), (1,) * 100_001]
NO_CONDITIONS: list[Any] = [
    None,
    [("mhz", 1.0)],
    {"mhz": 1},
    {"mhz": math.nan},
    {"host name": 1.0},
    {"mhz": "fast"},
]
NO_MODEL_KEYS = ["", "a\nb", "a\x1b[31mb", "a\x9bb", "x" * 256, None]
NO_FIGURES: list[Any] = [{"tpot_ms": math.nan}, {"tpot_ms": "fast"}, {"not a word": 1.0}, {7: 1.0}, None]
REFUSED: list[tuple[Any, str, list[Any]]] = [
    (SAMPLE, "samples_ns", NO_SAMPLES),
    (SAMPLE, "conditions", [*NO_CONDITIONS, {f"c{number}": 1.0 for number in range(17)}]),
    (SAMPLE, "numeric_error", [math.nan, math.inf, -0.5, "0", 1, True]),
    *((PROMOTION.comparison, name, [math.nan, -1.0, 2e6, 1]) for name in ("gain", "gain_low", "gain_high")),
    (PROMOTION.comparison, "gain_low", [1.5]),
    (PROMOTION.comparison, "gain_high", [1.0]),
    (PROMOTION.comparison, "confidence", [1.5]),
    (PROMOTION.comparison, "pairs", [0]),
    (PLAN, "model_key", NO_MODEL_KEYS),
    (PLAN, "phase", ["DROP TABLE"]),
    (PLAN, "plan_json", ["", "x" * 100_001, b"{}"]),
    (PLAN, "objectives", NO_FIGURES),
    (STEP_TIME.step, "tokens", [0, 2**24 + 1, 1.0]),
    (STEP_TIME.step, "sequences", [0, True]),
    (STEP_TIME.step, "context", [-1, None]),
    (STEP_TIME.step, "phase", ["Decode"]),
    (STEP_TIME, "model_key", [""]),
    (STEP_TIME, "configuration_key", ["a\n"]),
    (STEP_TIME, "plan_json", [""]),
    (STEP_TIME, "kernels", ["very tuned"]),
    (STEP_TIME, "samples_ns", [(), [1]]),
    (STEP_TIME, "estimate_ns", [0]),
    (STEP_TIME, "kernel_abi", ["\x1b"]),
    (STEP_TIME, "conditions", [{"load": math.nan}]),
]


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [(record, name, value) for record, name, values in REFUSED for value in values],
)
def test_what_no_tuner_writes_is_refused_by_the_name_of_its_field(record: Any, name: str, value: Any) -> None:
    with pytest.raises(RecordError, match=name):
        replace(record, **{name: value})


@pytest.mark.parametrize("text", ["", " ", "a\nb", "a ", "é", "x" * 256, None, 7, "a\0b"])
def test_signatures_and_versions_are_one_printable_line(text: Any) -> None:
    with pytest.raises(RecordError):
        MachineKey(text, "p")
    with pytest.raises(RecordError):
        replace(MEASUREMENT, kernel_abi=text)
    with pytest.raises(RecordError):
        replace(ORIGIN, program_version=text)


def test_a_model_key_may_hold_any_script() -> None:
    """Model names are people's, unlike signatures."""
    key = "模型/Llama 3 – instruct@int4"

    assert replace(PLAN, model_key=key).model_key == key


@pytest.mark.parametrize("value", ["x" * 10_000_000, 10**4000, ["deep"] * 1_000_000])
def test_a_huge_value_gives_a_short_message(value: Any) -> None:
    """The message quotes no more than a line of what it refuses."""
    with pytest.raises(RecordError) as caught:
        replace(PROBLEM, n=value)

    assert len(str(caught.value)) < 250


def test_the_default_is_in_the_xdg_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    assert locate(None) == Location(tmp_path / "phasewise" / "phasewise.db", None, is_default=True)
    assert locate(None).is_absent


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tuned.db", "{cwd}/tuned.db"),
        ("/data/a b%20?.db", "/data/a b%20?.db"),
        ("~/x.db", "{home}/x.db"),
        ("sqlite:///tuned.db", "{cwd}/tuned.db"),
        ("sqlite:////data/x.db", "/data/x.db"),
        ("sqlite+pysqlite:////data/x.db", "/data/x.db"),
    ],
)
def test_a_path_or_a_sqlite_url_is_a_file(text: str, path: str) -> None:
    expected = Path(path.format(cwd=Path.cwd(), home=Path.home()))

    assert locate(text) == Location(expected, None)
    assert locate(text).name == str(expected)


@pytest.mark.parametrize(
    "text", [":memory:", "sqlite://", "sqlite:///:memory:", "sqlite:///", "sqlite+pysqlite://"]
)
def test_memory_has_several_names(text: str) -> None:
    assert locate(text) == Location(None, MEMORY_URL)
    assert not locate(text).is_absent


@pytest.mark.parametrize(
    "text", ["", "a\0b", "sqlite:odd", "sqlite:///x?mode=ro", "sqlite+aiosqlite:///x", "~no-such-user/x"]
)
def test_what_names_no_database_is_refused(text: str) -> None:
    with pytest.raises(KernelDbError):
        locate(text)


def test_a_kind_of_database_that_is_not_known_is_named() -> None:
    with pytest.raises(KernelDbError, match=r"unknown kind.*nosuchkind"):
        engine_for(locate("nosuchkind://host/db"), read_only=False)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://me:secret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql+psycopg://me:se:cr@et@host/db", "postgresql+psycopg://me:***@host/db"),
        ("postgresql://me:pa/ss@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:pa?ss#w@host/db", "postgresql://me:***@host/db"),
        ("postgresql://:secret@host/db", "postgresql://:***@host/db"),
        ("postgresql://host/db?user=me&password=secret", "postgresql://host/db?user=me&password=***"),
        ("postgresql://host/db?PassWord=s%20t&x=1", "postgresql://host/db?PassWord=***&x=1"),
        ("postgresql://host/db?sslpassword=s&sslkey=k", "postgresql://host/db?sslpassword=***&sslkey=***"),
        ("mysql://host/db?passwd=secret", "mysql://host/db?passwd=***"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql:///db?host=/run", "postgresql:///db?host=/run"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, name: str) -> None:
    assert locate(url).url == url
    assert locate(url).name == name


@pytest.mark.parametrize(
    "url", ["sqlite+pysqlcipher://:secret@/file.db", "sqlite:///file.db?password=secret"]
)
def test_a_refused_url_is_told_without_its_password(url: str) -> None:
    with pytest.raises(KernelDbError) as refusal:
        locate(url)

    assert "secret" not in str(refusal.value)


def test_finding_the_database_does_not_load_sqlalchemy() -> None:
    """A first `generate`, without any database, starts without paying for it."""
    code = (
        "import sys, phasewise.tuner.plans, phasewise.kerneldb.location; "
        "print([name for name in ('sqlalchemy', 'alembic') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert loaded.strip() == "[]"

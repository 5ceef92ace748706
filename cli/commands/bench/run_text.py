"""The rows of `phasewise bench run` as text, under llama-bench's field names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from phasewise._words import counted, number, percent
from phasewise.cli import tables
from phasewise.cli.present import say
from phasewise.cli.tables import RowTable, show
from phasewise.serving.engine.throughput import Workload
from phasewise.workflows.bench.model_speed import ModelRow

SCALARS = tables.scalar_names(ModelRow)
SQL_TYPES = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL"}


def show_rows(form: str, rows: Sequence[ModelRow], *, wide: bool) -> None:
    """The rows in the form that was asked for."""
    if form == "md":
        show(*table_of(rows, wide=wide))
    else:
        say({"json": tables.as_json, "jsonl": as_jsonl, "csv": as_csv, "sql": as_sql}[form](rows), end="")


def as_jsonl(rows: Sequence[ModelRow]) -> str:
    return "".join(json.dumps(tables.json_fields(row)) + "\n" for row in rows)


def as_csv(rows: Sequence[ModelRow]) -> str:
    """A header, then every value in double quotes; truth values as 0 and 1."""
    return tables.as_csv(SCALARS, map(_scalars, rows), quoted=True)


def as_sql(rows: Sequence[ModelRow]) -> str:
    """A CREATE TABLE and one INSERT a row, for `sqlite3 results.db`."""
    types = {f.name: SQL_TYPES[str(f.type)] for f in fields(ModelRow) if f.name in SCALARS}
    columns = ",\n".join(f"  {name} {types[name]}" for name in SCALARS)
    inserts = [
        f"INSERT INTO llama_bench ({', '.join(SCALARS)}) VALUES ({', '.join(map(_sql_text, _scalars(row)))});"
        for row in rows
    ]
    return "\n".join([f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);", *inserts]) + "\n"


NARROW = ("model", "threads", "batch", "KV", "test", "t/s", "peak", "bandwidth")
MAX_MODEL_CHARS = 28
VARYING = ("batch", "KV")
"""Columns that are told where their values differ, as llama-bench does."""


def table_of(rows: Sequence[ModelRow], *, wide: bool = False) -> Iterator[str | RowTable]:
    """llama-bench's table and line of the build, with the shares of the machine's limits behind its columns.

    wide: false keeps a terminal's table within 80 columns; a pipe gets all.
    """
    is_narrow = not wide and sys.stdout.isatty()
    cells = [_cells(row, is_narrow=is_narrow) for row in rows]
    same = {name for name in VARYING if len({row[name] for row in cells}) < 2}
    if is_narrow and len({row["threads"] for row in cells}) < 2:
        same.add("threads")
    table = RowTable(
        [{name: cell for name, cell in row.items() if name not in same} for row in cells],
        ("model", "backend"),
        form="github",
    )
    yield table.narrow(NARROW) if is_narrow else table
    yield ""
    yield from dict.fromkeys(_left_out(row) for row in cells) if is_narrow else ()
    yield from tables.low_limit_lines(
        share for row in rows for share in (row.peak_fraction, row.bandwidth_fraction)
    )
    yield from map(_kv_line, filter(lambda row: row.kv_bytes_per_s, rows))
    yield from map(_counters_line, filter(lambda row: row.instructions_per_cycle, rows))
    yield from dict.fromkeys(f"build: {row.build_commit} ({row.isa})" for row in rows)


def _kv_line(row: ModelRow) -> str:
    """By what a test takes longer behind its depth; more than memory gives where a cache holds some of it."""
    rates = (number(rate / 1e9, 3) for rate in (row.kv_bytes_per_s, row.read_limit_bytes_per_s))
    return "{}: KV ({}) is read at {} GB/s; memory: {} GB/s".format(_test_name(row), row.type_k, *rates)


def _counters_line(row: ModelRow) -> str:
    """Instructions a cycle, and per thousand of them (PKI) misses; what this core does not count is left
    out.
    """
    misses = [
        f"{name} {number(pki, 3)}"
        for name, pki in (("LLC", row.llc_misses_pki), ("dTLB", row.dtlb_misses_pki))
        if pki
    ]
    stalled = f", {percent(row.stalled_share)} stalled" if row.stalled_share else ""
    told = f"; misses PKI: {', '.join(misses)}" if misses else ""
    return f"{_test_name(row)}: IPC {number(row.instructions_per_cycle, 3)}{stalled}{told}"


def _left_out(row: Mapping[str, str]) -> str:
    """The columns that a narrow table has no room for."""
    threads = counted(int(row["threads"]), "thread")
    return f"{row['model']}: {row['size']}, {row['params']} params; {row['backend']}, {threads}"


def _cells(row: ModelRow, *, is_narrow: bool) -> dict[str, str]:
    is_decode = row.n_gen and not row.n_prompt
    return {
        "model": row.model_type[-MAX_MODEL_CHARS:] if is_narrow else row.model_type,
        "size": f"{row.model_size / 2**20:.2f} MiB",
        "params": f"{row.model_n_params / 1e6:.2f} M",
        "backend": row.backends,
        "threads": str(row.n_threads),
        "batch": str(row.n_batch),
        "KV": row.type_k,
        "test": _test_name(row),
        "t/s": f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
        "peak": tables.limit_cell(row.peak_fraction),
        "bandwidth": tables.limit_cell(row.bandwidth_fraction) if is_decode else "",
        **({} if row.joules_per_token is None else _energy(row, row.joules_per_token)),
        **({} if is_narrow else {"lines across nodes": number(row.lines_across_nodes)}),
    }


def _energy(row: ModelRow, joules_per_token: float) -> dict[str, str]:
    """The watts are what `power_w` of a machine for `provision` asks for."""
    watts = joules_per_token * row.avg_ts
    cap = {"cap W": number(row.power_cap_w, 4)} if row.power_cap_w else {}
    return {"J/token": number(joules_per_token, 3), "W": number(watts, 3), **cap}


def _scalars(row: ModelRow) -> list[str | int | float]:
    values = (getattr(row, name) for name in SCALARS)
    return [int(value) if isinstance(value, bool) else value for value in values]


def _sql_text(value: str | int | float) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def _test_name(row: ModelRow) -> str:
    return Workload(row.n_prompt, row.n_gen, row.n_sequences, row.n_depth).name

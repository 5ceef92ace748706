"""The rows of `phasewise bench run` as text, under llama-bench's field names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields

from phasewise._words import percent
from phasewise.cli.render import row_forms
from phasewise.workflows.bench.model import ModelRow

SCALARS = row_forms.scalar_names(ModelRow)
SQL_TYPES = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL"}


def as_json(rows: Sequence[ModelRow]) -> str:
    """A list of objects, as llama-bench prints, each with the version of our schema."""
    return row_forms.as_json(rows)


def as_jsonl(rows: Sequence[ModelRow]) -> str:
    return "".join(json.dumps(row_forms.json_fields(row)) + "\n" for row in rows)


def as_csv(rows: Sequence[ModelRow]) -> str:
    """A header, then every value in double quotes; truth values as 0 and 1."""
    return row_forms.as_csv(SCALARS, map(_scalars, rows), quoted=True)


def as_sql(rows: Sequence[ModelRow]) -> str:
    """A CREATE TABLE and one INSERT a row, for `sqlite3 results.db`."""
    types = {f.name: SQL_TYPES[str(f.type)] for f in fields(ModelRow) if f.name in SCALARS}
    columns = ",\n".join(f"  {name} {types[name]}" for name in SCALARS)
    inserts = [
        f"INSERT INTO llama_bench ({', '.join(SCALARS)}) VALUES ({', '.join(map(_sql_text, _scalars(row)))});"
        for row in rows
    ]
    return "\n".join([f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);", *inserts]) + "\n"


CORE = ("model", "test", "t/s", "peak", "bandwidth")
MAX_MODEL_CHARS = 28


def as_md(rows: Sequence[ModelRow], *, wide: bool = False) -> str:
    """llama-bench's table, with the shares of the machine's limits in place of its backend column."""
    table = [
        {
            "model": row.model_type if wide else row.model_type[-MAX_MODEL_CHARS:],
            "size": f"{row.model_size / 2**20:.0f} MiB",
            "threads": str(row.n_threads),
            "test": _test_name(row),
            "t/s": f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
            "peak": percent(row.peak_fraction),
            "bandwidth": percent(row.bandwidth_fraction) if row.n_gen else "",
        }
        for row in rows
    ]
    return row_forms.as_md(table, left=("model",), core=() if wide else CORE)


FORMATS: dict[str, Callable[..., str]] = {
    "md": as_md,
    "csv": as_csv,
    "json": as_json,
    "jsonl": as_jsonl,
    "sql": as_sql,
}


def _scalars(row: ModelRow) -> list[str | int | float]:
    values = (getattr(row, name) for name in SCALARS)
    return [int(value) if isinstance(value, bool) else value for value in values]


def _sql_text(value: str | int | float) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def _test_name(row: ModelRow) -> str:
    test = f"pp{row.n_prompt}" if row.n_prompt else f"tg{row.n_gen}"
    return test if row.n_sequences == 1 else f"{test} x{row.n_sequences}"

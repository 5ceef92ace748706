"""The forms in which `phasewise bench` prints its rows, under llama-bench's field names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from phasewise.cli import row_forms


@dataclass(frozen=True)
class BenchRow:
    """One test. llama-bench's fields first, in its order; then ours. Sample arrays appear in JSON only."""

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    cpu_mask: str
    cpu_strict: bool
    poll: int
    type_k: str
    type_v: str
    n_gpu_layers: int
    n_cpu_moe: int
    split_mode: str
    main_gpu: int
    no_kv_offload: bool
    flash_attn: bool
    devices: str
    tensor_split: str
    tensor_buft_overrides: str
    use_mmap: bool
    embeddings: bool
    no_op_offload: int
    no_host: bool
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    n_sequences: int
    weight_format: str
    isa: str
    core_signature: str
    placement_signature: str
    flops_per_s: float
    peak_flops_per_s: float
    peak_fraction: float
    bytes_per_s: float
    """Zero for a prefill test: what it streams says nothing about its limit."""
    read_limit_bytes_per_s: float
    bandwidth_fraction: float
    samples_ns: list[int] = field(default_factory=list)
    samples_ts: list[float] = field(default_factory=list)


SCALARS = row_forms.scalar_names(BenchRow)
SQL_TYPES = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL"}


def as_json(rows: Sequence[BenchRow]) -> str:
    """A list of objects, as llama-bench prints, each with the version of our schema."""
    return row_forms.as_json(rows)


def as_jsonl(rows: Sequence[BenchRow]) -> str:
    return "".join(json.dumps(row_forms.json_fields(row)) + "\n" for row in rows)


def as_csv(rows: Sequence[BenchRow]) -> str:
    """A header, then every value in double quotes; truth values as 0 and 1."""
    return row_forms.as_csv(SCALARS, map(_scalars, rows), quoted=True)


def as_sql(rows: Sequence[BenchRow]) -> str:
    """A CREATE TABLE and one INSERT a row, for `sqlite3 results.db`."""
    types = {f.name: SQL_TYPES[str(f.type)] for f in fields(BenchRow) if f.name in SCALARS}
    columns = ",\n".join(f"  {name} {types[name]}" for name in SCALARS)
    inserts = [
        f"INSERT INTO llama_bench ({', '.join(SCALARS)}) VALUES ({', '.join(map(_sql_text, _scalars(row)))});"
        for row in rows
    ]
    return "\n".join([f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);", *inserts]) + "\n"


def as_md(rows: Sequence[BenchRow]) -> str:
    """llama-bench's table, with the shares of the machine's limits in place of its backend column."""
    table = [
        {
            "model": row.model_type,
            "size": f"{row.model_size / 2**20:.0f} MiB",
            "threads": str(row.n_threads),
            "test": _test_name(row),
            "t/s": f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
            "peak": f"{row.peak_fraction:.0%}",
            "bandwidth": f"{row.bandwidth_fraction:.0%}" if row.n_gen else "",
        }
        for row in rows
    ]
    return row_forms.as_md(table, left=("model",))


FORMATS: dict[str, Callable[[Sequence[BenchRow]], str]] = {
    "md": as_md,
    "csv": as_csv,
    "json": as_json,
    "jsonl": as_jsonl,
    "sql": as_sql,
}


def _scalars(row: BenchRow) -> list[str | int | float]:
    values = (getattr(row, name) for name in SCALARS)
    return [int(value) if isinstance(value, bool) else value for value in values]


def _sql_text(value: str | int | float) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def _test_name(row: BenchRow) -> str:
    test = f"pp{row.n_prompt}" if row.n_prompt else f"tg{row.n_gen}"
    return test if row.n_sequences == 1 else f"{test} x{row.n_sequences}"

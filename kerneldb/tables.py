"""The tables, which follow from the kinds of records. A trigger on each refuses to edit rows.

Deleting whole rows stays possible, for `gc`. A column's key has the name of the record's flat field, also
where the column has an older name. A change of a record needs a migration: see `phasewise.migrations`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeEngine

from phasewise.kerneldb import fields
from phasewise.kerneldb.fields import MAX_DIMENSION, MAX_TEXT, Check, RecordField, flat_parts
from phasewise.kerneldb.records import KINDS, Measurement, Problem, Promotion, Schedule, StorageDuel

METADATA = MetaData(
    naming_convention={
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)
"""Metadata of all tables; constraints carry names on every database, so that migrations can refer to them."""

# SQLite numbers rows by itself only where the key is declared INTEGER; its INTEGER has 64 bits anyway.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")


def _type_of(check: Check | None) -> TypeEngine[Any]:
    match check:
        case fields.Whole():
            return BigInteger() if check.high > MAX_DIMENSION else Integer()
        case fields.Finite():
            return Double()
        case fields.Truth():
            return Boolean()
        case fields.Characters():
            return String(check.most) if check.most <= MAX_TEXT else Text()
        case _:
            return JSON()


def _column(part: RecordField, name: str) -> Column[Any]:
    if part.record is not None:
        table = _PROBLEM if part.record is Problem else _SCHEDULE
        return Column(f"{part.name}_id", _ROW_ID, ForeignKey(table.c.id), nullable=part.may_be_none)
    return Column(name, _type_of(part.check), key=part.name, nullable=part.may_be_none)


def _keyed(name: str, record: type) -> Table:
    parts = flat_parts(record)
    unique = UniqueConstraint(*(part.name for part in parts), name=f"uq_{name}")
    columns = [_column(part, part.name) for part in parts]
    return Table(name, METADATA, Column("id", _ROW_ID, primary_key=True), *columns, unique)


def _of_rows(record: Any) -> Table:
    kind = record.kind
    parts = [part for part in flat_parts(record) if not (kind.on_one_core and part.name == "placement_sig")]
    return Table(
        kind.table,
        METADATA,
        Column("id", _ROW_ID, primary_key=True),
        *(_column(part, kind.columns.get(part.name, part.name)) for part in parts),
        *(Index(f"ix_{kind.table}_{word}", *columns) for word, columns in kind.indexes.items()),
    )


_PROBLEM, _SCHEDULE = _keyed("problem", Problem), _keyed("schedule", Schedule)
TABLES: dict[type, Table] = {
    Problem: _PROBLEM,
    Schedule: _SCHEDULE,
    **{record: _of_rows(record) for record in KINDS.values()},
}
MEASUREMENT, PROMOTION, STORAGE_DUEL = (TABLES[kind] for kind in (Measurement, Promotion, StorageDuel))
PROBLEM = _PROBLEM

"""`phasewise bench allreduce`: rows that agree with themselves, and ranks that may die."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict

import pytest

from phasewise.cli.commands.bench.allreduce import table_of
from phasewise.cli.tables import as_csv, as_json, scalar_names
from phasewise.workflows.bench.allreduce.compare import AllReduceRow
from tests.cli import command


def row(
    system: str = "rank-shifted", median_ns: int = 1000, message_bytes: int = 4096, n_turns: int = 3
) -> AllReduceRow:
    """Three samples for each of `n_turns`; six samples prove a ratio."""
    return AllReduceRow(
        ranks=2,
        message_bytes=message_bytes,
        system=system,
        median_ns=median_ns,
        lowest_ns=900,
        highest_ns=1200,
        gbps=4.096,
        copy_fraction=0.5,
        cores=(0, 1),
        core_signature="core",
        placement_signature="placement",
        steal=0.0,
        samples_ns=[median_ns * tenths // 10 for tenths in (9, 10, 12)] * n_turns,
    )


def test_the_forms_hold_the_same_rows() -> None:
    proven = [row(), row("ring", 2500), row("copy", 500)]
    few = [row(message_bytes=8192, n_turns=1), row("ring", 2500, 8192, n_turns=1)]
    rows = [*proven, *few]

    read = json.loads(as_json(rows))
    assert [{**fields, "cores": tuple(fields["cores"])} for fields in read] == [
        {"schema_version": 1, **asdict(r)} for r in rows
    ]
    names = scalar_names(AllReduceRow)
    lines = list(
        csv.DictReader(io.StringIO(as_csv(names, ([getattr(row, name) for name in names] for row in rows))))
    )
    assert [(line["system"], int(line["median_ns"])) for line in lines] == [
        ("rank-shifted", 1000),
        ("ring", 2500),
        ("copy", 500),
        ("rank-shifted", 1000),
        ("ring", 2500),
    ]
    header, _, *lines = str(table_of(rows, wide=False)).splitlines()
    assert "rank-shifted, us" in header
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        ["2", "4 KiB", "1.00", "50%", "2.50x", "4.10", "15%"],
        ["2", "8 KiB", "1.00", "50%", "no verdict", "4.10", "15%"],
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "99999"], "each rank has a core of its own"),
        (["--ranks", ""], "each rank has a core of its own"),
        (["--sizes", "1T"], "no multiple of 4 bytes"),
        (["--sizes", "6"], "no multiple of 4 bytes"),
        (["--sizes", "4K,,1M"], "no multiple of 4 bytes"),
        (["--sizes", "2048M"], "no multiple of 4 bytes"),
        (["--kinds", "tree"], "is not a list of rank-shifted, master-copies, ring"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], says: str) -> None:
    assert says in command.run("bench", "allreduce", *options).usage_error


def test_the_command_prints_one_document() -> None:
    rows = command.text_of("bench", "allreduce", "--ranks", 1, "--sizes", "1K", "-r", 1, "-o", "json")

    systems = ["rank-shifted", "master-copies", "ring", "copy"]
    assert [row["system"] for row in json.loads(rows)] == systems

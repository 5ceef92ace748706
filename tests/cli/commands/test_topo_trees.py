"""`phasewise topo --trees` and `--tree`: what a machine can be made to do, drawn within bounds."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path

import pytest

from phasewise.cli.commands.topo.text import one_tree_lines, trees_fields, trees_lines
from phasewise.topology import Machine, read_lstopo
from phasewise.tuner.topotree import fundamental, parse
from tests.cli import command
from tests.support.machines.paper_machines import epyc, kunpeng

DATA = Path(__file__).parents[2] / "data" / "topology"
V2 = DATA / "lstopo_v2.xml"
HYBRID = DATA / "lstopo_hybrid.xml"

_invoke = partial(command.run, "topo")
_run = partial(command.text_of, "topo")
_fields = partial(command.fields_of, "topo")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(
    "machine", [kunpeng(), epyc(), read_lstopo(HYBRID)], ids=lambda machine: machine.source
)
def test_trees_fit_80_columns_and_any_encoding(machine: Machine, encoding: str) -> None:
    lines = list(trees_lines(fundamental(machine), encoding))
    lines += one_tree_lines(fundamental(machine).tree, encoding)

    assert max(map(len, lines)) <= 80
    for line in lines:
        line.encode(encoding)


@pytest.mark.parametrize("machine", [kunpeng(), epyc()], ids=lambda machine: machine.source)
def test_counts_multiply_and_every_notation_can_be_given_back(machine: Machine) -> None:
    """The listing and the search speak one language."""
    whole = fundamental(machine)
    fields = trees_fields(whole)
    counts = fields["counts"]

    assert prod(level["groupings"] for level in counts["groupings_by_level"]) == counts["groupings"]
    assert counts["groupings_and_removals"] == counts["groupings"] * whole.tree.n_pus
    assert counts["distinct_trees"] <= counts["groupings_and_removals"]
    assert len(fields["groupings"]) == 10
    for grouping in fields["groupings"]:
        assert parse(grouping["notation"], machine).key == grouping["key"]
    assert f"and {counts['groupings'] - 10} more groupings" in "\n".join(trees_lines(whole, "utf-8"))


def test_a_machine_is_read_and_what_is_left_out_is_named() -> None:
    assert [left["reason"] for left in _fields("--trees", "--input", HYBRID)["left_out"]] == ["hybrid"]
    assert "left to the system" in _run("--trees", "--input", HYBRID)


def test_one_tree_is_drawn_with_its_neighbours() -> None:
    text = _run("--tree", "fundamental | remove(1,1)", "--input", V2)

    assert "1 of 2 x numa" in text
    assert "One removal from:\n  fundamental\n" in text
    fields = _fields("--tree", "fundamental", "--input", V2)
    assert fields["parents"] == []
    assert "fundamental | remove(1,1)" in fields["removals"]


def test_a_tree_that_cannot_be_is_one_line() -> None:
    line = _invoke("--tree", "fundamental | group(3,1,1)", "--input", V2).refusal

    assert "group(3,1,1) cannot tile the 2 children" in line

"""The trees of real machines and of the paper's. PHASEWISE_SHARED_DATA names the folder of the former."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from phasewise.topology import Kind, Machine, read_lstopo, read_machine
from phasewise.tuner.plans import parse_cores
from phasewise.tuner.topotree import count_grouped, every_tree, fundamental, group_bound, parse, removal_bound
from tests.support.machines.paper_machines import epyc, kunpeng

SHARED = Path(os.environ.get("PHASEWISE_SHARED_DATA") or Path(__file__).parents[4] / "shared" / "data")
FILES = sorted((SHARED / "hwloc").glob("*.xml"))

needs_files = pytest.mark.skipif(
    not FILES, reason=f"no machines in {SHARED}/hwloc: set PHASEWISE_SHARED_DATA to have them"
)


def _check(machine: Machine) -> None:
    """Every tree once, its notation leads back to it, and no more than the paper's bounds."""
    regular = fundamental(machine)
    tree = regular.tree
    left = [pu for part in regular.left_out for pu in part.pus]
    assert sorted([*tree.pus, *left]) == sorted(machine.allowed_pus)
    n_grouped = count_grouped(tree)
    assert n_grouped <= group_bound(tree.n_pus)
    seen = set()
    for number, each_tree in enumerate(every_tree(tree)):
        assert each_tree.key not in seen
        seen.add(each_tree.key)
        if number % 101 == 0:
            assert parse(each_tree.notation, machine) == each_tree
    assert len(seen) <= n_grouped * removal_bound(tree.n_pus)


@needs_files
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_machine_at_hand_has_its_trees(path: Path) -> None:
    """Whatever lstopo wrote: symmetric, hybrid, with offline PUs, with memory without CPUs."""
    _check(read_lstopo(path))


@pytest.mark.many
@needs_files
@pytest.mark.parametrize("path", sorted((SHARED / "hwloc").glob("*.tar.bz2")), ids=lambda path: path.stem)
def test_every_snapshot_at_hand_has_its_trees(path: Path, tmp_path: Path) -> None:
    """sysfs as the kernel of a real machine showed it. Links that point outside are left out."""
    with tarfile.open(path) as tar:
        members = [member for member in tar.getmembers() if member.isdir() or member.isfile()]
        tar.extractall(tmp_path, members=members, filter="data")

    _check(read_machine(tmp_path / path.name.removesuffix(".tar.bz2")))


@pytest.mark.parametrize("machine", [epyc(), kunpeng()], ids=lambda machine: machine.source)
def test_the_papers_largest_machines(machine: Machine) -> None:
    """256 PUs in 4 levels, and 192 cores in 8 nodes."""
    _check(machine)


@needs_files
def test_the_machine_built_from_facts_is_the_one_lstopo_describes() -> None:
    """Two ways to the same fundamental tree of the 7H12."""
    (path,) = [path for path in FILES if "7H12" in path.stem]

    assert fundamental(read_lstopo(path)).tree == fundamental(epyc()).tree


@needs_files
def test_the_papers_machines_have_the_cpus_that_lscpu_lists() -> None:
    """Nodes and their CPUs, as the facts transcribed from public outputs state them."""
    facts = json.loads((SHARED / "hwloc" / "PAPER_PLATFORM_FACTS.json").read_text())

    for machine, name in ((kunpeng(), "kunpeng920_5250_4s"), (epyc(), "epyc7h12_2s_nps1_smt")):
        nodes = [parse_cores(text) for text in facts[name]["numa_cpus"]]
        assert [node.cpus for node in machine.nodes(Kind.NUMA)] == nodes
        assert len(machine.allowed_pus) == facts[name]["cpus"]

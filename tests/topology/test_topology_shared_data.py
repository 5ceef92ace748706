"""Real machines: lstopo XML files and sysfs snapshots of public projects, where they are at hand.

They may not be part of this repository. PHASEWISE_SHARED_DATA names their folder, else `../shared/data`.
"""

from __future__ import annotations

import re
import tarfile
from functools import cache
from pathlib import Path

import pytest

from phasewise.topology import Counts, Kind, Machine, read_lstopo, read_machine
from tests.support import SHARED

HWLOC = SHARED / "hwloc"
ARM = "128arm-2pa2n8cluster4co"

pytestmark = pytest.mark.skipif(
    not HWLOC.is_dir(), reason=f"no reference machines in {HWLOC}: set PHASEWISE_SHARED_DATA to have them"
)

XML_COUNTS = {
    f"{ARM}.sysfs.xml": (2, 4, 4, 128, 128),
    "16em64t-4s2c2t-offlines.xml": (4, 1, 4, 6, 7),
    "20em64t-hybrid-1p6c2t+2ca4co1t.sysfs.xml": (1, 1, 1, 14, 20),
    "64intel64-fakeKNL-SNC4-hybrid.xml": (1, 8, 4, 16, 64),
    "fakecpukinds.xml": (1, 1, 0, 2, 4),
    "memorysidecaches.xml": (2, 4, 2, 40, 80),
    "mpibind-coral-lassen.xml": (2, 2, 20, 40, 160),
    "mpibind-epyc-corona-p2.xml": (2, 2, 16, 48, 96),
    "mpibind-g4dnmetal.xml": (2, 2, 2, 48, 96),
    "paper-2xEPYC7H12-NPS1-SMTon.synthetic.xml": (2, 2, 32, 128, 256),
    "paper-2xXeonGold6230.synthetic.xml": (2, 2, 2, 40, 80),
}
"""Packages, NUMA nodes, L3, cores, PUs, as the index of that folder gives them."""

SNAPSHOT_COUNTS = {
    ARM: (2, 4, 4, 128, 128),
    "16em64t-4s2c2t-offlines": (4, 1, 4, 7, 12),
    "memorysidecaches": (2, 4, 2, 40, 80),
}


@cache
def _snapshot(name: str, folder: Path) -> Path:
    """The snapshot unpacked. Links that point outside (`driver`, `subsystem`) are left out."""
    with tarfile.open(HWLOC / f"{name}.tar.bz2") as tar:
        members = [member for member in tar.getmembers() if member.isdir() or member.isfile()]
        tar.extractall(folder, members=members, filter="data")
    return folder / name


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


def _five(counts: Counts) -> tuple[int, int, int, int, int]:
    return counts.packages, counts.numa_nodes, counts.l3, counts.cores, counts.pus


@pytest.mark.parametrize("name", sorted(XML_COUNTS))
def test_xml_files_give_the_counts_of_their_index(name: str) -> None:
    counts = read_lstopo(HWLOC / name).counts()

    assert _five(counts) == XML_COUNTS[name]
    assert counts.allowed_pus == counts.pus


def test_no_xml_file_is_forgotten() -> None:
    assert {path.name for path in HWLOC.glob("*.xml")} == set(XML_COUNTS)


@pytest.mark.many
@pytest.mark.parametrize("name", sorted(SNAPSHOT_COUNTS))
def test_snapshots_give_the_counts_that_lstopo_gives(name: str, unpacked: Path) -> None:
    assert _five(read_machine(_snapshot(name, unpacked)).counts()) == SNAPSHOT_COUNTS[name]


@pytest.mark.parametrize(
    ("name", "xml"), [(ARM, f"{ARM}.sysfs.xml"), ("memorysidecaches", "memorysidecaches.xml")]
)
def test_a_snapshot_and_its_xml_are_the_same_tree(name: str, xml: str, unpacked: Path) -> None:
    """Apart from L1 caches, which one of the XML files was written without."""
    from_sysfs, from_xml = read_machine(_snapshot(name, unpacked)), read_lstopo(HWLOC / xml)

    assert _skeleton(from_sysfs) == _skeleton(from_xml)


def test_a_snapshot_gives_what_lstopo_printed(unpacked: Path) -> None:
    """The levels of the .console file: how many of each, and every cache's and core's PUs in order."""
    console = (HWLOC / f"{ARM}.console").read_text()
    machine = read_machine(_snapshot(ARM, unpacked))
    counts = {word: int(number) for number, word in re.findall(r":\s+(\d+) (\w+) \(type", console)}

    assert counts
    assert len(machine.nodes(Kind.PACKAGE)) == counts["Package"]
    assert len(machine.nodes(Kind.NUMA)) == counts["NUMANode"]
    assert len(machine.nodes(Kind.L3)) == counts["L3Cache"]
    assert len(machine.nodes(Kind.CLUSTER)) == counts["Group"]
    assert len(machine.nodes(Kind.L2)) == counts["L2Cache"]
    assert len(machine.nodes(Kind.CORE)) == counts["Core"]
    assert len(machine.nodes(Kind.PU)) == counts["PU"]
    assert [node.os_index for node in machine.nodes(Kind.PU)] == _printed_numbers(console, "PU")
    assert [node.os_index for node in machine.nodes(Kind.CLUSTER)] == _printed_numbers(
        console, r"Group\(Cluster\)"
    )
    assert [node.os_index for node in machine.nodes(Kind.PACKAGE)] == _printed_numbers(console, "Package")
    assert {node.l1d_bytes for node in machine.nodes(Kind.CORE)} == {64 << 10}


def _printed_numbers(console: str, what: str) -> list[int]:
    return [int(number) for number in re.findall(rf"^ *{what} L#\d+ \(P#(\d+)", console, re.MULTILINE)]


def _skeleton(machine: Machine) -> list[tuple[Kind, tuple[int, ...], int | None, int | None]]:
    return [(node.kind, node.cpus, node.size_bytes, node.memory_cache_bytes) for node in machine.tree.walk()]


@pytest.mark.parametrize(
    ("name", "nodes", "furthest"),
    [
        (f"{ARM}.sysfs.xml", (0, 1, 2, 3), 33),
        ("memorysidecaches.xml", (0, 1, 2, 3), 21),
        ("mpibind-coral-lassen.xml", (0, 8), 40),
        ("mpibind-epyc-corona-p2.xml", (0, 1), 32),
        ("mpibind-g4dnmetal.xml", (0, 1), 21),
    ],
)
def test_distances_of_real_machines(name: str, nodes: tuple[int, ...], furthest: int) -> None:
    distances = read_lstopo(HWLOC / name).distances

    assert distances is not None
    assert distances.nodes == nodes
    assert max(max(row) for row in distances.rows) == furthest
    assert all(distances.between(node, node) == 10 for node in nodes)


@pytest.mark.parametrize("name", [ARM, "memorysidecaches"])
def test_a_snapshot_and_its_xml_have_the_same_distances(name: str, unpacked: Path) -> None:
    xml = f"{ARM}.sysfs.xml" if name == ARM else f"{name}.xml"

    assert read_machine(_snapshot(name, unpacked)).distances == read_lstopo(HWLOC / xml).distances


def test_fast_memory_is_told_from_slow_by_its_attributes() -> None:
    machine = read_lstopo(HWLOC / "64intel64-fakeKNL-SNC4-hybrid.xml")
    rates = {access.node: access.read_bytes_per_s for access in machine.memory}

    assert len(rates) == 8
    assert sorted(set(rates.values())) == [22_500 << 20, 90_000 << 20]
    assert all(len(access.initiators) == 16 for access in machine.memory)

"""`phasewise topo`: text in 80 columns, JSON with everything, a picture that appears whole or not at all."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phasewise.cli.commands.topo.text import topo_lines
from phasewise.topology import MemoryAccess, NumaDistances, read_lstopo, read_machine
from tests.cli import command
from tests.support.machines.sysfs_factory import grid, write, write_sysfs

DATA = Path(__file__).parents[2] / "data" / "topology"
V2 = DATA / "lstopo_v2.xml"
HYBRID = DATA / "lstopo_hybrid.xml"
NODES = "sys/devices/system/node"

_run = partial(command.text_of, "topo")
_fields = partial(command.fields_of, "topo")


def test_json_has_the_counts_the_tree_and_both_signatures() -> None:
    fields = _fields("--input", V2)

    assert fields["counts"] == {
        "packages": 2,
        "numa_nodes": 2,
        "l3": 2,
        "cores": 4,
        "pus": 8,
        "allowed_pus": 7,
    }
    assert fields["signature"] == {
        "core": "AcmeChips 7/11 no-isa L1d 32K L2 256K",
        "placement": "4 threads: 2 nodes x 1 L3 x 2 cores",
    }
    assert fields["isa_features"] == []
    assert fields["cpu_quota"] is None
    assert fields["source"] == str(V2)


def test_the_json_tree_holds_every_pu_once() -> None:
    pu_indices: list[int] = []

    def visit(node: dict[str, object]) -> None:
        if node["kind"] == "pu":
            pu_indices.append(node["os_index"])
        for child in node.get("children", []):
            visit(child)

    visit(_fields("--input", HYBRID)["tree"])

    assert sorted(pu_indices) == list(range(6))


def test_this_machine_is_shown_without_arguments() -> None:
    fields = _fields()

    assert fields["counts"]["allowed_pus"] >= 1
    assert set(fields["allowed_pus"]) <= os.sched_getaffinity(0)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.xml")), ids=lambda path: path.name)
def test_text_stays_within_80_columns(path: Path) -> None:
    lines = topo_lines(read_lstopo(path), "utf-8")

    assert max(map(len, lines)) <= 80


def test_equal_parts_are_one_line_and_barred_pus_are_marked() -> None:
    lines = topo_lines(read_lstopo(V2), "utf-8")

    assert "├─ Package > NUMA node 4G > L3 8M  PU 0-3" in lines
    assert "│  └─ 2 x L2 256K > Core L1d 32K L1i 16K, 2 PUs  PU 0-1 ..." in lines
    assert "   └─ L2 256K > Core L1d 32K L1i 16K, 2 PUs (1 not allowed)  PU 6-7" in lines
    assert "Not allowed: PU 7" in lines


def test_a_terminal_without_unicode_gets_ascii() -> None:
    text = "\n".join(topo_lines(read_lstopo(HYBRID), "ascii"))

    assert text.isascii()
    assert "`- NUMA node 32G without CPUs" in text


def test_ascii_is_enough_to_print() -> None:
    done = command.run_process("topo", "--input", V2, env={"PYTHONIOENCODING": "ascii"})

    assert done.exit_code == 0, done.stderr
    assert "8 PUs, 7 allowed" in done.stdout


def test_a_picture_is_written_beside_the_text(tmp_path: Path) -> None:
    path = tmp_path / "machine.svg"

    text = _run("--input", V2, "--svg", path)

    assert "2 packages" in text
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert [entry.name for entry in tmp_path.iterdir()] == ["machine.svg"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_topo_shows_distances_and_memory_in_80_columns(tmp_path: Path) -> None:
    machine = replace(
        read_machine(write_sysfs(tmp_path, grid(1, 2, 1, 1, 1))),
        distances=NumaDistances((0, 3), ((10, 20), (20, 10))),
        memory=(MemoryAccess(0, (0,), 20000 << 20, 20000 << 20, 90, 90),),
    )
    lines = topo_lines(machine, "ascii")

    assert "  node   0   3" in lines
    assert "     0  10  20" in lines
    assert "NUMA node 0: read and write 21 GB/s, 90 ns from PU 0 (firmware)" in lines
    assert max(map(len, lines)) <= 80


def test_many_nodes_are_one_line(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, grid(1, 40, 1, 1, 1))
    for node in range(40):
        write(root / f"{NODES}/node{node}/distance", " ".join("10" if node == o else "32" for o in range(40)))

    assert "NUMA distances: 10 (local) to 32" in topo_lines(read_machine(root), "ascii")

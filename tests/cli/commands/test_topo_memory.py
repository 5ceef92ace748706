"""`topo` prints the distances between NUMA nodes and the speed of their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phasewise.cli.commands.topo.text import topo_lines
from phasewise.topology import MemoryAccess, NumaDistances, read_machine
from tests.support.machines.sysfs_factory import grid, write, write_sysfs

NODES = "sys/devices/system/node"


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

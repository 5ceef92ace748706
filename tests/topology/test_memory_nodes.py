"""Nodes with memory, and the nearest to cores that have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.topology import memory_nodes, read_machine, read_memory_nodes
from tests.support.machines.fake_host import NODE, clean_files

DISTANCES = ("10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10")


def _written(root: Path, sizes_kib: list[int], has_memory: str, mems_allowed: str) -> Path:
    """Four nodes of two CPUs each."""
    files = clean_files(8, nodes=4)
    for node, size in enumerate(sizes_kib):
        files[f"{NODE}/node{node}/meminfo"] = f"Node {node} MemTotal: {size} kB"
        files[f"{NODE}/node{node}/distance"] = DISTANCES[node]
    files[f"{NODE}/has_memory"] = has_memory
    files["proc/self/status"] = f"Cpus_allowed_list:\t0-7\nMems_allowed_list:\t{mems_allowed}"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_cores_are_at_home_on_their_own_nodes(tmp_path: Path) -> None:
    nodes = read_memory_nodes(_written(tmp_path, [4096] * 4, "0-3", "0-3"))

    assert nodes is not None
    assert nodes.usable == (0, 1, 2, 3)
    assert nodes.homes([0, 1]) == (0,)
    assert nodes.homes([5, 2, 3]) == (1, 2)
    assert nodes.homes([99]) == ()
    assert [nodes.nearest(node) for node in range(4)] == [0, 1, 2, 3]


def test_a_node_without_memory_has_a_nearest_one(tmp_path: Path) -> None:
    nodes = read_memory_nodes(_written(tmp_path, [4096, 4096, 4096, 0], "0-2", "0-3"))

    assert nodes is not None
    assert nodes.usable == (0, 1, 2)
    assert nodes.homes([6, 7]) == (3,)
    assert nodes.nearest(3) == 2


def test_memory_that_the_cpuset_withholds_is_not_used(tmp_path: Path) -> None:
    nodes = read_memory_nodes(_written(tmp_path, [4096] * 4, "0-3", "0,2-3"))

    assert nodes is not None
    assert nodes.usable == (0, 2, 3)
    assert nodes.nearest(1) == 0


@pytest.mark.parametrize(("has_memory", "allowed"), [("0", "0-3"), ("0-3", "2"), ("damaged", "0-3")])
def test_there_is_no_choice_of_one_node(tmp_path: Path, has_memory: str, allowed: str) -> None:
    assert read_memory_nodes(_written(tmp_path, [4096] * 4, has_memory, allowed)) is None


def test_what_does_not_say_its_memory_has_none(tmp_path: Path) -> None:
    root = _written(tmp_path, [4096, 0, 0, 0], "0-3", "0-3")

    assert memory_nodes(read_machine(root)) is None
    assert read_memory_nodes(root) is None
    assert read_memory_nodes(tmp_path / "nothing") is None

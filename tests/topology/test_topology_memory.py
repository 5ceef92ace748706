"""NUMA distances and memory attributes: what the firmware claims, from sysfs and from lstopo XML."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.topology import Machine, MemoryAccess, NumaDistances, TopologyError, read_lstopo, read_machine
from tests.support.machines.sysfs_factory import grid, write, write_sysfs

DATA = Path(__file__).parents[1] / "data" / "topology"
RATED = NumaDistances((0, 1), ((10, 20), (20, 10)))
NODES = "sys/devices/system/node"

TWO_NODES = """
<object type="Machine" os_index="0" cpuset="0x3">
<object type="NUMANode" os_index="0" cpuset="0x1" local_memory="1024" gp_index="7"/>
<object type="NUMANode" os_index="3" cpuset="0x2" local_memory="1024" gp_index="8"/>
<object type="PU" os_index="0" cpuset="0x1"/><object type="PU" os_index="1" cpuset="0x2"/>
</object>"""


def _read(tmp_path: Path, beside: str) -> Machine:
    path = tmp_path / "machine.xml"
    path.write_text(f'<topology version="2.0">{TWO_NODES}{beside}</topology>', encoding="utf-8")
    return read_lstopo(path)


def _distances(indexes: str, values: str, attributes: str = 'indexing="os"') -> str:
    return (
        f'<distances2 type="NUMANode" name="NUMALatency" kind="5" {attributes}>'
        f"<indexes>{indexes}</indexes><u64values>{values}</u64values></distances2>"
    )


def _attribute(name: str, value: str, target: str = "7", cpuset: str = "0x1") -> str:
    return (
        f'<memattr name="{name}" flags="5"><memattr_value target_obj_type="NUMANode" '
        f'target_obj_gp_index="{target}" value="{value}" initiator_cpuset="{cpuset}"/></memattr>'
    )


@pytest.mark.parametrize("name", ["lstopo_v1.xml", "lstopo_v2.xml", "lstopo_v3.xml"])
def test_every_version_of_xml_gives_the_same_distances(name: str) -> None:
    """Version 1 writes ratios to the local distance, later ones the numbers; a list may come in pieces."""
    assert read_lstopo(DATA / name).distances == RATED


def test_sysfs_gives_distances_in_the_order_of_node_numbers(tmp_path: Path) -> None:
    """Folders sort as text, where node10 stands before node2; rows are written by number."""
    root = write_sysfs(tmp_path, grid(1, 12, 1, 1, 1))
    for node in range(12):
        write(
            root / f"{NODES}/node{node}/distance",
            " ".join(str(10 + abs(node - other)) for other in range(12)),
        )

    distances = read_machine(root).distances

    assert distances is not None
    assert distances.nodes == tuple(range(12))
    assert distances.between(2, 10) == 18
    assert distances.between(2, 99) is None


@pytest.mark.parametrize("ratings", [[], ["10 21", "10"], ["10"]])
def test_nodes_without_ratings_with_too_few_or_alone_have_no_distances(
    tmp_path: Path, ratings: list[str]
) -> None:
    root = write_sysfs(tmp_path, grid(1, 1 if len(ratings) == 1 else 2, 1, 2, 1))
    for node, text in enumerate(ratings):
        write(root / f"{NODES}/node{node}/distance", text)

    assert read_machine(root).distances is None


def test_a_damaged_rating_is_a_topology_error(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, grid(1, 2, 1, 1, 1))
    write(root / f"{NODES}/node0/distance", "10 far")

    with pytest.raises(TopologyError, match="damaged"):
        read_machine(root)


def _hmat(root: Path, node: int, access: str, initiator: int, bandwidth: int) -> None:
    folder = root / f"{NODES}/node{node}/{access}/initiators"
    (folder / f"node{initiator}").mkdir(parents=True)
    for name, value in (("read_bandwidth", bandwidth), ("read_latency", 110), ("write_latency", 0)):
        write(folder / name, str(value))


def test_sysfs_gives_what_the_firmware_says_of_memory(tmp_path: Path) -> None:
    """In MB/s and ns; zero is unknown; the class of CPUs is preferred to that of all devices."""
    root = write_sysfs(tmp_path, grid(1, 2, 1, 2, 1), memory_only={2: 1 << 30})
    _hmat(root, 0, "access0", 0, 50_000)
    _hmat(root, 2, "access0", 0, 900_000)
    _hmat(root, 2, "access1", 1, 90_000)

    assert read_machine(root).memory == (
        MemoryAccess(0, (0, 1), read_bytes_per_s=50_000_000_000, read_ns=110),
        MemoryAccess(2, (2, 3), read_bytes_per_s=90_000_000_000, read_ns=110),
    )


def test_xml_attributes_of_a_node_are_joined_by_initiator(tmp_path: Path) -> None:
    machine = _read(
        tmp_path,
        _attribute("ReadBandwidth", "1000")
        + _attribute("Latency", "90")
        + _attribute("Bandwidth", "500", target="8")
        + _attribute("Capacity", "1024"),
    )

    assert machine.memory == (
        MemoryAccess(0, (0,), read_bytes_per_s=1000 << 20, read_ns=90, write_ns=90),
        MemoryAccess(3, (0,), read_bytes_per_s=500 << 20, write_bytes_per_s=500 << 20),
    )


@pytest.mark.parametrize(
    "beside",
    [
        _distances("0 3", "10 20 20"),
        _distances("0 4", "10 20 20 10"),
        _distances("0 0", "10 20 20 10"),
        _distances("7 9", "10 20 20 10", 'indexing="gp"'),
        '<distances2 type="Package" name="NUMALatency"><u64values>10</u64values></distances2>',
        '<distances2 type="NUMANode" name="XGMIHops"><u64values>10</u64values></distances2>',
        '<distances nbobjs="1"><latency value="1.0"/></distances>',
        "",
    ],
)
def test_distances_that_are_not_of_these_nodes_are_left_out(tmp_path: Path, beside: str) -> None:
    machine = _read(tmp_path, beside)

    assert machine.distances is None
    assert machine.counts().numa_nodes == 2


def test_nodes_may_be_named_by_gp_index(tmp_path: Path) -> None:
    assert _read(tmp_path, _distances("7 8", "10 20 20 10", 'indexing="gp"')).distances == NumaDistances(
        (0, 3), ((10, 20), (20, 10))
    )


@pytest.mark.parametrize(
    "beside",
    [
        _distances("0 3", "10 -20 20 10"),
        _distances("0 3", "10 0x14 20 10"),
        _distances("0 3", f"10 {'9' * 5000} 20 10"),
        _distances("0 \u0663", "10 20 20 10"),
        '<distances><latency value="nan"/></distances>',
        '<distances><latency value="1e400"/></distances>',
        '<distances><latency value="close"/></distances>',
        _attribute("Bandwidth", "fast"),
        _attribute("Bandwidth", "1", cpuset="0xf...f"),
        _attribute("Bandwidth", "1") * 8_193,
        _distances("0 3", "10 " * 3_000_000),
    ],
    ids=lambda text: text[:60] + text[-20:],
)
def test_hostile_numbers_are_one_clear_error(tmp_path: Path, beside: str) -> None:
    with pytest.raises(TopologyError):
        _read(tmp_path, beside)

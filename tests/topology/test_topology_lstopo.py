"""lstopo XML of all versions, and XML that was made to hurt."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phasewise.topology import Kind, Machine, TopologyError, core_signature, placement_signature, read_lstopo
from phasewise.topology.lstopo import MAX_FILE_BYTES
from phasewise.topology.outline import outline
from phasewise.topology.picture import draw_svg
from tests.support.tiers import n_examples

DATA = Path(__file__).parents[1] / "data" / "topology"
VERSIONS = ("lstopo_v1.xml", "lstopo_v2.xml", "lstopo_v3.xml")
FUZZ_CASES = n_examples(400, soak=10_000)
SLOWEST_CASE_S = 10.0


def _xml(tmp_path: Path, inside: str, head: str = "") -> Path:
    path = tmp_path / "machine.xml"
    path.write_text(
        f'<?xml version="1.0"?>{head}<topology version="2.0">{inside}</topology>', encoding="utf-8"
    )
    return path


def _pu(index: int | str) -> str:
    return f'<object type="PU" os_index="{index}" cpuset="0x1"/>'


@pytest.mark.parametrize("name", VERSIONS)
def test_every_version_describes_the_same_machine(name: str) -> None:
    """The three files were written by hand for one machine."""
    machine, reference = read_lstopo(DATA / name), read_lstopo(DATA / VERSIONS[0])

    counts = machine.counts()
    assert (counts.packages, counts.numa_nodes, counts.l3, counts.cores) == (2, 2, 2, 4)
    assert (counts.pus, counts.allowed_pus) == (8, 7)
    assert machine.tree == reference.tree
    assert machine.cpu == reference.cpu


@pytest.mark.parametrize("name", VERSIONS)
def test_signatures_carry_no_host_name_and_no_serial(name: str) -> None:
    machine = read_lstopo(DATA / name)
    text = core_signature(machine) + placement_signature(machine, machine.allowed_pus)

    assert core_signature(machine) == "AcmeChips 7/11 no-isa L1d 32K L2 256K"
    assert "secret" not in text
    assert "SN-" not in text


def test_hybrid_cores_clusters_and_memory_without_cpus() -> None:
    machine = read_lstopo(DATA / "lstopo_hybrid.xml")

    counts = machine.counts()
    assert (counts.packages, counts.numa_nodes, counts.l3, counts.cores, counts.pus) == (0, 2, 0, 5, 6)
    assert [(kind.name, kind.cpus) for kind in machine.kinds] == [
        ("efficiency", (2, 3, 4, 5)),
        ("performance", (0, 1)),
    ]
    assert machine.nodes(Kind.CLUSTER)[0].cpus == (2, 3, 4, 5)
    assert machine.nodes(Kind.NUMA)[0].memory_cache_bytes == 1 << 30
    assert machine.nodes(Kind.NUMA)[1].cpus == ()


def test_two_nodes_on_the_same_cpus_are_both_counted(tmp_path: Path) -> None:
    node = '<object type="NUMANode" os_index="{}" cpuset="0x1" local_memory="{}"/>'
    machine = read_lstopo(_xml(tmp_path, node.format(0, 1 << 30) + node.format(1, 1 << 32) + _pu(0)))

    assert [(n.os_index, n.cpus) for n in machine.nodes(Kind.NUMA)] == [(0, (0,)), (1, ())]


def test_text_from_the_file_is_made_printable(tmp_path: Path) -> None:
    """A name with terminal escapes (C1 controls are legal in XML) must not reach a terminal."""
    info = '<info name="CPUModel" value="Evil\u009b31m CPU&#x202e;"/>'

    assert read_lstopo(_xml(tmp_path, info + _pu(0))).cpu.name == "Evil31m CPU"


ENTITIES = '[<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]'


@pytest.mark.parametrize(
    ("head", "inside"),
    [
        (ENTITIES, ""),
        ('[<!ENTITY a SYSTEM "file:///etc/passwd">]', ""),
        ('[<!ENTITY % a SYSTEM "http://127.0.0.1:9/x.dtd"> %a;]', ""),
        ('SYSTEM "http://127.0.0.1:9/x.dtd"', "&a;"),
        (ENTITIES, "&b;"),
    ],
)
def test_no_entity_is_ever_expanded_or_fetched(tmp_path: Path, head: str, inside: str) -> None:
    with pytest.raises(TopologyError, match="entities"):
        read_lstopo(_xml(tmp_path, inside + _pu(0), f"<!DOCTYPE topology {head}>"))


@pytest.mark.parametrize(
    ("inside", "complaint"),
    [
        ("", "no processing unit"),
        ("<object type='Package' cpuset='0x1'/>", "no processing unit"),
        (_pu(0) + _pu(0), "described twice"),
        (_pu(16_384), "above 16383"),
        (_pu(-1), "os_index"),
        (_pu("9" * 5000), "os_index"),
        ("<object type='PU'/>", "number is missing"),
        ("<object type='Core'/>" + _pu(0), "no cpuset"),
        ("<object type='Core' cpuset='0xf...f'/>" + _pu(0), "infinite"),
        (f"<object type='Core' cpuset='{'0xffffffff,' * 600}0x0'/>" + _pu(0), "too large"),
        ("<object type='L3Cache' cpuset='0x1' cache_size='1e9'/>" + _pu(0), "cache_size"),
        (f"<object type='NUMANode' cpuset='0x1' local_memory='{2**70}'/>" + _pu(0), "local_memory"),
        ("<object type='Machine' allowed_cpuset='0x2'/>" + _pu(0), "allowed_cpuset"),
        ("<object>" * 200 + "</object>" * 200, "deeper"),
        ("<object/>" * 100_001, "more than"),
    ],
)
def test_contradictions_and_excess_are_clear_errors(tmp_path: Path, inside: str, complaint: str) -> None:
    with pytest.raises(TopologyError, match=complaint):
        read_lstopo(_xml(tmp_path, inside))


def test_sets_nested_without_end_are_refused(tmp_path: Path) -> None:
    pus = "".join(_pu(index) for index in range(64))
    shells = "".join(
        f'<object type="L3Cache" cpuset="0x{(1 << n) - 1 >> 32:x},0x{(1 << n) - 1 & 0xFFFFFFFF:x}"/>'
        for n in range(2, 64)
    )

    with pytest.raises(TopologyError, match="levels"):
        read_lstopo(_xml(tmp_path, shells + pus))


def test_a_machine_larger_than_any_is_refused_before_it_is_built(tmp_path: Path) -> None:
    pus = "".join(_pu(index) for index in range(16_384))
    wide = ",".join(["0xffffffff"] * 512)
    shells = "".join(f'<object type="Core" cpuset="{wide}"/>' for _ in range(130))

    with pytest.raises(TopologyError, match="larger than any"):
        read_lstopo(_xml(tmp_path, pus + shells))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"not xml",
        b"<html><body/></html>",
        b"<topology",
        b'<?xml version="1.0" encoding="no-such"?><topology/>',
        b'<?xml version="1.0" encoding="utf-7"?><topology/>',
        b'<?xml version="1.0" encoding="shift_jis"?><topology/>',
        b"\xff\xfe<\x00t\x00",
        b"\xed\xa0\x80<topology/>",
    ],
)
def test_what_is_no_lstopo_file_is_said_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.xml"
    path.write_bytes(content)

    with pytest.raises(TopologyError, match=r"machine\.xml"):
        read_lstopo(path)


def test_a_file_that_is_too_large_absent_or_a_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.xml"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)

    for bad, reason in (
        *((path, "larger than 16 MiB"), (Path("/dev/zero"), "larger than 16 MiB")),
        *((tmp_path / "absent.xml", "cannot be read"), (tmp_path, "cannot be read")),
    ):
        with pytest.raises(TopologyError, match=reason):
            read_lstopo(bad)


Mutation = Callable[[random.Random, bytes], bytes]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip_bytes(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randrange(1, 12)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _change_digits(rng: random.Random, data: bytes) -> bytes:
    """Stays well-formed, so that it gets past the XML parser."""
    damaged = bytearray(data)
    places = [place for place, byte in enumerate(damaged) if chr(byte) in "0123456789abcdef"]
    for place in rng.sample(places, k=min(len(places), rng.randrange(1, 60))):
        damaged[place] = ord(rng.choice("0123456789f"))
    return bytes(damaged)


def _repeat_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    start = rng.randrange(len(lines))
    chunk = lines[start : start + rng.randrange(1, 30)]
    return b"".join([*lines[:start], *chunk * rng.randrange(2, 40), *lines[start:]])


def _drop_lines(rng: random.Random, data: bytes) -> bytes:
    return b"".join(line for line in data.splitlines(keepends=True) if rng.random() > 0.05)


def _drop_whole_objects(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(line for line in lines if b"/>" not in line or rng.random() > 0.2)


def _insert_tokens(rng: random.Random, data: bytes) -> bytes:
    tokens = (
        b"0xf...f", b"-1", b"99999999999999999999", b"&lt;", b"&x;", b"]]>", b"<!DOCTYPE a [", b"<object>",
        b"\xc2\x9b", b'"', b"</object>", b'type="PU"', b"0xffffffff," * 64, b"<![CDATA[", b"<?x?>", b"\x00",
    )  # fmt: skip
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(data))
        data = data[:place] + rng.choice(tokens) + data[place:]
    return data


MUTATIONS: tuple[Mutation, ...] = (
    _truncate,
    _flip_bytes,
    _change_digits,
    _repeat_lines,
    _drop_lines,
    _drop_whole_objects,
    _insert_tokens,
)


def _fuzz_seeds() -> list[bytes]:
    """Our files, and with PHASEWISE_FUZZ_SEEDS a folder of more."""
    folders = [DATA, *(Path(name) for name in [os.environ.get("PHASEWISE_FUZZ_SEEDS", "")] if name)]
    return [path.read_bytes() for folder in folders for path in sorted(folder.glob("*.xml"))]


def test_damaged_files_give_a_machine_or_a_topology_error(tmp_path: Path) -> None:
    """FUZZ_CASES files, each of them a machine that can be used or one clear error, and soon."""
    rng = random.Random(20_261_121)
    seeds, path = _fuzz_seeds(), tmp_path / "damaged.xml"
    outcomes = {"machine": 0, "error": 0}
    slowest_s = 0.0
    for _ in range(FUZZ_CASES):
        data = rng.choice(MUTATIONS)(rng, rng.choice(seeds))
        path.write_bytes(data)
        started_s = time.process_time()
        try:
            machine = read_lstopo(path)
        except TopologyError as error:
            outcomes["error"] += 1
            message = str(error)
        else:
            outcomes["machine"] += 1
            _assert_usable(machine)
            message = "a machine"
        assert message
        slowest_s = max(slowest_s, time.process_time() - started_s)

    print(f"{FUZZ_CASES} damaged files from {len(seeds)} seeds: {outcomes}, slowest {slowest_s:.2f} s")
    assert slowest_s < SLOWEST_CASE_S
    assert min(outcomes.values()) > 0


def _assert_usable(machine: Machine) -> None:
    counts = machine.counts()
    assert counts.pus == len(machine.tree.cpus) > 0
    assert 0 < counts.allowed_pus <= counts.pus
    assert core_signature(machine)
    assert placement_signature(machine, machine.allowed_pus)
    assert sum(map(len, machine.allowed_cores())) == counts.allowed_pus
    assert outline(machine)
    assert draw_svg(machine).endswith("</svg>\n")


def test_pus_without_a_core_are_cores_of_their_own(tmp_path: Path) -> None:
    machine = read_lstopo(_xml(tmp_path, '<object type="Core" cpuset="0x3"/>' + "".join(map(_pu, range(4)))))

    assert machine.allowed_cores() == ((0, 1), (2,), (3,))


def test_a_core_inside_a_core_is_left_out(tmp_path: Path) -> None:
    cores = '<object type="Core" cpuset="0xf"/><object type="Core" cpuset="0x3"/>'

    assert read_lstopo(_xml(tmp_path, cores + "".join(map(_pu, range(4))))).allowed_cores() == ((0, 1, 2, 3),)

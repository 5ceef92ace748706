"""The picture: well-formed, complete, one box per PU, every box inside its parent."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phasewise.topology import Cpu, Kind, Machine, read_lstopo, read_machine
from phasewise.topology.picture import draw_svg, plan_groups
from tests.support.machines.sysfs_factory import FakeCpu, grid, write_sysfs

SVG = "{http://www.w3.org/2000/svg}"
DATA = Path(__file__).parents[1] / "data" / "topology"


def _machine(tmp_path: Path, *shape: int) -> Machine:
    return read_machine(write_sysfs(tmp_path, grid(*shape)))


def _hints(svg: str) -> list[str]:
    """The text of each PU, shown when it is pointed at."""
    return [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_pu_is_drawn_once(tmp_path: Path) -> None:
    machine = _machine(tmp_path, 2, 2, 2, 3, 2)

    hints = _hints(draw_svg(machine))

    assert sorted(hints) == sorted(f"PU {cpu}: allowed PU" for cpu in machine.tree.cpus)


def test_everything_lies_inside_the_picture(tmp_path: Path) -> None:
    root = ElementTree.fromstring(draw_svg(_machine(tmp_path, 2, 1, 4, 4, 2)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])

    for rect in root.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
            assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height


def test_what_is_not_allowed_is_marked_and_in_the_legend(tmp_path: Path) -> None:
    machine = replace(_machine(tmp_path, 1, 1, 1, 4, 1), allowed_pus=(0, 2))

    svg = draw_svg(machine)

    assert "PU 1: PU not allowed" in _hints(svg)
    assert "PU 2: allowed PU" in _hints(svg)
    assert {"allowed PU", "PU not allowed"} <= set(_texts(svg))


def test_a_plan_colours_its_pus(tmp_path: Path) -> None:
    """A PU of two phases has both colours; one of none stays white."""
    machine = _machine(tmp_path, 1, 1, 1, 4, 1)
    groups = plan_groups([("prefill rank 0", [0, 1, 2]), ("decode rank 0", [0])])

    svg = draw_svg(machine, groups)

    assert "PU 0: prefill rank 0, decode rank 0" in _hints(svg)
    assert "PU 1: prefill rank 0" in _hints(svg)
    assert "PU 3: allowed PU" in _hints(svg)
    assert {"prefill rank 0", "decode rank 0"} <= set(_texts(svg))
    assert groups[0].fill != groups[1].fill


def test_caches_and_memory_are_written_on_their_boxes() -> None:
    texts = _texts(draw_svg(read_lstopo(DATA / "lstopo_v2.xml")))

    assert texts.count("L3 8M") == 2
    assert texts.count("L2 256K") == texts.count("L1d 32K") == 4
    assert "NUMA node 1 · 4G" in texts


def test_memory_without_cpus_has_a_box() -> None:
    texts = _texts(draw_svg(read_lstopo(DATA / "lstopo_hybrid.xml")))

    assert "NUMA node 2 · 32G · no CPUs" in texts
    assert "memory-side cache 1G" in texts


def test_names_from_strangers_stay_text(tmp_path: Path) -> None:
    machine = replace(_machine(tmp_path, 1, 1, 1, 1, 1), cpu=Cpu(name="<script>&\"'"))

    svg = draw_svg(machine, plan_groups([("</title><b>", [0])]))

    assert "<script>\u0026\"'" in _texts(svg)
    assert "<b>" not in svg


@pytest.mark.parametrize("cores", [1, 2, 7, 64])
def test_boxes_do_not_overlap(tmp_path: Path, cores: int) -> None:
    cpus = [FakeCpu(cpu=n, core=n, l2=n // 3, l3=n // 7) for n in range(cores)]
    root = ElementTree.fromstring(draw_svg(read_machine(write_sysfs(tmp_path, cpus))))

    pus = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    corners = [(float(pu.attrib["x"]), float(pu.attrib["y"])) for pu in pus if pu is not None]
    assert len(corners) == cores
    for index, (x, y) in enumerate(corners):
        assert all(abs(x - other_x) >= 34 or abs(y - other_y) >= 24 for other_x, other_y in corners[:index])


@pytest.mark.slow
def test_a_huge_flat_machine_is_drawn_in_reasonable_time(tmp_path: Path) -> None:
    """Choosing the columns must not cost the square of the cores."""
    pus = "".join(f'<object type="PU" os_index="{n}"/>' for n in range(8192))
    path = tmp_path / "flat.xml"
    path.write_text(f"<topology>{pus}</topology>", encoding="utf-8")
    started_s = time.process_time()

    machine = read_lstopo(path)
    assert len(_hints(draw_svg(machine))) == len(machine.nodes(Kind.PU)) == 8192
    assert time.process_time() - started_s < 30

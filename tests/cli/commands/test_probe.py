"""`phasewise topo --probe`: 80 columns, JSON, a picture; short budgets on the machine at hand, large ones
made up.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from phasewise.cli.commands.topo.probe_text import probe_lines
from phasewise.topology import Kind, Machine
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.probe import Interference, Probe, read_groups
from phasewise.tuner.probe.groups import hints_of, latency_levels
from phasewise.tuner.topotree import OperatorLimits, fundamental
from phasewise.workflows.topo.probe_svg import draw_probe
from tests.cli import command
from tests.support.machines.paper_machines import build, epyc, kunpeng, tag_clusters
from tests.support.machines.planted_pairs import measured, nested_latencies

DATA = Path(__file__).parents[2] / "data" / "topology"


def _probe(machine: Machine, scales: list[tuple[list[tuple[int, ...]], float]], far_ns: float) -> Probe:
    pus = tuple(core[0] for core in machine.allowed_cores())
    latency = measured(nested_latencies(pus, scales, far_ns), np.random.default_rng(0), unmeasured=0.01)
    levels = latency_levels(fundamental(machine).tree, pus, latency) if len(pus) > 1 else ()
    readers = pus[:24]
    lost = measured(np.full((len(readers), len(readers)), 0.1), np.random.default_rng(1))
    interference = Interference(readers, 64 << 20, (1.2e10,) * len(readers), lost)
    return Probe(
        pus=pus,
        latency_ns=latency,
        siblings_ns=None,
        interference={"memory": interference},
        levels=levels,
        groups=hints_of(levels),
        conditions={"steal": 0.2, "others": 0.1},
        elapsed_s=3.0,
        budget_s=30.0,
    )


def _kunpeng() -> tuple[Machine, Probe]:
    machine = kunpeng()
    nodes = [node.cpus for node in machine.nodes(Kind.NUMA)]
    return machine, _probe(machine, [(nodes, 55.0), (list(tag_clusters(machine)), 25.0)], 220.0)


def test_the_text_names_what_is_known_and_what_is_hidden() -> None:
    machine, probe = _kunpeng()

    text = "\n".join(probe_lines(machine, probe))

    assert "192 cores" in text
    assert "48 clusters of 4 cores (PU 0-3 ...)" in text
    assert "hidden from the system; worth trying as group(4,1," in text
    assert "as the system claims: NUMA node" in text
    assert "Disturbed: " in text


@pytest.mark.parametrize("cores", [2, 3, 8, 12, 13, 40])
def test_the_text_stays_within_80_columns(cores: int) -> None:
    machine = build("some", [(Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, cores)])

    lines = probe_lines(machine, _probe(machine, [], 12_345.0))

    assert max(map(len, lines)) <= 80
    assert all(line.isascii() for line in lines)


def test_one_core_is_said_plainly() -> None:
    machine = build("one", [(Kind.NUMA, 1), (Kind.CORE, 1)])

    assert probe_lines(machine, _probe(machine, [], 1.0)) == [
        "1 core to look at: there is nothing to compare."
    ]


@pytest.mark.parametrize("machine", [kunpeng(), epyc(1), build("two", [(Kind.NUMA, 1), (Kind.CORE, 2)])])
def test_the_picture_is_sound_svg_of_moderate_size(machine: Machine) -> None:
    nodes = [node.cpus for node in machine.nodes(Kind.NUMA)]

    picture = draw_probe(machine, _probe(machine, [(nodes, 50.0)], 200.0))

    root = ElementTree.fromstring(picture)
    inner = root.find("{http://www.w3.org/2000/svg}svg")
    assert inner is not None
    assert float(root.get("width", "0")) >= float(inner.get("x", "0")) + float(inner.get("width", "0"))
    assert float(root.get("height", "0")) >= float(inner.get("height", "0"))
    assert len(picture) < 4 << 20
    assert {"from CPU", "to CPU"} <= {element.text for element in root.iter()}


def test_the_picture_of_one_core_has_no_scale() -> None:
    machine = build("one", [(Kind.NUMA, 1), (Kind.CORE, 1)])

    ElementTree.fromstring(draw_probe(machine, _probe(machine, [], 1.0)))


def test_a_proposed_group_colours_the_tree() -> None:
    machine, probe = _kunpeng()

    with_group, without = draw_probe(machine, probe), draw_probe(machine, replace(probe, groups=()))

    assert "group(4,1," in with_group
    assert "group(" not in without


def test_what_a_probe_proposes_is_tried_first(tmp_path: Path) -> None:
    """The file of `--json` gives the search of `tune-config --hints` the grouping that it begins with."""
    machine, probe = _kunpeng()
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"schema_version": 1, **probe.fields()}))
    tree = fundamental(machine).tree

    hints = tuple(hint.apply(tree) for hint in read_groups(path))

    assert hints == (tree.group(4, 1, tree.depth),)
    space = ConfigSpace(tree, OperatorLimits(32, 32, 128, 11008), hints)
    with_one_latent_level = list(space.generations())[1]
    assert with_one_latent_level[0] == hints[0]


def test_this_machine_is_probed_as_json_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "probe.svg"

    fields = command.fields_of("topo", "--probe", "--budget", "0.2s", "--svg", picture)

    assert set(fields["pus"]) <= os.sched_getaffinity(0)
    assert len(fields["latency_ns"]) == len(fields["pus"])
    assert isinstance(fields["groups"], list)
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "soon"), "90s, 10m or 1h"),
        (("--budget", "0"), "90s, 10m or 1h"),
        (("--budget", "-3s"), "90s, 10m or 1h"),
        (
            ("--input", DATA / "lstopo_v2.xml"),
            "--input has no effect with --probe: a probe measures the machine it runs on",
        ),
    ],
)
def test_a_budget_that_is_no_time_and_another_machine_are_wrong_usage(
    arguments: tuple[object, ...], said: str
) -> None:
    assert said in command.run("topo", "--probe", *arguments).usage_error

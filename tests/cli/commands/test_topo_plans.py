"""`phasewise topo --plan` and `--plan-file`: plans drawn on their machines, within bounds."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from phasewise.cli.commands.topo.text import plan_lines
from phasewise.kerneldb.records import Origin, PlanRecord
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_lstopo
from phasewise.tuner.errors import PlanError
from phasewise.tuner.plans import RankCores, ServicePlan, default_plan, machine_key
from phasewise.tuner.topotree import OperatorLimits, parse
from phasewise.workflows.topo.plan_json import model_name, picture_groups, plan_fields, read_plans
from tests.cli import command
from tests.support.machines.paper_machines import epyc, kunpeng
from tests.support.topotrees import configurations

DATA = Path(__file__).parents[2] / "data" / "topology"
V2 = DATA / "lstopo_v2.xml"
HYBRID = DATA / "lstopo_hybrid.xml"
FIGURE_5 = "fundamental | group(4,1,3) | remove(1,4)"

_invoke = partial(command.run, "topo")
_run = partial(command.text_of, "topo")
_fields = partial(command.fields_of, "topo")


def _figure_5_plans() -> dict[str, ServicePlan]:
    limits = OperatorLimits(n_heads=32, n_kv_heads=32, head_dim=128, ffn=11008)
    candidates = configurations(parse(FIGURE_5, kunpeng()), limits)
    return {"prefill": default_plan(kunpeng(), "prefill"), "decode": candidates[-1].plan("decode")}


def test_plans_are_drawn_where_they_run() -> None:
    """One strip for every node and phase, a mark for every PU, in the order of the tree."""
    lines = list(plan_lines(kunpeng(), _figure_5_plans()))
    strips = [line for line in lines if re.match(r"  (prefill|decode) +[0-9.]", line)]

    assert max(map(len, lines)) <= 80
    assert len(strips) == 16
    marks = "".join(line.split(maxsplit=1)[1].replace(" ", "") for line in strips[1::2])
    assert marks == "".join((str(node) * 3 + ".") * 6 for node in range(8))
    assert lines[-1].endswith(".: rests")


def test_siblings_and_l3_are_seen_in_the_strips() -> None:
    """On a machine with SMT every other PU rests; L3s are apart; a long strip goes on in the next line."""
    lines = list(plan_lines(epyc(), {"decode": default_plan(epyc(), "decode")}))
    first = lines.index("NUMA node 0  PU 0-63,128-191")

    assert max(map(len, lines)) <= 80
    words = " ".join(line[12:] for line in lines[first + 1 : first + 4]).split()
    assert words == ["0.0.0.0."] * 16


def test_the_plan_of_a_model_comes_from_the_database(tmp_path: Path) -> None:
    """The stored plan where there is one, else the default with a remark that says so."""
    machine = read_lstopo(V2)
    database = tmp_path / "plans.db"
    plan = ServicePlan("decode", (RankCores((1,), 0), RankCores((2,), 1)), "database")
    with open_store(str(database)) as store:
        origin = Origin(machine_key(machine), "1.0", 1_700_000_000_000)
        store.add([PlanRecord("small@native", "decode", plan.to_json(), origin)])

    fields = _fields("--plan", "small", "--input", V2, "--db", database)
    other = _invoke("--plan", "large", "--input", V2, "--db", database)

    assert fields["plans"]["decode"]["source"] == "database"
    assert fields["plans"]["decode"]["ranks"] == [
        {"cores": [1], "numa_node": 0},
        {"cores": [2], "numa_node": 1},
    ]
    assert fields["plans"]["prefill"]["source"] == "default"
    assert "no plan of large@native" in other.output


def test_a_file_or_folder_goes_by_its_own_name(tmp_path: Path) -> None:
    """As the loaders call it, so that the database's key is found."""
    model = tmp_path / "Small-Q8_0.gguf"
    model.touch()
    (tmp_path / "config.json").touch()

    assert model_name(str(model)) == "Small-Q8_0"
    assert model_name(str(tmp_path / "config.json")) == tmp_path.name
    assert model_name("org/model") == "org/model"


def test_plans_of_a_file_are_those_that_were_written(tmp_path: Path) -> None:
    """Plans that tune-config --json printed for another machine can be drawn on that machine."""
    plans = _figure_5_plans()
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"schema_version": 1, "plans": plan_fields(plans)}))

    read_back = read_plans(path, kunpeng())

    assert {phase: plan.ranks for phase, plan in read_back.items()} == {
        phase: plan.ranks for phase, plan in plans.items()
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"plans": []}',
        '{"plans": {}}',
        '{"plans": {"verify": {"ranks": []}}}',
        '{"plans": {"decode": 1}}',
        '{"plans": {"decode": {"ranks": []}}}',
        '{"plans": {"decode": {"ranks": [1]}}}',
        '{"plans": {"decode": {"ranks": [{"cores": 1}]}}}',
        '{"plans": {"decode": {"ranks": [{"cores": []}]}}}',
        '{"plans": {"decode": {"ranks": [{"cores": ["0"]}]}}}',
        '{"plans": {"decode": {"ranks": [{"cores": [0, 0]}]}}}',
        '{"plans": {"decode": {"ranks": [{"cores": [4711]}]}}}',
        '{"plans": {"decode": {"ranks": [{"cores": [0], "numa_node": "a"}]}}}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_strangers_plans_are_checked(tmp_path: Path, text: str) -> None:
    """One line that names the file, never a traceback of ours."""
    path = tmp_path / "plans.json"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(PlanError) as caught:
        read_plans(path, kunpeng())

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_picture_of_a_plan_names_every_rank(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"

    _run("--plan", "--input", V2, "--svg", picture)

    text = picture.read_text()
    assert "prefill, rank 0" in text
    assert "decode, rank 0" in text


@pytest.mark.parametrize(("n_prefill", "n_decode"), [(1, 1), (1, 32), (8, 8), (8, 1), (2, 4)])
def test_no_colour_means_both_phases(n_prefill: int, n_decode: int) -> None:
    """Neighbouring ranks differ too, while there are colours for that."""
    plans = {
        "prefill": ServicePlan("prefill", tuple(RankCores((pu,)) for pu in range(n_prefill))),
        "decode": ServicePlan("decode", tuple(RankCores((pu,)) for pu in range(n_decode))),
    }
    groups = picture_groups(plans)
    prefill, decode = groups[:n_prefill], groups[n_prefill:]

    assert {group.fill for group in prefill}.isdisjoint(group.fill for group in decode)
    assert all(group.fill != next_group.fill for group, next_group in pairwise(decode))


@pytest.mark.parametrize("arguments", [["--plan", "--plan-file", "plans.json"], ["model"]])
def test_views_that_do_not_go_together_are_wrong_usage(arguments: list[str]) -> None:
    assert _invoke(*arguments, "--input", V2).usage_error

"""A model whose decode plan has bands, opened: each band has schedules, kernels to tune, and its room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.serving.engine.engine_size import engine_bytes
from phasewise.topology import read_machine
from phasewise.tuner.plans import Phase, RankCores, ServicePlan
from phasewise.workflows.opening.open_model import OpenModel, open_under
from phasewise.workflows.opening.settings import NATIVE
from phasewise.workflows.topo.plan_json import plan_cores, plan_fields
from phasewise.workflows.tune_kernels.run import rounds_of_model
from tests.support.engine_sizes import engine_size
from tests.support.machines.paper_machines import xeon
from tests.support.models.tiny_models import write_tiny_gguf

MACHINE = xeon()


def decode(*sizes: int) -> ServicePlan:
    """One rank; from 8 sequences on on the cores of the second size, from 16 on on those of the third."""
    plan = ServicePlan("decode", (RankCores(tuple(range(sizes[0])), 0),))
    for place, size in enumerate(sizes[1:], start=1):
        plan = plan.with_band(8 * place, (RankCores(tuple(range(size)), 0),))
    return plan


def plans(*sizes: int) -> dict[Phase, ServicePlan]:
    return {"prefill": ServicePlan("prefill", (RankCores(tuple(range(4)), 0),)), "decode": decode(*sizes)}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    folder = tmp_path_factory.mktemp("bands")
    write_tiny_gguf(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        path = str(folder / "tiny.gguf")
        return open_under(plans(1, 2, 4), path, NATIVE, str(folder / "none.db"), read_machine())


def test_each_band_has_schedules_of_its_own_cores(opened: OpenModel) -> None:
    table = opened.schedules["decode"]
    assert len(table.bands) == 2
    assert opened.schedules["prefill"].bands == ()
    assert all(band.asked_choice == table.asked_choice for band in table.bands)

    uses = opened.explain(64, 16)
    loads = dict.fromkeys((use.phase, use.from_sequences) for use in uses)

    assert list(loads) == [("prefill", 1), ("decode", 1), ("decode", 8), ("decode", 16)]


def test_kernels_are_tuned_on_every_set_of_cores_once(opened: OpenModel) -> None:
    """The last band's are those of prefill."""
    rounds = rounds_of_model(opened, MACHINE, ("prefill", "decode"), 64)
    alone = rounds_of_model(opened, MACHINE, ("decode",), 64)

    assert [(own.phases, len(own.cores)) for own in rounds] == [
        (("prefill",), 4),
        (("decode",), 1),
        (("decode",), 2),
    ]
    assert [len(own.cores) for own in alone] == [1, 2, 4]


def test_kernels_of_ranks_are_those_of_all_bands(opened: OpenModel) -> None:
    two = ServicePlan("decode", (RankCores((0,), 0), RankCores((1,), 0)))
    banded = two.with_band(8, (RankCores((0, 1), 0), RankCores((2, 3), 0)))
    divided = replace(opened, plans={"prefill": replace(two, phase="prefill"), "decode": banded})

    rounds = rounds_of_model(divided, MACHINE, ("decode",), 64)

    assert [len(own.cores) for own in rounds] == [1, 2]


def test_an_engine_has_room_for_the_widest_band(opened: OpenModel) -> None:
    size = engine_size(64, 64, 16)

    few, many = (engine_bytes(opened.model, plans(*sizes), size, None) for sizes in ((1,), (1, 16)))

    assert few < many == engine_bytes(opened.model, plans(16), size, None)


def test_bands_are_in_the_json_of_plans() -> None:
    told = plan_fields(plans(1, 2))["decode"]["bands"]
    cores = plan_cores(plans(1, 2))["decode"]["bands"]

    assert told == [{"sequences": 8, "ranks": [{"cores": [0, 1], "numa_node": 0}]}]
    assert cores == [{"sequences": 8, "ranks": [[0, 1]]}]
    assert plan_fields(plans(1))["prefill"]["bands"] == []

"""Bands of decode's plan in servers of more than one model: beside another one (`--also`), and beside
embeddings.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.kerneldb import shipped
from phasewise.serving.batch import Batch
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_host import EngineHost, SeveralEngines
from phasewise.serving.engine.messages import Answer, Delivery, Submit
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.topology import read_machine
from phasewise.tuner.plans import Phase, ServicePlan, default_plan, rank_on
from phasewise.workflows.opening.open_model import OpenModel, open_under
from phasewise.workflows.opening.settings import NATIVE
from phasewise.workflows.serve.core_plans import plans_now
from phasewise.workflows.serve.embedding import EmbeddingRoom
from phasewise.workflows.serve.opened_models import ALONE, Opener
from phasewise.workflows.serve.run import _beside_embeddings
from phasewise.workflows.serve.settings import Embeddings, KeysAndValues, Running, ServeSettings
from tests.support.machines.paper_machines import xeon
from tests.support.machines.stored_plans import keep_banded_plan
from tests.support.models.encoder_models import write_encoder
from tests.support.models.tiny_models import write_tiny_gguf

CPUS = tuple(sorted(os.sched_getaffinity(0)))[:2]
BOUND_S = 60.0
N_REQUESTS = 4
Cores = tuple[int, ...]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setattr(shipped, "shipped_names", lambda: ())


@contextlib.contextmanager
def running(host: EngineHost) -> Iterator[None]:
    host.start()
    try:
        yield
    finally:
        assert host.stop()


def noting_steps(engine: Engine, steps: list[tuple[int, Cores]]) -> None:
    """Sequences of each of its decode steps, and the CPUs that its threads were seen on."""
    forward: Callable[[Batch], Any] = engine.ranks.forward

    def noted(batch: Batch) -> Any:
        logits = forward(batch)
        if batch.phase == "decode":
            steps.append((len(batch.slices), engine.ranks.observed_cpus()["decode"]))
        return logits

    engine.ranks.forward = noted  # type: ignore[method-assign]


def asked(name: str, number: int, n_tokens: int) -> Submit:
    params = SamplingParams(temperature=0.0)
    return Submit(f"{name} {number}", (5, 6, 7), n_tokens, params, ignore_eos=True, model=name)


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_each_of_several_models_runs_by_the_band_of_its_own_sequences(tmp_path: Path) -> None:
    """The two have other bands, and take turns step by step."""
    db, machine = tmp_path / "tuned.db", read_machine()
    by_name: dict[str, Mapping[int, Cores]] = {
        "one": {1: CPUS[:1], 3: CPUS},
        "two": {1: CPUS, 2: CPUS[1:], 4: CPUS[:1]},
    }
    refs = [str(write_tiny_gguf(tmp_path / f"{name}.gguf")) for name in by_name]
    for name, bands in by_name.items():
        keep_banded_plan(db, machine, f"{name}@native", bands)
    kv = KeysAndValues(kv_budget_bytes=64 << 20)
    settings = ServeSettings(db=str(db), kv=kv, running=Running(also=refs[1:]))
    seen: dict[str, list[tuple[int, Cores]]] = {name: [] for name in by_name}
    ended, lock, done = 0, threading.Lock(), threading.Event()

    def deliver(delivery: Delivery) -> None:
        nonlocal ended
        with lock:
            ended += sum(isinstance(out, Answer) and bool(out.finish_reason) for out in delivery.outs)
        if ended == 2 * N_REQUESTS:
            done.set()

    with ExitStack() as stack:
        host = SeveralEngines(deliver)
        plans = {}
        for served in Opener(settings).open_models(refs, [(name,) for name in by_name], stack):
            (name,) = served.row.names
            assert isinstance(served.row.open_host, partial)
            plans[name] = served.sized.open_model.plans["decode"]
            noting_steps(served.row.open_host.args[0], seen[name])
            host.put(name, served.row.open_host)
        for number in range(N_REQUESTS):  # of other lengths, so that they end one by one
            for name in by_name:
                host.send(asked(name, number, n_tokens=8 * (number + 1)))
        with running(host):
            assert done.wait(BOUND_S)

    for name, bands in by_name.items():
        assert {sequences: plans[name].at(sequences).cores for sequences in bands} == bands
        assert {sequences for sequences, _ in seen[name]} == {1, 2, 3, 4}
        for sequences, cpus in seen[name]:
            assert cpus == plans[name].at(sequences).cores


def banded() -> dict[Phase, ServicePlan]:
    """Decode on two cores, from 8 sequences on on six; prefill on ten."""
    machine = xeon()
    ranks = [(rank_on(machine, tuple(range(n_cores))),) for n_cores in (2, 6, 10)]
    decode = ServicePlan("decode", ranks[0], "database").with_band(8, ranks[1])
    return {"prefill": ServicePlan("prefill", ranks[2], "database"), "decode": decode}


def opened_under(plans: Mapping[Phase, ServicePlan], folder: Path) -> OpenModel:
    path = write_tiny_gguf(folder / "tiny.gguf")
    return open_under(plans, str(path), NATIVE, str(folder / "none.db"), xeon())


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_beside_embeddings_one_engine_has_the_same_cores_for_every_load(tmp_path: Path) -> None:
    """As many as embeddings leave it, as if by `--threads`: no band was tuned for these."""
    machine, db = read_machine(), tmp_path / "tuned.db"
    keep_banded_plan(db, machine, "tiny@native", {1: CPUS[:1], 2: CPUS})
    encoder = str(write_encoder(tmp_path / "bert", "bert"))
    embeddings = Embeddings(embed_model=encoder, embed_cores=1)
    settings = _beside_embeddings(ServeSettings(db=str(db), embeddings=embeddings), encoder, ALONE)

    for own in (settings, replace(settings, embeddings=Embeddings())):  # at the start, and as cores change
        plan = plans_now("tiny@native", own, machine, default_plan)["decode"]
        of_embeddings = EmbeddingRoom(machine, plan.all_cores).cores
        assert plan.starts == ()
        assert len(plan.cores) == settings.running.threads
        assert len(of_embeddings) == 1

"""Several models behind one server: requests reach the one they name, and the engines take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from phasewise.serving.engine.engine_host import Deliver, SeveralEngines, SharedCores
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Abort, Answer, Delivery, EngineLoad, Submit
from phasewise.serving.errors import RanksError
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.serving.scheduling.pacing import Pacing
from tests.support.models.tiny_models import TinyShape, tiny_gguf
from tests.support.servers.fake_engine import FakeRanks, make_engine, next_letter
from tests.support.servers.rude_clients import until
from tests.support.servers.scripted_instances import FINGERPRINT


def test_a_request_reaches_the_engine_of_its_model_and_loads_add_up() -> None:
    ranks = {"up": FakeRanks(next_letter), "same": FakeRanks(lambda token_id: token_id)}
    engines = {name: make_engine(rank) for name, rank in ranks.items()}
    engines["up"].pacing, engines["same"].pacing = Pacing(1, 64), Pacing(10**12, 64)
    came: list[Delivery] = []
    host = SeveralEngines(came.append)
    for name, engine in engines.items():
        host.put(name, partial(EngineThread, engine))
    host.start()
    for name in engines:
        host.send(Submit(f"r-{name}", (97,), 4, GREEDY, model=name))
    host.send(Abort("r-unknown"))

    def outs() -> list[Answer]:
        return [out for delivery in list(came) for out in delivery.outs if isinstance(out, Answer)]

    until(lambda: sum(out.finish_reason is not None for out in outs()) == 2, "they do not end")
    texts = {name: "".join(out.text for out in outs() if out.request_id == f"r-{name}") for name in engines}
    assert texts == {"up": "bcde", "same": "aaaa"}
    assert (host.state, host.is_alive, host.lost) == ("running", True, None)
    slots = sum(engine.scheduler.pool.n_slots for engine in engines.values())
    assert came[-1].load.kv_slots == slots
    by_model = came[-1].load.by_model
    assert by_model is not None
    assert {name: load.kv_slots for name, load in by_model.items()} == {
        name: engine.scheduler.pool.n_slots for name, engine in engines.items()
    }
    slow_steps = {name: load.steps_over_tpot for name, load in by_model.items()}
    assert slow_steps["up"] > slow_steps["same"] == 0
    assert came[-1].load.steps_over_tpot == slow_steps["up"]
    assert {delivery.stats.model for delivery in came if delivery.stats is not None} == {"up", "same"}
    assert host.stop()
    assert host.state == "running" or not host.is_alive


def test_requests_of_batches_wait_while_another_engine_computes_for_others() -> None:
    """Not those of others to the same engine. Later nothing is left of any."""
    came: list[Delivery] = []
    host = SeveralEngines(came.append)
    endless = 1 << 20
    for name in ("batches", "busy"):
        engine = make_engine(FakeRanks(next_letter), kv_slots=endless, context_length=endless)
        host.put(name, partial(EngineThread, engine))
    host.start()

    def steps() -> list[str]:
        return [delivery.stats.model for delivery in list(came) if delivery.stats is not None]

    def ends() -> set[str]:
        outs = [out for delivery in list(came) for out in delivery.outs if isinstance(out, Answer)]
        return {out.request_id for out in outs if out.finish_reason is not None}

    host.send(Submit("long", (97,), 1000, GREEDY, model="busy"))
    until(lambda: "busy" in steps(), "it does not begin")
    host.send(Submit("batch", (97,), 8, GREEDY, model="batches", in_shadow=True))
    until(lambda: ends() == {"long", "batch"}, "they do not end")
    n_busy = steps().count("busy")
    assert steps()[:n_busy] == ["busy"] * n_busy

    host.send(Submit("longer", (97,), endless - 1, GREEDY, model="busy"))
    until(lambda: steps().count("busy") > n_busy, "it does not begin")
    host.send(Submit("batch too", (97,), 8, GREEDY, model="batches", in_shadow=True))
    host.send(Submit("short", (97,), 2, GREEDY, model="batches"))
    until(lambda: "short" in ends(), "it waits with those of batches")
    assert "batch too" not in ends()
    host.send(Abort("longer"))
    until(lambda: "batch too" in ends(), "it does not go on")
    assert host.stop()


@pytest.mark.slow
def test_one_engine_that_is_lost_is_a_lost_server() -> None:
    ranks = FakeRanks()
    ranks.reopen_errors = [RanksError("no")] * 100
    lost = threading.Event()
    host = SeveralEngines(lambda _delivery: None, lost.set)
    host.put("a", partial(EngineThread, make_engine(ranks)))
    host.put("b", partial(EngineThread, make_engine()))
    host.start()
    ranks.lose()
    assert lost.wait(60)
    assert host.state == "lost"
    host.stop()


@pytest.mark.slow
def test_two_models_share_a_server_and_its_budget(tmp_path: Path) -> None:
    pytest.importorskip(
        "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
    )
    for name, seed in (("one", 0), ("two", 1)):
        content = tiny_gguf(shape=TinyShape(context_length=2048), seed=seed).to_bytes()
        (tmp_path / f"{name}.gguf").write_bytes(content)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "c"), "XDG_DATA_HOME": str(tmp_path / "d")}
    command = [sys.executable, "-m", "phasewise", "serve", str(tmp_path / "one.gguf"), "--port", "0"]
    command += [
        "--also",
        str(tmp_path / "two.gguf"),
        "--kv-budget",
        "8M",
        "--log-level",
        "off",
        "--draft",
        "off",
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if line.startswith("listening on"):
                break
        assert said[-1].startswith("listening on"), said
        url = said[-1].split()[-1]
        cards = httpx.get(f"{url}/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["one", "two"]
        texts = {}
        for name in ("one", "two"):
            body = {"model": name, "prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            texts[name] = answer.json()["choices"][0]["text"]
            assert answer.json()["model"] == name
        assert texts["one"] != texts["two"]
        missing = httpx.post(f"{url}/v1/completions", json={"model": "three", "prompt": "a"})
        assert missing.status_code == 404
        assert "one, two" in json.dumps(missing.json())
        metrics = httpx.get(f"{url}/metrics").text
        for name in ("one", "two"):
            assert f'phasewise_generated_tokens_total{{model="{name}"}} 12.0' in metrics
            assert float(metrics.split(f'phasewise_kv_slots{{model="{name}"}} ')[1].split()[0]) > 0
            assert f'phasewise_step_seconds_count{{model="{name}",phase="decode"}} 11.0' in metrics
    finally:
        server.terminate()
        assert server.wait(60) == 0


def test_each_model_has_a_fingerprint_of_its_own() -> None:
    engines = {name: make_engine(FakeRanks()) for name in ("one", "other")}
    for name, engine in engines.items():
        engine.fingerprint = replace(FINGERPRINT, weights=name)
    host = SeveralEngines(lambda delivery: None)
    for name, engine in engines.items():
        host.put(name, partial(EngineThread, engine))

    assert [host.fingerprint(name) for name in engines] == [
        model_engine.fingerprint for model_engine in engines.values()
    ]


def test_the_newest_sum_of_loads_is_delivered_last() -> None:
    """A thread that has added up waits before it delivers, and another engine tells its load meanwhile."""
    told: list[Delivery] = []
    deliver_of: dict[str, Deliver] = {}
    is_inside, is_later = threading.Event(), threading.Event()

    def open_one(
        name: str, deliver: Deliver, on_lost: Callable[[], None], cores: SharedCores
    ) -> EngineThread:
        deliver_of[name] = deliver
        return EngineThread(make_engine(), deliver, on_lost, cores)

    def deliver(delivery: Delivery) -> None:
        if not is_inside.is_set():
            is_inside.set()
            is_later.wait(0.2)  # the other would be through by then, where it does not wait
        told.append(delivery)

    def of_the_other() -> None:
        deliver_of["other"](loaded(3))
        is_later.set()

    host = SeveralEngines(deliver)
    for name in ("one", "other"):
        host.put(name, partial(open_one, name))
    first = threading.Thread(target=lambda: deliver_of["one"](loaded(2)))
    first.start()
    assert is_inside.wait(60)
    second = threading.Thread(target=of_the_other)
    second.start()
    first.join()
    second.join()

    assert [delivery.load.n_running for delivery in told] == [2, 5]


def loaded(n_running: int) -> Delivery:
    return Delivery((), None, EngineLoad(0, n_running, 0, 64))

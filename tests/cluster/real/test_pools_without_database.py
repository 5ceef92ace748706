"""An instance that ends while the tuning database cannot be read comes back, by the schedules of its first
life: with another arithmetic it would not fit the others."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.cluster.real.instance import Orders
from phasewise.cluster.real.local_instances import LocalInstances
from phasewise.kerneldb.records import Measurement, Problem, Schedule
from phasewise.serving.engine.messages import Submit
from phasewise.serving.loaders import load_model
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.topology import read_machine
from phasewise.tuner.plans import machine_key
from phasewise.tuner.weights import format_name
from tests.support.machines.kerneldb_server import new_database_url, postgres_socket
from tests.support.servers.pools import PATIENCE_S, open_alone, pools, prompt, tiny_model
from tests.support.tuned_here import keep_in_use, timed


def _in_two_parts(model: Path) -> list[Measurement]:
    """Schedules in use for every weight on a core, with an arithmetic that is not the default."""
    schedule = Schedule(1, 1, 3, 16, 32, 1, 1, 1, "fma", 2, 640, "mn")
    machine = machine_key(read_machine(), (0,))
    weights = load_model(str(model), "native").products().values()
    problems = {Problem("gemm", format_name(weight), weight.n, weight.k, 1) for weight in weights}
    return [timed(problem, schedule, machine=machine) for problem in problems]


def test_an_instance_comes_back_without_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    requests = [Submit(f"r{salt}", prompt(300, salt), 12, GREEDY, ignore_eos=True) for salt in range(3)]
    model = tiny_model(tmp_path)
    launch, may_start = LocalInstances.launch, threading.Event()

    def launch_once_let(self: LocalInstances, index: int, orders: Orders) -> None:
        assert may_start.wait(PATIENCE_S)
        launch(self, index, orders)

    monkeypatch.setattr(LocalInstances, "launch", launch_once_let)
    may_start.set()
    with ExitStack() as database:
        url = new_database_url(database.enter_context(postgres_socket()))
        keep_in_use(url, _in_two_parts(model))
        with pools(model, ("prompt", "token"), db=url) as server:
            assert server.front.fingerprint() != open_alone(model).fingerprint
            wanted = server.run(requests)
            database.close()
            for index in (1, 0):
                before = server.front.pids[index]
                may_start.clear()
                os.kill(before, signal.SIGKILL)
                server.wait_until(lambda: server.front.state == "replacing", "it is not ready meanwhile")
                may_start.set()
                server.wait_until(lambda: server.front.state == "running", "a new instance runs")
                again = [replace(request, request_id=f"{request.request_id}-{index}") for request in requests]
                answered = server.run(again)
                assert [*answered.values()] == [*wanted.values()]
            assert [own.without_database for own in server.front.instances()] == [1, 1]

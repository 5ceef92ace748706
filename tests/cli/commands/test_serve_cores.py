"""`phasewise serve` while its cores come and go: noticed, told, and no answer ends or changes for it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.machines.own_cgroup import own_cgroup
from tests.support.servers.asking_clients import Clients
from tests.support.servers.rude_clients import until
from tests.support.servers.served_command import Server, own_places, serving

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

CORES = sorted(os.sched_getaffinity(0))[:2]
N_TOKENS = 400
BOUND_S = 60.0
PROMPTS = ("a", "the cat", "one two three", "x" * 40)

Limit = Callable[[list[int]], None]
"""Leaves a server these cores, or time for as many."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if len(CORES) < 2:
        pytest.skip("needs two CPUs")
    return own_places(tmp_path_factory.mktemp("home"))


def threads_of(server: Server) -> Any:
    answer = httpx.get(f"{server.url}/ready").json()
    return answer.get("threads") if answer["status"] == "running" else None


def wait_for_threads(server: Server, n_threads: int) -> None:
    expected = {"prefill": n_threads, "decode": n_threads}
    until(lambda: threads_of(server) == expected, f"not on {n_threads} cores: {server.lines}", BOUND_S)


def counted(server: Server, name: str) -> int:
    text = httpx.get(f"{server.url}/metrics").text
    match = re.search(rf"^phasewise_{name}(?:_total)?(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert match, text
    return int(float(match[1]))


def answer(server: Server, prompt: str) -> str:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": N_TOKENS, "temperature": 1, "seed": 5}
    body = {**fields, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@contextlib.contextmanager
def limiting(how: str, pid: int) -> Iterator[Limit]:
    if how == "taskset":
        yield lambda cores: os.sched_setaffinity(pid, cores)
        return
    with own_cgroup(pid, CORES) as group:
        yield group.allow if how == "cpuset" else (lambda cores: group.set_quota(len(cores)))


@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("how", ["taskset", "cpuset", "quota"])
@pytest.mark.slow
def test_answers_go_on_while_cores_go_and_come(
    roomy: Path, environment: dict[str, str], how: str, ranks: int
) -> None:
    flags = () if ranks == 1 else ("--ranks", 2)
    with serving(roomy, environment, "--port", 0, "--context", 4096, *flags, exec_anew=True) as server:
        wanted = {prompt: answer(server, prompt) for prompt in PROMPTS}
        assert threads_of(server) == {"prefill": 2, "decode": 2}
        with limiting(how, server.process.pid) as limit, Clients(PROMPTS, partial(answer, server)) as clients:
            for cores in (CORES[:1], CORES, CORES[1:], CORES):
                n_before = clients.n_answers
                limit(cores)
                wait_for_threads(server, len(cores))
                until(lambda n=n_before: clients.n_answers > n + 2, "no answers", BOUND_S)  # type: ignore[misc]
        assert counted(server, "core_moves") == 4
        assert counted(server, "ranks_replaced") == 0
        assert {text for texts in clients.texts.values() for text in texts} == set(wanted.values())
        for prompt, texts in clients.texts.items():
            assert set(texts) <= {wanted[prompt]}


@pytest.mark.parametrize("flag", ["--threads", pytest.param("--ranks", marks=pytest.mark.slow)])
def test_an_idle_server_follows_its_cores(roomy: Path, environment: dict[str, str], flag: str) -> None:
    """Also before it has computed anything. Flags are kept as far as the cores go."""
    with serving(roomy, environment, "--port", 0, flag, 2, exec_anew=True) as server:
        for cores in (CORES[:1], CORES, CORES[1:], CORES):
            os.sched_setaffinity(server.process.pid, cores)
            wait_for_threads(server, len(cores))
            assert counted(server, "threads") == len(cores)
            assert os.sched_getaffinity(server.process.pid) == set(cores)
        assert answer(server, "a")
    assert any(f"decode: 1 rank on core {CORES[1]} (flag)" in line for line in server.lines)

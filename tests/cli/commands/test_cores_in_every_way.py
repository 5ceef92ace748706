"""Cores that go while phasewise runs: in every way of running a line tells it, and no answer changes.

`test_serve_cores` is of the ways that go on by other plans, and takes cores that come.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.machines.own_cgroup import OwnCgroup, own_cgroup
from tests.support.models.encoder_models import write_encoder
from tests.support.process_trees import tree_of
from tests.support.servers.rude_clients import until
from tests.support.servers.served_command import Server, own_places, serving

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = pytest.mark.slow

CORES = sorted(os.sched_getaffinity(0))[:2]
BOUND_S = 60.0
CHANGED = "the cores of this process have changed"
MOVED = rf"{CHANGED}: decode: 1 rank on core {{left}}"
EMBEDDING = rf"{CHANGED}: embeddings on cores {{left}}"
KEPT = "this process may use core {left} now: its plans stay those of its start"

SERVERS: dict[str, tuple[tuple[object, ...], str]] = {
    "one process": ((), MOVED),
    "ranks": (("--ranks", 2), MOVED),
    "pools": (("--mixed-pool", "{first}", "--mixed-pool", "{second}"), MOVED),
    "pools of ranks": (
        ("--mixed-pool", "{first}+{second}"),
        f"{CHANGED}, and the plans stay for now: an instance of several ranks takes others only when",
    ),
    "embeddings": ((), EMBEDDING),
    "embeddings beside": (("--embed-model", "{encoder}"), EMBEDDING),
}
"""Options of a server, and the line that tells it."""

COMMANDS: dict[str, tuple[object, ...]] = {
    "generate": ("generate", "{model}", "-p", "a", "-n", 1500, "--ignore-eos"),
    "bench": ("bench", "run", "{model}", "-p", 0, "-n", 300, "-r", 1),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if len(CORES) < 2:
        pytest.skip("needs two CPUs")
    return own_places(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "bert", "bert")


@contextlib.contextmanager
def limited(pid: int) -> Iterator[OwnCgroup]:
    """A process and all that it has started, in a cgroup of CORES."""
    with own_cgroup(pid, CORES) as group:
        for child in tree_of(pid)[1:]:
            group.add(child)
        yield group


def n_running(server: Server) -> int:
    """Instances of its pools that run."""
    return httpx.get(f"{server.url}/metrics").text.count("\nphasewise_instance_info{")


def ask(server: Server, *, embeds: bool) -> Any:
    """The answer of a server to the same request."""
    fields: dict[str, Any] = {"model": "bert", "input": "the cat sat"}
    path = "embeddings"
    if not embeds:
        path = "completions"
        fields = {"model": "tiny", "prompt": "a", "max_tokens": 100, "temperature": 1, "seed": 5}
    reply = httpx.post(f"{server.url}/v1/{path}", json=fields, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()["data" if embeds else "choices"]


@pytest.mark.parametrize("way", SERVERS)
def test_a_server_tells_of_it_and_answers_as_before(
    roomy: Path, encoder: Path, environment: dict[str, str], way: str
) -> None:
    options, told = SERVERS[way]
    names = {"first": CORES[0], "second": CORES[1], "encoder": encoder, "left": CORES[0]}
    flags = [str(option).format(**names) for option in options]
    model, embeds = (encoder if way == "embeddings" else roomy), way.startswith("embeddings")
    with serving(model, environment, "--port", 0, *flags, exec_anew=True) as server:
        n_instances = flags.count("--mixed-pool")
        until(lambda: n_running(server) == n_instances, f"not all run: {server.lines}", BOUND_S)
        wanted = ask(server, embeds=embeds)
        with limited(server.process.pid) as group:
            group.allow(CORES[:1])

            def is_told() -> bool:
                assert ask(server, embeds=embeds) == wanted
                return any(re.search(told.format(**names), line) for line in server.lines)

            until(is_told, f"nothing is told: {server.lines}", BOUND_S)
            group.allow(CORES)
            for _ in range(3):
                assert ask(server, embeds=embeds) == wanted
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_tells_of_it_and_says_the_same(
    roomy: Path, environment: dict[str, str], command: str
) -> None:
    words = [
        sys.executable,
        "-m",
        "phasewise",
        *(str(word).format(model=roomy) for word in COMMANDS[command]),
    ]

    def run(meanwhile: Callable[[int], contextlib.AbstractContextManager[None]]) -> tuple[str, str]:
        """The text that it writes, if `meanwhile` happens once it has begun to compute."""
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            first = said = b""
            if command == "generate":
                first = process.stdout.read(1)
            while command == "bench" and b"tg300: " not in said:
                said += (line := process.stderr.readline())
                assert line, said
            process.send_signal(signal.SIGSTOP)
            with meanwhile(process.pid):
                process.send_signal(signal.SIGCONT)
                out, rest = process.communicate(timeout=120)
        assert process.returncode == 0, said + rest
        return (first + out).decode(), (said + rest).decode()

    @contextlib.contextmanager
    def with_one_core(pid: int) -> Iterator[None]:
        with limited(pid) as group:
            group.allow(CORES[:1])
            yield

    wanted, of_before = run(lambda _pid: contextlib.nullcontext())
    out, said = run(with_one_core)

    told = KEPT.format(left=CORES[0])
    assert said.count(told) == 1, said
    assert told not in of_before
    if command == "generate":
        assert out == wanted


def test_a_conversation_tells_of_it_between_two_answers(roomy: Path, environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "phasewise", "chat", str(roomy), "-n", "5"]
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        bufsize=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"one\n")
        process.stdout.read(1)
        with limited(process.pid) as group:
            group.allow(CORES[:1])
            _, said = process.communicate(b"two\nthree\n", timeout=60)
    assert process.returncode == 0, said
    assert said.decode().count(KEPT.format(left=CORES[0])) == 1, said

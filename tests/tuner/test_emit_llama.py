"""The printed flags under the real llama.cpp: its threads are where the plan says, as the kernel reports it.

PHASEWISE_LLAMA_BIN names llama-completion, another of its programs that takes both masks, or llama-server;
PHASEWISE_LLAMA_MODEL names a GGUF file, by default one that phasewise has fetched. llama-completion must be
built with -DGGML_OPENMP=OFF: with OpenMP a thread that is alone is not pinned, and threads take CPUs in
another order. Of a server with OpenMP that much less is asked.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from phasewise.topology import read_machine
from phasewise.tuner.emit import emit
from phasewise.tuner.plans import Phase, RankCores, ServicePlan, parse_cores
from tests.support.servers.ports import reserved_port

PROGRAM = os.environ.get("PHASEWISE_LLAMA_BIN")
CACHE = Path(os.environ.get("PHASEWISE_CACHE") or Path.home() / ".cache" / "phasewise")
MODEL = os.environ.get("PHASEWISE_LLAMA_MODEL") or next(map(str, (CACHE / "models").rglob("*.gguf")), None)
IS_SERVER = "server" in Path(PROGRAM or "").name

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="PHASEWISE_LLAMA_BIN names no program of llama.cpp"),
    pytest.mark.skipif(MODEL is None, reason="no GGUF file: PHASEWISE_LLAMA_MODEL names one"),
]
of_a_server = pytest.mark.skipif(not IS_SERVER, reason="PHASEWISE_LLAMA_BIN names no llama-server")

MAX_SECONDS = 120
OPENMP = re.compile(r"/lib[gi]?omp\d*\.so")
PROMPT = "Count from one to a thousand, every number on a line of its own. " * 12
CORES = tuple(core[0] for core in read_machine().allowed_cores())[:16]


def plan_on(phase: Phase, cores: tuple[int, ...]) -> ServicePlan:
    return ServicePlan(phase, (RankCores(cores),))


def _allowed(pid: int) -> dict[int, tuple[int, ...]]:
    """CPUs on which each thread of a process may run now; empty once it has ended."""
    allowed = {}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        listed = next(line for line in lines if line.startswith("Cpus_allowed_list:"))
        allowed[int(status.parent.name)] = parse_cores(listed.partition(":")[2].strip())
    return allowed


def _watched(command: list[str]) -> tuple[int, list[dict[int, tuple[int, ...]]]]:
    """Run a command to its end: its process, and where its threads might run, over and over."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seen = []
    deadline_s = time.monotonic() + MAX_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline_s:
            seen.append(_allowed(process.pid))
            time.sleep(0.01)
        assert process.poll() == 0, f"{command[0]} ended with {process.poll()}"
    finally:
        process.kill()
        process.wait()
    return process.pid, [allowed for allowed in seen if allowed]


@pytest.mark.slow
@pytest.mark.skipif(IS_SERVER, reason="PHASEWISE_LLAMA_BIN names a server")
@pytest.mark.parametrize("decode_at", [0, -1])
def test_llama_cpp_runs_where_the_plan_says(decode_at: int) -> None:
    """Batches on all cores, generation on one: every thread is pinned to one core of its phase's plan."""
    plans = {"prefill": plan_on("prefill", CORES), "decode": plan_on("decode", (CORES[decode_at],))}
    flags = shlex.split(emit("llama.cpp", plans, read_machine()).text)

    pid, seen = _watched(
        [str(PROGRAM), "-m", str(MODEL), *flags, "-p", PROMPT, "-n", "96", "--ignore-eos", "-no-cnv"]
    )

    pinned = {(thread, pus[0]) for allowed in seen for thread, pus in allowed.items() if len(pus) == 1}
    workers = {cpu for thread, cpu in pinned if thread != pid}
    main = [allowed[pid][0] for allowed in seen if len(allowed.get(pid, ())) == 1]
    assert {cpu for _, cpu in pinned} == set(CORES)
    assert workers == set(sorted(CORES)[:-1])
    assert set(main) <= {max(CORES), CORES[decode_at]}
    assert main[-1] == CORES[decode_at]


# ---- a server ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """CPUs on which the threads that computed might run, by phase, and whether OpenMP had started them."""

    busy: dict[Phase, set[tuple[int, ...]]]
    has_openmp: bool


@contextmanager
def llama_server(command: list[str]) -> Iterator[tuple[int, int]]:
    """Its process and its port, once it is ready."""
    port = reserved_port()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + MAX_SECONDS
        while not _is_ready(port):
            assert process.poll() is None, f"{command} ended with {process.poll()}"
            assert time.monotonic() < deadline_s, f"{command} is not ready"
            time.sleep(0.1)
        yield process.pid, port
    finally:
        process.kill()
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def _cpu_ticks(pid: int) -> dict[int, int]:
    """CPU time of each thread of a process."""
    ticks = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # state, field 3, is the first of these
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
    return ticks


def serve_once(command: list[str]) -> Served:
    """One long prompt and its answer; who worked for a third of what the busiest thread did was busy."""
    with llama_server([*command, "-m", str(MODEL), "-np", "1"]) as (pid, port):
        has_openmp = OPENMP.search(Path(f"/proc/{pid}/maps").read_text()) is not None
        ticks = [_cpu_ticks(pid)]
        allowed: dict[Phase, dict[int, tuple[int, ...]]] = {}

        def looks(phase: Phase) -> None:
            allowed[phase] = _allowed(pid)
            ticks.append(_cpu_ticks(pid))

        _answer(port, looks)
    busy: dict[Phase, set[tuple[int, ...]]] = {}
    for phase, before, after in zip(("prefill", "decode"), ticks, ticks[1:], strict=False):
        spent = {thread: after[thread] - before.get(thread, 0) for thread in after}
        worked = [thread for thread in spent if 3 * spent[thread] >= max(spent.values())]
        busy[phase] = {allowed[phase][thread] for thread in worked}
    return Served(busy, has_openmp)


def _answer(port: int, looks: Callable[[Phase], None]) -> None:
    """Looks at the first token, when the prompt has been read, and in the middle of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MAX_SECONDS)
    asked = {
        "prompt": PROMPT * 5,
        "n_predict": 160,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
    }
    connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
    tokens = (line for line in connection.getresponse() if line.startswith(b"data:"))
    next(tokens)
    looks("prefill")
    for _ in range(120):
        next(tokens)
    looks("decode")


def alone(cores: tuple[int, ...]) -> set[tuple[int, ...]]:
    """A thread on each, and nowhere else."""
    return {(core,) for core in cores}


@of_a_server
@pytest.mark.slow
@pytest.mark.parametrize("decode", [CORES, CORES[:1], CORES[-1:]], ids=["all", "first", "last"])
def test_both_pools_of_a_server_are_where_the_plan_says(decode: tuple[int, ...]) -> None:
    plans = {"prefill": plan_on("prefill", CORES), "decode": plan_on("decode", decode)}
    emitted = emit("llama.cpp", plans, read_machine())
    served = serve_once([str(PROGRAM), *shlex.split(emitted.text)])

    assert served.busy["prefill"] == alone(CORES)
    if served.has_openmp and len(decode) == 1:
        assert any("OpenMP" in note for note in emitted.notes)
        pytest.skip("llama.cpp with OpenMP leaves a thread that is alone where it was, as the note says")
    assert served.busy["decode"] == alone(decode)


@of_a_server
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["taskset", "numactl", "openmp"])
def test_a_server_under_a_launcher_is_where_the_plan_says(tool: str) -> None:
    if tool != "openmp" and shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    cores = CORES if tool == "openmp" else CORES[-1:]
    launcher = shlex.split(emit(tool, {"decode": plan_on("decode", cores)}, read_machine()).text)
    served = serve_once([*launcher, str(PROGRAM), "-t", str(len(cores))])
    if tool == "openmp" and not served.has_openmp:
        pytest.skip("PHASEWISE_LLAMA_BIN is built without OpenMP")

    assert served.busy["prefill"] == served.busy["decode"] == alone(cores)

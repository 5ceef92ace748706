"""The printed flags under the real llama.cpp: its threads are where the plan says, as the kernel reports it.

PHASEWISE_LLAMA_BIN names llama-completion or another of its programs that takes both masks, built with
-DGGML_OPENMP=OFF (with OpenMP a single thread is not pinned, and threads take CPUs in another order);
PHASEWISE_LLAMA_MODEL names a GGUF file, by default one that phasewise has fetched.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from phasewise.topology import read_machine
from phasewise.tuner.emit import emit
from phasewise.tuner.plans import RankCores, ServicePlan, parse_cores

PROGRAM = os.environ.get("PHASEWISE_LLAMA_BIN")
CACHE = Path(os.environ.get("PHASEWISE_CACHE") or Path.home() / ".cache" / "phasewise")
MODEL = os.environ.get("PHASEWISE_LLAMA_MODEL") or next(map(str, (CACHE / "models").rglob("*.gguf")), None)

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="PHASEWISE_LLAMA_BIN names no program of llama.cpp"),
    pytest.mark.skipif(MODEL is None, reason="no GGUF file: PHASEWISE_LLAMA_MODEL names one"),
]

MAX_SECONDS = 120
PROMPT = "Count from one to a thousand, every number on a line of its own. " * 12


def _allowed(pid: int) -> dict[int, tuple[int, ...]]:
    """Where each thread of a process may run now; empty once it has ended."""
    found = {}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        listed = next(line for line in lines if line.startswith("Cpus_allowed_list:"))
        found[int(status.parent.name)] = parse_cores(listed.partition(":")[2].strip())
    return found


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
    return process.pid, [one for one in seen if one]


@pytest.mark.slow
@pytest.mark.parametrize("decode_at", [0, -1])
def test_llama_cpp_runs_where_the_plan_says(decode_at: int) -> None:
    """Batches on all cores, generation on one: every thread is pinned to one core of its phase's plan."""
    machine = read_machine()
    cores = tuple(core[0] for core in machine.allowed_cores())[:16]
    plans = {
        "prefill": ServicePlan("prefill", (RankCores(cores),)),
        "decode": ServicePlan("decode", (RankCores((cores[decode_at],)),)),
    }
    flags = shlex.split(emit("llama.cpp", plans, machine).text)

    pid, seen = _watched(
        [str(PROGRAM), "-m", str(MODEL), *flags, "-p", PROMPT, "-n", "96", "--ignore-eos", "-no-cnv"]
    )

    pinned = {(thread, pus[0]) for one in seen for thread, pus in one.items() if len(pus) == 1}
    workers = {cpu for thread, cpu in pinned if thread != pid}
    main = [one[pid][0] for one in seen if len(one.get(pid, ())) == 1]
    assert {cpu for _, cpu in pinned} == set(cores)
    assert workers == set(sorted(cores)[:-1])
    assert set(main) <= {max(cores), cores[decode_at]}
    assert main[-1] == cores[decode_at]

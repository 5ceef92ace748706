"""Other tools are told the plan, read back as those tools read it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import Machine, read_machine
from phasewise.tuner.emit import TOOLS, cpu_mask, emit
from phasewise.tuner.errors import PlanError
from phasewise.tuner.plans import Phase, RankCores, ServicePlan, default_plan, parse_cores
from phasewise.tuner.topotree import OperatorLimits, parse
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.support.topotrees import configurations

LIMITS = OperatorLimits(n_heads=32, n_kv_heads=32, head_dim=128, ffn=11008)
TREES = {
    "fundamental | group(4,1,3) | remove(1,4)": kunpeng(),
    "fundamental | remove(1,4)": epyc(threads_a_core=2),
    "fundamental | remove(3,2)": xeon(),
}


def _plans(notation: str, n_ranks: int = 1) -> tuple[Machine, Mapping[Phase, ServicePlan]]:
    """All cores in one rank for prefill; for decode what the tree leaves, in N ranks."""
    machine = TREES[notation]
    by_ranks = {
        len(configuration.ranks): configuration
        for configuration in configurations(parse(notation, machine), LIMITS)
    }
    return machine, {
        "prefill": default_plan(machine, "prefill"),
        "decode": by_ranks[n_ranks].plan("decode", "search"),
    }


def _pus_of_mask(text: str) -> set[int]:
    """As llama.cpp reads it: digit by digit from the left, four CPUs each, at most 128 of them."""
    digits = text.removeprefix("0x")
    assert len(digits) <= 128
    pus = set()
    for place, digit in enumerate(digits):
        low = 4 * (len(digits) - 1 - place)
        pus |= {low + bit for bit in range(4) if int(digit, 16) >> bit & 1}
    return pus


def _options(text: str) -> dict[str, str]:
    words = shlex.split(text)
    return dict(zip(words[::2], words[1::2], strict=True))


@given(st.sets(st.integers(0, 511), min_size=1))
def test_masks_are_exact_however_many_cpus(pus: set[int]) -> None:
    """Beyond 64 CPUs too, which is where masks in machine words end."""
    assert _pus_of_mask(cpu_mask(tuple(pus))) == pus


@pytest.mark.parametrize("notation", TREES)
def test_llama_cpp_gets_both_phases(notation: str) -> None:
    """A mask and a thread count for generation, and for batches, each thread on a CPU of its own."""
    machine, plans = _plans(notation)

    options = _options(emit("llama.cpp", plans, machine).text)

    assert _pus_of_mask(options["-C"]) == set(plans["decode"].cores)
    assert _pus_of_mask(options["-Cb"]) == set(plans["prefill"].cores)
    assert int(options["-t"]) == len(plans["decode"].cores)
    assert int(options["-tb"]) == len(plans["prefill"].cores)
    assert options["--cpu-strict"] == options["--cpu-strict-batch"] == "1"


def test_llama_cpp_is_told_what_gets_lost() -> None:
    """One process has no ranks, and --numa would bind its threads to nodes instead of cores."""
    machine, plans = _plans("fundamental | group(4,1,3) | remove(1,4)", n_ranks=8)
    emitted = emit("llama.cpp", plans, machine)

    assert "--numa" not in emitted.text
    assert "8 ranks of decode become 144 threads" in emitted.notes[0]
    assert "--interleave=0,1,2,3,4,5,6,7" in emitted.notes[1]


def test_llama_cpp_may_leave_a_single_thread_anywhere() -> None:
    """As a server built with OpenMP does."""
    machine = epyc()
    plans: dict[Phase, ServicePlan] = {"prefill": ServicePlan("prefill", (RankCores((0, 1, 2)),))}
    single = ServicePlan("decode", (RankCores((2,)),))

    assert emit("llama.cpp", plans, machine).notes == ()
    (note,) = emit("llama.cpp", {**plans, "decode": single}, machine).notes
    assert "in decode" in note
    assert "GGML_OPENMP=OFF" in note


def test_cpus_beyond_llama_cpps_masks_are_refused() -> None:
    """A mask that it would cut off is not printed."""
    plan = ServicePlan("decode", (RankCores((511, 512)),))

    with pytest.raises(PlanError, match="CPU 512 is not in them"):
        emit("llama.cpp", {"decode": plan}, kunpeng())


@pytest.mark.parametrize("n_ranks", [1, 2, 32])
def test_vllm_gets_a_list_for_every_rank(n_ranks: int) -> None:
    """As many lists as the tensor parallel size says, in the order of the ranks."""
    machine, plans = _plans("fundamental | remove(1,4)", n_ranks)

    emitted = emit("vllm", plans, machine)

    words = shlex.split(emitted.text)
    lists = words[1].removeprefix("VLLM_CPU_OMP_THREADS_BIND=").split("|")
    assert words[-2:] == ["--tensor-parallel-size", str(n_ranks)]
    assert [set(parse_cores(text)) for text in lists] == [set(r.cores) for r in plans["decode"].ranks]


@pytest.mark.parametrize("n_ranks", [1, 4, 8])
def test_launchers_get_a_line_for_every_rank(n_ranks: int) -> None:
    """numactl with the rank's memory, taskset, and OpenMP with one place for each thread."""
    machine, plans = _plans("fundamental | group(4,1,3) | remove(1,4)", n_ranks)
    ranks = [set(rank.cores) for rank in plans["decode"].ranks]

    numactl, taskset, openmp = (
        emit(tool, plans, machine).text.splitlines() for tool in ("numactl", "taskset", "openmp")
    )

    assert [set(parse_cores(line.split()[-1])) for line in taskset] == ranks
    bound = [re.search(r"--physcpubind=(\S+) --(membind|interleave)=(\S+)$", line) for line in numactl]
    assert [set(parse_cores(binding[1])) for binding in bound if binding] == ranks
    nodes = [set(parse_cores(binding[3])) for binding in bound if binding]
    assert set().union(*nodes) == set(range(8))
    assert {binding[2] for binding in bound if binding} == ({"membind"} if n_ranks == 8 else {"interleave"})
    for line, cores in zip(openmp, ranks, strict=True):
        settings = dict(word.split("=", 1) for word in shlex.split(line)[1:])
        assert int(settings["OMP_NUM_THREADS"]) == len(cores)
        assert {int(pu) for pu in re.findall(r"{(\d+)}", settings["OMP_PLACES"])} == cores


@pytest.mark.parametrize("tool", ["vllm", "numactl", "taskset", "openmp"])
def test_one_set_of_cores_for_both_phases_is_said_so(tool: str) -> None:
    """Decode's, with a remark where prefill's differ and none where they do not."""
    machine, plans = _plans("fundamental | remove(3,2)")
    same = plans | {"prefill": replace(plans["decode"], phase="prefill")}

    assert any("for both phases" in line for line in emit(tool, plans, machine).notes)
    assert emit(tool, same, machine) == emit(tool, {"decode": plans["decode"]}, machine)
    assert not any("both" in line for line in emit(tool, same, machine).notes)
    only = emit(tool, {"prefill": plans["prefill"]}, machine)
    assert only.text != emit(tool, plans, machine).text


def test_a_pod_is_guaranteed_and_has_whole_cpus() -> None:
    """Requests equal limits, CPUs are whole and fill every core, and the topology policy can hold."""
    yaml = pytest.importorskip("yaml", reason="reading the pod back needs PyYAML")
    machine, plans = _plans("fundamental | remove(1,4)")
    emitted = emit("kubernetes", plans, machine)

    (container,) = yaml.safe_load(emitted.text)["spec"]["containers"]

    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert int(resources["limits"]["cpu"]) == 256
    assert "full-pcpus-only=true,distribute-cpus-across-numa=true" in emitted.text
    assert "best-effort" in emitted.text
    assert "chooses which" in emitted.notes[0]
    assert "resting" in emitted.notes[1]


def test_what_cannot_be_printed() -> None:
    """Another tool, or no plan."""
    machine = xeon()

    with pytest.raises(PlanError, match=r"llama.cpp, vllm, .* not for 'ollama'"):
        emit("ollama", {"decode": default_plan(machine, "decode")}, machine)
    for tool in TOOLS:
        with pytest.raises(PlanError, match="no plan"):
            emit(tool, {}, machine)


# ---- the tools themselves ----------------------------------------------------------------------------------

PRINT_AFFINITY = "import os; print(*sorted(os.sched_getaffinity(0)))"


PRINT_POLICIES = "print(*{line.split()[1] for line in open('/proc/self/numa_maps')})"


def _run_under(launcher: str, program: str) -> str:
    """Output of a Python program with a launcher's flags before it. Skips where the launcher cannot run."""
    command = shlex.split(launcher)
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    command += [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "not permitted" in ended.stderr:
        pytest.skip(f"{command[0]} may not do that here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("tool", ["taskset", "numactl"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_launcher_takes_its_flags(tool: str, last: bool) -> None:
    """A process started with them has the plan's cores."""
    machine = read_machine()
    core = machine.allowed_cores()[-1 if last else 0][0]
    plan = ServicePlan("decode", (RankCores((core,)),))

    shown = _run_under(emit(tool, {"decode": plan}, machine).text, PRINT_AFFINITY)

    assert set(map(int, shown.split())) == {core}


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
@pytest.mark.skipif(0 not in os.sched_getaffinity(0), reason="CPU 0 may not be used here")
def test_numactl_binds_memory_where_there_are_several_nodes() -> None:
    """The plan is another machine's, whose first core and node this one has as well."""
    plan = ServicePlan("decode", (RankCores((0,)),))
    launcher = emit("numactl", {"decode": plan}, xeon()).text

    shown = _run_under(launcher, PRINT_POLICIES)

    assert launcher.endswith("--membind=0")
    assert shown.split() == ["bind:0"]

"""`phasewise tune-config`, end to end: described machines that are modelled, and a tiny model here."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phasewise.kerneldb.records import Origin, PlanRecord
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.plans import PHASES, Phase, default_plan, machine_key
from tests.cli import command
from tests.support.machines.kerneldb_server import new_database_url, postgres_socket
from tests.support.models.tiny_models import TinyShape, hf_config

MACHINES = Path(__file__).resolve().parents[2] / "data" / "topology"
EIGHT = MACHINES / "lstopo_v2.xml"
"""Two packages of two cores of two PUs; PU 7 is not allowed."""

invoke = partial(command.run, "tune-config")
fields_of = partial(command.fields_of, "tune-config")
start = partial(command.start, "tune-config")

LLAMA = TinyShape(16, 2048, 5632, 32, 8, 64, 32000, 2048, tied=False)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A model of a billion weights, of which only the config exists."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config("llama", LLAMA)))
    return str(folder)


def write_machine(path: Path, nodes: int, cores: int) -> Path:
    """NUMA nodes with an L3 and N cores each, of one PU."""

    def mask(first: int, count: int) -> str:
        words, bits = [], ((1 << count) - 1) << first
        while bits or not words:
            words.append(f"0x{bits & 0xFFFFFFFF:08x}")
            bits >>= 32
        return ",".join(reversed(words))

    def core(pu: int) -> str:
        own = f'os_index="{pu}" cpuset="{mask(pu, 1)}"'
        return f'<object type="Core" {own}><object type="PU" {own}/></object>'

    def package(node: int) -> str:
        own = f'os_index="{node}" cpuset="{mask(node * cores, cores)}"'
        inside = "".join(core(node * cores + index) for index in range(cores))
        return (
            f'<object type="Package" {own}><object type="NUMANode" {own} local_memory="4294967296"/>'
            f'<object type="L3Cache" cpuset="{mask(node * cores, cores)}" cache_size="33554432" depth="3">'
            f"{inside}</object></object>"
        )

    every = mask(0, nodes * cores)
    packages = "".join(package(node) for node in range(nodes))
    path.write_text(
        '<?xml version="1.0"?><topology version="2.0"><object type="Machine" os_index="0" '
        f'cpuset="{every}" complete_cpuset="{every}" allowed_cpuset="{every}">{packages}</object></topology>'
    )
    return path


def modelled(model: str, machine: Path, *arguments: object) -> command.Done:
    return invoke(model, "--evaluator", "modelled", "--machine", machine, *arguments)


def modelled_fields(model: str, machine: Path, *arguments: object) -> dict[str, Any]:
    return fields_of(model, "--evaluator", "modelled", "--machine", machine, *arguments)


# ---- wrong and impossible requests -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--budget", "soon"), "90s, 10m or 1h"),
        (("--trace", "none.csv"), "there is no file none.csv"),
        (("--trace", __file__, "--lengths", "fixed:8/8"), "either --trace or --lengths"),
        (("--hidden", __file__), "--hidden has no effect without --evaluator modelled"),
        (("--evaluator", "guessed"), "'--evaluator': 'guessed' is not one of"),
        (("--emit", "ollama"), "'--emit': 'ollama' is not one of"),
        (("--top-k", "0"), "greater than or equal to 1"),
        (("--ranks", "9"), "--ranks 9: tiny cannot be divided so: 9 ranks cannot share 4 query heads"),
        (("--cores", "0,4095"), "--cores 0,4095: 4095 may not be used here, only "),
        (("--objective", "goodput", "--slo", "fast"), "an SLO is written like ttft=1.5s,tpot=50ms"),
        (("--concurrency", "many"), "numbers are written like 1 or 1,8,32"),
        (("--concurrency", "8,1"), "--concurrency 8,1: each number must be more than the one before"),
        (("--concurrency", "1,8", "--phase", "prefill"), "bands are decode's"),
    ],
)
def test_wrong_usage_is_exit_code_two_and_creates_nothing(
    db: Path, tiny: Path, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in invoke(tiny, *arguments).usage_error
    assert not db.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--cores", "all"), "cores are written like 0-3,8, not 'all'"),
        (("--machine", str(EIGHT)), "describes another machine (Acme Eight, "),
        (("--machine", "none.xml"), "none.xml"),
        (("--objective", "goodput"), "--slo"),
        (("--lengths", "zipf:2"), "zipf"),
        (("--trace", __file__), "test_tune_config.py"),
    ],
)
def test_an_impossible_request_is_one_line_and_creates_nothing(
    db: Path, tiny: Path, arguments: tuple[str, ...], reason: str
) -> None:
    done = invoke(tiny, *arguments)

    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("phasewise: ")
    assert reason in done.stderr.splitlines()[-1]
    assert not db.exists()


def test_another_machines_xml_says_how_to_plan_for_it(db: Path, tiny: Path) -> None:
    assert "add --evaluator modelled" in invoke(tiny, "--machine", EIGHT).stderr


# ---- modelled ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lstopo_v1.xml", "lstopo_v2.xml", "lstopo_v3.xml", "lstopo_hybrid.xml"])
def test_json_holds_the_plans_what_they_cost_and_what_they_were_held_against(
    db: Path, llama: str, name: str
) -> None:
    fields = modelled_fields(llama, MACHINES / name)
    allowed = set(fields["machine"]["allowed_pus"])

    assert fields["end"] == "complete"
    assert set(fields["plans"]) == set(PHASES)
    assert 0 < fields["evaluations"] <= fields["configurations"]
    for phase, plan in fields["plans"].items():
        cores = [core for rank in plan["ranks"] for core in rank["cores"]]
        assert len(cores) == len(set(cores)) > 0
        assert set(cores) <= allowed
        assert plan["stored"] is False
        references = fields["references"][phase]
        assert [reference["name"] for reference in references] == [
            "all cores", "all physical cores", "one process per NUMA node",
        ]  # fmt: skip
        for reference in references:
            assert reference["same_plan"] or reference["gain"] >= 1
            assert reference["latency_ms"] >= plan["latency_ms"] > 0
    assert {"version", "settings", "machine", "model", "pruned", "elapsed_s"} <= set(fields)
    assert not db.exists()


def test_the_same_command_gives_the_same_plan(db: Path, llama: str, tmp_path: Path) -> None:
    machine = write_machine(tmp_path / "machine.xml", 2, 8)
    first, second = (modelled_fields(llama, machine) for _ in range(2))

    assert first["plans"] == second["plans"]
    assert first["evaluations"] == second["evaluations"]


def test_a_hidden_resource_changes_decodes_plan(db: Path, llama: str, tmp_path: Path) -> None:
    """Four cores share less than one of them can use, and lose more with each that reads."""
    machine = write_machine(tmp_path / "machine.xml", 1, 8)
    hidden = [
        {"pus": list(range(first_pu, first_pu + 4)), "read_gbps": 10, "lost_per_extra_pu": 0.3}
        for first_pu in (0, 4)
    ]
    (tmp_path / "hidden.json").write_text(json.dumps(hidden))
    arguments = ("--phase", "decode")
    plain = modelled_fields(llama, machine, *arguments)
    with_hidden = modelled_fields(llama, machine, *arguments, "--hidden", tmp_path / "hidden.json")

    def cores(fields: dict[str, Any]) -> int:
        return sum(len(rank["cores"]) for rank in fields["plans"]["decode"]["ranks"])

    assert cores(with_hidden) < cores(plain)
    assert with_hidden["plans"]["decode"]["standing"] == "faster"


def test_only_so_many_ranks_and_only_these_cores(db: Path, llama: str, tmp_path: Path) -> None:
    machine = write_machine(tmp_path / "machine.xml", 2, 4)
    fields = modelled_fields(llama, machine, "--ranks", 2, "--cores", "0-1,4-5")

    for plan in fields["plans"].values():
        assert len(plan["ranks"]) == 2
        assert {core for rank in plan["ranks"] for core in rank["cores"]} <= {0, 1, 4, 5}


def test_a_phase_alone_has_no_other(db: Path, llama: str) -> None:
    assert list(modelled_fields(llama, EIGHT, "--phase", "prefill")["plans"]) == ["prefill"]


def test_the_report_fits_eighty_columns_and_says_that_nothing_was_timed(
    db: Path, llama: str, tmp_path: Path
) -> None:
    machine = write_machine(tmp_path / "machine.xml", 4, 16)
    result = modelled(llama, machine)

    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert max(map(len, result.stderr.splitlines())) <= 80
    assert "one per NUMA node" in result.stdout
    assert "Not stored: only plans that were measured" in result.stdout
    covered = "ms: mean time that a request spends in this phase, one request at a time"
    assert covered in result.stdout.split("\n")
    assert "\x1b" not in result.output
    assert result.stderr.startswith("searching for at most ")  # before a model or a machine is looked at


def crowded(machine: Path, tmp_path: Path) -> tuple[Any, ...]:
    """Arguments for a machine on whose one L3 of 16 cores few of them read as much as all."""
    hidden = [{"pus": list(range(16)), "read_gbps": 80, "lost_per_extra_pu": 0.12}]
    (tmp_path / "hidden.json").write_text(json.dumps(hidden))
    return write_machine(machine, 1, 16), "--hidden", tmp_path / "hidden.json"


def test_each_load_gets_its_cores_and_the_report_of_all_fits_eighty_columns(
    db: Path, llama: str, tmp_path: Path
) -> None:
    arguments = (*crowded(tmp_path / "machine.xml", tmp_path), "--concurrency", "1,8,64")
    fields, told = modelled_fields(llama, *arguments), modelled(llama, *arguments)
    decode = fields["plans"]["decode"]
    bands = decode["bands"]
    sizes = [sum(len(rank["cores"]) for rank in load["ranks"]) for load in (decode, *bands)]

    assert [load["sequences"] for load in fields["bands"]] == [8, 64]
    assert {band["sequences"] for band in bands} <= {8, 64}
    assert bands
    assert sizes == sorted(set(sizes))
    assert fields["settings"]["bands"] == [8, 64]
    assert "decode of 64 sequences at once\n-----" in told.stdout
    assert f"  from {bands[-1]['sequences']}: 1 rank of {sizes[-1]} cores" in told.stdout
    assert "for fewer sequences" in told.stdout
    assert max(map(len, told.output.splitlines())) <= 80

    plans = tmp_path / "plans.json"
    plans.write_text(json.dumps(fields))
    drawn = command.run("topo", "--input", arguments[0], "--plan-file", plans)
    assert drawn.exit_code == 0, drawn.output
    assert any(line.startswith(f"  from {bands[-1]['sequences']}") for line in drawn.stdout.splitlines())
    assert max(map(len, drawn.stdout.splitlines())) <= 80


@pytest.mark.parametrize("stored", [(), ("decode",), ("prefill", "decode")])
def test_emitting_never_searches(
    db: Path, tiny: Path, stored: tuple[Phase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored plans are printed, and the default for the rest, which is said; a script does not wait."""
    monkeypatch.setattr("phasewise.workflows.tune_config.run.tune", lambda *_: pytest.fail("it searches"))
    machine = read_machine()
    for phase in stored:
        origin = Origin(machine_key(machine), "0.1.0", 1_795_000_000_000)
        plan = default_plan(machine, phase)
        with open_store(db) as store:
            store.add([PlanRecord("tiny@native", phase, plan.to_json(), origin)])
    result = invoke(tiny, "--emit", "taskset")
    fields = fields_of(tiny, "--emit", "taskset")

    assert result.exit_code == 0, result.output
    assert "taskset" in result.stdout
    assert {phase: plan["stored"] for phase, plan in fields["plans"].items()} == {
        phase: phase in stored for phase in PHASES
    }
    missing = [phase for phase in PHASES if phase not in stored]
    assert ("is stored: the default is printed" in result.stderr) == bool(missing)
    assert f"no plan for {' and '.join(missing)} " in result.stderr or not missing


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_without_weights_is_not_timed(db: Path, llama: str, inside: bool) -> None:
    """A lone config.json, or a directory with nothing else."""
    result = invoke(f"{llama}/config.json" if inside else llama)

    assert (result.exit_code in (1, 2), result.stdout) == (True, "")
    assert "has no weights to time: add --evaluator modelled" in result.stderr


def test_emitting_prints_the_flags_alone(db: Path, llama: str) -> None:
    result = modelled(llama, EIGHT, "--emit", "taskset")

    assert result.exit_code == 0, result.output
    assert "taskset" in result.stdout
    assert "reference" not in result.stdout
    assert "reference" in result.stderr


@contextmanager
def at_every_opening(act: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """act(n) comes before the n-th configuration is opened."""
    count, original = 0, ModelledEvaluator.open

    def open_after_act(self: ModelledEvaluator, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        act(count)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ModelledEvaluator, "open", open_after_act)
        yield


def interrupt_sixth(number: int) -> None:
    if number > 5:
        raise KeyboardInterrupt


def test_interrupted_it_ends_with_130_the_best_so_far_and_goes_on(
    db: Path, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = write_machine(tmp_path / "machine.xml", 2, 8)
    arguments = ("--storage", tmp_path / "study.db", "--phase", "decode")
    with at_every_opening(interrupt_sixth, monkeypatch):
        result = modelled(llama, machine, *arguments)
    rest = modelled_fields(llama, machine, *arguments)

    assert result.exit_code == 130
    assert "so far" in result.stdout
    assert "Interrupted." in result.stdout
    assert "goes on from here" in result.stdout
    assert rest["end"] == "complete"
    assert rest["replayed"] >= 5


def test_an_empty_budget_ends_the_search_and_the_best_so_far_is_the_plan(
    db: Path, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, now_s = write_machine(tmp_path / "machine.xml", 4, 8), time.monotonic()

    def takes_time(_number: int) -> None:
        nonlocal now_s
        now_s += 0.15

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with at_every_opening(takes_time, monkeypatch):
        fields = modelled_fields(llama, machine, "--budget", "2s", "--phase", "decode")

    assert fields["end"] == "budget"
    assert 0 < fields["evaluations"] < fields["configurations"]
    assert fields["plans"]["decode"]["ranks"]


@pytest.mark.slow
def test_killed_it_goes_on_where_it_was(db: Path, llama: str, tmp_path: Path) -> None:
    """With trials kept in a file, as a measured search keeps them."""
    machine = write_machine(tmp_path / "machine.xml", 8, 24)
    arguments = (
        llama, "--evaluator", "modelled", "--machine", machine, "--storage", tmp_path / "study.db",
        "--phase", "decode", "--budget", "20s",
    )  # fmt: skip
    process = start(*arguments)
    assert process.stderr is not None
    for _ in range(5):
        assert process.stderr.readline()
    process.kill()
    process.communicate()
    rest = fields_of(*arguments)

    assert process.returncode == -signal.SIGKILL
    assert rest["replayed"] >= 3
    assert rest["plans"]["decode"]["ranks"]


@pytest.mark.slow
def test_two_processes_with_one_study_on_a_server_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: str
) -> None:
    """Both the tuning database and the trials are in PostgreSQL."""
    monkeypatch.setenv("PHASEWISE_CONFIG", "/dev/null")
    machine = write_machine(tmp_path / "machine.xml", 2, 4)
    with postgres_socket() as socket:
        url = new_database_url(socket)
        arguments = (
            llama, "--evaluator", "modelled", "--machine", machine, "--db", url, "--storage", url,
            "--phase", "decode",
        )  # fmt: skip
        both = [start(*arguments, "--json") for _ in range(2)]
        outputs = [process.communicate(timeout=300) for process in both]
        # A server ends when its last client has gone: so this one is a process too.
        third = start(*arguments, "--json")
        outputs.append(third.communicate(timeout=300))

    assert [process.returncode for process in (*both, third)] == [0, 0, 0], outputs
    first, second, again = (json.loads(out) for out, _ in outputs)
    assert first["plans"] == second["plans"] == again["plans"]
    assert first["evaluations"] + first["replayed"] == second["evaluations"] + second["replayed"]
    assert again["evaluations"] == 0
    assert again["replayed"] == first["evaluations"] + first["replayed"]


# ---- measured ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_measured_here_the_plan_is_stored_used_and_emitted(db: Path, tiny: Path) -> None:
    """A tiny model on this machine's cores; what the database learned is not measured again."""
    arguments = (tiny, "--lengths", "fixed:24/8")
    first = fields_of(*arguments, "--budget", "30s")
    again = fields_of(*arguments, "--budget", "6s")

    assert set(first["plans"]) == set(PHASES)
    assert first["timings"] > 0
    assert all(plan["stored"] for plan in first["plans"].values())
    assert again["replayed"] > 0 or again["evaluations"] == 0
    with open_store(db) as store:
        for phase in PHASES:
            record = store.newest_plan(machine_key(read_machine()), "tiny@native", phase)
            assert record is not None
            assert record.objectives["e2e_ms"] > 0
    generated = command.run("generate", tiny, "-p", "hello", "-n", 2)
    assert generated.exit_code == 0, generated
    assert generated.stderr.count("(database)") == 2
    emitted = invoke(tiny, "--emit", "taskset")
    assert emitted.exit_code == 0, emitted.output
    assert "taskset" in emitted.stdout
    assert "cores" not in emitted.stdout.splitlines()[0]


@pytest.mark.slow
def test_two_processes_that_measure_try_nothing_twice(db: Path, tiny: Path) -> None:
    """One waits for the other, takes its trials, and goes on where the other one's budget was used up."""
    both = [start(tiny, "--lengths", "fixed:24/8", "--budget", "80s", "--json") for _ in range(2)]
    outputs = [process.communicate(timeout=200) for process in both]

    assert [process.returncode for process in both] == [0, 0], outputs
    results = [json.loads(out) for out, _ in outputs]
    n_tried = sum(result["evaluations"] for result in results)
    assert max(result["evaluations"] + result["replayed"] for result in results) == n_tried > 0
    for result in results:
        assert set(result["plans"]) == set(PHASES)
        assert all(plan["stored"] for plan in result["plans"].values())


@pytest.mark.slow
def test_two_processes_that_measure_and_one_is_killed(db: Path, tiny: Path) -> None:
    """Whenever that is: the other one ends with a plan, and a third run finds all that was tried."""
    arguments = (tiny, "--lengths", "fixed:24/8", "--phase", "decode")
    survivor, victim = (start(*arguments, "--json", "--budget", "60s") for _ in range(2))
    assert victim.stderr is not None
    assert victim.stderr.readline()
    time.sleep(random.uniform(0, 8))
    victim.kill()
    victim.communicate()
    out, err = survivor.communicate(timeout=200)
    assert survivor.returncode == 0, err
    result = json.loads(out)
    again = fields_of(*arguments, "--budget", "60s")

    assert result["plans"]["decode"]["stored"]
    assert result["evaluations"] + result["replayed"] == again["replayed"]
    assert again["evaluations"] == 0
    assert again["plans"]["decode"]["ranks"]


@pytest.mark.slow
def test_ctrl_c_on_real_cores_keeps_what_was_learned(db: Path, tiny: Path) -> None:
    process = start(tiny, "--budget", "60s", "--lengths", "fixed:200/50")
    assert process.stderr is not None
    for line in process.stderr:
        if "best so far" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 130, err
    assert "goes on from here" in out
    assert err.splitlines()[-1] == "phasewise: interrupted"
    assert "Traceback" not in err

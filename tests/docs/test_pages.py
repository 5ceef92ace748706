"""Pages say what is so: numbers, options, metrics, tests, pictures and versions are those of the program.

Promises of docs/guide/planning-capacity.md about `simulate` and `provision` hold, with its own cluster. Its
commands run with those of all pages, machines from a database and from XML are tested with the commands.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from runpy import run_path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.machine_types import machine_types
from phasewise._json import MOST_CONTAINERS, MOST_VALUES
from phasewise.cluster.real.supervisor import FrontSettings
from phasewise.cluster.routing import OVERFLOW_S, OWN_TOKEN_COUNTS
from phasewise.cluster.simulated.steps import Curve
from phasewise.serving.engine.engine_size import KV_SHARE_OF_FREE_MEMORY
from phasewise.serving.grammar import grammar_limits, guides
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.requests import request_threads as preparation
from phasewise.serving.http.requests import schemas
from phasewise.serving.http.routes import embeddings, responses
from phasewise.serving.processes.restarts import MOST_RERUNS
from phasewise.serving.scheduling.held_prefixes import BLOCK_TOKENS
from phasewise.serving.text import chat_template as chat
from phasewise.workflows.serve.settings import SPLIT_ABOVE_TOKENS
from phasewise.workflows.serve.ways import OnCores
from tests.cli.command import fields_of, run
from tests.cli.command import run as phasewise
from tests.docs.test_guide import FIXTURES, GUIDE, commands
from tests.soak.hostile import ROWS
from tests.support import ROOT
from tests.support.tiers import examples

PAGE = (ROOT / "docs" / "guide" / "planning-capacity.md").read_text()
SLO = "ttft=2s,tbt=150ms"
Fields = dict[str, object]


def example() -> str:
    """The cluster file that the page shows."""
    return str(re.findall(r"```toml\n(.*?)```", PAGE, re.S)[0])


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(example())
    return path


def simulated(cluster: Path, *options: object) -> Fields:
    return fields_of("simulate", "fixed:800/120", "--pools", cluster, "--slo", SLO, *options)


def with_machines(cluster: Path, role: str, count: int) -> Path:
    """The same file with one pool."""
    pool = f'[[pool]]\nrole = "{role}"\nmachine = "xeon"\ncount = {count}\n\n'
    path = cluster.with_name(f"{role}{count}.toml")
    path.write_text(re.sub(r"\[\[pool\]\].*?(?=\[machines\.xeon\])", pool, example(), flags=re.S))
    return path


def kept(fields: Fields) -> bool:
    slo = fields["slo"]
    assert isinstance(slo, dict)
    return bool(slo["kept"])


def test_the_file_that_tests_run_is_the_one_that_it_shows(cluster: Path) -> None:
    (written,) = re.findall(r"<!-- test: printf '%s\\n' (.*?) > cluster.toml -->", PAGE)
    run_by_tests = "\n".join(re.findall(r"'([^']*)'", written))

    assert tomllib.loads(run_by_tests) == tomllib.loads(example())


def test_the_output_has_what_it_lists() -> None:
    options = ("simulate", "lognormal:1500,0.8/30,0.8", "--pools", "prompt=2*h100,token=1*h100")
    options = (*options, "--rate", 3, "--duration", 20, "--slo", "table6")
    fields, text = fields_of(*options), run(*options).stdout

    for part in ("times_s", "slowdowns"):
        assert {metric: set(own) for metric, own in fields[part].items()} == {
            metric: {"p50", "p90", "p99"} for metric in ("ttft", "tbt", "e2e")
        }
    for machines in fields["machines"]:
        assert 0 < machines["utilisation"] <= 1
        tokens, shares = zip(*machines["occupancy"], strict=True)
        assert list(tokens) == sorted(tokens)
        assert list(shares) == sorted(shares)
        assert shares[-1] == pytest.approx(1)
    assert fields["kv_transfers"]["count"] > 0
    for word in ("TTFT", "TBT", "E2E", "TTFT slowdown", "P50", "P90", "P99"):
        assert word in text


def test_with_a_rate_arrivals_are_drawn_and_without_one_they_are_the_traces(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2026-01-01 00:00:{second:02}.000000,700,20" for second in (0, 10, 40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    options = ("simulate", trace, "--pools", "mixed=1*h100")
    own = fields_of(*options)
    drawn, again, other = (
        fields_of(*options, "--rate", 2, "--duration", 30, "--seed", seed) for seed in (0, 0, 1)
    )

    assert own["n_requests"] == 3
    assert 40 < own["duration_s"] < 45
    assert drawn["n_requests"] > 20
    assert drawn == again
    assert drawn != other
    assert run("simulate", "fixed:700/20", "--pools", "mixed=1*h100").exit_code == 1  # states no arrivals


def provisioned(cluster: Path, *options: object) -> tuple[list[Fields], list[str]]:
    """Designs, and the lines of progress."""
    arguments = ("provision", "fixed:800/120", "--machines", cluster, "--slo", SLO, *options)
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["designs"], done.stderr.splitlines()


def test_the_fewest_machines_keep_the_promises_and_one_less_breaks_them(cluster: Path) -> None:
    load = ("--rate", 1, "--duration", 20)
    (design,), lines = provisioned(
        cluster, *load, "--design", "mixed:xeon", "--minimise", "machines", "--most", 20
    )
    count = design["n_machines"]
    assert isinstance(count, int)

    assert count > 1
    assert kept(simulated(with_machines(cluster, "mixed", count), *load))
    assert not kept(simulated(with_machines(cluster, "mixed", count - 1), *load))
    runs = [line for line in lines if line.startswith("mixed:xeon ")]
    assert len(runs) == design["n_runs"] < 20  # a line for each cluster, and not the whole grid
    assert 0 < float(str(design["bound_used"])) <= 1


def test_the_highest_rate_is_what_the_money_pays_for(cluster: Path) -> None:
    load = ("--rate-step", 1, "--duration", 20)
    (design,), _ = provisioned(cluster, *load, "--design", "mixed:xeon", "--cost", 13)
    rate, count = design["rate"], design["n_machines"]
    assert isinstance(rate, float)
    assert isinstance(count, int)
    paid_for = with_machines(cluster, "mixed", count)

    assert float(str(design["cost"])) <= 13
    assert rate % 1 == 0
    assert kept(simulated(paid_for, "--rate", rate, "--duration", 20))
    assert not kept(simulated(paid_for, "--rate", rate + 1, "--duration", 20))


def test_splitting_bounds_the_time_between_tokens_while_long_prompts_arrive(cluster: Path) -> None:
    """Against the same machines undivided, which let prompts into the steps of answers."""
    load = ("--rate", 2, "--duration", 30)
    split = simulated(cluster, *load)
    mixed = simulated(with_machines(cluster, "mixed", 4), *load)
    between = [fields["times_s"]["tbt"]["p99"] for fields in (split, mixed)]  # type: ignore[index]

    assert between[0] < between[1]


@pytest.mark.slow
def test_splitting_raises_no_throughput_of_two_machines(cluster: Path) -> None:
    """More than two machines can do, undivided and one of each: the last token is not earlier."""
    load = ("--rate", 20, "--duration", 10)
    mixed = simulated(with_machines(cluster, "mixed", 2), *load)
    cluster.write_text(re.sub("count = 3", "count = 1", example()))
    split = simulated(cluster, *load)

    assert split["n_requests"] == mixed["n_requests"]
    assert float(str(split["duration_s"])) >= float(str(mixed["duration_s"]))


@pytest.mark.parametrize("slower", [1.0, 1.25, 2.0])
def test_measured_runs_give_the_fields_of_a_machine(tmp_path: Path, slower: float) -> None:
    """Step times as measured, the cap as the watts; the capped run beside the other, per phase."""
    sizes = [(16, 0, 0), (512, 0, 0), (0, 32, 0), (0, 32, 2048)]

    def row(n_prompt: int, n_gen: int, n_depth: int, pace: float, cap_w: float) -> Fields:
        tokens_per_s = (
            n_prompt / (0.02 + 1e-3 * n_prompt) if n_prompt else 1 / (0.03 + 1e-6 * n_depth)
        ) / pace
        joules = 0.0 if n_depth else 90.0 / tokens_per_s
        fields: Fields = {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": n_depth, "n_sequences": 1}
        return fields | {"avg_ts": tokens_per_s, "joules_per_token": joules, "power_cap_w": cap_w}

    files = [tmp_path / "free.json", tmp_path / "capped.json"]
    for file, pace, cap_w in zip(files, (1.0, slower), (0.0, 70.0), strict=True):
        file.write_text(json.dumps([row(*size, pace, cap_w) for size in sizes]))

    free, capped, beside = [line for line in machine_types(files) if isinstance(line, dict)]

    for machine, pace, power_w in ((free, 1.0, 90.0), (capped, slower, 70.0)):
        assert machine["power_w"] == pytest.approx(power_w)
        for n_tokens, ms in json.loads(str(machine["prefill_ms"])):
            assert ms == pytest.approx(pace * (20 + n_tokens), rel=1e-3)
        curves = [Curve(json.loads(str(machine[name]))) for name in ("decode_ms", "decode_sequences_ms")]
        for n_depth in (0, 2048):
            step_ms = curves[0].at(n_depth + 16) + curves[1].at(1)
            assert step_ms == pytest.approx(pace * (30 + 1e-3 * n_depth), rel=0.02)
    assert beside["time, prefill"] == pytest.approx(slower)
    assert beside["J/token, decode"] == pytest.approx(slower)


POOLS_PAGE = " ".join((ROOT / "docs" / "guide" / "pools.md").read_text().split())
WORDS = {"two": 2, "twice": 2, "four": 4, "ten": 10, "quarter": 0.25, "minute": 60}


def stated(pattern: str) -> float:
    """The number where the pattern has a group; the same one, however often it stands there."""
    (text,) = set(re.findall(pattern, POOLS_PAGE))
    return float(WORDS.get(text, text))


def test_its_numbers_are_those_of_the_program() -> None:
    settings = FrontSettings("", lambda index, life: "")

    assert stated(r"which blocks of (\d+) tokens it holds") == BLOCK_TOKENS
    assert stated(r"prompts that wait there, and (\w+) times those of its own") == OWN_TOKEN_COUNTS
    assert stated(r"longer than computing it again (\w+) times") == OWN_TOKEN_COUNTS
    assert stated(r"prompts of more than (\d+) tokens, or than `split_above`") == SPLIT_ABOVE_TOKENS
    assert stated(r"wait for longer than ([\d.]+) s by the best pace") == OVERFLOW_S
    assert stated(r"divide a (\w+) of what is free on that node") == KV_SHARE_OF_FREE_MEMORY
    assert stated(r"(?:noticed after|says nothing for) ([\d.]+) seconds") == settings.silent_s
    assert stated(r"is tried again every (\w+),") == settings.again_s
    assert stated(r"ended, (\w+) for each of the server and once more") == MOST_RERUNS
    assert stated(r"has not arrived (\w+) seconds after its prompt was computed") == settings.hand_over_s


def test_options_that_it_says_are_refused_are() -> None:
    """All of them, and no others."""
    (with_pools,) = re.findall(r"(`--threads` and [^ ]*) are refused with pools", POOLS_PAGE)

    named = {flag.lstrip("-").replace("-", "_") for flag in re.findall(r"`(--[a-z-]+)`", with_pools)}
    assert named == {*OnCores.unused} - {"spread"}


SECURITY_PAGE = (ROOT / "docs" / "security.md").read_text()
MIB = 1 << 20


def limits() -> dict[str, str]:
    """The table of limits: what is limited, and how."""
    rows = (line.split("|")[1:3] for line in SECURITY_PAGE.splitlines() if line.startswith("| "))
    return {name.strip(): limit.strip() for name, limit in rows}


def test_the_threats_name_every_row_of_the_benchmark_and_tests_that_exist() -> None:
    table = SECURITY_PAGE.partition("## Threats")[2]
    named = re.findall(r"`([a-z_]+)`", table.partition("What was tried before")[0])
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}

    assert set(ROWS) == set(named)
    assert set(re.findall(r"`(test_[a-z_]+\.py)`", table)) <= tests
    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == [str(number) for number in range(1, 17)]


def test_its_flags_are_flags_of_serve() -> None:
    serve = (ROOT / "docs" / "reference" / "cli.md").read_text()
    of_serve = "\n".join(
        line for line in SECURITY_PAGE.splitlines() if "tests.soak" not in line and "Suite" not in line
    )
    flags = set(re.findall(r"`(--[a-z-]+)", of_serve))

    assert {flag for flag in flags if flag not in serve} == set()


def test_its_limits_are_those_of_the_code() -> None:
    told, ours = limits(), HttpLimits()
    expected = {
        "body of a request": (
            f"{ours.max_body_bytes // MIB} MiB; {MOST_VALUES:,} values, {MOST_CONTAINERS:,} lists and objects"
        ),
        "bodies that have not come whole, together": (
            f"{ours.max_unfinished_bytes // MIB} MiB; the one that began first makes room"
        ),
        "open connections; from one address": (
            f"{ours.max_connections:,}; {ours.max_connections_per_address:,}"
        ),
        "memory of an answer until it is sent; of all answers of the engine": (
            f"{ours.max_response_bytes // MIB} MiB; eight times that"
        ),
        "requests waiting to be prepared: texts, conversations, longer than 128 Ki characters, grammars": (
            f"{preparation.MOST_ORDINARY}, {preparation.MOST_ORDINARY}, {preparation.MOST_LONG}, "
            f"{preparation._MOST_GRAMMARS}; then 429"
        ),
        "requests for vectors waiting to be cut into tokens: short, longer than 256 Ki characters": (
            f"{preparation.MOST_ORDINARY}, {preparation.MOST_LONG}; then 429"
        ),
        "responses kept for `previous_response_id`; their characters; seconds": (
            f"{responses.MOST_KEPT:,}; {responses.MOST_KEPT_CHARACTERS >> 20} Mi; {responses.STORED_S:,.0f}"
        ),
        "compiling a grammar": (
            f"{guides.BOUNDS.seconds:g} s of processor time, {guides.BOUNDS.memory_bytes // MIB} MiB"
        ),
        "writing a conversation out by the model's template": (
            f"{chat.BOUNDS.seconds:g} s of processor time, {chat.BOUNDS.memory_bytes // MIB} MiB, "
            f"{chat.MOST_CHARACTERS >> 20} Mi characters"
        ),
        "integers in requests (`max_tokens`, `top_k`)": f"{schemas.MOST_INT:,}",
    }

    assert {name: told.get(name) for name in expected} == expected
    assert f"{embeddings.MOST_INPUTS:,}; the depths" in SECURITY_PAGE
    assert f"{grammar_limits.MOST_INTERSECTION:,}" in SECURITY_PAGE


DRAWN = GUIDE / "another-machine.md"
PICTURE = GUIDE / "plan.svg"


def test_the_plan_s_picture_is_what_the_guide_s_commands_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIXTURES / "topology" / "lstopo_v2.xml", "machine.xml")
    shutil.copy(FIXTURES / "guide" / "llama-3-8b.json", "config.json")
    (plan,) = (
        command for command in commands(DRAWN.read_text(encoding="utf-8")) if command.endswith("> plan.json")
    )
    (draw,) = (
        command
        for command in commands(DRAWN.read_text(encoding="utf-8"))
        if command.endswith("--svg plan.svg")
    )

    done = phasewise(*plan.partition(" > ")[0].replace("\\\n", " ").split()[1:])
    Path("plan.json").write_text(done.stdout, encoding="utf-8")
    phasewise(*draw.split()[1:])

    assert Path("plan.svg").read_bytes() == PICTURE.read_bytes(), (
        f"stale picture: run the commands of {DRAWN}"
    )


INDEX = run_path(str(Path(__file__).parents[2] / "docs" / "site_index.py"))
NUMBERS = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))


@given(drawn=st.sets(NUMBERS, min_size=1, max_size=6))
@examples(20)
def test_every_version_is_listed_and_latest_is_the_newest(
    tmp_path_factory: pytest.TempPathFactory, drawn: set[tuple[int, int, int]]
) -> None:
    site = tmp_path_factory.mktemp("site")
    names = {number: ".".join(map(str, number)) for number in drawn}
    for name in (*names.values(), "assets"):
        (site / name).mkdir()

    INDEX["write"](site)
    INDEX["write"](site)  # a version more, or the same again

    listed = re.findall(r'href="([\d.]+)/"', (site / "index.html").read_text())
    assert listed == [names[number] for number in sorted(drawn, reverse=True)]
    (leads,) = re.findall(r"url=\.\./([\d.]+)/", (site / "latest" / "index.html").read_text())
    assert leads == names[max(drawn)]

"""Promises of docs/guide/planning-capacity.md about `simulate` and `provision` hold, with its own cluster.

That its commands run is tested with all pages, machines from a database and from XML with the commands.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.papers.machine_types import machine_types
from phasewise.cluster.simulated.steps import Curve
from tests.cli.command import fields_of, run
from tests.support import ROOT

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

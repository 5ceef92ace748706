"""`phasewise simulate` and `phasewise provision`: what they print, and bad input in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from phasewise.kerneldb.records import ServedStep
from phasewise.kerneldb.store import open_store
from tests.cli.command import fields_of, run
from tests.support.machines.kerneldb_examples import STEP_TIME

LENGTHS = "lognormal:800,0.8/30,0.6"
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]}
{"timestamp": 9000, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 4]}
"""


def fails(*arguments: object) -> str:
    """The last line that is said of bad input; a table of designs may come before it."""
    done = run(*arguments)
    assert done.exit_code in (1, 2), done
    assert "Traceback" not in done.output
    return done.stderr.splitlines()[-1]


def test_a_cluster_is_simulated_as_text_and_json() -> None:
    options = ("simulate", LENGTHS, "--pools", "prompt=2*h100,token=1*a100", "--rate", 4, "--duration", 20)

    text = run(*options, "--slo", "table6")
    fields = fields_of(*options, "--slo", "table6")

    assert text.exit_code == 0, text.output
    assert "TTFT slowdown" in text.stdout
    assert "SLO table6: " in text.stdout
    assert fields["policy"] == "splitwise"
    assert [pool["count"] for pool in fields["pools"]] == [2, 1]
    assert set(fields["times_s"]) == {"ttft", "tbt", "e2e"}
    assert fields["kv_transfers"]["count"] <= fields["n_requests"]
    assert fields["slo"]["kept"] == (not fields["slo"]["broken"])
    assert run(*options, "--slo", "table6").stdout == text.stdout


def test_prefixes_of_a_mooncake_trace_are_reused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(MOONCAKE, encoding="utf-8")
    options = ("simulate", trace, "--pools", "mixed=1*h100", "--policy", "prefix-aware", "--json")

    without, reused = (fields_of(*options, *extra) for extra in ((), ("--prefix-reuse",)))

    assert reused["times_s"]["ttft"]["p50"] < 0.8 * without["times_s"]["ttft"]["p50"]


def test_a_machine_is_made_from_a_tuning_database(tmp_path: Path) -> None:
    db, cluster = tmp_path / "tuning.db", tmp_path / "cluster.toml"
    steps = [
        ("prefill", 64, 1, 0, 64),
        ("prefill", 256, 1, 0, 256),
        ("decode", 1, 1, 64, 4),
        ("decode", 1, 8, 64, 8),
    ]
    with open_store(db) as store:
        store.add(
            dataclasses.replace(
                STEP_TIME,
                plan_json=STEP_TIME.plan_json.replace("decode", phase),
                step=ServedStep(phase, tokens, sequences, context),
                estimate_ns=ms * 1_000_000,
            )
            for phase, tokens, sequences, context, ms in steps
        )
    cluster.write_text(
        'model = "mine"\n[[pool]]\nrole = "mixed"\nmachine = "db"\ncount = 2\n[machines.db]\n'
        "memory_bytes = 8_000_000_000\n[machines.db.models.mine]\nweight_bytes = 1_000_000_000\n"
        "kv_bytes_per_token = 100_000\nn_layers = 22\n",
        encoding="utf-8",
    )
    options = ("simulate", "fixed:128/9", "--rate", 2, "--duration", 10, "--pools", cluster, "--json")

    done = run(*options, "--db", db, "--machine-from-db", "AuthenticAMD")

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["times_s"]["ttft"]["p50"] == pytest.approx(0.128, rel=0.2)
    assert "no timed steps of a machine" in fails(*options, "--db", db, "--machine-from-db", "Intel")
    assert "no step times" in fails(*options)


def test_a_machine_is_modelled_from_its_xml(tmp_path: Path) -> None:
    """Its steps are computed; a prompt of 128 tokens takes longer than one token."""
    data = Path(__file__).parents[2] / "data"
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        'model = "mine"\n[[pool]]\nrole = "mixed"\nmachine = "xml"\ncount = 1\n[machines.xml]\n'
        "memory_bytes = 64_000_000_000\n[machines.xml.models.mine]\nweight_bytes = 16_000_000_000\n"
        "kv_bytes_per_token = 131_072\nn_layers = 32\n",
        encoding="utf-8",
    )
    described = f"{data}/topology/lstopo_v2.xml:{data}/guide/llama-3-8b.json"
    options = ("simulate", "fixed:128/9", "--rate", 0.1, "--duration", 60, "--pools", cluster, "--json")

    done = run(*options, "--machine-from-xml", described)

    assert done.exit_code == 0, done.output
    times = json.loads(done.stdout)["times_s"]
    assert 0 < times["tbt"]["p50"] < times["ttft"]["p50"]
    assert run(*options, "--machine-from-xml", "only.xml").exit_code == 2
    assert fails(*options, "--machine-from-xml", "absent.xml:absent.json")
    whole = (data / "topology" / "lstopo_v2.xml").read_text(encoding="utf-8")
    for text in ("", "no XML", '<svg xmlns="http://www.w3.org/2000/svg"/>', whole[: len(whole) // 2]):
        (tmp_path / "other.xml").write_text(text, encoding="utf-8")
        said = fails(*options, "--machine-from-xml", f"{tmp_path}/other.xml:{data}/guide/llama-3-8b.json")
        assert "other.xml" in said
        assert len(said.splitlines()) == 1


def test_the_cheapest_cluster_for_a_rate() -> None:
    options = ("provision", LENGTHS, "--rate", 6, "--duration", 15, "--most", 8)

    text = run(*options, "--design", "mixed:h100,split:h100/h100")
    fields = fields_of(*options, "--design", "baseline", "--minimise", "power")

    assert text.exit_code == 0, text.output
    assert "split:h100/h100" in text.stdout
    assert [design["design"] for design in fields["designs"]] == ["mixed:a100", "mixed:h100"]
    for design in fields["designs"]:
        assert design["reason"] or design["slo"]["kept"]


def test_the_highest_rate_for_a_budget() -> None:
    options = ("provision", LENGTHS, "--design", "mixed:h100,split:h100/a100", "--duration", 10)
    kept = ("--cost", 130, "--slo", "ttft=20s,tbt=2s")

    result = run(*options, *kept, "--json")

    assert result.exit_code == 0, result.output
    for design in json.loads(result.stdout)["designs"]:
        assert design["cost"] <= 130
        assert design["rate"] % 5 == 0
    assert "pay for" in fails(*options, "--cost", 10)


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "absent.csv", "--pools", "mixed=1*h100"),
        ("simulate", LENGTHS, "--pools", "mixed=1*h100"),
        ("simulate", LENGTHS, "--pools", "mixed=1*b200", "--rate", 1),
        ("simulate", LENGTHS, "--pools", "absent.toml", "--rate", 1),
        ("simulate", LENGTHS, "--pools", "prompt=1*h100", "--rate", 1),
        ("simulate", LENGTHS, "--pools", "mixed=1*h100", "--rate", 1, "--slo", "fast"),
        ("simulate", LENGTHS, "--pools", "mixed=1*h100", "--rate", 1e9),
        ("provision", LENGTHS, "--rate", 1, "--design", "best"),
        ("provision", LENGTHS, "--rate", 60, "--most", 1, "--duration", 5, "--design", "mixed:h100"),
        ("provision", LENGTHS),
        ("provision", LENGTHS, "--rate", 1, "--cost", 1),
    ],
)
def test_bad_input_is_told_and_nothing_is_computed(arguments: tuple[object, ...]) -> None:
    assert fails(*arguments)

"""Splitwise's characterisation by our model of machines: shares are shares, and what must grow does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers.splitwise_profile import characterization, share_within
from phasewise.cluster.simulated.arrivals import poisson
from phasewise.cluster.simulated.simulate import ClusterSpec, Pool, simulate
from phasewise.cluster.simulated.spec_file import DEFAULT_MODEL, MachineCatalogue

LENGTHS = [(1500, 13), (800, 40), (3000, 5)]
POWERS = {1: (0.6, 0.4), 2: (0.9, 0.4), 4: (1.0, 0.41), 8: (0.0, 0.0)}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Of eight sequences nothing was measured."""
    head = "model,hardware,tensor_parallel,batch_size,peak_power,average_power"
    rows = [f"llama2-70b,a100-80gb,8,{n},{peak},{mean}" for n, (peak, mean) in POWERS.items()]
    path = tmp_path / "perf.csv"
    path.write_text("\n".join([head, *rows, "llama2-70b,h100-80gb,8,1,9,9"]) + "\n")
    return path


def test_every_figure_has_its_rows_and_they_are_of_the_trace_and_the_profile(profile: Path) -> None:
    rows = list(characterization(MachineCatalogue(DEFAULT_MODEL)["h100"], LENGTHS, 20.0, profile))
    told = {str(row["what"]): row["ours"] for row in rows}

    assert {str(row["figure"])[0] for row in rows} == set("345678")
    assert (told["prompt, median of tokens"], told["answer, median of tokens"]) == (1500, 13)
    assert told["peak power over the TDP, of 1, 2, 4 sequences"] == "0.60, 0.90, 1.00"
    rates = [float(text) for text in str(told["tokens/s of 1 to 64 sequences over 1"]).split(", ")]
    assert rates == sorted(rates)
    assert rates[0] == 1


def test_memory_is_the_weights_and_a_sequences_bytes_for_each(profile: Path) -> None:
    kind = MachineCatalogue(DEFAULT_MODEL)["h100"]
    rows = [row for row in characterization(kind, LENGTHS, 20.0, profile) if row["figure"] == "7"]

    single, many, most = (float(str(row["ours"])) for row in rows)
    sequence = 1500 * kind.kv_bytes_per_token / 1e9
    weights = kind.weight_bytes / 1e9
    assert single - weights == pytest.approx(sequence)
    assert many - weights == pytest.approx(64 * sequence)
    assert weights + most * sequence <= kind.memory_bytes / 1e9 < weights + (most + 1) * sequence


def test_a_share_grows_with_its_bound_up_to_all_of_the_time() -> None:
    pool = Pool("mixed", MachineCatalogue(DEFAULT_MODEL)["h100"], 1)
    uses = simulate(ClusterSpec((pool,)), poisson(LENGTHS, 2.0, 20.0, 0, "columns")).machines
    busy_s = sum(use.busy_s for use in uses)

    shares = [share_within(uses, most, busy_s) for most in (0, 1, 20, 2048, 1 << 30)]

    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(1)
    assert share_within((), 20, 0.0) == 0

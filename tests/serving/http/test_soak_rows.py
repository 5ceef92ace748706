"""tests/soak in short: rows of faults and attacks (a tiny model), fuzzing, and what it judges memory by."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from phasewise.serving.grammar.guides import GuideCompiler, TokenView
from tests.soak import flatness
from tests.support import ROOT
from tests.support.models.encoder_models import write_encoder
from tests.support.servers.api_bombs import KINDS, bombs
from tests.support.servers.api_fuzz import drop, generate
from tests.support.servers.fake_embedding import embedding_server
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.tiers import first_is_smoke, n_examples

FAULTS = ["killed_while_starting", "killed_in_each_phase", "killed_under_migration", "disk_full"]
ATTACKS = ["schemas_that_explode", "templates_that_burn", "turns_in_contents"]


def assert_row_holds(program: str, row: str) -> None:
    command = [sys.executable, "-m", f"tests.soak.{program}", "--model", "tiny", "--quick", "--only", row]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout.strip())

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"ok   {row}: ")


@pytest.mark.slow
@pytest.mark.parametrize("row", FAULTS)
def test_a_server_holds_what_it_promises(row: str) -> None:
    assert_row_holds("faults", row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ATTACKS)
def test_an_attack_has_no_effect_on_others(row: str) -> None:
    assert_row_holds("hostile", row)


def walk(seed: int, share_kept: float, n: int = 800) -> np.ndarray:
    """Noise whose neighbours are alike, of standard deviation 1."""
    dice = np.random.default_rng(seed)
    y = np.zeros(n)
    for place in range(1, n):
        y[place] = share_kept * y[place - 1] + dice.normal() * (1 - share_kept**2) ** 0.5
    return y


def samples(y: np.ndarray, rise: float = 0.0) -> list[tuple[float, float]]:
    x = np.linspace(0, 20, len(y))
    return list(zip(x.tolist(), (100 + rise * x + y).tolist(), strict=True))


@pytest.mark.parametrize("rise", [-0.3, 0.0, 0.08, 2.0])
def test_a_line_without_noise_is_found(rise: float) -> None:
    slope = flatness.slope(samples(np.zeros(800), rise))

    assert slope.value == pytest.approx(rise, abs=1e-9)
    assert slope.low == pytest.approx(rise, abs=1e-9)
    assert slope.high == pytest.approx(rise, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rise", [0.0, 0.05])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(rise: float) -> None:
    slopes = [flatness.slope(samples(0.1 * walk(seed, 0.8), rise)) for seed in range(20)]

    assert sum(slope.low <= rise <= slope.high for slope in slopes) >= 16


def resident(seed: int, bytes_a_request: float) -> list[tuple[float, float]]:
    """Requests ended and bytes resident, the first quarter left out.

    The most that was ever in use, where that goes up and down by 40 KiB (standard deviation).
    """
    requests = np.linspace(0, 20000, 800)
    in_use = bytes_a_request * requests + 40960 * walk(seed, 0.9)
    pages = np.maximum.accumulate(np.ceil((in_use - in_use[0]) / 4096))
    return list(zip(requests.tolist(), (4096.0 * (25000 + pages)).tolist(), strict=True))[200:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_is_smoke(range(8)))
def test_a_load_of_which_nothing_is_kept_is_flat(seed: int) -> None:
    assert flatness.is_flat(flatness.slope(resident(seed, 0.0)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_is_smoke(range(8)))
@pytest.mark.parametrize("bytes_a_request", [24, 40, 1000])
def test_one_block_kept_of_every_request_is_not(bytes_a_request: float, seed: int) -> None:
    """An integer in a list is 40 bytes; the least leak that is always found beside this noise is 24."""
    slope = flatness.slope(resident(seed, bytes_a_request))

    assert not slope.is_zero_within_noise
    assert not flatness.is_flat(slope)


def test_one_late_step_is_no_slope() -> None:
    late = [(n, 1e8 + (132 * 1024.0 if n > 17000 else 0.0)) for n in range(5000, 20000, 20)]

    assert flatness.is_flat(flatness.slope(late))


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_is_smoke(range(8)))
def test_steps_that_stop_are_flat_in_what_follows_and_a_stair_without_end_is_not(seed: int) -> None:
    dice = np.random.default_rng(seed)
    requests = np.linspace(5000, 20000, 800)
    stops = 4096 * np.searchsorted(np.sort(dice.uniform(0, 9000, 200)), requests)
    goes_on = 4096 * np.searchsorted(np.sort(dice.uniform(0, 20000, 120)), requests)

    assert flatness.is_flat(flatness.slope(list(zip(requests.tolist(), stops.tolist(), strict=True))[300:]))
    assert not flatness.is_flat(flatness.slope(list(zip(requests.tolist(), goes_on.tolist(), strict=True))))


def test_a_run_that_says_nothing_does_not_pass() -> None:
    noisy = flatness.slope(samples(1e6 * walk(0, 0.0)))

    assert noisy.is_zero_within_noise
    assert not flatness.is_flat(noisy)
    with pytest.raises(ValueError, match="tell no slope"):
        flatness.slope(samples(np.zeros(10)))
    with pytest.raises(ValueError, match="tell no slope"):
        flatness.slope([(1.0, 1.0)] * 100)


def test_a_leak_rises_alike_in_every_quarter_and_first_uses_die_out() -> None:
    x = np.linspace(0, 20, 800)
    levels_off = list(zip(x.tolist(), (100 + 12 * np.minimum(x, 3.0)).tolist(), strict=True))

    assert flatness.rises(samples(np.zeros(800), 0.08)) == pytest.approx([0.4] * 4)
    assert flatness.rises(levels_off) == pytest.approx([36.0, 0.0, 0.0, 0.0], abs=0.1)


BOUND_S = 120.0  # against hanging; the longest take part of a second on a quiet machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    guides = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))
    folder = tmp_path_factory.mktemp("batches")
    with fake_server(
        model=lambda served: replace(served, guides=guides), batch_dir=folder, batch_bytes=1 << 20
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_is_smoke(KINDS))
def test_no_bomb_hangs_breaks_or_surprises_the_server(server: FakeServer, kind: str) -> None:
    drop(server.url, bombs("fake", kind), BOUND_S)
    server.wait_until_idle()


@pytest.mark.slow
def test_generated_requests_get_only_what_the_document_states(server: FakeServer) -> None:
    tally = generate(server.url, n_examples(30), BOUND_S)
    server.wait_until_idle()

    assert tally.statuses["200"] > 0


def test_the_document_is_valid_and_names_every_route(server: FakeServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]

    assert {route.path.replace(":path", "") for route in server.app.routes} == set(document["paths"])
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


@pytest.mark.slow
def test_generated_requests_for_vectors_get_only_what_the_document_states(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    with embedding_server(folder) as server:
        tally = generate(server.url, n_examples(40), BOUND_S)

        assert tally.statuses["200"] > 0
        assert server.client.n_live == 0


def test_no_bytes_break_the_server() -> None:
    command = [sys.executable, "-m", "tests.soak.fuzz_http", "--inputs", str(n_examples(1500))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "200: " in ran.stdout


SWALLOWS = """
import os, signal, sys, time, weakref
from tests.soak.served_process import leave_no_server

leave_no_server()

class Thing:
    pass

thing = Thing()
watched = weakref.ref(thing, lambda _: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.01)))
del thing
print("swallowed", flush=True)
time.sleep(60)
"""


def test_sigterm_ends_a_script_even_where_a_callback_swallows_the_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout == "swallowed\n"
    assert done.returncode == 128 + signal.SIGTERM

"""Claims to cores: nobody has one twice, and a process that is killed gives its own back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phasewise.serving.errors import RanksError
from phasewise.serving.processes.core_claims import CoreClaims, claim_cores, claimed_on_host

ROOT = Path(__file__).parents[2]
CLAIMS = """
import sys, time
from phasewise.serving.processes.core_claims import claim_cores
claims = claim_cores("node", range(4), 3, scope=sys.argv[1])
print(*claims.cores, flush=True)
time.sleep(600)
"""


@pytest.fixture
def scope() -> str:
    """Claims of this test's own."""
    return f"phasewise-test-{os.getpid()}-{random.getrandbits(64):x}"


def test_drawn_claims_of_a_node_never_overlap(scope: str) -> None:
    drawn = random.Random(3)
    held: list[CoreClaims] = []
    for _ in range(300):
        taken = {core for claims in held for core in claims.cores}
        count = drawn.randint(1, 5)
        if held and drawn.random() < 0.5:
            held.pop(drawn.randrange(len(held))).close()
            continue
        first = tuple(drawn.sample(range(16), drawn.randint(0, count)))
        try:
            claims = claim_cores("node", range(16), count, first, scope)
        except RanksError:
            assert 16 - len(taken) < count
            continue
        assert len(set(claims.cores)) == count
        assert not taken & set(claims.cores)
        assert taken & set(first) or claims.cores[: len(first)] == first
        assert not claims.shared
        held.append(claims)
    for claims in held:
        claims.close()


def test_claims_at_the_same_time_never_overlap(scope: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        held = list(pool.map(lambda _: claim_cores("node", range(24), 3, scope=scope), range(8)))

    assert sorted(core for claims in held for core in claims.cores) == list(range(24))
    for claims in held:
        claims.close()


def test_nodes_of_one_host_share_its_cores_only_where_they_must(scope: str) -> None:
    first = claim_cores("a", range(4), 2, scope=scope)
    second = claim_cores("b", range(4), 2, scope=scope)
    third = claim_cores("c", range(4), 3, scope=scope)

    assert not set(first.cores) & set(second.cores)
    assert (first.shared, second.shared) == ((), ())
    assert set(third.shared) == set(third.cores)
    for claims in (first, second, third):
        claims.close()


def test_what_another_program_computes_on_is_taken_last(scope: str) -> None:
    with claimed_on_host([0, 1], scope):
        apart, everything = (claim_cores(node, range(4), n, scope=scope) for node, n in (("a", 2), ("b", 4)))
        assert apart.cores == (2, 3)
        assert set(everything.shared) == set(range(4))
    apart.close()
    everything.close()
    after = claim_cores("a", range(4), 2, scope=scope)
    assert after.cores == (0, 1)
    after.close()


def test_a_process_that_is_killed_gives_its_cores_back(scope: str) -> None:
    command = [sys.executable, "-c", CLAIMS, scope]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline().split() == ["0", "1", "2"]
        with pytest.raises(RanksError, match="2 cores are asked for, 1 of 4 are free") as refusal:
            claim_cores("node", range(4), 2, scope=scope)
        assert "\n" not in str(refusal.value)
        child.send_signal(signal.SIGKILL)
        child.wait()
    after = claim_cores("node", range(4), 4, scope=scope)
    assert after.cores == (0, 1, 2, 3)
    after.close()

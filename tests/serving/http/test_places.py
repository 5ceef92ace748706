"""Whose places a newcomer gets when all are taken: laws over drawn arrivals, then a server."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.http.answers.places import displaced
from phasewise.serving.http.http_settings import HttpLimits
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import until
from tests.support.tiers import examples

MOST = 24
KEYS = ("one", "two", "three", "newcomer")


@dataclass(eq=False)
class One:
    owner: str
    n_places: int


@examples(200)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(KEYS), st.integers(1, 8), st.booleans()), min_size=20, max_size=120
    )
)
def test_places_go_from_those_who_hold_more_and_a_fair_share_is_never_refused(
    arrivals: list[tuple[str, int, bool]],
) -> None:
    waiting: list[One] = []
    held: Counter[str] = Counter()
    for owner, n_new, ends in arrivals:
        if ends and waiting:
            held[waiting[0].owner] -= waiting[0].n_places
            del waiting[0]
        n_missing = held.total() + n_new - MOST
        others = displaced(n_missing, owner, n_new, held, waiting)

        before = held.copy()
        for other in others:
            assert other is [request for request in waiting if request.owner == other.owner][-1]  # the newest
            assert held[other.owner] > held[owner] + n_new
            waiting.remove(other)
            held[other.owner] -= other.n_places
        is_refused = n_missing > 0 and not others
        if is_refused and n_new == 1:
            n_clients = len({request.owner for request in waiting} | {owner})
            assert held[owner] >= MOST // n_clients
        if not is_refused:
            waiting.append(One(owner, n_new))
            held[owner] += n_new
        else:
            assert held == before
        assert held.total() <= MOST


def test_what_has_begun_never_gives_way() -> None:
    assert displaced(1, "newcomer", 1, {"one": MOST}, []) == []


def ask(server: FakeServer, key: str, n: int = 1, **fields: object) -> httpx.Response:
    return server.post("/v1/completions", key, prompt="a", n=n, ignore_eos=True, **fields)


def test_greedy_clients_together_keep_no_newcomer_out() -> None:
    """Three keys hold all places, none more than its share. The newest request that waits is told 429."""
    limits = HttpLimits(api_keys=KEYS, max_live_requests=24, max_waiting_requests=24, max_sequences_per_key=8)
    with fake_server(limits, max_sequences=2) as server, ThreadPoolExecutor(13) as clients:
        gate = threading.Event()
        server.ranks.before_step = lambda: gate.wait(60) and None
        greedy = [
            clients.submit(ask, server, key, 2, max_tokens=20, stream=index % 2 == 0)
            for key in KEYS[:3]
            for index in range(4)
        ]
        until(lambda: server.client.n_live == 24, "three keys hold all places")

        newcomer = clients.submit(ask, server, KEYS[3], max_tokens=1)
        until(lambda: any(future.done() for future in greedy), "a greedy request gives way")
        gate.set()
        served = newcomer.result()
        said = [future.result() for future in greedy]
        server.wait_until_idle()

    assert served.status_code == 200
    refused = [answer for answer in said if answer.status_code != 200]
    assert [answer.status_code for answer in refused] == [429]
    assert int(refused[0].headers["retry-after"]) >= 1

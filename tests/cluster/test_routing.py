"""Routing: laws over random orders of events, the paper's choices, and reports of held prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.routing import (
    OWN_TOKEN_COUNTS,
    POLICIES,
    ROLES,
    UNLIKE,
    Ask,
    Assignment,
    HeldBlocks,
    Limits,
    ReportRefused,
    Role,
    Router,
)
from phasewise.serving.scheduling.held_prefixes import BLOCK_TOKENS, MOST_KEYS, HeldReport
from tests.support.clusters import check_counts
from tests.support.tiers import examples

SPLIT: list[tuple[Role, int]] = [("prompt", 10_000), ("prompt", 10_000), ("token", 10_000), ("token", 10_000)]


def router(machines: list[tuple[Role, int]], policy: str = "splitwise", **limits: int) -> Router:
    return Router(machines, policy, Limits(**limits))


def ask(name: int | str, prompt: int = 100, answer: int = 10, prefix: tuple[int, ...] = ()) -> Ask:
    return Ask(str(name), prompt, answer, prefix)


def test_the_shortest_queue_of_each_pool_is_joined() -> None:
    """Pending prompt tokens decide on one side, context to read on the other; of equals the first."""
    route = router(SPLIT)

    chosen = [route.assign(ask(0, 500, 10)), route.assign(ask(1, 100, 900)), route.assign(ask(2, 100, 10))]

    assert chosen == [Assignment(0, 2), Assignment(1, 3), Assignment(1, 2)]


def test_a_done_prompt_shortens_its_queue() -> None:
    route = router(SPLIT)
    route.assign(ask(0, 500))
    route.prompt_done("0")

    assert route.assign(ask(1)).prompt == 0


def test_overflow_takes_a_token_machine_and_gives_it_back() -> None:
    """Its own pool, then the mixed one, then the opposite one; back when its prompts are done."""
    route = router(SPLIT, prompt_overflow_tokens=1000)
    for name in range(2):
        route.assign(ask(name, 900))

    assert route.assign(ask(2, 900)).prompt == 2
    assert route.roles == ("prompt", "prompt", "mixed", "token")
    assert route.assign(ask(3, 50)).prompt == 0  # fits beside 900
    assert route.assign(ask(4, 80)).prompt == 1
    assert route.assign(ask(5, 90)).prompt == 2  # mixed before another token machine

    for name in ("2", "5"):
        route.prompt_done(name)
    assert route.roles == ("prompt", "prompt", "token", "token")


def test_full_memory_takes_a_prompt_machine_and_gives_it_back() -> None:
    route = router(SPLIT)
    for name in range(2):
        route.assign(ask(name, 100, 9800))
        route.prompt_done(str(name))

    assigned = route.assign(ask(2, 100, 500))
    assert assigned.token in (0, 1)
    assert route.roles[assigned.token] == "mixed"

    route.finished("2")
    assert route.roles == ("prompt", "prompt", "token", "token")


def test_where_all_is_full_both_phases_run_on_the_least_loaded() -> None:
    route = router([("prompt", 1000), ("token", 1000)], prompt_overflow_tokens=100)
    for name in range(4):
        route.assign(ask(name, 450, 10))

    assignment = route.assign(ask(9, 450, 10))

    assert assignment.prompt == assignment.token


def test_short_prompts_stay_with_their_answers() -> None:
    route = router(SPLIT, split_above_tokens=64)

    assert route.assign(ask(0, 64)) == Assignment(2, 2)
    assert route.assign(ask(1, 65)).prompt in (0, 1)


REPLICAS: list[tuple[Role, int]] = [("mixed", 100_000), ("mixed", 100_000)]
PREFIX = tuple(range(100, 116))
LONG = len(PREFIX) * BLOCK_TOKENS + 10


def holding(index: int = 1, machines: list[tuple[Role, int]] = REPLICAS) -> Router:
    """One machine has reported `PREFIX`."""
    route = router(machines, "prefix-aware")
    route.tells(index, 0.0, HeldReport(1, PREFIX))
    return route


def test_a_held_beginning_is_worth_so_many_times_its_tokens_and_no_more() -> None:
    """The machine that holds all but 10 tokens of a prompt gets it, until its queue is longer by more."""
    n_held = len(PREFIX) * BLOCK_TOKENS
    worth = OWN_TOKEN_COUNTS * n_held
    for n_queued, chosen in ((worth - 2, 1), (worth, 0)):
        route = holding()
        route.assign(ask("idle", 1))
        route.finished("idle")
        route.assign(ask("queued", n_held + n_queued, 10, PREFIX))
        assert route.assign(ask(0, LONG, 10, PREFIX)) == Assignment(chosen, chosen)
        check_counts(route)


def test_a_hot_beginning_spreads_when_its_machine_is_busy() -> None:
    """By a long queue, or by answers that fill its memory. The other machine holds it from then on."""
    busy = holding()
    busy.assign(ask("busy", (OWN_TOKEN_COUNTS + 2) * LONG, 10, PREFIX))
    assert busy.assign(ask(0, LONG, 10, PREFIX)).prompt == 0
    assert busy.assign(ask(1, LONG, 10, PREFIX)).prompt == 0
    assert busy.counts[0].tokens_expected == LONG - 10

    full = holding(1, [("mixed", 5 * LONG), ("mixed", 5 * LONG)])
    taken = [full.assign(ask(name, LONG, 10, PREFIX)).prompt for name in range(8)]
    assert taken == [1, 1, 1, 1, 0, 0, 0, 0]
    check_counts(full)


def test_a_slow_machine_is_asked_for_less() -> None:
    """By what the machines tell of their pace: one that is ten times as slow gets a tenth of the tokens, once
    the other has a queue."""
    route = router(REPLICAS, "prefix-aware")
    route.tells(0, 0.010)
    route.tells(1, 0.001)

    chosen = [route.assign(ask(name, 500)).prompt for name in range(150)]

    assert 8 <= chosen[-110:].count(0) <= 12


@pytest.mark.parametrize("slower", [1.0, 1.3, 0.99 * UNLIKE])
def test_machines_that_are_nearly_as_fast_take_turns(slower: float) -> None:
    """Idle ones too: else the one that was a little faster would get every prompt, and all answers."""
    route = router(REPLICAS, "prefix-aware")
    route.tells(0, 0.001 * slower)
    route.tells(1, 0.001)

    chosen = list[int]()
    for name in range(40):  # answers go on when their prompts are done
        chosen.append(route.assign(ask(name, 500)).prompt)
        route.prompt_done(str(name))

    assert chosen.count(0) == chosen.count(1)


@pytest.mark.parametrize("pace_s", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_pace_that_is_none_is_not_heard(pace_s: float) -> None:
    route = router(REPLICAS, "prefix-aware")
    route.tells(0, pace_s)
    route.tells(1, 0.001)

    assert {route.assign(ask(name, 500)).prompt for name in range(4)} == {0, 1}


def test_what_is_forgotten_attracts_nobody() -> None:
    route = holding()
    route.tells(1, 0.0, HeldReport(2, (), PREFIX))

    assert route.assign(ask(0, LONG, 10, PREFIX)).prompt == 0


def test_a_machine_that_was_started_anew_holds_nothing() -> None:
    route = holding()
    route.leave(1)
    route.back(1, 100_000)
    route.tells(1, 0.0, HeldReport(1))

    assert route.n_blocks(1) == 0
    assert route.assign(ask(0, LONG, 10, PREFIX)).prompt == 0


def test_what_is_on_its_way_counts_as_held() -> None:
    """Two requests that begin alike come at once: the second one goes where the first one is computed."""
    route = router(REPLICAS, "prefix-aware")
    route.assign(ask(0, 300))

    assert [route.assign(ask(name, LONG, 10, PREFIX)).prompt for name in (1, 2)] == [1, 1]
    for name in (1, 2):
        route.finished(str(name))
    route.assign(ask(3, 300))
    assert route.assign(ask(4, LONG, 10, PREFIX)).prompt == 0  # of equal ones the first


def test_the_next_turn_of_a_conversation_is_computed_where_the_last_was_answered() -> None:
    """In divided pools: unless it has more new tokens than `split_above_tokens`, or a queue is there."""
    route = router(SPLIT, "prefix-aware", split_above_tokens=64)
    route.tells(3, 0.0, HeldReport(1, PREFIX))

    assert route.assign(ask(0, LONG, 10, PREFIX)) == Assignment(3, 3)
    assert route.assign(ask(1, LONG + 100, 10, PREFIX)).prompt in (0, 1)


def test_a_queue_is_long_by_the_time_that_it_takes() -> None:
    """Without a number of tokens: a machine of 1 ms a token has a long queue at 1340 tokens."""
    route = Router(SPLIT, "splitwise", Limits(prompt_overflow_tokens=None))
    for index in range(4):
        route.tells(index, 0.001)
    for name in range(2):
        route.assign(ask(name, 900))

    assert [route.assign(ask(name, 440)).prompt for name in (2, 3)] == [0, 1]
    assert route.assign(ask(4, 100)).prompt in (2, 3)


@examples(100)
@given(
    homes=st.lists(st.sampled_from(ROLES), min_size=1, max_size=5),
    policy=st.sampled_from(tuple(POLICIES)),
    asks=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 12), st.integers(0, 3)), max_size=30),
)
def test_a_policy_is_deterministic(homes: list[Role], policy: str, asks: list[tuple[int, int, int]]) -> None:
    """The same events, the same choices; and what is counted of prefixes is what was asked for."""

    def choices() -> list[Assignment]:
        route = Router([(home, 5000) for home in homes], policy, Limits(64, 64))
        chosen = []
        for name, (prompt, n_blocks, ended) in enumerate(asks):
            prefix = tuple(range(min(n_blocks, prompt // BLOCK_TOKENS)))
            chosen.append(route.assign(ask(name, prompt, 10, prefix)))
            if ended and name >= ended:
                route.prompt_done(str(name - ended))
            check_counts(route)
        expected = sum(counts.tokens_expected for counts in route.counts)
        assert 0 <= expected < max(1, sum(prompt for prompt, _, _ in asks))
        return chosen

    try:
        assert choices() == choices()
    except ClusterError:
        assert "mixed" not in homes


@examples(200)
@given(
    homes=st.lists(st.sampled_from(ROLES), min_size=1, max_size=6),
    policy=st.sampled_from(tuple(POLICIES)),
    asks=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500)), max_size=30),
    data=st.data(),
)
def test_counts_are_those_of_the_requests_that_are_there(
    homes: list[Role], policy: str, asks: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever comes and ends in whatever order; when all has ended every machine is in its own pool."""
    machines = [(home, 4000) for home in homes]
    try:
        route = Router(machines, policy, Limits(prompt_overflow_tokens=2000))
    except ClusterError:
        assert "mixed" not in homes
        assert set(homes) != {"prompt", "token"}
        return
    live: list[str] = []
    for name, (prompt, answer) in enumerate(asks):
        assignment = route.assign(ask(name, prompt, answer))
        assert 0 <= min(assignment) <= max(assignment) < len(homes)
        live.append(str(name))
        check_counts(route)
        if data.draw(st.booleans()):
            route.prompt_done(data.draw(st.sampled_from(live)))
        if data.draw(st.booleans()):
            route.finished(live.pop(data.draw(st.integers(0, len(live) - 1))))
        check_counts(route)
    for request_id in live:
        route.finished(request_id)
    check_counts(route)
    assert not route._held
    assert list(route.roles) == homes


def test_a_request_is_assigned_once() -> None:
    route = router(SPLIT)
    route.assign(ask(0))

    with pytest.raises(ValueError, match="assigned already"):
        route.assign(ask(0))


sets_of_keys = st.lists(st.frozensets(st.integers(0, 9), max_size=8), max_size=12)


@examples(100)
@given(held=sets_of_keys, coming=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_changes_add_up(held: list[frozenset[int]], coming: list[tuple[int, int]]) -> None:
    """The blocks at a prompt's beginning are counted up to the first that is neither held nor coming."""
    blocks, before = HeldBlocks(8), frozenset[int]()
    for number, keys in enumerate(held, start=1):
        blocks.hear(HeldReport(number, tuple(keys - before), tuple(before - keys)))
        before = keys
        assert len(blocks) == len(keys)
        assert [blocks.n_first((key,)) for key in range(10)] == [key in keys for key in range(10)]
    for pair in coming:
        blocks.expect(pair)
    for pair in coming:
        assert blocks.n_first(pair) == 2
    for pair in coming:
        blocks.ended(pair)
    assert [blocks.n_first((key,)) for key in range(10)] == [key in before for key in range(10)]
    assert blocks.n_first(tuple(range(10))) == next((key for key in range(10) if key not in before), 10)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (HeldReport(3, (4,)), "report 3 of held prefixes came after report 1"),
        (HeldReport(0, (4,)), "report 0 of held prefixes came after report 1"),
        (HeldReport(2, (1,)), "it reports a prefix twice"),
        (HeldReport(2, (4, 4)), "it reports a prefix twice"),
        (HeldReport(2, (), (9,)), "it has forgotten a prefix that it did not report"),
        (HeldReport(2, (), (1, 1)), "it has forgotten a prefix that it did not report"),
        (HeldReport(2, (4, 5, 6)), "it reports 5 blocks of prefixes, but has room for 4"),
        (HeldReport(2, (-1,)), "it reports a key that is none"),
        (HeldReport(2, (1 << 64,)), "it reports a key that is none"),
        (HeldReport(2, tuple(range(10, 11 + MOST_KEYS))), f"more than {MOST_KEYS} keys"),
    ],
)
def test_a_report_that_cannot_be_true_ends_the_trust(report: HeldReport, says: str) -> None:
    """Until a first report says that the machine begins anew."""
    blocks = HeldBlocks(4)
    blocks.hear(HeldReport(1, (1, 2)))

    with pytest.raises(ReportRefused, match=says):
        blocks.hear(report)

    assert len(blocks) == 0
    blocks.hear(HeldReport(2, (3,)))
    assert blocks.n_first((3,)) == 0
    blocks.hear(HeldReport(1, (3,)))
    assert blocks.n_first((3,)) == 1

"""Reports of held prefixes: changes add up to what is held, and what cannot be true ends the trust."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.routing import HeldBlocks, ReportRefused
from phasewise.serving.scheduling.held_prefixes import MOST_KEYS, HeldReport
from tests.support.tiers import examples

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

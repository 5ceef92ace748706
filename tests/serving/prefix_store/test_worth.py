"""The order of eviction: worth decides, and nothing is left without its beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.prefix_store.folder import KeptBlock, order_of_leaving, to_leave, worth
from tests.support.tiers import examples

SECONDS, AGES, SIZES = st.floats(0, 10), st.floats(-5, 1e6), st.integers(1, 1 << 22)


@st.composite
def chains(draw: st.DrawFn) -> dict[bytes, KeptBlock]:
    """Blocks of several beginnings, some of which have branches, and some of which are gone."""
    blocks: dict[bytes, KeptBlock] = {}
    for number in range(draw(st.integers(0, 30))):
        parents = [name for name in blocks if draw(st.booleans())]
        parent = parents[-1] if parents else b"root" if draw(st.integers(0, 4)) else b"gone"
        begin = blocks[parent].begin + 128 if parents else 0 if parent == b"root" else 128
        blocks[b"%d" % number] = KeptBlock(parent, begin, draw(SIZES), draw(SECONDS), draw(AGES))
    return blocks


@examples(200)
@given(blocks=chains())
def test_whatever_leaves_those_that_stay_have_their_beginnings(blocks: dict[bytes, KeptBlock]) -> None:
    order = order_of_leaving(blocks)
    n_lost = sum(not is_reached(blocks, name) for name in blocks)

    assert sorted(order) == sorted(blocks)
    assert not any(is_reached(blocks, name) for name in order[:n_lost])
    for place, name in enumerate(order):
        parent = blocks[name].parent
        if is_reached(blocks, name) and parent in blocks:
            assert order.index(parent) > place


def is_reached(blocks: dict[bytes, KeptBlock], name: bytes) -> bool:
    while blocks[name].begin:
        name = blocks[name].parent
        if name not in blocks:
            return False
    return True


@examples(100)
@given(blocks=chains(), share=st.floats(0, 1.5))
def test_no_more_leave_than_must(blocks: dict[bytes, KeptBlock], share: float) -> None:
    n_bytes = sum(block.n_bytes for block in blocks.values())
    most = int(n_bytes * share)
    leaving = list(to_leave(blocks, most))
    left = n_bytes - sum(blocks[name].n_bytes for name in leaving)

    assert left <= most
    assert not leaving or left + blocks[leaving[-1]].n_bytes > most


@examples(100)
@given(seconds=st.floats(0.001, 10), n_bytes=SIZES, age_s=st.floats(0, 1e6))
def test_a_block_is_worth_more_for_seconds_and_less_for_bytes_and_age(
    seconds: float, n_bytes: int, age_s: float
) -> None:
    block = KeptBlock(b"", 0, n_bytes, seconds, age_s)

    assert worth(block._replace(seconds=2 * seconds)) > worth(block)
    assert worth(block._replace(n_bytes=2 * n_bytes)) < worth(block)
    assert worth(block._replace(age_s=2 * age_s + 1)) < worth(block)

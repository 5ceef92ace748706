"""Step times: curves, and steps cut as engines cut them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.simulated.steps import Curve, PromptPart, StepTimes, pieces
from phasewise.serving.batch import SequenceSlice
from phasewise.serving.ranks.first_rank import slices_at_once


def test_lines_join_the_points_and_are_prolonged() -> None:
    curve = Curve([(200, 3.0), (100, 1.0), (400, 4.0)])

    assert [curve.at(x) for x in (100, 150, 200, 300, 400)] == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert [curve.at(x) for x in (50, 0, 600)] == [0.0, -1.0, 5.0]


def test_one_point_is_the_same_everywhere() -> None:
    assert {Curve([(10, 2.0)]).at(x) for x in (0, 10, 999)} == {2.0}


@given(x=st.integers(0, 10_000))
def test_no_step_takes_no_time(x: int) -> None:
    """A prolonged line may fall below zero."""
    steps = StepTimes(Curve([(100, 0.1), (200, 0.5)]), Curve([(100, 0.1), (200, 0.5)]))

    assert steps.prefill_s(x) > 0
    assert steps.decode_s(1, x) > 0


PARTS = st.lists(st.builds(PromptPart, st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=8)


@given(parts=PARTS, most=st.integers(1, 50))
def test_a_simulated_step_is_cut_where_the_engine_cuts_it(parts: list[PromptPart], most: int) -> None:
    slices = [SequenceSlice(range(part.n_tokens), part.n_before, 0, True) for part in parts]
    cut = [[(len(piece.token_ids), piece.start) for piece in run] for run in slices_at_once(slices, most)]

    assert [[tuple(part) for part in piece] for piece in pieces(parts, most)] == cut
    assert sum(part.n_pairs for piece in pieces(parts, most) for part in piece) == sum(
        part.n_pairs for part in parts
    )
    assert list(pieces(parts, None)) == [parts]


@given(parts=PARTS, most=st.integers(1, 50))
def test_a_prefill_step_costs_what_its_tokens_and_their_pairs_do(parts: list[PromptPart], most: int) -> None:
    """On a machine of 1 ms a token and 10 us a pair, whose timed prompts bend upwards for their pairs."""
    alone = Curve([(n, 1e-3 * n + 1e-5 * PromptPart(n).n_pairs) for n in range(1, 401)])
    flat = Curve([(0, 0.0)])
    n_tokens, n_pairs = sum(part.n_tokens for part in parts), sum(part.n_pairs for part in parts)
    exact_s = pytest.approx(1e-3 * n_tokens + 1e-5 * n_pairs)

    assert StepTimes(alone, flat, prefill_context_s=1e-5).prompts_s(parts) == exact_s
    assert StepTimes(alone, flat, prefill_context_s=1e-5, rows_at_once=most).prompts_s(parts) == exact_s


def test_a_step_above_what_is_computed_at_once_costs_as_its_pieces_do() -> None:
    """Not as the line through the last two points would have it, were it prolonged."""
    steps = StepTimes(
        Curve([(256, 0.2), (512, 0.5)]), Curve([(0, 0.0)]), prefill_context_s=1e-6, rows_at_once=512
    )
    assert steps.prefill_s(1280) == pytest.approx(
        steps.prefill_s(512) + steps.prefill_s(512, 512) + steps.prefill_s(256, 1024)
    )

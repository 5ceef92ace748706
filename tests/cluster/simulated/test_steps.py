"""Step times: curves, profiles in the authors' format, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.steps import Curve, ProfileKey, PromptPart, StepTimes, pieces, read_profile
from phasewise.serving.batch import SequenceSlice
from phasewise.serving.ranks.first_rank import slices_at_once

HEADER = (
    "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,"
    "prompt_time,token_time,e2e_time,tensor_parallel\n"
)


def _profile(path: Path, *rows: str) -> Path:
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


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


def test_repeats_become_their_median_by_tokens_of_the_batch(tmp_path: Path) -> None:
    path = _profile(
        tmp_path / "profile.csv",
        "m,h,512,1,128,0,0,10,1,0,8",
        "m,h,512,1,128,0,0,30,2,0,8",
        "m,h,512,1,128,0,0,20,9,0,8",
        "m,h,512,2,128,0,0,40,4,0,8",
        "m,h,1024,1,128,0,0,60,6,0,8",
        "m,h,512,1,128,0,0,99,99,0,4",
    )

    profile = read_profile(path)

    assert set(profile) == {ProfileKey("m", "h", 8), ProfileKey("m", "h", 4)}
    steps = profile[ProfileKey("m", "h", 8)]
    assert steps.prefill_s(512) == 0.020
    assert steps.prefill_s(1024) == pytest.approx(0.050)
    assert steps.decode_s(3, 1024) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column"),
        ("a,b\n1,2\n", "no column model"),
        (HEADER, "no step times"),
        (HEADER + "m,h,512,1,128,0,0,nan,1,0,8\n", "row 2: prompt_time"),
        (HEADER + "m,h,512,1,128,0,0,-3,1,0,8\n", "row 2: prompt_time"),
        (HEADER + "m,h,512,1,128,0,0,1,inf,0,8\n", "row 2: token_time"),
        (HEADER + "m,h,0,1,128,0,0,1,1,0,8\n", "row 2: prompt_size"),
        (HEADER + "m,h,1e9,1,128,0,0,1,1,0,8\n", "row 2: prompt_size"),
        (HEADER + "m,h,512\n", "row 2"),
        ("\x00" * 50, "no column"),
        (HEADER + "m," + "h" * 200_000 + ",512,1,128,0,0,1,1,0,8\n", "not CSV"),
    ],
)
def test_what_is_no_profile_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ClusterError, match=why) as error:
        read_profile(path)

    assert "\n" not in str(error.value)
    assert "profile.csv" in str(error.value)


def test_a_profile_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("absent.csv", "binary.csv", "."):
        with pytest.raises(ClusterError):
            read_profile(tmp_path / name)

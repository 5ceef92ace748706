"""Step times: curves, profiles in the authors' format, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.steps import Curve, ProfileKey, StepTimes, read_profile

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
    assert steps.iteration_s(x, 1) > 0


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
    assert steps.iteration_s(1000, 24) == pytest.approx(1.1 * 0.050)


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

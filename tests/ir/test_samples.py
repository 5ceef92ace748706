"""The samples: raised, printed, read back, lowered and compiled, they compute what their C computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from phasewise.ir.build import built, chosen, with_parameters
from phasewise.ir.printing import printed_c
from phasewise.ir.raising.parse import parse_file
from phasewise.ir.reading import read
from phasewise.ir.running.checking import Program, check
from phasewise.ir.targets import TARGETS
from phasewise.ir.text import printed
from tests.ir.samples import HOME, NAMES, original, path_of, skip_without, text_of, verdict, why_not

RUN_ON = ("portable", "avx2", "avx512", "neon")
QUICK = (("dot_q4", "avx2"), ("rmsnorm", "portable"))


def test_there_are_twelve() -> None:
    assert len(NAMES) == 12


@pytest.mark.parametrize("name", NAMES)
def test_what_is_raised_prints_to_a_fixed_point_and_lowers_to_every_target(name: str) -> None:
    text = text_of(name)

    assert printed(read(text)) == text
    for target in TARGETS.values():
        assert f"{name}(" in built(text, {}, target).body


@pytest.mark.parametrize("name", NAMES)
def test_no_intrinsic_and_no_lane_of_an_instruction_set_is_left(name: str) -> None:
    assert "_mm" not in text_of(name)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(NAMES, RUN_ON)
    ],
)
def test_every_sample_keeps_every_bit_on_every_instruction_set(
    name: str, target: str, tmp_path: Path
) -> None:
    """At the default parameters lanes and orders are the author's wherever the kernel runs."""
    skip_without(TARGETS[target], HOME)

    assert verdict(text_of(name), name, TARGETS[target], tmp_path, {}).is_exact


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_low_level_prints_to_c_that_computes_the_same(name: str, tmp_path: Path) -> None:
    skip_without(HOME)
    text = text_of(name)
    source = tmp_path / "low.c"
    source.write_text(printed_c(parse_file(path_of(name), name)))

    low = Program(chosen(text, {}), [source], tmp_path, HOME)

    assert check(original(text, name, tmp_path), low, chosen(text, {}), 100).is_exact


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformed_samples_stay_within_the_bound(name: str, tmp_path: Path) -> None:
    """Every loop widened and unrolled as far as offered, sums in another order: on the widest set here."""
    target = TARGETS["avx512" if not why_not(TARGETS["avx512"]) else "avx2"]
    skip_without(target)
    text = with_parameters(text_of(name, reassociate=True))
    choice = {parameter.name: parameter.values[-1] for parameter in read(text).parameters}

    assert choice
    assert verdict(text, name, target, tmp_path, choice).cases == 100

"""Numbers in sentences: one plural, one form of shares and multiples, no source with a rule of its own."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise._words import NO_VERDICT, counted, meant, multiple, number, percent, plural, proven

ROOT = Path(__file__).resolve().parents[2]
TOLD = ("cli", "workflows", "loadtest", "serving", "kerneldb", "ir", "cluster", "topology", "tuner")
"""Rooms whose texts are for people."""

values = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


@given(st.integers(0, 10**9), st.sampled_from(["plan", "query", "process", "class", "box", "day", "match"]))
def test_a_count_of_one_is_the_only_one_without_a_plural(count: int, noun: str) -> None:
    words = counted(count, noun).split()

    assert words[0] == str(count)
    assert (words[1] == noun) == (count == 1)
    assert words[1] == noun or words[1].endswith("s")


@pytest.mark.parametrize(
    ("noun", "several"), [("query", "queries"), ("day", "days"), ("process", "processes"), ("CPU", "CPUs")]
)
def test_plurals(noun: str, several: str) -> None:
    assert plural(2, noun) == plural(0, noun) == several
    assert plural(2, "is", "are") == "are"


@given(values)
def test_no_number_has_an_exponent_or_a_sign_without_a_value(value: float) -> None:
    for text in (number(value), percent(value), percent(value, 1), multiple(value), number(value, 3)):
        assert re.fullmatch(r"-?[0-9]+(\.[0-9]+)?[%x]?", text), text
        assert not re.fullmatch(r"-0(\.0+)?[%x]?", text)


@given(st.floats(1e-6, 1e12))
def test_digits_are_those_of_the_value(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=1e-5)
    assert float(multiple(value)[:-1]) == pytest.approx(value, rel=6e-3, abs=6e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_a_dash(value: float) -> None:
    assert {number(value), percent(value), multiple(value)} == {"-"}


MODELS = ["smollm2-135m-instruct", "all-minilm-l6-v2", "qwen3-0.6b", "qwen3-1.7b", "Mine-Q4_1.gguf"]


@given(st.sampled_from(MODELS), st.integers(3, 30), st.booleans())
def test_a_beginning_in_either_case_means_every_name_that_has_it(name: str, length: int, loud: bool) -> None:
    begun = [model for model in sorted(MODELS) if model.lower().startswith(name[:length].lower())]

    said = meant(name[:length].upper() if loud else name[:length].lower(), MODELS)

    assert said == f"; did you mean {' or '.join(begun)}?"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("smolm2-135m-instruct", "; did you mean smollm2-135m-instruct?"),
        ("mine_q4_1.guf", "; did you mean Mine-Q4_1.gguf?"),
        ("m", ""),
        ("", ""),
        ("llama", ""),
    ],
)
def test_a_name_that_is_not_alike_is_not_told(word: str, said: str) -> None:
    assert meant(word, MODELS) == said
    assert meant(word, []) == ""


def test_no_line_tells_a_whole_list() -> None:
    assert meant("name", [f"name-{i}" for i in range(9)]).count("name") <= 1


OWN_RULES = {
    "a plural of its own": re.compile(r"""['"]s['"] (if|\*)"""),
    "a count before a plural": re.compile(r"\{len\([^{}]*\)\} (?!of\b|is\b|has\b)[a-z]+[^s\W]s\b(?!/)"),
    "a named count before a plural": re.compile(
        r"\{([a-z_]+\.)*n_[a-z_]+\} (?!was\b|is\b|has\b)[a-z]+[^s\W]s\b(?!/)"
    ),
    "a share of its own": re.compile(r":\.[0-9]*%\}"),
    "an exponent": re.compile(r":\.?[0-9]*g\}"),
}
EXCEPT = {
    "serving/http/requests/request_to_messages.py": "a named count before a plural",
    "ir/words.py": "a plural of its own",
    "cli/commands/embed.py": "an exponent",
    "workflows/predict_len/judge.py": "an exponent",
    "workflows/prune/settings.py": "an exponent",
}
"""For programs: names of instructions, vectors, keys of JSON, and OpenAI's words that clients look for."""


@pytest.mark.parametrize("rule", OWN_RULES)
def test_no_text_has_a_rule_of_its_own(rule: str) -> None:
    offending = [
        f"{name}:{index}: {line.strip()}"
        for room in TOLD
        for path in sorted((ROOT / room).rglob("*.py"))
        for name in [str(path.relative_to(ROOT))]
        if EXCEPT.get(name) != rule
        for index, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OWN_RULES[rule].search(line)
    ]

    assert offending == []


@given(low=st.floats(0, 4), between=st.floats(0, 1), width=st.floats(0, 4))
def test_a_measured_ratio_is_told_where_its_interval_excludes_one(
    low: float, between: float, width: float
) -> None:
    high = low + width
    ratio = low + between * width
    text = proven(ratio, low, high, 3)

    assert text in (NO_VERDICT, multiple(ratio, 3))
    if low <= 1 <= high:
        assert text == NO_VERDICT
    elif 0 < high <= 1.25 * low:
        assert text != NO_VERDICT


@pytest.mark.parametrize(
    ("ratio", "low", "high", "is_told"),
    [
        (1.01, 1.001, 18.41, False),
        (0.99, 0.05, 0.999, False),
        (1.2, 1.02, 1.5, False),
        (1.3, 1.1, 1.5, True),
        (3.0, 2.0, 4.0, True),
        (0.5, 0.4, 0.6, True),
        (1.01, 1.001, 1.02, True),
        (0.5, 0.0, 0.9, False),
    ],
)
def test_a_wide_interval_counts_its_longer_side_on_both_sides(
    ratio: float, low: float, high: float, is_told: bool
) -> None:
    assert (proven(ratio, low, high) != NO_VERDICT) == is_told
    assert (proven(1 / ratio, 1 / high, 1 / max(low, 1e-9)) != NO_VERDICT) == is_told, "the same turned round"


def test_where_there_is_no_interval_there_is_no_verdict() -> None:
    assert proven(1.931, 0.0, 1e6) == NO_VERDICT
    assert proven(math.nan, math.nan, math.nan) == NO_VERDICT


def test_no_text_of_a_command_writes_a_ratio_but_by_that_rule() -> None:
    """`multiple` writes what is exact: of a calculation, or of a gain that is proven already."""
    exact = {
        "cli/commands/tune_config/found.py": 1  # --evaluator modelled
    }
    calls_by_file: dict[str, int] = {}
    for folder in ("cli", "workflows"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if calls := len(re.findall(r"\bmultiple\(|(?:gain|ratio|speedup):\.[0-9]f", text)):
                calls_by_file[str(path.relative_to(ROOT))] = calls

    assert calls_by_file == exact

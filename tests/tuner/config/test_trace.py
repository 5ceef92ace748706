"""Traces of requests: three public formats, distributions, and files that mean harm."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.tuner.config import trace_files
from phasewise.tuner.config.lengths import MAX_TOKENS, RequestLengths, parse_distribution
from phasewise.tuner.config.trace import (
    default_trace,
    describe,
    fitted,
    load_trace,
    read_trace,
    sampled,
    slices,
)
from phasewise.tuner.errors import TraceError
from tests.support import SHARED

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109"""
MOONCAKE = [
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
    {"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": []},
]
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "human", "value": "x" * 400},
            {"from": "gpt", "value": "y" * 41},
            {"from": "human", "value": "and?"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
    {"id": "c", "conversations": []},
]
lengths = st.integers(1, 100_000)
traces = st.lists(st.builds(RequestLengths, lengths, lengths), min_size=1, max_size=40).map(tuple)


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "requests.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(entries: list[dict[str, object]]) -> str:
    return "\n".join(map(json.dumps, entries))


def pairs(trace: tuple[RequestLengths, ...]) -> list[tuple[int, int]]:
    return [(arrival.prompt_tokens, arrival.output_tokens) for arrival in trace]


def length_log_line(arrived_s: float | None, prompt: int = 40, output: int = 8, **more: object) -> str:
    arrived = {} if arrived_s is None else {"arrived_at_s": arrived_s, "at_s": arrived_s + 3}
    return json.dumps({"prompt_token_ids": [1] * prompt, "output_tokens": output, **arrived, **more}) + "\n"


# Formats.


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_an_azure_trace_is_read(tmp_path: Path, line_end: str) -> None:
    """Without a final line end, as it is published, and with seven digits of a second."""
    trace = read_trace(written(tmp_path, AZURE.replace("\n", line_end)))

    assert pairs(trace) == [(374, 44), (396, 109)]
    assert [arrival.arrival_s for arrival in trace] == [0.0, pytest.approx(4.314579, abs=1e-5)]


LOG = length_log_line(1_700_000_000.5, lookup="00") + length_log_line(1_700_000_002.0, 5, 3)
OLD_LOG = length_log_line(None, at_s=1_700_000_003.5) + length_log_line(None, at_s=1_700_000_007.0)
STATED = json.dumps([{"prompt_tokens": 512, "output_tokens": 64}, [1024, 16]])


@pytest.mark.parametrize(
    ("content", "lengths", "arrivals_s"),
    [
        (lines(MOONCAKE), [(6955, 52), (6472, 26)], [0.0, 3.053]),
        (STATED, [(512, 64), (1024, 16)], [None, None]),
        (AZURE.replace(",44", ",0"), [(396, 109)], [0.0]),  # one without an answer is left out
        (LOG, [(40, 8), (5, 3)], [0.0, 1.5]),
        (OLD_LOG, [(40, 8), (40, 8)], [0.0, 3.5]),
    ],
    ids=["mooncake", "stated lengths", "without an answer", "length log", "older length log"],
)
def test_each_format_gives_its_lengths_and_times(
    tmp_path: Path, content: str, lengths: list[tuple[int, int]], arrivals_s: list[float | None]
) -> None:
    trace = read_trace(written(tmp_path, content))

    assert pairs(trace) == lengths
    for request, arrival_s in zip(trace, arrivals_s, strict=True):
        assert request.arrival_s == (arrival_s if arrival_s is None else pytest.approx(arrival_s))


@pytest.mark.parametrize("as_lines", [False, True])
def test_sharegpt_conversations_are_measured_by_their_characters(tmp_path: Path, as_lines: bool) -> None:
    """The first question that was answered; conversations without one are left out."""
    content = lines(SHAREGPT) if as_lines else json.dumps(SHAREGPT, indent=1)

    assert pairs(read_trace(written(tmp_path, content))) == [(100, 11)]


@pytest.mark.skipif(not SHARED.exists(), reason="the reference traces are not here")
def test_the_published_traces_are_read_whole(tmp_path: Path) -> None:
    azure = read_trace(SHARED / "azure" / "AzureLLMInferenceTrace_code.csv")
    packed = (SHARED / "traces" / "mooncake_synthetic_trace.jsonl.xz").read_bytes()
    mooncake = read_trace(written(tmp_path, lzma.decompress(packed)))

    assert (len(azure), len(mooncake)) == (8819, 3993)
    assert sum(request.prompt_tokens for request in azure) / len(azure) == pytest.approx(2047.85, abs=0.01)
    assert azure[-1].arrival_s == pytest.approx(3435.9, abs=0.1)


# What means harm, or is merely wrong: one line that names the file and the row.


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is no trace"),
        ("my notes", "is no trace"),
        ("TIMESTAMP,Prompt,Answer\n", "is no trace"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (AZURE.splitlines()[0], "holds no request"),
        ("[]", "holds no request"),
        (AZURE.replace("374", "-5"), "row 2: a number of tokens"),
        (AZURE.replace("109", "1e3"), "row 3: a number of tokens"),
        (AZURE.replace("109", "9" * 400), "row 3: a number of tokens"),
        (AZURE.replace("109", "999999999"), "row 3: output_tokens must be"),
        (AZURE.replace("109", "nan"), "row 3: a number of tokens"),
        (AZURE.replace(",109", ""), "row 3: 2 fields, 3 expected"),
        (AZURE.replace("2023-11-16 18:15:50", "yesterday"), "row 3: a time like"),
        (AZURE + '\n"' + "x" * 200_000, "row 4: not CSV"),
        ("{" * 100_000, "row 1: not JSON"),
        ("[" * 100_000, "entry 1: nested too deeply"),
        ("[7]", "entry 1: a JSON object"),
        ("[[1, 2, 3]]", "entry 1: a JSON object"),
        ("[[512, true]]", "entry 1: output_tokens must be a number"),
        ('[{"prompt_tokens": 512}]', "entry 1: output_tokens must be a number"),
        ('{"input_length": NaN, "output_length": 1}', "row 1: not JSON"),
        ('{"input_length": 1.5, "output_length": 1}', "row 1: input_length must be a number"),
        ('{"input_length": -1, "output_length": 1}', "row 1: prompt_tokens must be"),
        ('{"input_length": ' + "9" * 5000 + ', "output_length": 1}', "row 1: not JSON"),
        ('{"input_length": 1, "output_length": 1, "timestamp": Infinity}', "row 1: not JSON"),
        ('{"input_length": 1, "output_length": 1, "timestamp": 1e999}', "row 1: not JSON"),
        ('[{"prompt_tokens": NaN, "output_tokens": 1}]', "entry 1: not JSON"),
        ('[{"prompt_tokens": 1, "output_tokens": 1, "x": ' + "[" * 100_000, "entry 1: nested too deeply"),
        ('{"input_length": 1, "output_length": 1, "timestamp": "now"}', "row 1: timestamp must be"),
        (lines(MOONCAKE) + "\n{}", "row 3: neither lengths"),
        ('[{"conversations": {}}]', "entry 1: neither lengths"),
        ('[{"conversations": [{"from": "human", "value": 7}]}]', "entry 1: a turn"),
        ("{\n", "row 1: not JSON"),
        (length_log_line(1.0) + length_log_line(1.0, output_tokens="x"), "row 2: an answer of a length log"),
        (length_log_line(1.0, arrived_at_s="soon"), "row 1: arrived_at_s must be Unix seconds"),
        (length_log_line(1.0, output=0), "holds no request"),
    ],
)
def test_a_hostile_file_is_one_clear_line(tmp_path: Path, content: str | bytes, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(written(tmp_path, content))

    assert str(caught.value).isprintable()
    assert "requests.txt" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_bounds_on_rows_and_their_length_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_REQUESTS", 1)
    with pytest.raises(TraceError, match="more than 1 row"):
        read_trace(written(tmp_path, AZURE))
    monkeypatch.setattr(trace_files, "MAX_ROW_CHARS", 40)
    with pytest.raises(TraceError, match="row 1: not JSON"):
        read_trace(written(tmp_path, lines(MOONCAKE)))
    monkeypatch.setattr(trace_files, "MAX_FILE_BYTES", 10)
    with pytest.raises(TraceError, match="is larger than"):
        read_trace(written(tmp_path, AZURE))


@pytest.mark.parametrize("name", ["absent.csv", ".", "a\0b", "x" * 5000])
def test_a_file_that_cannot_be_opened_is_one_clear_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(str(tmp_path / name))

    assert "\n" not in str(caught.value)


@given(content=st.binary(max_size=300))
def test_any_bytes_are_a_trace_or_a_clear_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "requests.txt"
    path.write_bytes(content)
    said = ""
    try:
        trace = read_trace(path)
    except TraceError as error:
        trace, said = (), str(error)

    assert trace or said
    assert "\n" not in said


# Distributions.


def test_a_fixed_distribution_is_that_request_again_and_again() -> None:
    assert parse_distribution("fixed:512/64", 3, 0) == (RequestLengths(512, 64),) * 3


@given(seed=st.integers(0, 1000))
def test_a_uniform_distribution_keeps_its_ends(seed: int) -> None:
    for request in parse_distribution("uniform:100-200/5-5", 50, seed):
        assert 100 <= request.prompt_tokens <= 200
        assert request.output_tokens == 5


def test_a_lognormal_distribution_has_its_median_and_no_absurd_length() -> None:
    trace = parse_distribution("lognormal:500,0.9/4000000,10", 2001, 1)
    prompts = sorted(arrival.prompt_tokens for arrival in trace)

    assert prompts[1000] == pytest.approx(500, rel=0.1)
    assert all(1 <= request.output_tokens <= MAX_TOKENS for request in trace)


@pytest.mark.parametrize(
    "text",
    [
        *("fixed:512", "fixed:512/", "fixed:/64", "fixed:0/64", "fixed:-1/64", "fixed:nan/64"),
        *("fixed:1e5/64", "uniform:9-5/1-2", "uniform:5/1-2", "lognormal:500/120", "lognormal:500,inf/120,1"),
        *("lognormal:500,-1/120,1", "zipf:1/2", "fixed:" + "9" * 100 + "/1"),
    ],
)
def test_what_is_no_distribution_is_one_clear_line(text: str) -> None:
    with pytest.raises(TraceError) as caught:
        load_trace(text)

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_an_absurd_number_of_requests_is_refused() -> None:
    with pytest.raises(TraceError, match="1 to 1000000 requests"):
        parse_distribution("fixed:1/1", 10**9, 0)


# Sampling, slices, fitting.


def test_the_same_seed_draws_the_same_requests() -> None:
    assert default_trace(50, seed=3) == default_trace(50, seed=3) != default_trace(50, seed=4)


@given(trace=traces, count=st.integers(1, 50), seed=st.integers(0, 9))
def test_a_sample_is_part_of_its_trace_in_order(
    trace: tuple[RequestLengths, ...], count: int, seed: int
) -> None:
    chosen = sampled(trace, count, seed)
    rest = iter(trace)

    assert len(chosen) == min(count, len(trace))
    assert all(request in rest for request in chosen)
    assert chosen == sampled(trace, count, seed)


@given(trace=traces, count=st.integers(1, 8))
def test_slices_hold_every_request_once_from_short_to_long(
    trace: tuple[RequestLengths, ...], count: int
) -> None:
    parts = slices(trace, count)
    tokens = [request.tokens for part in parts for request in part]

    assert sorted(pairs(tuple(request for part in parts for request in part))) == sorted(pairs(trace))
    assert tokens == sorted(tokens)
    assert len(parts) == min(count, len(trace))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(trace=traces, context=st.integers(2, 4096))
def test_fitted_requests_fit_and_short_ones_stay(trace: tuple[RequestLengths, ...], context: int) -> None:
    for before, after in zip(trace, fitted(trace, context), strict=True):
        assert after.tokens <= context
        assert before.tokens > context or after == before


def test_a_file_wins_over_a_distribution_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fixed:").mkdir()
    Path("fixed:/requests").write_text(AZURE)

    assert len(load_trace("fixed:/requests")) == 2


def test_a_trace_is_described_in_a_line() -> None:
    assert (
        describe((RequestLengths(10, 3), RequestLengths(30, 5)))
        == "2 requests, prompt p50 10 max 30, output p50 3 max 5 tokens"
    )

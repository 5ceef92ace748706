"""A load report as JSON, CSV, tables and a picture: every form says the same, under vLLM's field names."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cli.commands.bench.serve_text import (
    FORMATS,
    LEAST_MS,
    MOST_POINTS,
    distribution,
    draw_report,
    fields_of,
)
from phasewise.loadtest.client import Target
from phasewise.loadtest.metrics import FailureKind, Measured, RequestOutcome
from phasewise.loadtest.send import RequestPace
from phasewise.loadtest.session import LoadReport, LoadTest, RateProbe
from phasewise.loadtest.settings import Promises, SentLengths
from phasewise.tuner.config.slo import LatencyBounds
from tests.support import SHARED
from tests.support.tiers import examples

SLO = LatencyBounds(200.0, 50.0)


OUTCOMES = (
    RequestOutcome(0.0, 128, 3, 0.1, 0.18, [0.04, 0.04]),
    RequestOutcome(0.5, 128, 3, 0.3, 0.5, [0.1, 0.1]),
    RequestOutcome(1.0, 128, failure=FailureKind.overloaded, error="status 429: full"),
)


def report(outcomes: Sequence[RequestOutcome] = OUTCOMES, **more: Any) -> LoadReport:
    outcomes = list(outcomes)
    probes = (
        RateProbe(2.0, Measured(outcomes[:1], 1.0, 0.0), 1.0, True),
        RateProbe(4.0, Measured(outcomes, 1, 0), 0.3, False),
    )
    target, wanted = Target("http://127.0.0.1:1", "models/tiny"), Promises("ttft=200ms", find_rate=True)
    return LoadReport(
        LoadTest(target, (), RequestPace(2.0), SLO, SentLengths(), wanted, None),
        datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        3,
        Measured(outcomes, 2.0, 0.02),
        "random token ids",
        probes=probes,
        found_rate=2.0,
        **more,
    )


def documented_fields() -> list[str]:
    """The fields that vLLM's readers look for, without the words that explain them."""
    path = SHARED / "formats" / "FIELDS.json"
    if not path.exists():
        pytest.skip(f"{path} is not here: the lists of other tools' fields")
    listed = json.loads(path.read_text())["vllm_bench_serve"]
    names = [
        name
        for part in ("header_fields", "stable_result_fields", "newer_result_fields")
        for name in listed[part]
    ]
    names = [re.split(r"[ ,(]", name)[0] for name in names if not name.startswith(("<", "ramp"))]
    metrics = [
        f"{statistic}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "median", "std", "p99")
    ]
    return names + metrics


def test_json_has_vllms_field_names_flat() -> None:
    fields = fields_of(report())

    assert fields["schema_version"] == 1
    assert [name for name in documented_fields() if name not in fields] == []
    assert fields["date"] == "20260102-030405"
    assert fields["request_rate"] == 2.0


def test_tables_tell_failures_probes_and_goodput() -> None:
    text = FORMATS["md"](report())

    for said in ("http_429", "status 429: full", "missed", "kept", "2.000 requests/s", "this client's CPU"):
        assert said in text


def test_the_picture_has_both_curves_and_the_goal() -> None:
    picture = draw_report(report()) or ""

    for said in (
        "latencies, 2 requests/s",
        ">TTFT<",
        ">E2EL<",
        "attainment over the rate",
        "goal: 90%",
        "requests/s",
        ">tiny<",
    ):
        assert said in picture


def test_nothing_is_drawn_of_requests_without_answers_and_promises() -> None:
    searched = report([OUTCOMES[2]])
    failed = replace(searched, test=replace(searched.test, slo=None), probes=())

    assert draw_report(failed) is None


@examples(50)
@given(samples=st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_a_distribution_counts_the_samples_that_are_at_most_so_long(samples: list[float]) -> None:
    """At every point, and it grows to all of them."""
    points = distribution(samples)

    assert len(points) == min(len(samples), MOST_POINTS)
    assert points == sorted(points)
    assert points[-1] == (max(LEAST_MS, max(samples)), 1.0)
    for ms, share in points:
        assert share * len(samples) <= sum(sample <= ms for sample in samples) + 1e-6


def test_answers_of_one_token_have_no_time_per_token() -> None:
    """The first token's time is all that there is."""
    single_token = RequestOutcome(0.0, 128, 1, 0.1, 0.1, [])

    alone, beside = (
        FORMATS["md"](report(outcomes)) for outcomes in ([single_token], [single_token, OUTCOMES[0]])
    )

    assert "TTFT" in alone
    assert "TPOT" not in alone
    assert "TPOT" in beside
    assert (
        fields_of(report([single_token, OUTCOMES[0]]))["mean_tpot_ms"]
        == fields_of(report([OUTCOMES[0]]))["mean_tpot_ms"]
    )

"""LocalHistogram is exported exactly as prometheus_client's own histogram."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from phasewise.serving.http.monitoring.histogram import LocalHistogram, LocalHistograms

BOUNDS = (0.001, 0.5, 1, 1024)


@given(values=st.lists(st.sampled_from([0, *BOUNDS]) | st.floats(0, 3000), max_size=20))
def test_it_reads_as_prometheus_own(values: list[float]) -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("a_seconds", "time", ["kind"], buckets=BOUNDS, registry=theirs).labels("x")
    ours_one = LocalHistogram(BOUNDS)
    ours.register(LocalHistograms("a_seconds", "time", ("kind",), {("x",): ours_one}))

    for value in values:
        histogram.observe(value)
        ours_one.observe(value)

    assert generate_latest(ours) == generate_latest(theirs)

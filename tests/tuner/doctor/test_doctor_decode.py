"""Reasons of slow decoding: each planted set of figures gets the reason that it was planted for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.tuner.doctor.decode import DecodeFigures, PhaseFigures, explain_decode

PREFILL = PhaseFigures(1200.0, 0.8, 2.5, 0.2, 0.01, 0.1)
SLOW = PhaseFigures(40.0, 0.3, 0.6, 20.0, 0.001, 0.8)
FIGURES = DecodeFigures("a-model", 4, PREFILL, SLOW, 6e9, 20e9, None)

shares = st.floats(0, 1)
rates = st.one_of(st.none(), st.floats(0, 1e3))
phases = st.builds(
    PhaseFigures, st.floats(0.01, 1e6), st.floats(0, 2), rates, rates, rates, st.one_of(st.none(), shares)
)
any_figures = st.builds(
    DecodeFigures,
    st.just("a-model"),
    st.integers(1, 512),
    phases,
    phases,
    st.floats(0, 1e12),
    st.floats(1, 1e12),
    st.one_of(st.none(), st.just("this machine shows no counters of its processor")),
)


@pytest.mark.parametrize(
    ("decode", "reasons"),
    [
        (replace(SLOW, limit_share=0.9), ["decode-bandwidth"]),
        (replace(SLOW, limit_share=0.9, dtlb_misses_pki=1.0), ["decode-small-pages", "decode-bandwidth"]),
        (SLOW, ["decode-waits"]),
        (replace(SLOW, dtlb_misses_pki=0.3), ["decode-small-pages", "decode-waits"]),
        (replace(SLOW, stalled_share=0.2), ["decode-computes"]),
        (PhaseFigures(40.0, 0.3), ["decode-below-bandwidth"]),
    ],
)
def test_figures_get_their_reason(decode: PhaseFigures, reasons: list[str]) -> None:
    assert [finding.id for finding in explain_decode(replace(FIGURES, decode=decode))] == reasons


def test_without_counters_the_line_that_says_why_is_evidence() -> None:
    figures = replace(FIGURES, decode=PhaseFigures(40.0, 0.3), absence="no counters: a guest")
    (finding,) = explain_decode(figures)
    assert "no counters: a guest" in [evidence.value for evidence in finding.evidence]


@given(any_figures)
def test_all_figures_have_a_reason_with_evidence_and_remedy(figures: DecodeFigures) -> None:
    findings = explain_decode(figures)

    assert findings
    assert all(finding.evidence and finding.remedy for finding in findings)

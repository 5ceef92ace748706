"""A verdict survives being told: what is heard is what was said."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.records import Comparison
from phasewise.tuner.config.references import Reference
from phasewise.tuner.plans import RankCores, ServicePlan
from phasewise.workflows.tune_config.verdict import Finalist, PhaseVerdict, Versus, verdict_fields, verdict_of

costs = st.floats(0.001, 1e6)
words = st.none() | st.text(max_size=20)
ranks = st.integers(1, 3).map(lambda n: tuple(RankCores((2 * i, 2 * i + 1), i) for i in range(n)))
plans = st.builds(ServicePlan, st.just("decode"), ranks, st.sampled_from(("default", "database", "flag")))
comparisons = st.tuples(st.floats(0.1, 1), st.floats(1, 2), st.floats(2, 9)).map(
    lambda gains: Comparison(gains[1], gains[0], gains[2], 0.99, 15)
)
references = st.builds(Reference, st.text(max_size=9), st.none() | plans, words)
versus = st.builds(
    Versus, references, st.booleans(), st.none() | costs, st.none() | costs, st.none() | comparisons, words
)
finalists = st.builds(Finalist, plans, st.none() | costs, st.none() | costs, words)
standings = st.sampled_from(("faster", "not slower", "reference", "not compared"))
verdicts = st.builds(
    PhaseVerdict,
    st.just("decode"),
    plans,
    costs,
    plans,
    standings,
    st.lists(versus, max_size=3).map(tuple),
    st.lists(finalists, max_size=3).map(tuple),
)


@given(verdict=verdicts)
def test_what_is_heard_is_what_was_said(verdict: PhaseVerdict) -> None:
    assert verdict_of(json.loads(json.dumps(verdict_fields(verdict)))) == verdict

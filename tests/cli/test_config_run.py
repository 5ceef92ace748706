"""What one phase leaves of a run's time goes to another whose plan was not compared, and to no other."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from phasewise.cli import config_run

JURY: Any = None
STORE: Any = None


def verdict(*, is_settled: bool) -> Any:
    return SimpleNamespace(is_settled=is_settled)


@pytest.mark.parametrize(
    ("before", "left_s", "is_judged"),
    [
        (verdict(is_settled=False), 60.0, True),
        (verdict(is_settled=False), -1.0, False),
        (verdict(is_settled=True), 60.0, False),
        (None, 60.0, False),
    ],
    ids=["not compared", "no time", "settled", "nothing could run"],
)
def test_a_phase_that_was_not_compared_gets_what_is_left(
    monkeypatch: pytest.MonkeyPatch, before: Any, left_s: float, is_judged: bool
) -> None:
    ends_s = time.monotonic() + left_s
    verdicts = {} if before is None else {"prefill": before}
    run: Any = SimpleNamespace(verdicts=verdicts, deadline_s=lambda: ends_s)
    judged, kept = [], []

    def judge(run: Any, one: Any, jury: Any, deadline_s: float) -> None:
        judged.append(deadline_s)
        run.verdicts[one.phase] = verdict(is_settled=True)

    monkeypatch.setattr(config_run, "_judge", judge)
    monkeypatch.setattr(config_run, "_keep_plan", lambda run, phase, store: kept.append(phase))
    one: Any = SimpleNamespace(phase="prefill")
    for _ in range(2):
        config_run._judge_again(run, one, JURY, STORE)

    assert judged == ([ends_s] if is_judged else [])
    assert kept == (["prefill"] if is_judged else [])

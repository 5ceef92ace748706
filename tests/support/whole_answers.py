"""Answers as their clients have them in the end, however they were cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phasewise.serving.engine.messages import Answer, Failure


def whole_answer(outs: Sequence[Answer | Failure]) -> dict[str, Any]:
    """All that a client was told of one request. AssertionError where it failed, or went on after its end."""
    assert outs
    for out in outs:
        assert isinstance(out, Answer), out
    answers = [out for out in outs if isinstance(out, Answer)]
    last = answers[-1]
    assert all(answer.finish_reason is None for answer in answers[:-1]), answers
    return {
        "text": "".join(answer.text for answer in answers),
        "tokens": [token for answer in answers for token in answer.tokens],
        "prompt": [answer.prompt for answer in answers if answer.prompt is not None],
        "end": (last.finish_reason, last.stop_text, last.n_generated),
        "evidence": last.evidence,
    }

"""Messages of instances as a stranger would write them: read, or refused by one exception in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.real.instance_messages import WireError, read_from_instance, read_to_instance
from tests.support.tiers import examples

KINDS = (
    *("take", "drop", "send_kv_to", "stop", "ready", "report", "dropped", "hand_over_failed", "heartbeat"),
    "cannot_start",
)
FIELDS = (
    "request_id", "part", "request", "epoch", "n_prompt", "endpoint", "placement", "place", "identity", "pid",
    "answers", "failures", "load", "turns", "is_busy", "n_handing_over", "refused", "message",
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(10**40), 10**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=8,
)
READ = (read_to_instance, read_from_instance)


def is_read_or_refused(raw: bytes) -> None:
    for read in READ:
        line = ""
        try:
            read(raw)
        except WireError as error:
            line = str(error)
        assert len(line) < 1000


@given(kind=st.sampled_from(KINDS) | VALUES, fields=st.dictionaries(st.sampled_from(FIELDS), VALUES))
@examples(300)
def test_drawn_messages(kind: Any, fields: dict[str, Any]) -> None:
    is_read_or_refused(json.dumps(fields | {"kind": kind}).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe{",
        b"[" * 200_000,
        b'{"kind":' * 200_000,
        b'{"kind":"drop","request_id":"\\ud800"}',
        b'{"kind":"heartbeat","turns":' + b"9" * 200_000 + b',"is_busy":true,"n_handing_over":1}',
        b'{"kind":"heartbeat","turns":NaN,"is_busy":1e999,"n_handing_over":-Infinity}',
        b'{"kind":"' + b"x" * 1_000_000 + b'"}',
        b'{"kind":"heartbeat","turns":1,"is_busy":true,"n_handing_over":1,"refused":{"'
        + b"y" * 1_000_000
        + b'":"z"}}',
    ],
    ids=range(10),
)
def test_messages_of_an_attacker(raw: bytes) -> None:
    is_read_or_refused(raw)

"""Messages of instances as a stranger would write them: read, or refused by one exception in one line."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.real.instance_messages import (
    FromInstance,
    ToInstance,
    WireError,
    read_from_instance,
    read_to_instance,
)
from tests.support.tiers import examples

KINDS = tuple(kind.__name__ for kind in (*get_args(ToInstance), *get_args(FromInstance)))
FIELDS = ["outs", "placed", "request_id", "guide", "sampling", "place", "identity", "pid", "turns", "refused"]
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


@given(
    kind=st.sampled_from(KINDS) | st.text(max_size=8),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES) | VALUES,
)
@examples(300)
def test_drawn_messages(kind: str, fields: Any) -> None:
    is_read_or_refused(f"{kind} {json.dumps(fields)}".encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe{",
        b"Delivery " + b"[" * 200_000,
        b"Abort " + b'{"request_id":' * 200_000,
        b'Abort {"request_id":"\\ud800"}',
        b'Delivery [[["a",["RequestError","no",{}]]],null,[0,0,0,0]]',
        b'Delivery [[["a",["__doc__","no",null]]],null,[0,0,0,0]]',
        b'Heartbeat {"turns":' + b"9" * 200_000 + b',"is_busy":true,"n_handing_over":1}',
        b'Heartbeat {"turns":NaN,"is_busy":1e999,"n_handing_over":-Infinity}',
        b"x" * 1_000_000,
        b'Heartbeat {"turns":1,"is_busy":true,"n_handing_over":1,"refused":{"'
        + b"y" * 1_000_000
        + b'":"z"}}',
    ],
    ids=range(12),
)
def test_messages_of_an_attacker(raw: bytes) -> None:
    is_read_or_refused(raw)

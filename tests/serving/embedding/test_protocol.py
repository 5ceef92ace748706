"""Messages between the front and a worker come through whole, or are refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.protocol import (
    ProtocolError,
    WorkerFrame,
    WorkerFrameKind,
    frame,
    inputs_from_bytes,
    inputs_to_bytes,
    read_frame,
    vectors_from_bytes,
    vectors_to_bytes,
)
from tests.support.tiers import examples

inputs = st.lists(
    st.builds(
        Tokens,
        st.lists(st.integers(0, 1 << 22), min_size=1, max_size=9),
        st.none() | st.integers(0, 9),
        st.integers(0, 2),
    ),
    max_size=9,
)


@examples(60)
@given(given=inputs)
def test_inputs_come_through(given: list[Tokens]) -> None:
    assert inputs_from_bytes(inputs_to_bytes(given)) == given


def test_vectors_come_through() -> None:
    vectors = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)

    assert vectors_from_bytes(vectors_to_bytes(vectors)).tobytes() == vectors.tobytes()


def test_frames_follow_each_other_until_the_end() -> None:
    stream = io.BytesIO(frame(WorkerFrameKind.EMBED, 7, b"abc") + frame(WorkerFrameKind.FAILED, 8, b""))

    assert read_frame(stream.read) == WorkerFrame(WorkerFrameKind.EMBED, 7, b"abc")
    assert read_frame(stream.read) == WorkerFrame(WorkerFrameKind.FAILED, 8, b"")
    assert read_frame(stream.read) is None


@examples(60)
@given(raw=st.binary(min_size=1, max_size=60))
def test_what_is_no_frame_is_refused_or_read_as_one(raw: bytes) -> None:
    for read in (inputs_from_bytes, vectors_from_bytes, lambda raw: read_frame(io.BytesIO(raw).read)):
        try:
            read(raw)  # type: ignore[operator]
        except ProtocolError:
            continue


def test_a_frame_that_is_cut_short_is_an_error() -> None:
    whole = frame(WorkerFrameKind.EMBED, 1, b"abc")
    for cut in (whole[:5], whole[:-1]):
        with pytest.raises(ProtocolError, match="cut short"):
            read_frame(io.BytesIO(cut).read)

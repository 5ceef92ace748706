"""Teams of ranks and of embeddings: a thread that is moved from its core is told."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.loaders import load_model
from phasewise.serving.ranks.rank_teams import open_teams, tell_if_moved
from tests.support.models.encoder_models import write_encoder

ALLOWED = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs to move a thread between")


def move_threads_of(core: int, to: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # one of an earlier test may end
            if os.sched_getaffinity(int(thread)) == {core}:
                os.sched_setaffinity(int(thread), {to})


def test_a_thread_that_was_moved_is_told(caplog: pytest.LogCaptureFixture) -> None:
    team = open_teams({"decode": tuple(ALLOWED[:2])})["decode"]
    team.barriers(1)
    move_threads_of(ALLOWED[1], ALLOWED[0])
    team.barriers(1)

    assert tell_if_moved(team)
    assert "another program or a cpuset moves them" in caplog.text
    team.close()


def test_embeddings_tell_it_once_and_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(str(write_encoder(tmp_path / "bert", "bert")), "native", tmp_path / "cache")
    inputs = [Tokens([1, 2, 3]), Tokens([4, 5])]
    with Embedder(model, ALLOWED[:2]) as embedder:
        wanted = embedder.embed(inputs)
        move_threads_of(ALLOWED[1], ALLOWED[0])
        for _ in range(3):
            assert (embedder.embed(inputs) == wanted).all()

    assert sum("were seen on" in record.message for record in caplog.records) == 1

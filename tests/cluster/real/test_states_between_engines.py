"""A state handed over between two engines, by copy and in frames: the answers of one engine."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasewise.cluster.real.handing_over.frames import Codec, parts_of
from phasewise.cluster.real.handing_over.receiver import Receiver
from phasewise.cluster.real.handing_over.sender import Sender, SharedLink, StreamLink
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.loaders import load_model
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.support.engine_sizes import engine_size
from tests.support.models import family_models as families
from tests.support.servers.fake_engine import run_all

PROMPT = tuple(3 + (7 * i * i + i) % 240 for i in range(150))
PLANS: dict[Any, Any] = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}


def tokens(outs: list[Any]) -> list[int]:
    return [token.token_id for out in outs for token in out.tokens]


def hand_over(giving: OpenEngine, taking: OpenEngine, request: Submit, *, shared: bool) -> list[Any]:
    """The prompt is computed by one engine, its answer by the other."""
    given, taken = giving.engine.ranks.kv_share, taking.engine.ranks.kv_share
    codec = Codec(given.shape, giving.model.config.vocab_size, 256, b"m" * 32)
    receiver, messages = Receiver(codec, taken.memory), queue.SimpleQueue[list[bytes]]()
    engine, n_parts = giving.engine, len(parts_of(given.shape.state_bytes))
    failed: list[tuple[str, str, str]] = []
    sender = Sender(
        given.shape.n_layers,
        lambda: engine.ranks.progress,
        lambda name: None,
        lambda *told: failed.append(told),
        n_parts=n_parts,
    )
    engine.hand_over.outbox = sender
    engine.ranks.follow(sender)
    sender.start()
    try:
        taking.engine.submit(replace(request, part="answer"))
        (placed,) = taking.engine.step().placed
        receiver.expect(request.request_id, len(PROMPT))
        receiver.await_kv(request.request_id, placed.placement)

        def post(parts: list[bytes]) -> bool:
            messages.put([bytes(part) for part in parts])
            return True

        own = request.request_id, len(PROMPT), codec, given.memory, post
        link = SharedLink(*own, taken.memory, placed.placement) if shared else StreamLink(*own)
        engine.submit(replace(request, part="prompt"))
        sender.send_to(request.request_id, link)
        engine.step()  # it has a block
        engine.hand_over.target_ready(request.request_id)
        while engine.scheduler.n_computed(request.request_id) < len(PROMPT):
            engine.step()
        arrived = None
        while arrived is None:
            arrived = receiver.take(messages.get(timeout=60))
        assert engine.scheduler.abort(request.request_id)
        assert not failed
        first = taking.engine.arrived(request.request_id, arrived.logits)
        return [*first.outs, *run_all(taking.engine).get(request.request_id, [])]
    finally:
        sender.stop()


@pytest.mark.parametrize("shared", [True, False], ids=["by copy", "in frames"])
@pytest.mark.parametrize("family", ["qwen3next", "granitehybrid", "lfm2"])
def test_an_answer_goes_on_from_a_state_that_was_handed_over(
    family: str, shared: bool, tmp_path: Path
) -> None:
    model = load_model(str(families.write_family_hf(tmp_path / "m", family)), "native", tmp_path / "cache")
    size = engine_size(256, 1024, 4, 64)
    size = replace(size, kv=replace(size.kv, shared=True, states=8))
    request = Submit("a", PROMPT, 12, GREEDY, ignore_eos=True)
    with open_engine(model, PLANS, size, pinned=False) as alone:
        expected = tokens(run_all(alone.engine, request)["a"])
    with (
        open_engine(model, PLANS, size, pinned=False) as giving,
        open_engine(model, PLANS, size, pinned=False) as taking,
    ):
        taking.engine.scheduler.check()
        assert tokens(hand_over(giving, taking, request, shared=shared)) == expected
        taking.engine.scheduler.check()

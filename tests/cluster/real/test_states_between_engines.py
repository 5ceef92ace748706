"""States, keys and values that go from one engine or pool to another change no answer."""

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
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.cluster.real.test_begun_answers_of_instances import assert_ends_change_nothing
from tests.cluster.real.test_pools import assert_divided_equals_whole
from tests.soak.changing_instances import every_way, undisturbed
from tests.support.engine_sizes import engine_size
from tests.support.models import family_models as families
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf
from tests.support.servers.fake_engine import run_all
from tests.support.servers.pools import guides_of

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """Two KV heads of three query heads each."""
    folder = tmp_path_factory.mktemp("model")
    shape = TinyShape(n_heads=6, n_kv_heads=2, hidden=96, ffn=128)
    return load_model(str(write_tiny_gguf(folder / "tiny.gguf", shape=shape)), "native", folder / "cache")


def engine_of(model: PackedModel, n_ranks: int, kv_format: str) -> OpenEngine:
    ranks = tuple(RankCores((core,)) for core in range(n_ranks))  # unpinned: any cores
    size = engine_size(256, 512, 2, 64, kv_format)
    size = replace(size, kv=replace(size.kv, shared=True))
    return open_engine(model, {phase: ServicePlan(phase, ranks) for phase in PHASES}, size, pinned=False)


@pytest.mark.many
@pytest.mark.parametrize("shared", [True, False], ids=["by copy", "in frames"])
@pytest.mark.parametrize(
    ("giving", "taking", "kv_format"), [(1, 3, "int8"), (3, 1, "int8"), (4, 3, "auto"), (2, 5, "auto")]
)
def test_other_numbers_of_ranks_take_what_these_have_computed(
    model: PackedModel, giving: int, taking: int, kv_format: str, shared: bool
) -> None:
    request = Submit("a", PROMPT, 12, GREEDY, ignore_eos=True)
    with engine_of(model, 1, kv_format) as alone:
        expected = tokens(run_all(alone.engine, request)["a"])
    with engine_of(model, giving, kv_format) as given, engine_of(model, taking, kv_format) as taken:
        assert tokens(hand_over(given, taken, request, shared=shared)) == expected
        taken.engine.scheduler.check()


LONG = {"max_position_embeddings": 16_384}


def test_divided_requests_get_the_answers_of_one_engine(tmp_path: Path) -> None:
    """A gated delta rule with convolutions, over shared memory."""
    assert_divided_equals_whole(families.write_family_hf(tmp_path / "m", "qwen3next", LONG))


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3next", "granitehybrid", "falcon-h1", "kimi-linear"])
def test_whatever_the_kind_of_state(tmp_path: Path, family: str, transfer: str) -> None:
    n_drafts = assert_divided_equals_whole(
        families.write_family_hf(tmp_path / "m", family, LONG), transfer=transfer
    )
    assert n_drafts > 0 or family == "qwen3next"  # whose texts repeat nothing


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_with_two_ranks_a_pool(tmp_path: Path, transfer: str) -> None:
    model = families.write_family_hf(tmp_path / "m", "granitehybrid", LONG)
    assert assert_divided_equals_whole(model, 2, transfer) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3next", "granitehybrid"])
@pytest.mark.parametrize("roles", [("prompt", "token"), ("mixed", "mixed")], ids=" ".join)
def test_begun_answers_go_on_where_instances_are_killed(
    tmp_path: Path, family: str, roles: tuple[str, ...]
) -> None:
    model = families.write_family_hf(tmp_path / "m", family, LONG)
    asked = every_way(guides_of(model))
    assert_ends_change_nothing(model, asked, undisturbed(model, asked), roles)

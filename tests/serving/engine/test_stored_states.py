"""States on disk beside keys and values, over the real kernels: what a stopped process had computed goes on
in the next one with the same bits, whatever lies in the folder."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.prefix_store.blocks import BlockNames, write_record
from phasewise.serving.prefix_store.folder import PrefixFolder
from phasewise.serving.prefix_store.store import PrefixSettings
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.support.engine_sizes import engine_size
from tests.support.models import family_models as families
from tests.support.servers.pools import plans_of, pools, size_of

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.serving.engine.open_engine import open_engine
from tests.serving.engine.test_stored_prefixes import (
    LIMIT,
    PROMPT,
    ask,
    counts_of,
    forget,
    heads,
    said,
    wait_for_writer,
)

CONTEXT = 900
MORE = tuple(random.Random(44).choices(range(3, 250), k=21))


@pytest.fixture(scope="module", params=["lfm2", "qwen3next", "granitehybrid", "kimi-linear"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    return families.write_family_hf(
        folder / request.param, request.param, {"max_position_embeddings": 2048, "model_max_length": 2048}
    )


@pytest.fixture(scope="module")
def model(path: Path) -> PackedModel:
    return load_model(str(path), "native", cache_dir=path.parent / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefixes"


@contextmanager
def opened(
    model: PackedModel, folder: Path | None, policy: str = "odma", n_ranks: int = 1, states: int = 12
) -> Iterator[object]:
    """An engine whose store has written everything when it is left."""
    size = engine_size(CONTEXT, 4096, 8, 100, "auto", policy)
    size = replace(size, kv=replace(size.kv, shared=True, states=states))
    plans = {plan.phase: plan for plan in plans_of(n_ranks)}
    if n_ranks == 1:
        plans = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}
    settings = None if folder is None else PrefixSettings(str(folder), LIMIT)
    with open_engine(model, plans, size, pinned=False, prefixes=settings) as running:
        yield running.engine
        if running.engine.prefixes is not None:
            wait_for_writer(running.engine)


def next_turn(answer: Answer) -> tuple[int, ...]:
    return (*PROMPT, *(token.token_id for token in answer.tokens), *MORE)


def test_a_conversation_goes_on_after_a_restart_with_the_same_bits(model: PackedModel, folder: Path) -> None:
    """All that the stopped process had computed is taken over: not a panel, and not an interval, less."""
    with opened(model, None) as alone:
        first = ask(alone)
        prompt = next_turn(first)
        forget(alone)
        expected = said(ask(alone, prompt=prompt))
    with opened(model, folder) as before:
        assert said(ask(before)) == said(first)
    with opened(model, folder) as after:
        again = ask(after, prompt=prompt)
        counts = counts_of(after)

    assert said(again) == expected
    assert again.n_cached == len(PROMPT) + len(first.tokens) - 1
    assert (counts.hits, counts.tokens_restored, counts.refused) == (1, again.n_cached, {})


def test_an_equal_prompt_and_one_that_begins_alike_take_over_what_they_can(
    model: PackedModel, folder: Path
) -> None:
    """All but the last token, and what was kept at an interval."""
    other = (*PROMPT[:280], *MORE)
    with opened(model, None) as alone:
        expected = [said(ask(alone, name, prompt)) for name, prompt in (("a", PROMPT), ("b", other))]
    with opened(model, folder) as before:
        ask(before)
    with opened(model, folder) as after:
        same, alike = ask(after), ask(after, "b", other)

    assert [said(same), said(alike)] == expected
    assert (same.n_cached, alike.n_cached) == (len(PROMPT) - 1, 256)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["odma", "paged"])
def test_what_one_pool_or_number_of_ranks_kept_another_reads(
    model: PackedModel, folder: Path, policy: str
) -> None:
    with opened(model, folder, policy, n_ranks=2) as before:
        first = ask(before)
    prompt = next_turn(first)
    with opened(model, None) as alone:
        expected = said(ask(alone, prompt=prompt))
    for n_ranks in (1, 2):
        with opened(model, folder, n_ranks=n_ranks, states=2) as after:
            again = ask(after, prompt=prompt)
            assert said(again) == expected
            assert again.n_cached >= len(PROMPT) + len(first.tokens) - 1


def test_damaged_records_change_no_answer(model: PackedModel, folder: Path) -> None:
    """Each byte counts, of states as of rows: what leads from a record that is not believed is computed."""
    with opened(model, folder) as before:
        expected = said(ask(before))
    good = {path.name: path.read_bytes() for path in folder.glob("*.kv")}
    assert len(good) >= 6  # three blocks, and states after 256, 332 and 344 tokens with what leads to them
    rng = random.Random(5)
    with opened(model, folder) as after:
        for name in good:
            for other, data in good.items():
                (folder / other).write_bytes(data)
            data = bytearray(good[name])
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            (folder / name).write_bytes(data)
            forget(after)
            assert said(ask(after, name)) == expected
            after.scheduler.check()
        refused = counts_of(after).refused
    assert refused
    assert sum(refused.values()) >= 3


def test_rows_of_another_model_are_refused(model: PackedModel, folder: Path) -> None:
    """One who knows the folder's key writes other rows: the first tokens' are computed again."""
    with opened(model, folder) as before:
        expected = said(ask(before))
        shape = before.prefixes._store.shape
    kept = PrefixFolder.open(folder, LIMIT)
    for head in list(heads(kept)):
        if head.begin == 0 and head.n_tokens:
            naming = BlockNames(kept.key, head.identity)
            block = naming.after(head.parent, 0, PROMPT[: head.n_tokens])
            rows = bytes(random.Random(1).randbytes(shape.rows_bytes(head.n_tokens)))
            kept.write(block.name, write_record(naming, block, 1.0, rows))
    with opened(model, folder) as after:
        again = ask(after)
        counts = counts_of(after)

    assert said(again) == expected
    assert again.n_cached == 0
    assert (counts.hits, counts.refused) == (0, {"row": 1})


def test_a_request_that_leaves_while_it_is_read_holds_nobody_up(model: PackedModel, folder: Path) -> None:
    with opened(model, folder) as before:
        expected = said(ask(before))
    with opened(model, folder) as after:
        for round_ in range(4):
            forget(after)
            after.submit(Submit("gone", PROMPT, 12, GREEDY, ignore_eos=True))
            for _ in range(round_):
                after.step()
            after.abort("gone")
            assert said(ask(after, f"r{round_}")) == expected
            after.scheduler.check()


@pytest.mark.slow
def test_pools_of_instances_read_states_that_others_kept(path: Path, folder: Path) -> None:
    """The instance that computes prompts writes them, another life of it reads them, and hands them over."""
    size = size_of(path, context_length=CONTEXT)
    settings = PrefixSettings(str(folder), LIMIT)
    request = Submit("a", PROMPT, 12, GREEDY, ignore_eos=True)
    with pools(path, size=size, prefixes=settings) as server:
        first = server.run([request])
    with pools(path, size=size, prefixes=settings) as server:
        again = server.run([request])
        cached = server.answers["a"][-1].n_cached

    assert [token for _, some, _ in again["a"] for token in some] == [
        token for _, some, _ in first["a"] for token in some
    ]
    assert cached in (0, len(PROMPT) - 1)  # of the answering instance's own, or of the prompt's
    assert list(folder.glob("*.kv"))

"""Beginnings of prompts on disk, over the real kernels: no answer changes, whatever lies in the folder."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.prefix_store.blocks import BlockNames, RecordShape, read_record, write_record
from phasewise.serving.prefix_store.folder import PrefixFolder
from phasewise.serving.prefix_store.store import PrefixSettings, PrefixStore, StoreCounts
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.support.engine_sizes import engine_size
from tests.support.models.reference_models import write_tiny_case
from tests.support.models.tiny_models import TinyShape, tiny_gguf
from tests.support.servers.pools import PATIENCE_S, plans_of
from tests.support.servers.rude_clients import until
from tests.support.tiers import n_examples

start = pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

CONTEXT = 600
PROMPT = tuple(random.Random(41).choices(range(3, 250), k=333))
FULL = 320
"""Tokens of PROMPT that can be kept: whole panels, and never the last token."""
LIMIT = 64 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.gguf").write_bytes(tiny_gguf(shape=TinyShape(context_length=CONTEXT)).to_bytes())
    return load_model(str(folder / "tiny.gguf"), "native", cache_dir=folder / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefixes"


def opened(
    model: PackedModel, folder: Path | None, kv_format: str = "auto", policy: str = "odma", n_ranks: int = 1
):
    """An engine with a store, or without where there is no folder."""
    size = engine_size(CONTEXT, 4096, 8, 100, kv_format, policy)
    size = replace(size, kv=replace(size.kv, shared=True))
    plans = {plan.phase: plan for plan in plans_of(n_ranks)}
    if n_ranks == 1:
        plans = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}
    settings = None if folder is None else PrefixSettings(str(folder), LIMIT)
    return start.open_engine(model, plans, size, pinned=False, prefixes=settings)


def ask(engine, name: str = "a", prompt: tuple[int, ...] = PROMPT, space: str = "") -> Answer:
    """The whole answer, in one piece."""
    sampling = SamplingParams(temperature=0.8, seed=5, top_logprobs=2)
    engine.submit(Submit(name, prompt, 12, sampling, ignore_eos=True, cache_space=space))
    return finish(engine)[name]


def finish(engine) -> dict[str, Answer]:
    pieces: dict[str, list[Answer]] = {}
    until = time.monotonic() + PATIENCE_S
    while engine.has_work:
        delivery = engine.step()
        engine.scheduler.check()
        for out in delivery.outs:
            assert isinstance(out, Answer), out
            pieces.setdefault(out.request_id, []).append(out)
        if delivery.stats is None:
            assert time.monotonic() < until
            time.sleep(0.001)
    return {name: whole(outs) for name, outs in pieces.items()}


def whole(outs: list[Answer]) -> Answer:
    tokens = tuple(token for out in outs for token in out.tokens)
    return outs[-1]._replace(text="".join(out.text for out in outs), tokens=tokens, at_ns=0)


def said(answer: Answer) -> tuple[object, ...]:
    """All of an answer that may not depend on what was kept."""
    return answer.text, answer.tokens, answer.finish_reason


def counts_of(engine) -> StoreCounts:
    counts = engine.load().stored
    assert counts is not None
    return counts


def forget(engine) -> None:
    """Leave nothing in memory."""
    engine.scheduler.clear()


@pytest.fixture(scope="module")
def computed(model: PackedModel) -> tuple[object, ...]:
    with opened(model, None) as alone:
        return said(ask(alone.engine))


@pytest.mark.parametrize("policy", ["odma", "paged"])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_restarted_engine_answers_the_same_without_computing_the_prompt(
    model: PackedModel, folder: Path, kv_format: str, policy: str
) -> None:
    with opened(model, None, kv_format, policy) as alone:
        expected = said(ask(alone.engine))
    with opened(model, folder, kv_format, policy) as first:
        assert said(ask(first.engine)) == expected
    with opened(model, folder, kv_format, policy) as second:
        again = ask(second.engine)

    assert said(again) == expected
    assert again.n_cached == FULL
    assert counts_of(second.engine).hits == 1
    assert counts_of(second.engine).tokens_restored == FULL


def test_what_one_pool_or_number_of_ranks_kept_another_reads(
    model: PackedModel, folder: Path, computed: tuple[object, ...]
) -> None:
    with opened(model, folder, policy="paged") as first:
        ask(first.engine)
    with opened(model, folder, n_ranks=3) as second:  # they share two KV heads
        again = ask(second.engine)
        longer = ask(second.engine, "b", (*PROMPT, *PROMPT[:200]))
    with opened(model, folder, policy="odma") as third:
        longer_again = ask(third.engine, "b", (*PROMPT, *PROMPT[:200]))

    assert said(again) == computed
    assert again.n_cached == FULL
    assert longer_again.n_cached == 528
    assert said(longer_again) == said(longer)


def test_layers_with_windows_are_restored(folder: Path, tmp_path: Path) -> None:
    """A window of 24, which PROMPT goes far beyond."""
    source = write_tiny_case(tmp_path / "mistral", "mistral")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    windowed = load_model(str(source), "native", cache_dir=tmp_path / "cache")
    assert windowed.config.kinds[0].window == 24
    with opened(windowed, None) as alone:
        expected = said(ask(alone.engine))
    with opened(windowed, folder) as first:
        assert said(ask(first.engine)) == expected
    with opened(windowed, folder) as second:
        again = ask(second.engine)

    assert said(again) == expected
    assert again.n_cached == FULL


def test_other_formats_and_spaces_find_nothing(model: PackedModel, folder: Path) -> None:
    with opened(model, folder) as first:
        ask(first.engine, space="one key")
    with opened(model, folder) as second:
        assert ask(second.engine, "a", space="another key").n_cached == 0
        forget(second.engine)
        assert ask(second.engine, "b").n_cached == 0
        forget(second.engine)
        assert ask(second.engine, "c", space="one key").n_cached == FULL
    with opened(model, folder, "int8") as other:
        assert ask(other.engine, space="one key").n_cached == 0


def test_requests_that_begin_alike_are_restored_once(
    model: PackedModel, folder: Path, computed: tuple[object, ...]
) -> None:
    with opened(model, folder) as first:
        ask(first.engine)
    with opened(model, folder) as second:
        engine = second.engine
        sampling = SamplingParams(temperature=0.8, seed=5, top_logprobs=2)
        for name in "abcd":
            engine.submit(Submit(name, PROMPT, 12, sampling, ignore_eos=True))
        engine.submit(Submit("short", PROMPT[:40], 12, sampling, ignore_eos=True))
        answers = finish(engine)

    assert [said(answers[name]) for name in "abcd"] == [computed] * 4
    assert counts_of(engine).hits == 1


def test_an_abort_while_it_is_read_frees_the_block(model: PackedModel, folder: Path) -> None:
    with opened(model, folder) as first:
        ask(first.engine)
    with opened(model, folder) as second:
        engine = second.engine
        for number in range(n_examples(50)):
            engine.submit(Submit(f"r{number}", PROMPT, 4, ignore_eos=True))
            for _ in range(number % 3 + 1):
                engine.step()
            engine.abort(f"r{number}")
            engine.scheduler.check()
        assert engine.load().kv_slots_used == 0
        forget(engine)
        assert ask(engine).n_cached == FULL


def test_a_row_that_is_wrong_under_a_right_digest_is_found(
    model: PackedModel, folder: Path, computed: tuple[object, ...]
) -> None:
    """All rows of a block are those of other tokens: the row that is drawn says so, and the block goes."""
    with opened(model, folder) as first:
        ask(first.engine)
        identity = first.fingerprint.of_keys_and_values
        shape = first.engine.prefixes._store.shape
    n_forged = forge(folder, shape)
    with opened(model, folder) as second:
        again = ask(second.engine)
        counts = counts_of(second.engine)

    assert identity["kv_format"]
    assert n_forged > 0
    assert said(again) == computed
    assert counts.refused == {"row": 1}
    assert counts.hits == 0


def forge(folder: Path, shape: RecordShape) -> int:
    """Turn every row of every record, and write its digest anew as one who knows the key can."""
    kept = PrefixFolder.open(folder, LIMIT)
    store = PrefixStore(next(iter(heads(kept))).identity, shape, kept)
    naming, n_forged = BlockNames(kept.key, next(iter(heads(kept))).identity), 0
    blocks = {block.name: block for block in store._blocks_in_folder(PROMPT, "")}
    for name, block in blocks.items():
        buffer = memoryview(bytearray(shape.most_bytes))
        rows = read_record(naming, shape, block, buffer[: kept.read_into(name, buffer)])
        kept.write(name, write_record(naming, block, 1.0, bytes(byte ^ 0x11 for byte in rows)))
        n_forged += 1
    return n_forged


def heads(folder: PrefixFolder) -> Iterator:
    for name, _ in folder.kept():
        head = folder.head(name)
        if head is not None:
            yield head


def test_damaged_files_change_no_answer(
    model: PackedModel, folder: Path, computed: tuple[object, ...]
) -> None:
    """Flips, cuts, swaps, renames, noise, hostile headers, files gone: in `make test-all` 1,000 times."""
    with opened(model, folder) as first:
        for name, prompt in (("a", PROMPT), ("other", PROMPT[::-1])):
            ask(first.engine, name, prompt)
            wait_for_writer(first.engine)  # or the next one may take its slots
    good = {path.name: path.read_bytes() for path in folder.glob("*.kv")}
    rng = random.Random(11)
    with opened(model, folder) as second:
        engine, n_whole = second.engine, 0
        for number in range(n_examples(1000)):
            damage(folder, good, rng)
            forget(engine)
            answer = ask(engine, f"r{number}")
            assert said(answer) == computed
            n_whole += answer.n_cached == FULL
            wait_for_writer(engine)
            for name, data in good.items():
                (folder / name).write_bytes(data)
        refused = counts_of(engine).refused

    assert n_whole < n_examples(1000)
    assert refused is not None
    assert {"digest", "size"} <= set(refused)


def damage(folder: Path, good: dict[str, bytes], rng: random.Random) -> None:
    """One to three of the files."""
    names = sorted(good)
    for name in rng.sample(names, rng.randrange(1, 4)):
        path, data = folder / name, bytearray(good[name])
        kind = rng.randrange(7)
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[rng.randrange(len(data)) :]
        elif kind == 2:
            data = bytearray(good[rng.choice(names)])
        elif kind == 3:
            data[: 8 * rng.randrange(1, 18)] = rng.randbytes(8 * rng.randrange(1, 18))
        elif kind == 4:
            data += rng.randbytes(rng.randrange(1, 5000))
        elif kind == 5:
            path.unlink(missing_ok=True)
            continue
        else:
            data = bytearray(len(data))
        path.write_bytes(data)


def wait_for_writer(engine) -> None:
    until(lambda: not engine.prefixes._store.is_writing, "it writes on and on")


@pytest.mark.parametrize("error", [28, 5, 30])
def test_where_the_folder_fails_the_server_goes_on_without(
    model: PackedModel,
    folder: Path,
    computed: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    error: int,
) -> None:
    """No space left, an error of the device, a file system that became read-only."""

    def fails(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    with opened(model, folder) as first:
        monkeypatch.setattr(PrefixFolder, "write", fails)
        for number in range(3):
            assert said(ask(first.engine, f"r{number}")) == computed
            wait_for_writer(first.engine)
            forget(first.engine)
        assert counts_of(first.engine).writes_failed >= 3
        monkeypatch.undo()
    assert list(folder.glob("*.kv")) == []


def test_a_folder_that_is_removed_does_no_harm(
    model: PackedModel, folder: Path, computed: tuple[object, ...]
) -> None:
    with opened(model, folder) as first:
        ask(first.engine)
        wait_for_writer(first.engine)
        shutil.rmtree(folder)
        forget(first.engine)
        assert said(ask(first.engine, "b")) == computed


def test_two_engines_share_a_folder_at_once(
    model: PackedModel, folder: Path, computed: tuple[object, ...]
) -> None:
    with opened(model, folder) as first, opened(model, folder, policy="paged") as other:
        for number in range(6):
            for engine in (first.engine, other.engine):
                assert said(ask(engine, f"r{number}")) == computed
                ask(engine, f"s{number}", PROMPT[number:])
                forget(engine)
        ask(first.engine, "new", PROMPT[::-1])
        wait_for_writer(first.engine)
        assert ask(other.engine, "new", PROMPT[::-1]).n_cached == FULL


def test_a_limit_below_some_blocks_is_refused(model: PackedModel, folder: Path) -> None:
    size = engine_size(CONTEXT, 4096, 8, 100)
    size = replace(size, kv=replace(size.kv, shared=True))
    plans = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}
    with pytest.raises(ServingError, match="prefix_cache_bytes = '1M' is the least"):
        start.open_engine(model, plans, size, prefixes=PrefixSettings(str(folder), 1000))


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.serving.engine.test_stored_prefixes import *
model = load_model(sys.argv[3], "native", cache_dir=Path(sys.argv[3]).parent / "cache")
with opened(model, Path(sys.argv[1])) as one:
    print("open", flush=True)
    for number in range(10000):
        ask(one.engine, f"r{number}", PROMPT[number % 100 :])
        forget(one.engine)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_nothing_wrong(
    model: PackedModel, folder: Path, computed: tuple[object, ...], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(shape=TinyShape(context_length=CONTEXT)).to_bytes())
    rng, root = random.Random(3), str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    for _ in range(n_examples(10)):
        arguments = [sys.executable, "-c", KILLED, str(folder), root, str(path)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            time.sleep(rng.random() * 0.6)
            process.send_signal(signal.SIGKILL)
            process.wait()
        with opened(model, folder) as after:
            assert said(ask(after.engine)) == computed
            assert not counts_of(after.engine).refused

"""Rows with adapters: PEFT's logits, the base model's bits without one, and the same bits in any company."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import isa
from phasewise.cython_kernels.packing import pack_dense, unpack
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.engine.messages import Answer, Failure, Submit
from phasewise.serving.engine.open_engine import ModelText, open_engine
from phasewise.serving.errors import ModelError, RequestError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.adapter_files import with_adapters
from phasewise.serving.models.linears import Adapter, LowRank, flat, unflat, update_of
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, Ranks, open_ranks
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from tests.support.engine_sizes import engine_size
from tests.support.models.adapters import (
    CASES,
    REFERENCE,
    TINY_CASE,
    drawn_pairs,
    merged,
    write_case,
    write_peft,
)
from tests.support.models.family_models import write_family_hf
from tests.support.models.reference_forward import row_sizes, tiny_config, tiny_model
from tests.support.models.reference_models import tiny_case_weights, tiny_prompts, write_tiny_case
from tests.support.models.tiny_models import safetensors_bytes
from tests.support.servers.fake_engine import run_all, text_of
from tests.support.tiers import examples, isas

N_SLOTS = 64
"""Of each sequence, in the tests that lay sequences side by side."""


def ranks_of(model: PackedModel, prefill: tuple[int, ...] = (2,), decode: tuple[int, ...] = (2,)) -> Ranks:
    """Ranks of so many threads each, which the system may move."""
    plans: dict[Phase, ServicePlan] = {}
    for phase, sizes in zip(PHASES, (prefill, decode), strict=True):
        firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        cores = [tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True)]
        plans[phase] = ServicePlan(phase, tuple(RankCores(own, None) for own in cores))
    options = RankOptions(KvSettings(8 * N_SLOTS), max_batch_tokens=300, max_sequences=8, pinned=False)
    return open_ranks(model, plans, options)


def rows_after(ranks: Ranks, prompt: list[int], adapter: int) -> np.ndarray:
    """Logits after every token of a prompt."""
    piece = SequenceSlice(prompt, 0, 0, True, adapter=adapter)
    return ranks.all_logits(Batch("prefill", (piece,))).copy()


def drawn_adapter(model: PackedModel, seed: int, readers: tuple[str, ...], rank: int) -> Adapter:
    """An adapter of some weights of a tiny model; the ranks of its targets differ."""
    config, rng = model.config, np.random.default_rng(seed)
    q, kv = row_sizes(config)
    outputs = {
        "qkv": [(0, q), (q + kv, kv)],
        "o": [(0, config.hidden)],
        "gate_up": [(0, config.ffn), (config.ffn, config.ffn)],
        "down": [(0, config.hidden)],
    }
    inputs = {"qkv": config.hidden, "o": q, "gate_up": config.hidden, "down": config.ffn}

    def part(n: int, k: int, own: int) -> LowRank:
        a, b = rng.standard_normal((own, k), np.float32), rng.standard_normal((n, own), np.float32)
        return LowRank(a / np.float32(np.sqrt(k)), b, 0.5)

    updates = {
        f"layers.{layer}.{reader}": update_of(
            [(column, part(n, inputs[reader], rank + i)) for i, (column, n) in enumerate(outputs[reader])]
        )
        for layer in range(config.n_layers)
        for reader in readers
    }
    return Adapter(f"a{seed}", f"{seed:064}", updates)


def adapted_model(**config: int) -> PackedModel:
    """A tiny model with three adapters of different weights and ranks."""
    model = tiny_model(tiny_config(**config), "q8")
    adapters = (
        drawn_adapter(model, 1, ("qkv", "o", "gate_up", "down"), 4),
        drawn_adapter(model, 2, ("qkv",), 16),
        drawn_adapter(model, 3, ("down", "o"), 33),
    )
    return replace(model, adapters=adapters)


@pytest.fixture(scope="module")
def tiny_case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackedModel]:
    folder = tmp_path_factory.mktemp("adapters")
    path = write_tiny_case(folder / "base", TINY_CASE)
    return folder, load_model(str(path), "f32", cache_dir=folder / "cache")


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_with_peft(tiny_case: tuple[Path, PackedModel], name: str) -> None:
    """Scales by rank or its root, patterns, and bf16 files; stored by tests/data/make_adapters.py."""
    folder, model = tiny_case
    wanted = json.loads(REFERENCE.read_text())[name]
    opened = with_adapters(model, [f"x={write_case(folder / name, name)}"])
    ranks = ranks_of(opened)
    try:
        rows = rows_after(ranks, tiny_prompts(TINY_CASE)[2], 1)
    finally:
        ranks.close()
    last = np.asarray(wanted["last"])

    assert rows.argmax(axis=1).tolist() == wanted["chosen"]
    assert np.abs(rows[-1] - last).max() <= 1e-4 * np.abs(last).max()


def test_logits_are_those_of_merged_weights(tiny_case: tuple[Path, PackedModel]) -> None:
    """In float32 nothing but the order of sums differs."""
    folder, model = tiny_case
    weights = tiny_case_weights(TINY_CASE)
    drawn = drawn_pairs(weights, "merged", rank=5)
    opened = with_adapters(model, [f"x={write_peft(folder / 'merged-adapter', drawn)}"])
    path = write_tiny_case(folder / "merged", TINY_CASE)
    (path / "model.safetensors").write_bytes(safetensors_bytes(merged(weights, drawn, 2.0)))
    whole = load_model(str(path), "f32", cache_dir=folder / "cache")
    prompt, ranks, other = tiny_prompts(TINY_CASE)[2], ranks_of(opened), ranks_of(whole)
    try:
        ours, theirs = rows_after(ranks, prompt, 1), rows_after(other, prompt, 0)
    finally:
        ranks.close()
        other.close()

    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_rows_without_an_adapter_have_the_base_models_bits() -> None:
    """Beside rows with adapters, and in a program that has none."""
    model = adapted_model()
    prompt = list(range(3, 23))
    ranks, base = ranks_of(model), ranks_of(replace(model, adapters=()))
    try:
        beside = [
            SequenceSlice(prompt, 0, i * N_SLOTS, True, adapter=adapter)
            for i, adapter in enumerate((1, 0, 3, 2))
        ]
        rows = ranks.forward(Batch("prefill", tuple(beside))).copy()
        alone = base.forward(Batch("prefill", (SequenceSlice(prompt, 0, 0, True),))).copy()
    finally:
        ranks.close()
        base.close()

    assert rows[1].tobytes() == alone[0].tobytes()
    assert len({row.tobytes() for row in rows}) == 4


@pytest.fixture(scope="module")
def three_adapters() -> tuple[Ranks, list[list[bytes]]]:
    """Ranks, and the logits of every token of one text under each adapter, computed token by token."""
    ranks = ranks_of(adapted_model())
    alone = []
    for adapter in range(4):
        rows = [
            ranks.forward(Batch("decode", (SequenceSlice([token], i, 0, True, adapter=adapter),))).copy()
            for i, token in enumerate(TEXT)
        ]
        alone.append([row[0].tobytes() for row in rows])
    yield ranks, alone
    ranks.close()


TEXT = [int(token) for token in np.random.default_rng(5).integers(0, 83, 40)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 39), st.integers(1, 39)), min_size=1, max_size=8))
@examples(30)
def test_no_other_row_changes_a_bit(
    three_adapters: tuple[Ranks, list[list[bytes]]], drawn: list[tuple[int, int, int]]
) -> None:
    """Sequences with drawn adapters, each cut in two at a drawn place, all of them in the same two steps."""
    ranks, alone = three_adapters
    cuts = [(adapter, min(cut, end), end) for adapter, cut, end in drawn]
    for is_second in (False, True):
        slices = [
            SequenceSlice(
                TEXT[cut : end + 1] if is_second else TEXT[:cut],
                cut if is_second else 0,
                i * N_SLOTS,
                True,
                adapter=adapter,
            )
            for i, (adapter, cut, end) in enumerate(cuts)
        ]
        rows = ranks.forward(Batch("prefill", tuple(slices)))
        for row, (adapter, cut, end) in zip(rows, cuts, strict=True):
            assert row.tobytes() == alone[adapter][end if is_second else cut - 1]
    steps = tuple(
        SequenceSlice([TEXT[end]], end, i * N_SLOTS, True, adapter=adapter)
        for i, (adapter, _, end) in enumerate(cuts)
    )
    for row, (adapter, _, end) in zip(ranks.forward(Batch("decode", steps)), cuts, strict=True):
        assert row.tobytes() == alone[adapter][end]


@pytest.mark.parametrize("division", [((1, 1), (1, 1)), ((1,), (1, 1)), ((2, 1), (1, 2)), ((3,), (3,))])
def test_no_division_changes_a_bit(
    three_adapters: tuple[Ranks, list[list[bytes]]], division: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Several ranks, in processes of their own, with unequal numbers of threads."""
    _, alone = three_adapters
    ranks = ranks_of(adapted_model(), *division)
    try:
        prompts = tuple(
            SequenceSlice(TEXT[:20], 0, i * N_SLOTS, True, adapter=adapter)
            for i, adapter in enumerate((2, 0, 3, 1))
        )
        rows = ranks.forward(Batch("prefill", prompts)).copy()
        for length, few in ((20, 1), (21, 3)):  # fewer rows than threads, and as many
            steps = tuple(
                SequenceSlice([TEXT[length]], length, i * N_SLOTS, True, adapter=adapter)
                for i, adapter in enumerate((2, 0, 3)[:few])
            )
            stepped = ranks.forward(Batch("decode", steps)).copy()
            if length == 20:
                assert stepped[0].tobytes() == alone[2][20]
    finally:
        ranks.close()

    assert [row.tobytes() for row in rows] == [alone[adapter][19] for adapter in (2, 0, 3, 1)]


def test_every_instruction_set_gives_the_same_products() -> None:
    """Of float32 weights, whose products are the same everywhere, with adapters too."""
    model = replace(adapted_model(), weights=tiny_model(tiny_config(), "f32").weights)
    bits = []
    for name in isas():
        with isa.using(name):
            ranks = ranks_of(model)
            bits.append(rows_after(ranks, TEXT[:9], 1).tobytes())
            ranks.close()

    assert len(set(bits)) == 1


def test_outputs_that_begin_within_a_panel_are_put_right() -> None:
    """Heads of 24 dimensions, one of them for keys: values begin within a panel of the fused weight."""
    sizes = {"n_heads": 3, "n_kv_heads": 1, "head_dim": 24}
    fused = tiny_model(tiny_config(**sizes), "f32", fused=True)
    config, split = fused.config, dict(fused.weights)
    for layer in range(config.n_layers):
        rows = unpack(split.pop(f"layers.{layer}.qkv"))
        ends = np.cumsum(row_sizes(config))
        for part, own in zip("qkv", np.split(rows, ends), strict=True):
            split[f"layers.{layer}.{part}"] = pack_dense(own, "f32")
    adapter = drawn_adapter(fused, 4, ("qkv",), 3)
    rows_of = []
    for weights in (fused.weights, split):
        ranks = ranks_of(replace(fused, weights=weights, adapters=(adapter,)))
        rows_of.append(rows_after(ranks, TEXT[:9], 1).tobytes())
        ranks.close()

    assert rows_of[0] == rows_of[1]


def test_an_adapter_that_is_not_there_is_refused() -> None:
    ranks = ranks_of(adapted_model())
    try:
        for adapter in (-1, 4):
            with pytest.raises(ValueError, match="adapter"):
                ranks.forward(Batch("decode", (SequenceSlice([1], 0, 0, True, adapter=adapter),)))
    finally:
        ranks.close()


def test_flat_arrays_are_read_back_as_they_were() -> None:
    adapters = adapted_model().adapters
    read = unflat(*flat(adapters))

    assert [set(own.updates) for own in read] == [set(own.updates) for own in adapters]
    for own, theirs in zip(adapters, read, strict=True):
        for reader, update in own.updates.items():
            assert [column for column, _ in update.ups] == [
                column for column, _ in theirs.updates[reader].ups
            ]
            assert (update.scales == theirs.updates[reader].scales).all()


def test_prompts_are_never_shared_between_adapters(tiny_case: tuple[Path, PackedModel]) -> None:
    """An engine that has just answered a prompt under one adapter answers it anew under another."""
    folder, model = tiny_case
    paths = [f"{name}={write_case(folder / name, name)}" for name in ("all", "attention")]
    opened = with_adapters(model, paths)
    plans = {phase: ServicePlan(phase, (RankCores((0, 1), None),)) for phase in PHASES}
    prompt = tuple(tiny_prompts(TINY_CASE)[3])
    names = ("", "all", "attention")

    def ask(name: str, number: int) -> Submit:
        return Submit(f"{name}-{number}", prompt, 6, GREEDY, ignore_eos=True, adapter=name)

    def told(order: list[str]) -> dict[str, tuple[str, int]]:
        size = engine_size(400, 2048, 4)
        with open_engine(opened, plans, size, ModelText(opened), pinned=False) as running:
            answers = {}
            for number, name in enumerate(order):
                outs = run_all(running.engine, ask(name, number))[f"{name}-{number}"]
                last = outs[-1]
                assert isinstance(last, Answer)
                answers[f"{name}-{number}"] = text_of(outs), last.n_cached
            with pytest.raises(RequestError, match="no adapter"):
                running.engine.submit(ask("nobody", 0))
            together = run_all(running.engine, *(ask(name, 9) for name in names))
            for name in names:
                assert not any(isinstance(out, Failure) for out in together[f"{name}-9"])
                assert text_of(together[f"{name}-9"]) == answers[f"{name}-{order.index(name)}"][0]
            return answers

    answers = told(["", "all", "all", "attention"])

    assert len({answers[key][0] for key in ("-0", "all-1", "attention-3")}) == 3
    assert [answers[key][1] for key in ("-0", "all-1", "attention-3")] == [0, 0, 0]
    assert answers["all-2"][0] == answers["all-1"][0]
    assert answers["all-2"][1] > 0


def test_a_model_with_states_takes_no_adapters(tmp_path: Path) -> None:
    model = load_model(str(write_family_hf(tmp_path / "lfm2", "lfm2")), "f32", tmp_path / "cache")
    with pytest.raises(ModelError, match="whose layers keep a state, take no adapters"):
        with_adapters(model, [f"a={tmp_path}"])

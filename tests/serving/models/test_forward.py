"""A whole forward step: against plain numpy, and against itself cut, batched and threaded otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.serving.batch import SequenceSlice
from phasewise.serving.errors import ModelError
from phasewise.serving.models.forward import AUTO, Capacity, build_program, reschedule
from phasewise.serving.models.linears import PlacedProduct
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.rope import Llama3Scaling, RopeSpec
from tests.support.models.reference_forward import reference_logits, tiny_config, tiny_model
from tests.support.tiers import examples, isas

SLOTS = 1024

# What each architecture brings; `bias`, `fused` and `kind` are the model's, the rest is the config's.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3-rope": {"rope": RopeSpec(5e5, 16, Llama3Scaling(8.0, 1.0, 4.0, 64)), "tied_embeddings": True},
    "mistral-window": {"architecture": "mistral", "sliding_window": 33},
    "qwen2-bias": {"architecture": "qwen2", "bias": True, "n_kv_heads": 3},
    "qwen3-norms": {"architecture": "qwen3", "qk_norm": True, "n_kv_heads": 1},
    "separate-parts": {"fused": False, "bias": True, "n_kv_heads": 6},
    "odd-sizes": {"head_dim": 10, "hidden": 50, "ffn": 70, "vocab_size": 37},
    "wide-head": {"head_dim": 256, "n_heads": 2, "n_kv_heads": 1, "n_layers": 1},
}


def make_model(name: str, kind: str = "f32", seed: int = 0) -> PackedModel:
    fields = dict(MODELS[name])
    bias, fused = fields.pop("bias", False), fields.pop("fused", True)
    return tiny_model(tiny_config(**fields), kind, seed, bias, fused)


class Machine:
    """A program and a team of any size, unpinned."""

    def __init__(
        self,
        model: PackedModel,
        threads: int = 1,
        step_tokens: int = 256,
        schedules: Sequence[ScheduleLookup] = (),
        kv_format: str = AUTO,
    ) -> None:
        self.team = Team(None, members=threads)
        capacity = Capacity(SLOTS, step_tokens, 16, step_tokens, threads, kv_format)
        self.placed: list[PlacedProduct] = []
        self.program = build_program(model, capacity, schedules=schedules, placed=self.placed)
        self._model, self._capacity = model, capacity
        self.logits = np.asarray(self.program)

    def reschedule(self, *lookups: ScheduleLookup) -> None:
        reschedule(self.program, self._model, self._capacity, lookups, self.placed)

    def every_row(self, *slices: SequenceSlice) -> np.ndarray:
        return self.logits[: self.program.run(self.team, slices, every_row=True)].copy()

    def last_rows(self, *slices: SequenceSlice) -> np.ndarray:
        return self.logits[: self.program.run(self.team, slices)].copy()


def random_ids(n: int, model: PackedModel, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, model.config.vocab_size, n).tolist()
    return ids


def sliced(ids: Sequence[int], start: int = 0, base: int = 0, wants_logits: bool = True) -> SequenceSlice:
    return SequenceSlice(list(ids), start, base, wants_logits)


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_numpy_in_float64(name: str) -> None:
    """Float32 weights, activations and KV: what is left is rounding, a few hundred operations deep."""
    model = make_model(name)
    ids = random_ids(170, model)
    want = reference_logits(model, ids)
    for isa_name in isas():
        with isa.using(isa_name):
            got = Machine(model, threads=2).every_row(sliced(ids, base=5))
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), isa_name


@pytest.mark.parametrize(
    ("kind", "kv_format", "loss"),
    [
        *(("bf16", AUTO, 0.02), ("q8", AUTO, 0.05), ("q4", AUTO, 0.05)),
        *(("f32", "f16", 0.001), ("f32", "bf16", 0.01), ("f32", "int16", 0.001)),
        *(("f32", "int8", 0.03), ("f32", "int4", 0.4)),
    ],
)
def test_rounded_activations_keys_and_values_cost_little(kind: str, kv_format: str, loss: float) -> None:
    """Against the same weights in float64: bf16 keeps 8 bits of an activation, int8 groups about 7.

    Keys and values are rounded beside float32 weights, so that nothing else is."""
    model = make_model("llama", kind)
    ids = random_ids(150, model)
    want = reference_logits(model, ids)
    for isa_name in isas():
        with isa.using(isa_name):
            got = Machine(model, kv_format=kv_format).every_row(sliced(ids))
            error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
            assert error.max() <= loss, isa_name


@pytest.mark.many
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8", "q4"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "separate-parts"])
def test_token_by_token_equals_the_whole_prompt(name: str, kind: str) -> None:
    model = make_model(name, kind)
    ids = random_ids(150, model)
    machine = Machine(model, threads=2)
    whole = machine.every_row(sliced(ids))

    single = [machine.last_rows(sliced([token], i, 500))[0] for i, token in enumerate(ids)]

    assert (np.stack(single) == whole).all()


@pytest.mark.parametrize("isa_name", isa.usable())
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_changes_nothing(threads: int, isa_name: str) -> None:
    model = make_model("llama", "q8")
    prompts = [sliced(random_ids(n, model, n), base=base) for n, base in ((140, 0), (1, 200), (60, 333))]
    steps = [sliced([7], len(prompt.token_ids), prompt.slot_base) for prompt in prompts]
    with isa.using(isa_name):
        single, many = Machine(model), Machine(model, threads)

        assert (single.every_row(*prompts) == many.every_row(*prompts)).all()
        assert (single.last_rows(*steps) == many.last_rows(*steps)).all()


@dataclass(frozen=True)
class DefaultSchedules(ScheduleLookup):
    """An arithmetic, and nothing tuned."""

    k_parts: int

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return None, self.k_parts


@dataclass(frozen=True)
class RandomSchedules(ScheduleLookup):
    """Any numbers for any weight, and one arithmetic for all."""

    seed: int
    k_parts: int = 1

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return None, self.k_parts

    def products(self, weight: PackedWeight, max_m: int) -> list[RowRange]:
        return self._ranges(np.random.default_rng((self.seed, weight.n, weight.k)), max_m)

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> list[RowRange]:
        return self._ranges(np.random.default_rng((self.seed, n, k)), max_m)

    def _ranges(self, rng: np.random.Generator, max_m: int) -> list[RowRange]:
        last_rows = sorted({*rng.integers(1, max_m, rng.integers(0, 20)).tolist(), max_m})
        return [RowRange(last, self._schedule(rng), "random") for last in last_rows]

    def _schedule(self, rng: np.random.Generator) -> dict[str, Any] | None:
        if rng.random() < 0.1:
            return None
        names = ("mr", "panels", "block_m", "block_n", "block_k", "prefetch_bytes")
        wild = {name: int(rng.choice((rng.integers(0, 9), rng.integers(-(2**31), 2**31)))) for name in names}
        grid = {name: int(rng.integers(0, 6)) for name in ("threads_m", "threads_n", "threads_k")}
        return {**wild, **grid, "loop_order": str(rng.choice(("nm", "mn")))}


@examples(20)
@given(
    name=st.sampled_from(("llama", "separate-parts", "odd-sizes")),
    kind=st.sampled_from(("f32", "bf16", "q4")),
    k_parts=st.sampled_from((1, 2)),
    seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=3),
)
def test_schedules_that_come_between_steps_change_no_bit(
    name: str, kind: str, k_parts: int, seeds: list[int]
) -> None:
    """Nor do those of another arithmetic, which the program does not take."""
    model = make_model(name, kind)
    ids = random_ids(60, model)
    machine = Machine(model, threads=2, schedules=[DefaultSchedules(k_parts)] * 2)
    want = machine.every_row(sliced(ids))
    assert {product.table for product in machine.placed} == {0, 1}
    for seed in seeds:
        for parts in (k_parts, 3 - k_parts):
            machine.reschedule(RandomSchedules(seed, parts), RandomSchedules(seed + 1, parts))
            assert (machine.every_row(sliced(ids)) == want).all()
            n_rows = machine.program.run(machine.team, [sliced(ids)], every_row=True, table=1)
            assert (machine.logits[:n_rows] == want).all()


@examples(40)
@given(
    name=st.sampled_from(("llama", "separate-parts", "odd-sizes")),
    kind=st.sampled_from(("f32", "f16", "bf16", "q8", "q4")),
    threads=st.integers(1, 4),
    k_parts=st.sampled_from((1, 1, 2, 3)),
    seed=st.integers(0, 1000),
)
def test_no_schedule_changes_a_bit(name: str, kind: str, threads: int, k_parts: int, seed: int) -> None:
    """A database row may hold any numbers; run it under AddressSanitizer too."""
    model = make_model(name, kind)
    prompts = [sliced(random_ids(n, model, n), base=base) for n, base in ((1, 0), (30, 70), (200, 333))]
    steps = [sliced([7], len(prompt.token_ids), prompt.slot_base) for prompt in prompts]
    plain = Machine(model, schedules=[DefaultSchedules(k_parts)])
    tuned = Machine(model, threads, schedules=[RandomSchedules(seed, k_parts)])

    assert (plain.every_row(*prompts) == tuned.every_row(*prompts)).all()
    assert (plain.last_rows(*prompts[:2]) == tuned.last_rows(*prompts[:2])).all()
    assert (plain.last_rows(*steps) == tuned.last_rows(*steps)).all()


@examples(25)
@given(
    name=st.sampled_from(("llama", "mistral-window", "wide-head")),
    positions=st.sampled_from((-5, 0, 127, 128, 256, 300, 10**9)),
    rows=st.sampled_from((-1, 1, 2, 5, 13, 10**9)),
    lengths=st.lists(st.sampled_from((1, 127, 128, 129, 490)), min_size=1, max_size=2),
    threads=st.integers(1, 4),
)
def test_no_cut_of_attention_changes_a_bit(
    name: str, positions: int, rows: int, lengths: list[int], threads: int
) -> None:
    """Pieces of any size, for prompts and for single tokens with up to four chunks behind them."""
    model = make_model(name)
    plain, cut = Machine(model, 1, 512), Machine(model, threads, 512)
    numbers = dict.fromkeys(("mr", "panels", "block_m", "block_n", "block_k", "prefetch_bytes"), rows)
    grid = dict.fromkeys(("threads_m", "threads_n", "threads_k"), 1)
    cut.program.set_attention_schedules(
        [(SLOTS, {**numbers, **grid, "block_k": positions, "loop_order": "mn"})]
    )
    prompts = [sliced(random_ids(n, model, n), base=500 * i) for i, n in enumerate(lengths)]
    steps = [sliced([7], n, 500 * i) for i, n in enumerate(lengths)]

    for step in (*([prompt] for prompt in prompts), steps):
        assert (plain.last_rows(*step) == cut.last_rows(*step)).all()


def random_steps(
    sequences: Sequence[list[int]], bases: Sequence[int], rng: np.random.Generator
) -> Iterator[tuple[list[SequenceSlice], list[int]]]:
    """All sequences, cut and mixed at random; beside each step, which sequences end in it."""
    done = [0] * len(sequences)
    while any(done[i] < len(ids) for i, ids in enumerate(sequences)):
        step: list[SequenceSlice] = []
        ending, room = [], 256
        for i, ids in enumerate(sequences):
            most = min(room, len(ids) - done[i])
            count = int(rng.choice((0, 1, most, rng.integers(0, most + 1)))) if most else 0
            if count == 0:
                continue
            last = done[i] + count == len(ids)
            step.append(sliced(ids[done[i] : done[i] + count], done[i], bases[i], last))
            ending += [i] * last
            done[i], room = done[i] + count, room - count
        if step:
            yield step, ending


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    kind=st.sampled_from(("f32", "q4")),
    kv_format=st.sampled_from(KV_FORMATS),
    name=st.sampled_from(("llama", "mistral-window")),
    seed=st.integers(0, 1000),
)
def test_any_composition_of_steps_gives_the_same_logits(
    lengths: list[int], kind: str, kv_format: str, name: str, seed: int
) -> None:
    """Each sequence must come out as it does alone and whole, bit for bit."""
    model, rng = make_model(name, kind), np.random.default_rng(seed)
    machine = Machine(model, threads=2, kv_format=kv_format)
    sequences = [random_ids(n, model, i) for i, n in enumerate(lengths)]
    alone = [machine.every_row(sliced(ids))[-1] for ids in sequences]
    gaps = rng.integers(0, 20, len(lengths))
    bases = [int(sum(lengths[:i]) + gaps[: i + 1].sum()) for i in range(len(lengths))]
    got: dict[int, np.ndarray] = {}

    for step, ending in random_steps(sequences, bases, rng):
        got.update(zip(ending, machine.last_rows(*step), strict=True))

    for i, logits in enumerate(alone):
        assert (got[i] == logits).all()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_what_another_sequence_left_behind_does_not_matter(kv_format: str) -> None:
    """Freed slots are given to a new sequence as they are: NaN in them, and beside them, must not spread."""
    model = make_model("llama")
    machine = Machine(model, kv_format=kv_format)
    ids, later = random_ids(40, model), random_ids(250, model, 8)
    fresh = machine.every_row(sliced(ids, base=70))
    embedding, healthy = model.weights["embed"].values, model.weights["embed"].values.copy()
    embedding[:] = np.nan
    machine.every_row(sliced(later))
    embedding[:] = healthy

    assert (machine.every_row(sliced(ids, base=70)) == fresh).all()
    stepwise = [machine.last_rows(sliced([token], i, 70))[0] for i, token in enumerate(ids)]
    assert (np.stack(stepwise) == fresh).all()


BAD_STEPS: dict[str, Callable[[], list[SequenceSlice]]] = {
    "outside the vocabulary of 83": lambda: [sliced([1, 83])],
    "token -1 is outside": lambda: [sliced([-1])],
    "64 bits": lambda: [sliced([1 << 70])],
    "outside the KV slots": lambda: [sliced([1], start=SLOTS)],
    "lies outside": lambda: [sliced([1], base=-1)],
    "a slice lies": lambda: [sliced([1], start=-1, base=5)],
    "outside the KV": lambda: [sliced([1, 2], start=1000, base=SLOTS - 1001)],
    "no tokens": lambda: [sliced([])],
    "no tokens or too many": lambda: [],
    "at most 256 tokens": lambda: [sliced([1] * 257)],
    "at most 16 slices": lambda: [sliced([1], base=i) for i in range(17)],
    "write the same KV slot": lambda: [sliced([1, 2, 3]), sliced([5], start=1, base=1)],
}


@pytest.mark.parametrize("says", BAD_STEPS)
def test_a_step_out_of_range_is_refused_and_changes_nothing(says: str) -> None:
    model = make_model("llama")
    machine = Machine(model)
    ids = random_ids(9, model)
    machine.every_row(sliced(ids[:8]))

    with pytest.raises(ValueError, match=says):
        machine.last_rows(*BAD_STEPS[says]())

    assert (machine.last_rows(sliced(ids[8:], 8)) == Machine(model).every_row(sliced(ids))[8:]).all()


wild = st.one_of(
    st.integers(-2, 300), st.integers(-(2**65), 2**65), st.sampled_from((SLOTS - 1, SLOTS, 2**31))
)
wild_slices = st.lists(
    st.builds(
        SequenceSlice, st.lists(st.one_of(st.integers(0, 82), wild), max_size=6), wild, wild, st.booleans()
    ),
    max_size=4,
)


def test_hostile_steps_either_run_or_are_refused() -> None:
    """Run it under AddressSanitizer too: nothing may read or write outside."""
    model = make_model("llama")
    machine = Machine(model, threads=2)

    @examples(300)
    @given(slices=wild_slices)
    def check(slices: list[SequenceSlice]) -> None:
        with contextlib.suppress(ValueError):
            rows = machine.last_rows(*slices)
            assert np.isfinite(rows).all()

    check()
    assert np.isfinite(machine.last_rows(sliced(random_ids(50, model)))).all()


@examples(60)
@given(
    source=st.one_of(st.integers(0, 300), st.integers(0, 18).map(lambda panel: 16 * panel)),
    target=st.one_of(st.integers(0, 300), st.integers(0, 18).map(lambda panel: 16 * panel)),
    n=st.integers(1, 200),
    kv_format=st.sampled_from(KV_FORMATS),
)
def test_moved_keys_and_values_serve_as_before(source: int, target: int, n: int, kv_format: str) -> None:
    """Ranges may overlap and need not be aligned; whole panels of 16 slots take a way of their own."""
    model = make_model("odd-sizes")
    machine = Machine(model, threads=2, kv_format=kv_format)
    ids = random_ids(n + 1, model)
    machine.last_rows(sliced(ids[:n], base=source))
    want = machine.last_rows(sliced(ids[n:], n, source))
    machine.last_rows(sliced(ids[:n], base=source))

    machine.program.copy_kv(machine.team, source, target, n)

    assert (machine.last_rows(sliced(ids[n:], n, target)) == want).all()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(
    ("source", "target", "n"), [(0, 512, 40), (512, 16, 200), (48, 32, 100), (5, 77, 30)]
)
def test_a_move_leaves_its_neighbours_alone(source: int, target: int, n: int, kv_format: str) -> None:
    """Sequences that end right before the target, and begin right behind it."""
    model = make_model("llama")
    machine = Machine(model, kv_format=kv_format)
    ids = random_ids(9, model)
    places = [base for base in (target - 9, target + n) if base >= 0]
    want = machine.every_row(sliced(ids))[8:]
    for base in places:
        machine.last_rows(sliced(ids[:8], base=base))

    machine.program.copy_kv(machine.team, source, target, n)

    for base in places:
        assert (machine.last_rows(sliced(ids[8:], 8, base)) == want).all()


@pytest.mark.parametrize(("source", "target", "n"), [(-1, 0, 1), (0, SLOTS, 1), (0, 1, SLOTS), (0, 0, -1)])
def test_a_move_outside_the_slots_is_refused(source: int, target: int, n: int) -> None:
    machine = Machine(make_model("llama"))

    with pytest.raises(ValueError, match="slots"):
        machine.program.copy_kv(machine.team, source, target, n)


def test_logits_outlive_the_program() -> None:
    machine = Machine(make_model("llama"))
    logits = machine.logits[: machine.program.run(machine.team, [sliced([1])])]
    kept = logits.copy()

    del machine

    assert (logits == kept).all()


def test_a_model_beyond_the_kernels_is_refused() -> None:
    with pytest.raises(ModelError, match="heads of 514 dimensions"):
        Machine(tiny_model(tiny_config(head_dim=514, n_layers=1)))


def test_a_model_without_a_weight_is_named() -> None:
    model = make_model("llama")
    weights = {name: weight for name, weight in model.weights.items() if name != "layers.1.o"}
    fields = {name: getattr(model, name) for name in PackedModel.__dataclass_fields__}

    with pytest.raises(ModelError, match=r"no weight 'layers\.1\.o'"):
        Machine(PackedModel(**{**fields, "weights": weights}))

"""More ranks than KV heads: the bits of one rank, whoever computes a query head and from which copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels.division import Teams
from phasewise.serving.models.forward import kv_bytes_per_slot
from phasewise.serving.models.packed_model import PackedModel
from tests.serving.models.test_forward import SLOTS, Machine, random_ids, sliced
from tests.serving.models.test_forward_ranks import assert_bits_of_one, prompts, ranks
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.tiers import examples

DEFAULT_MODELS_HEADS = {"n_heads": 9, "n_kv_heads": 3, "hidden": 144, "ffn": 176}

SHAPES = [
    (DEFAULT_MODELS_HEADS, 4),
    (DEFAULT_MODELS_HEADS, 7),
    (DEFAULT_MODELS_HEADS, 9),
    ({"n_heads": 6, "n_kv_heads": 1}, 4),
    ({"n_heads": 6, "n_kv_heads": 2}, 3),
    ({"n_heads": 6, "n_kv_heads": 2}, 5),
    ({"n_heads": 6, "n_kv_heads": 6}, 6),
]


def model_of(fields: dict[str, int], kind: str = "f32") -> PackedModel:
    return tiny_model(tiny_config(**fields), kind)


@pytest.mark.parametrize("others", [None, (1,), (2, 1)], ids=str)
@pytest.mark.parametrize(("fields", "n_ranks"), SHAPES, ids=str)
def test_ranks_that_share_heads_give_the_bits_of_one(
    fields: dict[str, int], n_ranks: int, others: tuple[int, ...] | None
) -> None:
    """Prompts and answers by as many ranks; answers by few, and prompts by few."""
    many = (1,) * n_ranks
    model = model_of(fields)

    assert_bits_of_one(model, (many, others or many), 2)
    if others is not None:
        assert_bits_of_one(model, (others, many), 2)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8", "q4"])
def test_in_every_storage_of_weights(kind: str) -> None:
    assert_bits_of_one(model_of(DEFAULT_MODELS_HEADS, kind), ((1, 2, 1, 1), (1,) * 5), 2)


@pytest.mark.parametrize("kv_format", ["f16", "bf16", "int16", "int8", "int4"])
def test_in_every_format_of_keys_and_values(kv_format: str) -> None:
    assert_bits_of_one(model_of(DEFAULT_MODELS_HEADS), ((1,) * 4, (1,) * 7), 2, kv_format)


def test_in_rings() -> None:
    """Layers with windows keep copies of their rings."""
    model = tiny_model(tiny_config(architecture="mistral", sliding_window=33, n_kv_heads=2))
    ring = (SLOTS, 384)
    ids = random_ids(300, model)
    single = Machine(model)
    with ranks(model, ((1,) * 5, (1, 1)), (), 512) as many:
        done = 0
        for count in (200, 1, 1, 60, 1, 1, 1):
            step = [sliced(ids[done : done + count], done)]
            ringed = [step[0]._replace(ring=ring)]
            assert (many.run(ringed, done % 2) == single.last_rows(*step)).all()
            done += count


@examples(20)
@given(
    heads=st.sampled_from([(1, 5), (1, 8), (2, 3), (3, 3), (3, 2)]),
    sizes=st.tuples(*[st.lists(st.integers(1, 2), min_size=1, max_size=6).map(tuple)] * 2).filter(
        lambda sizes: max(map(len, sizes)) > 1
    ),
    kv_format=st.sampled_from(("f32", "int8")),
    seed=st.integers(0, 1000),
)
def test_chunks_moves_and_changes_of_ranks_change_nothing(
    heads: tuple[int, int], sizes: Teams, kv_format: str, seed: int
) -> None:
    """Any table for any step; now and then what is known so far moves to other slots, as prefixes do."""
    n_kv_heads, group = heads
    model = model_of({"n_heads": n_kv_heads * group, "n_kv_heads": n_kv_heads})
    rng = np.random.default_rng(seed)
    single = Machine(model, kv_format=kv_format)
    ids, done, base = random_ids(180, model, seed), 0, 70
    with ranks(model, sizes, (), 0, kv_format) as many:
        while done < len(ids):
            count = int(rng.choice((1, 1, 2, 9, 40)))
            step = ids[done : done + count]
            got = many.run([sliced(step, done, base)], int(rng.integers(2)))
            assert (got == single.last_rows(sliced(step, done, 70))).all()
            done += len(step)
            if rng.random() < 0.3:
                target = int(rng.integers(0, SLOTS - 200))
                many.programs[0].copy_kv(many.own_teams[0][0], base, target, done)
                base = target


def test_ranks_without_a_query_head_do_no_harm() -> None:
    """`RankLayout` refuses such plans; a program computes the same."""
    assert_bits_of_one(model_of({"n_heads": 2, "n_kv_heads": 1}), ((1,) * 3, (1,) * 4), 1)


@pytest.mark.parametrize(("fields", "n_ranks"), SHAPES, ids=str)
def test_each_rank_has_one_kv_head_in_its_memory(fields: dict[str, int], n_ranks: int) -> None:
    """So keys and values take as much as max(ranks, KV heads) heads, and programs take what is told."""
    model = model_of(fields)
    of_one_head = kv_bytes_per_slot(model) // fields["n_kv_heads"]
    teams = ((1,), (1,) * n_ranks)

    assert kv_bytes_per_slot(model, teams=teams) == of_one_head * max(n_ranks, fields["n_kv_heads"])
    with ranks(model, teams) as many:
        many.run(prompts(model))
        assert many.programs[0].kv_bytes() == SLOTS * kv_bytes_per_slot(model, teams=teams)

"""Heads divided between ranks: each query head once, a copy of its KV head for each rank that reads it."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.division import Division, HeadShare, Teams, head_copies, head_share
from tests.support.tiers import examples

HEAD_DIM = 8

teams_of_a_table = st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 5))
"""KV heads, and query heads of each."""


def shares(n_kv_heads: int, group: int, teams: tuple[int, ...]) -> list[HeadShare]:
    return [head_share(n_kv_heads * group, n_kv_heads, teams, rank) for rank in range(len(teams))]


@examples(200)
@given(shape=shapes, teams=teams_of_a_table)
def test_every_query_head_is_one_ranks(shape: tuple[int, int], teams: tuple[int, ...]) -> None:
    """Ranks that share a KV head have query heads of it alone, equally many, and copies 0, 1, and so on."""
    n_kv_heads, group = shape
    owned = shares(n_kv_heads, group, teams)
    is_shared = len(teams) > n_kv_heads

    for head in range(n_kv_heads):
        readers = [own for own in owned if own.begin <= head < own.end]
        queries = [own.queries for own in readers]
        assert sum(queries) == group
        assert max(queries) - min(queries) <= 1
        assert [own.copy for own in readers] == list(range(len(readers)))
        assert {own.n_sharers for own in readers} == {len(readers)}
    if is_shared:
        busy = [own for own in owned if own.n_heads]
        assert len(busy) == min(len(teams), n_kv_heads * group)
        assert {own.n_kv_heads for own in busy} == {1}
        readers_of = [sum(own.begin == head for own in busy) for head in range(n_kv_heads)]
        assert max(readers_of) - min(readers_of) <= 1
    assert head_share(n_kv_heads * group, n_kv_heads, teams, len(teams)).n_heads == 0


@examples(200)
@given(shape=shapes, tables=st.tuples(teams_of_a_table, teams_of_a_table))
def test_as_many_copies_are_kept_as_the_table_needs_that_shares_most(
    shape: tuple[int, int], tables: Teams
) -> None:
    n_kv_heads, group = shape
    n_heads = n_kv_heads * group
    copies = head_copies(n_heads, n_kv_heads, tables)

    for head in range(n_kv_heads):
        readers = [sum(own.begin <= head < own.end for own in shares(*shape, table)) for table in tables]
        assert copies[head] == max(readers)
    for table in tables:
        alone = head_copies(n_heads, n_kv_heads, (table, ()))
        assert sum(alone) == max(n_kv_heads, min(len(table), n_heads))
    assert head_copies(n_heads, n_kv_heads, ()) == (1,) * n_kv_heads


def sealed(shape: tuple[int, int], n_layers: int, tables: Teams) -> Program:
    n_kv_heads, group = shape
    numbers: dict[str, Any] = {
        "n_layers": n_layers, "n_heads": n_kv_heads * group, "n_kv_heads": n_kv_heads, "head_dim": HEAD_DIM,
        "hidden": 16, "ffn": 16, "vocab": 16, "window": 0, "norm_eps": 1e-5,
    }  # fmt: skip
    room: dict[str, Any] = {
        "kv_slots": 32, "max_tokens": 4, "max_slices": 2, "max_logit_rows": 2, "kv_format": "int8",
        "max_threads": 3,
    }  # fmt: skip
    program = Program(numbers, room, np.ones(HEAD_DIM // 2), Division(tables, 0))
    weight = packing.pack_dense(np.ones((16, 16), np.float32), "f32")
    program.embed(weight, 0, 16)
    program.linear([(weight, 0)], "rows", 0, 16, 128, 16, rows="gathered")
    program.seal_shared(128, memoryview(mmap.mmap(-1, program.shared_bytes())))
    return program


@examples(60)
@given(
    shape=shapes,
    n_layers=st.integers(1, 3),
    tables=st.tuples(teams_of_a_table, teams_of_a_table).filter(lambda teams: max(map(len, teams)) > 1),
)
def test_copies_lie_beside_each_other_and_are_all_of_the_memory(
    shape: tuple[int, int], n_layers: int, tables: Teams
) -> None:
    """The program and `head_copies` count alike: bytes of keys and values are the copies', and no more."""
    n_kv_heads, group = shape
    program = sealed(shape, n_layers, tables)
    copies = head_copies(n_kv_heads * group, n_kv_heads, tables)
    spans = [
        program.kv_span(layer, head, copy)
        for layer in range(n_layers)
        for head in range(n_kv_heads)
        for copy in range(copies[head])
    ]

    begin, size = spans[0]
    assert spans == [(begin + number * size, size) for number in range(len(spans))]
    assert program.kv_bytes() == n_layers * sum(copies) * size
    with pytest.raises(ValueError, match=rf"copy {copies[0]} of KV head 0: {copies[0]} are there"):
        program.kv_span(0, 0, copies[0])

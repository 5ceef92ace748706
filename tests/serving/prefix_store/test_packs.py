"""Packs come from outside: whole ones of this arithmetic are read, all others refused in one line."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from phasewise.serving.prefix_store.blocks import RecordShape, read_record
from phasewise.serving.prefix_store.pack_file import Pack, PackError
from tests.support.prefix_packs import IDENTITY, SHAPE, write_pack
from tests.support.tiers import n_examples

TOKENS = [number % 90 for number in range(300)]


def test_a_pack_has_its_tokens_in_whole_panels(tmp_path: Path) -> None:
    pack = Pack.open(write_pack(tmp_path / "pack", TOKENS))
    pack.refuse_other(IDENTITY, SHAPE)
    pack.check()
    buffer = memoryview(bytearray(SHAPE.most_bytes))

    assert pack.n_stored([*TOKENS, 1, 2]) == 288
    assert pack.n_stored(TOKENS[:287]) == 256
    assert pack.n_stored([7, *TOKENS]) == 0
    rng = random.Random(1)  # as they were drawn
    for number, block in enumerate(pack.blocks):
        record = buffer[: pack.read_into(number, buffer)]
        rows = read_record(pack.facts.naming, SHAPE, block, record)
        assert rows == rng.randbytes(len(rows))
    pack.close()


def test_a_pack_with_a_state_is_of_use_whole(tmp_path: Path) -> None:
    shape = RecordShape(2, 24, 64)
    pack = Pack.open(write_pack(tmp_path / "pack", TOKENS, shape=shape))
    pack.refuse_other(IDENTITY, shape)
    pack.check()

    assert pack.n_stored([*TOKENS, 1, 2]) == pack.n_stored(TOKENS) == 300
    assert pack.n_stored(TOKENS[:-1]) == pack.n_stored([7, *TOKENS]) == 0
    assert [block.is_state for block in pack.blocks] == [False, False, False, True]
    with pytest.raises(PackError, match="of another shape"):
        pack.refuse_other(IDENTITY, SHAPE)
    pack.close()


@pytest.mark.parametrize("name", list(IDENTITY))
def test_a_pack_of_another_identity_is_refused_by_what_differs(tmp_path: Path, name: str) -> None:
    pack = Pack.open(write_pack(tmp_path / "pack", TOKENS))
    with pytest.raises(PackError, match=f"of another {name.replace('_', ' ')}") as refused:
        pack.refuse_other({**IDENTITY, name: "another"}, SHAPE)

    assert "\n" not in str(refused.value)
    with pytest.raises(PackError, match="of another shape"):
        pack.refuse_other(IDENTITY, RecordShape(3, 24))
    pack.close()


def test_no_damaged_pack_is_used(tmp_path: Path) -> None:
    good = write_pack(tmp_path / "pack", TOKENS).read_bytes()
    rng, path = random.Random(7), tmp_path / "damaged"
    for _ in range(n_examples(400)):
        data = bytearray(good)
        if rng.random() < 0.7:
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        elif rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data += rng.randbytes(rng.randrange(1, 99))
        path.write_bytes(data)
        with pytest.raises(PackError) as refused:
            check_all(path)
        assert str(path) in str(refused.value)


def check_all(path: Path) -> None:
    opened = Pack.open(path)
    try:
        opened.check()
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("n_described", "n_tokens"), [(1 << 31, 5), (10, 1 << 60), (10, 0), (1 << 16, 1 << 20), (0, 1)]
)
def test_lengths_of_a_hostile_header_are_bounded(tmp_path: Path, n_described: int, n_tokens: int) -> None:
    path = tmp_path / "pack"
    path.write_bytes(struct.pack("<8sIIQ32s", b"PWPXPACK", 1, n_described, n_tokens, bytes(32)) + b"{}" * 9)

    with pytest.raises(PackError, match="is damaged"):
        Pack.open(path)


@pytest.mark.parametrize(
    "described",
    [
        b"[]",
        b"{}",
        b"{" * 60_000,
        b'{"model": 1, "identity": {}, "layers": 2, "slot_bytes": 24}',
        b'{"model": "", "identity": {}, "layers": -2, "slot_bytes": 24}',
        b'{"model": "", "identity": {}, "layers": 1e99, "slot_bytes": 24}',
        b'{"model": "", "identity": {}, "layers": 2, "slot_bytes": 99999999999}',
    ],
)
def test_a_description_that_says_something_else_is_refused(tmp_path: Path, described: bytes) -> None:
    import hashlib

    tokens = struct.pack("<2i", 1, 2)
    digest = hashlib.sha256(described + tokens).digest()
    path = tmp_path / "pack"
    path.write_bytes(struct.pack("<8sIIQ32s", b"PWPXPACK", 1, len(described), 2, digest) + described + tokens)

    with pytest.raises(PackError, match="cannot be understood"):
        Pack.open(path)


def test_what_is_no_pack_is_refused(tmp_path: Path) -> None:
    text, missing = tmp_path / "text", tmp_path / "missing"
    text.write_text("hello")
    for path, said in (
        (text, "is no prefix pack"),
        (missing, "cannot be read"),
        (tmp_path, "no regular file"),
    ):
        with pytest.raises(PackError, match=said):
            Pack.open(path)

"""Hand-made hostile GGUF headers: each is one clear error, at once and in little memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.formats import gguf_file
from phasewise.serving.loaders.formats.gguf_file import open_gguf
from tests.support.models.tiny_models import GgufWriter, tiny_gguf


def header(n_tensors: int = 0, n_pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs)


def text(raw: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: bytes, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


U32, STRING, ARRAY = 4, 8, 9
BYTES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "beyond its end"),
    "another file": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "a cut count": (header()[:-1], "beyond its end"),
    "2^63 tensors": (header(n_tensors=1 << 63), "claims 9223372036854775808 tensors"),
    "2^63 keys": (header(n_pairs=1 << 63), "metadata keys"),
    "more keys than bytes": (header(n_pairs=50_000), "beyond its end"),
    "a key of 2^63 bytes": (header(n_pairs=1) + text(b"a", 1 << 63), "claims a string"),
    "a string of 2^40 bytes": (header(n_pairs=1) + pair(b"a", STRING, text(b"b", 1 << 40)),
     "claims a string"),
    "a string to the end and more": (header(n_pairs=1) + pair(b"a", STRING, text(b"b", 100)),
     "beyond its end"),
    "a key twice": (header(n_pairs=2) + pair(b"a", U32, bytes(4)) * 2, "twice"),
    "a key that is no text": (header(n_pairs=1) + pair(b"\xff", U32, bytes(4)), "not UTF-8"),
    "a value that is no text": (header(n_pairs=1) + pair(b"a", STRING, text(b"\xff")), "not UTF-8"),
    "an unknown type": (header(n_pairs=1) + pair(b"a", 99, bytes(8)), "unknown type 99"),
    "2^61 numbers": (header(n_pairs=1) + pair(b"a", ARRAY, array(U32, 1 << 61)),
     "claims 2305843009213693952"),
    "2^22 numbers, absent": (header(n_pairs=1) + pair(b"a", ARRAY, array(U32, 1 << 22)), "beyond its end"),
    "2^22 strings, absent": (header(n_pairs=1) + pair(b"a", ARRAY, array(STRING, 1 << 22)), "beyond its end"),
    "an array of arrays": (header(n_pairs=1) + pair(b"a", ARRAY, array(ARRAY, 1)), "unsupported type 9"),
    "an array of no text": (header(n_pairs=1) + pair(b"a", ARRAY, array(STRING, 1, text(b"\xff"))), "UTF-8"),
    "no dimensions": (header(1) + tensor(b"a", []), "0 dimensions"),
    "five dimensions": (header(1) + tensor(b"a", [1] * 5), "5 dimensions"),
    "2^32 - 1 dimensions": (header(1) + tensor(b"a", [1], n_dims=(1 << 32) - 1), "4294967295 dimensions"),
    "an empty tensor": (header(1) + tensor(b"a", [4, 0]), "whole blocks"),
    "dimensions that overflow": (header(1) + tensor(b"a", [1 << 32, 1 << 32, 2]), "cut short"),
    "an unknown tensor type": (header(1) + tensor(b"a", [32], kind=99), "unknown type 99"),
    "half a block": (header(1) + tensor(b"a", [33], kind=8), "whole blocks of 32"),
    "an offset of 2^63": (header(1) + tensor(b"a", [8], offset=1 << 63), "cut short"),
    "a misaligned offset": (header(1) + tensor(b"a", [8], offset=4) + bytes(64), "misaligned"),
    "a tensor twice": (header(2) + tensor(b"a", [8]) + tensor(b"a", [8], offset=32) + bytes(96), "twice"),
    "an overlap": (header(2) + tensor(b"a", [16]) + tensor(b"b", [8], offset=32) + bytes(128), "inside 'a'"),
    "alignment zero": (header(0, 1) + pair(b"general.alignment", U32, bytes(4)), "alignment 0"),
    "alignment three": (header(0, 1) + pair(b"general.alignment", U32, struct.pack("<I", 3)), "alignment 3"),
    "alignment of text": (header(0, 1) + pair(b"general.alignment", STRING, text(b"32")), "alignment '32'"),
    "no model": (header() + bytes(64), "'nothing' model"),
}  # fmt: skip


@pytest.mark.parametrize("case", BYTES)
def test_a_hostile_header_is_one_clear_error(tmp_path: Path, case: str) -> None:
    raw, message = BYTES[case]
    (tmp_path / "bad.gguf").write_bytes(raw)

    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(tmp_path / "bad.gguf"), "native", tmp_path)

    assert "\n" not in str(caught.value)


def test_a_header_longer_than_the_first_read_is_read_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "FIRST_READ_BYTES", 64)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())

    file, gguf_header = open_gguf(path)
    file.close()

    assert len(gguf_header.tensors) == 20


def test_a_header_beyond_the_limit_is_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of 1 TB whose one string would fill it."""
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 1 << 20)
    monkeypatch.setattr(gguf_file, "FIRST_READ_BYTES", 1 << 16)
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header(n_pairs=3) + pair(b"a", ARRAY, array(STRING, 1 << 21)))
    os.truncate(path, 1 << 40)
    tracemalloc.start()

    with pytest.raises(ModelError, match="header of more than"):
        open_gguf(path)

    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 32 << 20


def _claims_a_petabyte(writer: GgufWriter) -> None:
    writer.tensors[0] = (writer.tensors[0][0], (1 << 25, 1 << 25), 0, writer.tensors[0][3])


def _is_a_cube(writer: GgufWriter) -> None:
    name, shape, kind, raw = writer.tensors[1]
    writer.tensors[1] = (name, (*shape, 1), kind, raw)


def _has_an_unknown_tensor(writer: GgufWriter) -> None:
    writer.tensors[1] = ("blk.0.attn_sinks.weight", *writer.tensors[1][1:])


def _has_a_layer_too_many(writer: GgufWriter) -> None:
    writer.tensors[1] = ("blk.7.attn_q.weight", *writer.tensors[1][1:])


def _has_a_quantised_norm(writer: GgufWriter) -> None:
    index = next(i for i, each in enumerate(writer.tensors) if each[0] == "output_norm.weight")
    writer.tensors[index] = ("output_norm.weight", (64,), 8, bytes(68))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_claims_a_petabyte, "cut short|inside"),
        (_is_a_cube, "in shape"),
        (_has_an_unknown_tensor, "attn_sinks"),
        (_has_a_layer_too_many, "lacks the tensor for layers.0.q"),
        (_has_a_quantised_norm, "vector output_norm.weight in Q8_0"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_one_clear_error(
    tmp_path: Path, change: Callable[[GgufWriter], None], message: str
) -> None:
    writer = tiny_gguf()
    change(writer)
    (tmp_path / "bad.gguf").write_bytes(writer.to_bytes())

    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path / "bad.gguf"), "native", tmp_path)

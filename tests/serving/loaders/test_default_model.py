"""The default model as shipped, where it has been pulled: what we load is what its file says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from phasewise.cython_kernels.packing import unpack
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.fetching.registry import KNOWN, known_path
from phasewise.serving.loaders.fetching.resolve import cache_root
from phasewise.serving.loaders.formats.gguf_file import GgufFiles, GgufHeader, open_gguf
from phasewise.serving.models.packed_model import PackedModel

NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def path() -> Path:
    path = known_path(KNOWN[NAME], cache_root())
    if not path.is_file():
        pytest.skip(f"{NAME} is not in the cache: phasewise models pull {NAME}")
    return path


@pytest.fixture(scope="module")
def model(path: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return load_model(str(path), "native", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def shipped(path: Path) -> Iterator[tuple[GgufFiles, GgufHeader]]:
    file, header = open_gguf(path)
    with closing(file):
        yield file, header


def test_its_shape_is_smollm2s(model: PackedModel) -> None:
    config = model.config

    assert (config.n_layers, config.hidden, config.ffn, config.vocab_size) == (30, 576, 1536, 49152)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tied_embeddings
    assert 2 in config.eos_token_ids
    assert model.weights["embed"].kind == "q8"
    assert model.weights["layers.29.qkv"].kind == "q4"
    assert model.weight_bytes < 100e6


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("embed", "token_embd"), ("layers.0.o", "blk.0.attn_output"), ("layers.29.down", "blk.29.ffn_down")],
)
def test_weights_are_what_the_gguf_package_reads(
    model: PackedModel, shipped: tuple[GgufFiles, GgufHeader], ours: str, theirs: str
) -> None:
    file, header = shipped
    info = header.tensors[f"{theirs}.weight"]
    raw = np.frombuffer(file.read(info.offset, info.n_bytes), np.uint8).reshape(info.shape[0], -1)

    expected = quants.dequantize(raw, GGMLQuantizationType[info.type_name])

    assert np.array_equal(unpack(model.weights[ours]), expected)


def test_query_rows_are_in_half_split_order(
    model: PackedModel, shipped: tuple[GgufFiles, GgufHeader]
) -> None:
    file, header = shipped
    info = header.tensors["blk.3.attn_q.weight"]
    raw = np.frombuffer(file.read(info.offset, info.n_bytes), np.uint8).reshape(info.shape[0], -1)
    interleaved = quants.dequantize(raw, GGMLQuantizationType[info.type_name])

    half_split = interleaved.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)

    assert np.array_equal(unpack(model.weights["layers.3.qkv"])[:576], half_split)

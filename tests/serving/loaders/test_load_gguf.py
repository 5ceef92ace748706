"""A GGUF model loads as the model that was written, through every format and both starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, quants

from phasewise.cython_kernels.packing import BLOCK_KINDS, unpack
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.formats.gguf_blocks import BLOCK_TYPES
from phasewise.serving.loaders.formats.gguf_file import TENSOR_TYPES, open_gguf
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.rope import FrequencyFactors, LinearScaling
from tests.support.models.family_gguf_files import write_family_gguf
from tests.support.models.tiny_models import (
    CHAT_TEMPLATE,
    TinyShape,
    gguf_name,
    tiny_gguf,
    tiny_weights,
    write_tiny_gguf,
    write_tiny_hf,
)

ODD = TinyShape(n_layers=1, hidden=40, ffn=56, n_heads=3, n_kv_heads=1, head_dim=10, vocab_size=261)
WIDE = TinyShape(n_layers=1, hidden=256, ffn=256, n_heads=4, n_kv_heads=2, head_dim=64)


def parts_of(model: PackedModel, shape: TinyShape) -> dict[str, np.ndarray]:
    """Every weight and vector in float32, un-fused, by our names."""
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    cuts = {"qkv": (("q", q), ("k", kv), ("v", kv)), "gate_up": (("gate", shape.ffn), ("up", shape.ffn))}
    cuts["qkv_bias"] = (("q_bias", q), ("k_bias", kv), ("v_bias", kv))
    whole = {name: unpack(weight) for name, weight in model.weights.items()} | dict(model.vectors)
    parts: dict[str, np.ndarray] = {}
    for name, value in whole.items():
        stem, _, last = name.rpartition(".")
        start = 0
        for part, rows in cuts.get(last, ((last, len(value)),)):
            parts[f"{stem}.{part}" if stem else part] = value[start : start + rows]
            start += rows
        assert start == len(value)
    return parts


OUR_NAMES = {
    "embed_tokens.weight": "embed", "norm.weight": "final_norm", "q_proj.weight": "q", "k_proj.weight": "k",
    "v_proj.weight": "v", "o_proj.weight": "o", "gate_proj.weight": "gate", "up_proj.weight": "up",
    "down_proj.weight": "down", "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm", "q_proj.bias": "q_bias", "k_proj.bias": "k_bias",
    "v_proj.bias": "v_bias", "q_norm.weight": "q_norm", "k_norm.weight": "k_norm",
}  # fmt: skip


def our_name(hf_name: str) -> str:
    if hf_name == "lm_head.weight":
        return "lm_head"
    pieces = hf_name.split(".")
    ours = OUR_NAMES[".".join(pieces[-2:])]
    return f"layers.{pieces[2]}.{ours}" if pieces[1] == "layers" else ours


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shape", [TinyShape(), ODD, TinyShape(tied=False)], ids=["even", "odd", "untied"])
def test_an_f32_file_comes_back_bit_for_bit(tmp_path: Path, architecture: str, shape: TinyShape) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture, shape=shape)

    model = load_model(str(path), "native", tmp_path)

    expected = {our_name(name): value for name, value in tiny_weights(architecture, shape).items()}
    got = parts_of(model, shape)
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], expected[name]) for name in expected)
    assert model.config.architecture == architecture
    assert model.config.tied_embeddings == shape.tied


@pytest.mark.parametrize("weight_format", ["native", "f32", "bf16", "int8", "int4"])
def test_a_gguf_file_and_a_directory_of_one_model_are_equal(tmp_path: Path, weight_format: str) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    directory = write_tiny_hf(tmp_path / "tiny")

    ours, theirs = (load_model(str(path), weight_format, tmp_path) for path in (gguf, directory))

    assert ours.weights.keys() == theirs.weights.keys()
    for name in ours.weights:
        assert np.array_equal(unpack(ours.weights[name]), unpack(theirs.weights[name]))
    assert ours.config.rope == theirs.config.rope
    assert ours.chat_template == theirs.chat_template == CHAT_TEMPLATE


IN_BLOCKS = tuple(kind.upper() for kind in BLOCK_KINDS if kind.upper() in BLOCK_TYPES)
WIDER_KINDS = {
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "q8"),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), "q4"),
}
"""Types without a packed form of their own size."""
TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", *IN_BLOCKS, *WIDER_KINDS]
FILE_SHARE = {"Q3_K": 1.04, "NVFP4": 1.06}
"""Most bytes of a packed weight over its tensor's bytes; of all other types 1.03. NVFP4 has 8 bytes a row."""


@pytest.mark.many
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("weight_format", ["native", "f32"])
def test_every_type_means_what_the_gguf_package_says(
    tmp_path: Path, type_name: str, weight_format: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", type_name, shape=WIDE)

    got = parts_of(load_model(str(path), weight_format, tmp_path), WIDE)

    for tensor in GGUFReader(path).tensors:
        hf = next(name for name in tiny_weights("qwen2", WIDE) if gguf_name(name) == tensor.name)
        expected = quants.dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        assert np.array_equal(got[our_name(hf)], expected)


NATIVE_KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4"}
NATIVE_KINDS |= {name: name.lower() for name in IN_BLOCKS} | WIDER_KINDS | {"Q1_0": "q4", "Q2_0": "q4"}


@pytest.mark.parametrize(("type_name", "kind"), NATIVE_KINDS.items())
def test_native_takes_the_closest_exact_kind(tmp_path: Path, type_name: str, kind: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", type_name, shape=WIDE)

    model = load_model(str(path), "native", tmp_path)

    assert {weight.kind for weight in model.weights.values()} == {kind}


@pytest.mark.parametrize("type_name", ["F16", "BF16", *IN_BLOCKS])
def test_blocks_are_packed_in_their_own_size(tmp_path: Path, type_name: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", type_name, shape=WIDE)

    packed = load_model(str(path), "native", tmp_path)

    in_file = sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1)
    assert packed.weight_bytes <= FILE_SHARE.get(type_name, 1.03) * in_file


@pytest.mark.parametrize("type_name", [name for name in TYPES if "16" not in name])
def test_int8_widens_block_types_exactly(tmp_path: Path, type_name: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", type_name, shape=WIDE)

    int8, native = (load_model(str(path), weight_format, tmp_path) for weight_format in ("int8", "native"))

    assert {weight.kind for weight in int8.weights.values()} == {"q8"}
    for name, weight in int8.weights.items():
        assert np.array_equal(unpack(weight), unpack(native.weights[name]))


def test_the_scale_beside_an_nvfp4_weight_multiplies_it(tmp_path: Path) -> None:
    writer = tiny_gguf("llama", "NVFP4", shape=WIDE)
    (tmp_path / "plain.gguf").write_bytes(writer.to_bytes())
    for name, number in (("scale", 0.25), ("input_scale", 3.0)):
        writer.add_tensor(f"blk.0.ffn_down.{name}", np.array([number], np.float32), "F32")
    (tmp_path / "scaled.gguf").write_bytes(writer.to_bytes())

    plain, scaled = (
        load_model(str(tmp_path / f"{name}.gguf"), "native", tmp_path) for name in ("plain", "scaled")
    )

    for name, weight in plain.weights.items():
        factor = np.float32(0.25 if name == "layers.0.down" else 1)
        assert np.array_equal(unpack(scaled.weights[name]), unpack(weight) * factor)


def test_int4_keeps_four_bit_blocks_and_holds_the_embedding_in_int8(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "t.gguf", "llama", {"": "Q4_K", "attn_v": "Q6_K", "token": "F16"}, shape=WIDE
    )

    int4, native = (load_model(str(path), weight_format, tmp_path) for weight_format in ("int4", "native"))

    kinds = {name: weight.kind for name, weight in int4.weights.items()}
    assert kinds.pop("embed") == "q8"
    assert kinds.pop("layers.0.v") == "q4"
    assert set(kinds.values()) == {"q4_k"}
    assert np.array_equal(unpack(int4.weights["layers.0.down"]), unpack(native.weights["layers.0.down"]))


def test_parts_of_unequal_kind_stay_separate_only_where_they_must(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "t.gguf", "llama", {"": "Q4_K", "attn_v": "Q6_K", "ffn_up": "Q8_0"}, shape=WIDE
    )

    native, bf16 = (load_model(str(path), weight_format, tmp_path) for weight_format in ("native", "bf16"))

    assert {"layers.0.q", "layers.0.k", "layers.0.v", "layers.0.gate", "layers.0.up"} < native.weights.keys()
    assert {"layers.0.qkv", "layers.0.gate_up"} < bf16.weights.keys()
    assert np.allclose(parts_of(native, WIDE)["layers.0.v"], parts_of(bf16, WIDE)["layers.0.v"], rtol=2**-8)


def test_metadata_equals_the_gguf_packages(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", "Q4_1")

    file, header = open_gguf(path)
    file.close()

    reader = GGUFReader(path)
    expected = {key: part.contents() for key, part in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors} == {
        info.name: (info.offset, info.n_bytes) for info in header.tensors.values()
    }


def test_config_and_tokenizer_come_from_the_metadata(tmp_path: Path) -> None:
    extra = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "tokenizer.ggml.eot_token_id": 7,
    }
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=extra)

    model = load_model(str(path), "native", tmp_path)

    config = model.config
    assert (config.n_layers, config.hidden, config.ffn, config.n_heads, config.n_kv_heads) == (
        2,
        64,
        96,
        4,
        2,
    )
    assert config.rope.scaling == LinearScaling(4.0)
    assert config.eos_token_ids == (2, 7, 0)
    assert (config.bos_token_id, config.add_bos) == (1, False)
    assert json.loads(model.tokenizer_json)["model"]["vocab"]["<|im_end|>"] == 2


def test_linear_scaling_of_older_files_is_honoured(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata={"llama.rope.scale_linear": 2.0})

    assert load_model(str(path), "native", tmp_path).config.rope.scaling == LinearScaling(2.0)


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    writer = tiny_gguf()
    writer.add_tensor("rope_freqs.weight", np.array([1, 1, 1, 1, 2, 4, 8, 8], np.float32), "F32")
    (tmp_path / "tiny.gguf").write_bytes(writer.to_bytes())

    rope = load_model(str(tmp_path / "tiny.gguf"), "native", tmp_path).config.rope

    assert isinstance(rope.scaling, FrequencyFactors)
    plain = 10000.0 ** (-np.arange(8) / 8)
    assert np.allclose(rope.inv_freq(), plain / [1, 1, 1, 1, 2, 4, 8, 8])


BAD_METADATA = {
    "another architecture": ({"general.architecture": "gpt2"}, "'gpt2'"),
    "no layers": ({"llama.block_count": 0}, "n_layers is 0"),
    "a billion layers": ({"llama.block_count": 10**9}, "n_layers"),
    "more layers than tensors": ({"llama.block_count": 3}, "lacks the tensor for layers.2"),
    "fewer layers than tensors": ({"llama.block_count": 1}, "no use"),
    "nothing hidden": ({"llama.embedding_length": 0}, "hidden is 0"),
    "hidden of text": ({"llama.embedding_length": "64"}, "int expected"),
    "heads that do not divide": ({"llama.attention.head_count_kv": 3}, "do not divide"),
    "no heads": ({"llama.attention.head_count": 0}, "n_heads is 0"),
    "heads per layer": ({"llama.attention.head_count": [4, 4]}, "int expected"),
    "another width": ({"llama.feed_forward_length": 128}, "its config asks for"),
    "epsilon of NaN": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
    "a negative base": ({"llama.rope.freq_base": -5.0}, "RoPE"),
    "a base of NaN": ({"llama.rope.freq_base": float("nan")}, "RoPE"),
    "dynamic": ({"llama.rope.scaling.type": "dynamic"}, "dynamic"),
    "experts": ({"llama.expert_count": 8}, "mixture"),
    "a split file": ({"split.count": 2}, "one of 2 parts"),
    "an end outside the vocabulary": ({"tokenizer.ggml.eos_token_id": 272}, "outside"),
    "odd rotation": ({"llama.rope.dimension_count": 7}, "RoPE over 7"),
    "rotation of more than a head": ({"llama.rope.dimension_count": 18}, "RoPE over 18"),
    "more chosen than experts": (
        {"llama.expert_count": 2, "llama.expert_used_count": 3},
        "of 2, that compute a token is 3",
    ),
    "none chosen": (
        {"llama.expert_count": 2, "llama.expert_used_count": 0},
        "of 2, that compute a token is 0",
    ),
    "a million experts": (
        {"llama.expert_count": 10**6, "llama.expert_used_count": 2},
        "number of experts is 1000000",
    ),
    "experts that are not there": (
        {"llama.expert_count": 2, "llama.expert_used_count": 1},
        "lacks the tensor",
    ),
    "another architecture of great length": ({"general.architecture": "x" * 9999}, "xxx"),
    "a negative window": ({"llama.attention.sliding_window": -5.0}, "int expected"),
    "yarn by nothing": ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}, "RoPE"),
    "yarn by NaN": ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": float("nan")}, "RoPE"),
    "yarn of no context": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 0},
        "original_context_length is 0",
    ),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_an_absurd_config_is_one_clear_error(tmp_path: Path, case: str) -> None:
    changes, message = BAD_METADATA[case]
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=changes)

    with pytest.raises(ModelError, match=message):
        load_model(str(path), "native", tmp_path)

    assert not list((tmp_path / "packed").glob("*")) if (tmp_path / "packed").exists() else True


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("weight_format", ["native", "bf16", "int8"])
def test_numbers_that_are_none_are_one_clear_error(
    tmp_path: Path, bad: float, part: str, weight_format: str
) -> None:
    writer = tiny_gguf()
    index = next(i for i, tensor in enumerate(writer.tensors) if tensor[0] == gguf_name(part))
    name, shape, kind, raw = writer.tensors[index]
    writer.tensors[index] = (name, shape, kind, np.float32(bad).tobytes() + raw[4:])
    (tmp_path / "tiny.gguf").write_bytes(writer.to_bytes())

    with pytest.raises(ModelError, match="NaN or infinity"):
        load_model(str(tmp_path / "tiny.gguf"), weight_format, tmp_path)

    assert not list((tmp_path / "packed").glob("*"))


@pytest.mark.parametrize(
    ("type_name", "offset", "raw"),
    [("Q4_1", 0, b"\x00\x7e"), ("Q4_K", 2, b"\x00\x7c"), ("Q6_K", 208, b"\x01\x7c"), ("MXFP4", 0, b"\xff")],
)
def test_a_block_without_a_scale_is_one_clear_error(
    tmp_path: Path, type_name: str, offset: int, raw: bytes
) -> None:
    writer = tiny_gguf(types=type_name, shape=WIDE)
    name, shape, kind, blocks = writer.tensors[3]
    writer.tensors[3] = (name, shape, kind, blocks[:offset] + raw + blocks[offset + len(raw) :])
    (tmp_path / "tiny.gguf").write_bytes(writer.to_bytes())

    with pytest.raises(ModelError, match="NaN or infinity"):
        load_model(str(tmp_path / "tiny.gguf"), "native", tmp_path)


@pytest.mark.parametrize("number", [9, 15, 28])
def test_a_type_we_do_not_read_is_named(number: int, tmp_path: Path) -> None:
    type_name, block, block_bytes = TENSOR_TYPES[number]
    writer = tiny_gguf(shape=WIDE)
    name, shape, _, _ = writer.tensors[1]
    writer.tensors[1] = (name, shape, number, bytes(shape[0] * shape[1] // block * block_bytes))
    (tmp_path / "tiny.gguf").write_bytes(writer.to_bytes())

    with pytest.raises(ModelError, match=f"in {type_name}; readable are"):
        load_model(str(tmp_path / "tiny.gguf"), "native", tmp_path)


def test_an_error_quotes_the_beginning_of_a_long_name(tmp_path: Path) -> None:
    """A damaged length makes a name of kilobytes: the line that tells of it stays one that can be read."""
    gguf = tiny_gguf()
    gguf.metadata["k" * 60_000] = (99, b"")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf.to_bytes())

    with pytest.raises(ModelError, match=r"has metadata 'kkk.* of unknown type 99") as error:
        load_model(str(path), "native")

    assert len(str(error.value)) < 200 + len(str(path))


def test_types_are_those_of_the_gguf_package() -> None:
    """Each that is here is there with the same number and block; either may have newer ones."""
    theirs = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}

    ours = {number: kind for number, kind in TENSOR_TYPES.items() if number <= max(theirs)}
    assert ours.items() <= theirs.items()


@pytest.mark.parametrize("numbers", [None, [0.5, 0.5], [1, 2, 3], 0.5])
def test_numbers_of_layers_are_a_list_with_one_for_each(numbers: object, tmp_path: Path) -> None:
    file = write_family_gguf(tmp_path / "model.gguf", "apertus", changes={"xielu.beta": numbers})

    with pytest.raises(ModelError, match="number"):
        load_model(str(file), "f32", cache_dir=tmp_path / "cache")

"""A GGUF file as a `ModelSource`: metadata to config, llama.cpp's tensor names to ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from phasewise._words import counted
from phasewise.cython_kernels.blocks import BlockRows, factors_of
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.encoders.embedding_spec import gguf_score, gguf_template
from phasewise.serving.loaders.encoders.encoder_files import (
    RANK,
    gguf_config,
    gguf_embedding,
    pooling_type,
    with_vectors,
)
from phasewise.serving.loaders.families import Family, family_of_gguf
from phasewise.serving.loaders.families.encoders import ENCODERS_BY_GGUF
from phasewise.serving.loaders.families.family import (
    GGUF_DEFAULTS,
    GGUF_DENSE,
    GGUF_KEYS,
    GGUF_NONE,
    LONG_FACTORS,
    ROPE_FACTORS,
    SCORE_OUT,
    by_layer,
    listed,
    whole_number,
    yarn_magnitude,
)
from phasewise.serving.loaders.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from phasewise.serving.loaders.formats.gguf_file import GgufFiles, GgufHeader, TensorInfo, open_gguf
from phasewise.serving.loaders.source import F32, ModelSource, Rows, SourceTensor
from phasewise.serving.models.encoding import MOST_POSITIONS
from phasewise.serving.models.packed_model import LayerKind, ModelConfig, alike
from phasewise.serving.models.rope import (
    FrequencyFactors,
    LinearScaling,
    LongScaling,
    RopeSpec,
    Scaling,
    YarnScaling,
)
from phasewise.serving.sampling.sampling_defaults import stated_by_gguf
from phasewise.serving.text.gguf_vocab import adds_bos, ends_by_text

T = TypeVar("T")

NVFP4_PARTS = "scale", "input_scale"  # of an NVFP4 weight; the latter is not used


def open_gguf_model(path: Path, name: str) -> ModelSource:
    """Read the header of the file at `path`, and of the model's other parts. Close the result."""
    file, header = open_gguf(path)
    with ExitStack() as stack:
        stack.callback(file.close)
        source = _source(file, header, name)
        stack.pop_all()
    return source


def _source(file: GgufFiles, header: GgufHeader, name: str) -> ModelSource:
    metadata = header.metadata
    architecture = field(metadata, "general.architecture", str, "nothing")

    def read(key: str, kind: Any, default: Any) -> Any:
        return field(metadata, key, kind, default)

    encoder = ENCODERS_BY_GGUF.get(architecture)
    if encoder is not None:
        config = gguf_config(encoder, read, header.tensors, str(file.path))
        naming = encoder.gguf_naming(config, str(file.path))
        if "blk.0.ffn_gate.weight" in header.tensors:
            naming = replace(naming, in_layers={**naming.in_layers, "ffn_up.weight": "up"})
        tensors = with_vectors(naming.tensors(file_tensors(file, header)), config, 0, str(file.path))
    else:
        family = family_of_gguf(architecture, str(file.path))
        config = config_of_gguf(file, header, family)
        tensors = tensors_in(file, header, family, config)
    embedding = gguf_embedding(architecture, read, config.context_length, encoder=config.sees_ahead)
    if encoder is None and embedding is not None and pooling_type(architecture, read) == RANK:
        stated = read("tokenizer.chat_template.rerank", str, None)
        template, instruction = gguf_template(stated, architecture, str(file.path))
        embedding = replace(embedding, pooling="last", pair_template=template, instruction=instruction)
        score = gguf_score(tensors.pop(SCORE_OUT, None), str(file.path))
        tensors = {**tensors, "score_out": score}
        tensors.pop("lm_head", None)
        config = replace(config, last_row_scores=True, tied_embeddings=True)
    elif SCORE_OUT in tensors:
        raise ModelError(
            f"{file.path} has the tensor cls.output.weight, and its pooling type is not that of scores"
        )
    return ModelSource(
        name=name,
        path=file.path,
        config=config,
        tensors=tensors,
        tokenizer_json=lambda: _tokenizer_json(metadata),
        tokenizer_kind=str(metadata.get("tokenizer.ggml.model", "none")),
        chat_template=None if encoder else field(metadata, "tokenizer.chat_template", str, None),
        close=file.close,
        embedding=embedding,
        sampling=stated_by_gguf(metadata),
    )


def config_of_gguf(file: GgufFiles, header: GgufHeader, family: Family) -> ModelConfig:
    """Make the config of a model that generates text."""
    factors = {
        name: _factors(file, header.tensors[theirs])
        for theirs, name in {ROPE_FACTORS: "factors", **LONG_FACTORS}.items()
        if theirs in header.tensors
    }
    architecture = field(header.metadata, "general.architecture", str, "nothing")
    return _config(header.metadata, family, architecture, header.tensors, factors, file.path)


def field(metadata: Mapping[str, Any], key: str, kind: type[T], default: T | None) -> Any:
    """metadata[key] if it has the type that such a key must have, `default` if it is absent."""
    value = metadata.get(key)
    if value is None:
        return default
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ModelError(f"the GGUF metadata {key!r:.80} is {value!r:.60}: {kind.__name__} expected")
    return value


def tensors_in(
    file: GgufFiles, header: GgufHeader, family: Family, config: ModelConfig
) -> dict[str, SourceTensor]:
    """Views of every tensor of a file, by our names."""
    stated = field(header.metadata, f"{header.metadata['general.architecture']}.block_count", int, 0)
    n_more, biased = stated - config.n_layers, any(own.endswith("attn_q.bias") for own in header.tensors)
    naming = family.gguf_naming(config, str(file.path), has_bias=biased, n_more=n_more)
    return naming.tensors(file_tensors(file, header)) | _numbers(header.metadata, family, config)


def file_tensors(file: GgufFiles, header: GgufHeader) -> Iterator[tuple[str, SourceTensor]]:
    """Yield names and tensors; those of an NVFP4 weight are one."""
    for theirs, info in header.tensors.items():
        base, _, end = theirs.rpartition(".")
        weight = header.tensors.get(f"{base}.weight")
        if end not in NVFP4_PARTS or weight is None or weight.type_name != "NVFP4":
            yield theirs, tensor_in(file, info, header.tensors.get(f"{base}.scale"))


def _numbers(metadata: Mapping[str, Any], family: Family, config: ModelConfig) -> dict[str, SourceTensor]:
    """Vectors of one number, which the metadata lists by layer."""
    return {
        f"layers.{layer}.{ours}": vector_of(number)
        for key, ours in family.gguf_numbers.items()
        for layer, number in enumerate(listed(metadata.get, key, config.n_layers))
    }


def vector_of(number: object) -> SourceTensor:
    if type(number) is not float:
        raise ModelError(f"the GGUF metadata lists {number!r:.60} by layer: numbers expected")
    return SourceTensor(
        "F32", (1,), 4, F32, lambda start, stop: np.full((stop - start, 1), number, np.float32)
    )


def _config(
    metadata: Mapping[str, Any],
    family: Family,
    architecture: str,
    infos: Mapping[str, TensorInfo],
    factors: Mapping[str, tuple[float, ...]],
    path: Path,
) -> ModelConfig:
    if "token_embd.weight" not in infos:
        raise ModelError(f"{path} lacks the tensor token_embd.weight")

    defaults = {**GGUF_DEFAULTS, **family.gguf_defaults}

    def get(key: str, kind: Any = None, default: Any = None) -> Any:
        full = f"{architecture}.{GGUF_KEYS.get(key, key)}"
        if full not in metadata:
            return defaults.get(key, default)
        if metadata[full] == GGUF_NONE.get(key, math.nan):
            return default
        return metadata[full] if kind is None else field(metadata, full, kind, default)

    field(metadata, "tokenizer.ggml.add_bos_token", bool, False)
    heads, hidden = get("attention.head_count", int), get("embedding_length", int)
    head_dim: Any = get("attention.key_length", int) or (hidden // heads if hidden and heads else None)
    latent = get("attention.kv_lora_rank", int, 0) and family.latent
    if not latent and get("attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"{path} has keys and values of different length, which cannot run")
    n_layers: Any = get("block_count", int)
    n_layers = n_layers - get("nextn_predict_layers", int, 0) if n_layers else n_layers
    rope = RopeSpec(
        theta=get("rope.freq_base", float, 10000.0),
        dim=get("rope.dimension_count", int, head_dim),
        scaling=_scaling(get, factors),
    )
    plain = ModelConfig(
        architecture=family.name,
        forms=alike(n_layers, LayerKind(None, rope), _most(get, "feed_forward_length", None, family)),
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=_most(get, "attention.head_count_kv", heads, family),
        head_dim=head_dim,
        vocab_size=infos["token_embd.weight"].shape[0],
        context_length=get("context_length", int),
        norm_eps=get("attention.layer_norm_rms_epsilon", float, 1e-5),
        tied_embeddings="output.weight" not in infos,
        bos_token_id=field(metadata, "tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=_eos_tokens(metadata),
        add_bos=adds_bos(metadata),
        **vars(family.ffn_form),
        out_bias="blk.0.attn_output.bias" in infos,
        dense=tuple(infos[theirs].shape[0] for theirs in GGUF_DENSE if theirs in infos),
    )
    config = (family.from_gguf or family.from_hf)(get, plain)
    return family.from_gguf_tensors(config, {theirs: info.shape for theirs, info in infos.items()})


def _most(get: Callable[..., Any], key: str, default: Any, family: Family) -> Any:
    """The number under `key`, or the largest of a list by layer in a family whose layers differ."""
    stated = get(key)
    if not family.own_layers or not isinstance(stated, list):
        return _one_for_all(get, key, default)
    return max(by_layer(stated, get("block_count", int, 0), key), default=None)


def _one_for_all(get: Callable[..., Any], key: str, default: Any) -> Any:
    """The number under `key`, or of a list by layer the one number that is not 0."""
    stated = get(key)
    if not isinstance(stated, list):
        return get(key, int, default)
    different = {number for number in stated if number != 0}
    if len(different) != 1 or len(stated) != get("block_count", int):
        raise ModelError(
            f"the GGUF metadata gives {key} = {stated!r:.60}: one number for all layers, or 0 for those"
            " without it, can run"
        )
    return different.pop()


def _scaling(get: Callable[..., Any], factors: Mapping[str, tuple[float, ...]]) -> Scaling | None:
    kind = get("rope.scaling.type", str)
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise ModelError(
            f"RoPE scaling {kind!r:.80} is not supported; linear, Llama 3's, yarn and longrope are"
        )
    if "short_factors" in factors and "long_factors" in factors:
        magnitude = get("rope.scaling.attn_factor", float, 1.0)
        both = factors["short_factors"], factors["long_factors"]
        return LongScaling(*both, _original_context(get), magnitude)
    older = get("rope.scale_linear", float)  # what files of 2023 say
    factor = get("rope.scaling.factor", float, older)
    if kind == "yarn":
        return _yarn_scaling(get, 1.0 if factor is None else factor)
    if kind in (None, "none"):
        factor = older
    if factor not in (None, 1.0):
        return LinearScaling(factor)
    return FrequencyFactors(factors["factors"]) if "factors" in factors else None


def _original_context(get: Callable[..., Any]) -> int:
    stated = get("context_length", int, 0)
    return whole_number(get, "rope.scaling.original_context_length", stated, 2, MOST_POSITIONS)


def _yarn_scaling(get: Callable[..., Any], factor: float) -> YarnScaling:
    return YarnScaling(
        factor,
        _original_context(get),
        get("rope.scaling.attn_factor", float, 1.0) * yarn_magnitude(factor),
        get("rope.scaling.yarn_beta_fast", float, 32.0),
        get("rope.scaling.yarn_beta_slow", float, 1.0),
    )


def _factors(file: GgufFiles, info: TensorInfo) -> tuple[float, ...]:
    if len(info.shape) != 1 or info.type_name != "F32" or info.shape[0] > 1 << 10:
        raise ModelError(f"{file.path} has {info.name} as {info.type_name} {info.shape}: unusable")
    return tuple(np.frombuffer(file.read(info.offset, info.n_bytes), "<f4").tolist())


def _eos_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    named = [field(metadata, f"tokenizer.ggml.{key}_token_id", int, None) for key in keys]
    texts = field(metadata, "tokenizer.ggml.tokens", list, [])
    by_text = ends_by_text(texts, field(metadata, "tokenizer.ggml.token_type", list, []))
    return tuple(dict.fromkeys(token for token in (*named, *by_text.values()) if token is not None))


def tensor_in(file: GgufFiles, info: TensorInfo, scale: TensorInfo | None = None) -> SourceTensor:
    """A view of a tensor; `scale`: what an NVFP4 weight, or each of its experts, is multiplied by."""
    kind = BLOCK_TYPES.get(info.type_name)
    if kind is None:
        raise ModelError(
            f"{file.path} has {info.name} in {info.type_name}; readable are {', '.join(BLOCK_TYPES)}"
        )
    n_rows = math.prod(info.shape[:-1])
    row_bytes = info.n_bytes // n_rows

    if len(info.shape) == 1 and kind.form.is_quantised:
        raise ModelError(f"{file.path} has the vector {info.name} in {info.type_name}, which no writer does")
    shape = info.shape
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) > 3:
        raise ModelError(
            f"{file.path} has {info.name} in {counted(len(info.shape), 'dimension')}: 1 to 3 expected"
        )

    stated = np.array(_factors(file, scale) if scale and info.type_name == "NVFP4" else (1.0,))
    if n_rows % len(stated) or len(stated) not in (1, *shape[:-2]) or not (np.abs(stated) < 2.0**60).all():
        raise ModelError(f"{file.path} has {info.name} as {shape} and scales that do not fit it")
    factors = factors_of(stated)

    def rows(start: int, stop: int) -> Rows:
        raw = file.read(info.offset + start * row_bytes, (stop - start) * row_bytes)
        decoded = decode_rows(info.type_name, raw, stop - start)
        if not isinstance(decoded, BlockRows) or not decoded.format.has_factors:
            return decoded
        return replace(decoded, scales=factors[np.arange(start, stop) // (n_rows // len(factors))])

    return SourceTensor(info.type_name, shape, info.n_bytes, kind.form, rows)


def _tokenizer_json(metadata: Mapping[str, Any]) -> str:
    from phasewise.serving.text.gguf_vocab import tokenizer_from_gguf

    return tokenizer_from_gguf(metadata)

"""The dimensions of a model that its speed depends on, from a model in memory or from a file's header.

Weights are never read for a model that is only planned for: a GGUF file's header, a Hugging Face directory,
or a lone `config.json` is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasewise.serving.loaders import open_source
from phasewise.serving.loaders.fetching.resolve import cache_root, locate
from phasewise.serving.loaders.formats.hf_config import config_of
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.loaders.layout import plan_weights, weight_shapes
from phasewise.serving.loaders.packed_file import is_packed, open_packed
from phasewise.serving.loaders.source import (
    BF16,
    F16,
    F32,
    INT4,
    INT8,
    SourceFile,
    parse_json_object,
    read_all,
)
from phasewise.serving.models.forward import EXACT_KINDS, resolve_kv_format
from phasewise.serving.models.packed_model import ModelConfig, PackedModel
from phasewise.tuner.config.steps import ModelShape
from phasewise.workflows.report import Report, silent

CONFIG_FILE = "config.json"
_NATIVE_OF_A_CONFIG = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The weight format that `native` stands for, by the type of numbers that a config names."""


def shape_of_model(model: PackedModel) -> ModelShape:
    read = {name: weight.nbytes for name, weight in model.weights.items()}
    return _shape(model.name, model.config, read, 4 if resolve_kv_format(model) == "f32" else 2)


def shape_of_reference(reference: str, weight_format: str, report: Report = silent) -> ModelShape:
    """The shape of the model that `reference` names, with weights in this format. Raises ModelError.

    reference: as for `open_model`, or the path of a `config.json`.
    """
    lone = lone_config(reference)
    if lone is not None:
        return _shape_of_config(*lone, weight_format)
    located = locate(reference, cache_root(), report)
    if is_packed(located.path):
        return shape_of_model(open_packed(located.path, weight_format))
    with open_source(located) as source:
        plans = plan_weights(source, weight_format)
        layers = [plan.form.kind for plan in plans if plan.name.startswith("layers.")]
        element_bytes = 4 if all(kind in EXACT_KINDS for kind in layers) else 2
        return _shape(source.name, source.config, {plan.name: plan.nbytes for plan in plans}, element_bytes)


def lone_config(reference: str) -> tuple[str, dict[str, Any]] | None:
    """Name and fields of a `config.json`, given itself or in a directory without weights; else None."""
    path = Path(reference).expanduser()
    if path.suffix == ".json" and path.is_file():
        with SourceFile(path) as file:
            return path.resolve().parent.name, parse_json_object(read_all(file), str(path))
    directory = ModelDirectory(path)
    if not path.is_dir() or directory.names(".safetensors"):
        return None
    fields = directory.json(CONFIG_FILE)
    return None if fields is None else (path.resolve().name, fields)


def _shape_of_config(name: str, fields: dict[str, Any], weight_format: str) -> ModelShape:
    config = config_of(fields, {}, add_bos=False)
    kind = weight_format
    if kind == "native":
        kind = _NATIVE_OF_A_CONFIG.get(str(fields.get("torch_dtype", fields.get("dtype"))), "bf16")
    form = {"f32": F32, "f16": F16, "bf16": BF16, "int8": INT8, "int4": INT4}[kind]
    read = {name: form.nbytes(n, k) for name, (n, k) in weight_shapes(config).items()}
    return _shape(name, config, read, 4 if kind in EXACT_KINDS else 2)


def _shape(name: str, config: ModelConfig, read: Mapping[str, int], kv_element_bytes: int) -> ModelShape:
    """read: bytes of every weight. An untied embedding counts nothing: its rows are only looked up."""
    looked_up = (0 if config.tied_embeddings else read["embed"]) + read.get("layer_table", 0)
    dense = [layer.mixture.expert if layer.mixture else layer.feed_forward for layer in config.layers]
    matrices = max(sum(len(product.outputs) for product in part.into) for part in dense if part) + 1
    heads, vectors = [part.heads for part in config.keeping], 1 if config.latent else 2
    kv_rows = sum(own.n_kv_heads * own.head_dim for own in heads)
    return ModelShape(
        name=name,
        n_layers=config.n_layers,
        hidden=config.hidden,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab_size,
        weight_bytes=sum(read.values()) - looked_up,
        ffn_matrices=matrices,
        kv_bytes_per_slot=vectors * kv_rows * kv_element_bytes,
        kv_vectors=vectors,
    )

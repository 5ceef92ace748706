"""As much of a model as its speed depends on: of one in memory, or of a file whose weights are never read.

A plan for a machine that is not here needs no weights: a GGUF file's header, a Hugging Face directory, or a
lone `config.json` will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.cli.options import WeightFormat
from phasewise.cli.present import note
from phasewise.serving.model import ModelConfig
from phasewise.tuner.config.steps import ModelShape

if TYPE_CHECKING:
    from phasewise.serving.model import PackedModel

CONFIG_FILE = "config.json"
_NATIVE_OF_A_CONFIG = {"float32": "f32", "float16": "f32", "bfloat16": "bf16"}
"""What `native` packs a checkpoint's numbers as, by the type that its config names."""


def shape_of_model(model: PackedModel) -> ModelShape:
    """Of a model in memory."""
    from phasewise.serving.forward import resolve_kv_format

    read = {name: weight.nbytes for name, weight in model.weights.items()}
    return _shape(model.name, model.config, read, 4 if resolve_kv_format(model) == "f32" else 2)


def shape_of_reference(reference: str, weight_format: WeightFormat) -> ModelShape:
    """Of what a command's MODEL names, with weights in this format. ModelError where there is none."""
    config = _lone_config(reference)
    if config is not None:
        return _shape_of_config(config, weight_format)
    from phasewise.serving.loaders import open_source
    from phasewise.serving.loaders.layout import plan_weights
    from phasewise.serving.loaders.resolve import cache_root, locate

    with open_source(locate(reference, cache_root(), note)) as source:
        plans = plan_weights(source, weight_format.value)
        layers = [plan.form.kind for plan in plans if plan.name.startswith("layers.")]
        element_bytes = 4 if all(kind == "f32" for kind in layers) else 2
        return _shape(source.name, source.config, {plan.name: plan.nbytes for plan in plans}, element_bytes)


def _lone_config(reference: str) -> Path | None:
    """A `config.json` that is given itself, or one that lies in a directory without weights."""
    path = Path(reference).expanduser()
    if path.suffix == ".json" and path.is_file():
        return path
    inside = path / CONFIG_FILE
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    return inside if inside.is_file() and not has_weights else None


def _shape_of_config(path: Path, weight_format: WeightFormat) -> ModelShape:
    from phasewise.serving.loaders.forms import BF16, F32, INT4, INT8
    from phasewise.serving.loaders.hf_config import config_of
    from phasewise.serving.loaders.layout import weight_shapes
    from phasewise.serving.loaders.source import parse_json_object, read_text

    fields = parse_json_object(read_text(path), str(path))
    config = config_of(fields, {}, add_bos=False)
    kind = str(weight_format)
    if weight_format is WeightFormat.native:
        kind = _NATIVE_OF_A_CONFIG.get(str(fields.get("torch_dtype", fields.get("dtype"))), "bf16")
    form = {"f32": F32, "bf16": BF16, "int8": INT8, "int4": INT4}[kind]
    read = {name: form.nbytes(n, k) for name, (n, k) in weight_shapes(config).items()}
    return _shape(path.resolve().parent.name, config, read, 4 if kind == "f32" else 2)


def _shape(name: str, config: ModelConfig, read: Mapping[str, int], kv_element_bytes: int) -> ModelShape:
    """read: bytes of every weight, of which an untied embedding is only looked up in."""
    looked_up = 0 if config.tied_embeddings else read["embed"]
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
        kv_bytes_per_slot=2 * config.n_layers * config.kv_rows * kv_element_bytes,
    )

"""A GGUF file that llama.cpp's `convert_lora_to_gguf.py` has written."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.adapters.low_rank_tensors import Pair, put
from phasewise.serving.loaders.cuts import CutFor, half_split, our_tensors
from phasewise.serving.loaders.families import family_of_gguf
from phasewise.serving.loaders.families.family import GGUF_LAYER
from phasewise.serving.loaders.formats.gguf_file import GgufFiles, TensorInfo, open_gguf
from phasewise.serving.loaders.formats.gguf_model import field, tensor_in
from phasewise.serving.loaders.layout import shapes_of_all
from phasewise.serving.models.packed_model import ModelConfig

_PAIR = re.compile(r"(.+)\.lora_([ab])", re.ASCII)
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(.+)", re.ASCII)


def gguf_pairs(path: Path, config: ModelConfig, stack: ExitStack) -> dict[str, Pair]:
    """The pairs of a file, by our names of weights; `stack` closes it. ModelError."""
    file, header = open_gguf(path)
    stack.callback(file.close)
    metadata = header.metadata
    kind = field(metadata, "general.type", str, "model")
    method = field(metadata, "adapter.type", str, "none")
    if (kind, method) != ("adapter", "lora"):
        raise ModelError(
            f"{path} is no LoRA adapter: its general.type is {kind!r:.40}, adapter.type {method!r:.40}"
        )
    if metadata.get("adapter.alora.invocation_tokens"):
        raise ModelError(f"{path} has activation from a token on (aLoRA), which cannot run")
    alpha = field(metadata, "adapter.lora.alpha", float, 0.0)
    architecture = field(metadata, "general.architecture", str, "nothing")
    return _pairs(file, header.tensors, alpha, architecture, config)


def _pairs(
    file: GgufFiles, infos: dict[str, TensorInfo], alpha: float, architecture: str, config: ModelConfig
) -> dict[str, Pair]:
    family = family_of_gguf(architecture, str(file.path))
    by_module: dict[str, dict[str, TensorInfo]] = {}
    for theirs, info in infos.items():
        match = _PAIR.fullmatch(theirs)
        if match is None or len(info.shape) != 2:
            raise ModelError(
                f"{file.path} has a tensor {theirs!r:.120} that is neither lora_a nor lora_b of a matrix"
            )
        by_module.setdefault(match[1], {})[match[2]] = info
    names = {**GGUF_LAYER, **family.gguf_names}
    shapes = shapes_of_all(config, has_bias=False)
    pairs: dict[str, Pair] = {}
    for theirs, both in by_module.items():
        if set(both) != {"a", "b"}:
            raise ModelError(f"{file.path} has of {theirs!r:.120} only lora_{next(iter(both))}")
        layer = _LAYER.fullmatch(theirs)
        if layer is None or "_exps" in theirs:
            kind = "embeddings, or of the head" if layer is None else "experts"
            raise ModelError(f"{file.path} has an adapter of {theirs!r:.120}: adapters of {kind} cannot run")
        a, b = (tensor_in(file, both[part]) for part in "ab")
        what = f"{file.path} has an adapter of {theirs!r:.120} that"
        scale = alpha / a.shape[0] if alpha else 1.0
        try:
            renamed = list(our_tensors(layer[2], names, b, CutFor(f"layers.{layer[1]}.", shapes, what)))
        except KeyError:
            raise ModelError(f"{what} {family.name} models do not have") from None
        for ours, part in renamed:
            b = half_split(ours, part, config) if family.gguf_interleaved_heads else part
            put(pairs, ours, Pair(theirs, a, b, scale), str(file.path))
    return pairs

"""A directory that PEFT has saved: adapter_config.json and adapter_model.safetensors.

Every setting that changes what the numbers mean, and is not listed here, is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.adapters.low_rank_tensors import Pair, put
from phasewise.serving.loaders.cuts import CutFor, half_split, our_tensors
from phasewise.serving.loaders.families import Family, family_named
from phasewise.serving.loaders.families.family import HF_LAYER
from phasewise.serving.loaders.formats.hf_model import layer_place, without_prefix
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.loaders.formats.safetensors_file import open_all, tensor_of
from phasewise.serving.loaders.layout import shapes_of_all
from phasewise.serving.loaders.source import SourceTensor
from phasewise.serving.models.packed_model import ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight", re.ASCII)
_PLAIN_PATTERN = re.compile(r"\^?[A-Za-z0-9_.\\]+", re.ASCII)

_MUST_BE_OFF = {
    "use_dora": "DoRA",
    "lora_bias": "biases of its own (lora_bias)",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "embeddings of tokens (trainable_token_indices)",
    "layer_replication": "repeated layers (layer_replication)",
    "target_parameters": "parameters that are no module's weight (target_parameters)",
    "alora_invocation_tokens": "activation from a token on (aLoRA)",
    "use_qalora": "QALoRA",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "arrow_config": "routing between adapters (arrow_config)",
    "use_bdlora": "block-diagonal factors (use_bdlora)",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Beginnings of `init_lora_weights` by which training began from other weights than the base model's."""


@dataclass(frozen=True)
class _Scaling:
    """The factors of B (A x): alpha / r, or alpha / sqrt(r)."""

    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    by_root: bool

    def of(self, module: str, rank: int, what: str) -> float:
        """The scale of a module whose A has `rank` rows."""
        stated = _by_pattern(self.ranks, module, self.rank)
        if stated != rank:
            raise ModelError(f"{what}: {module!r:.120} has rank {rank}, and {CONFIG} says {stated!r:.40}")
        alpha = _by_pattern(self.alphas, module, self.alpha)
        if type(alpha) not in (int, float):
            raise ModelError(f"{what} has lora_alpha {alpha!r:.40} for {module!r:.120}: a number expected")
        return float(alpha) / (math.sqrt(rank) if self.by_root else rank)


def peft_pairs(path: Path, config: ModelConfig, stack: ExitStack) -> dict[str, Pair]:
    """The pairs of a directory, by our names of weights; `stack` closes their file.

    ModelError in one line for whatever cannot run.
    """
    directory = ModelDirectory(path)
    fields = directory.json(CONFIG)
    if fields is None:
        raise ModelError(f"{path} has no {CONFIG}: neither PEFT's directory nor a GGUF file")
    scaling = _checked(fields, path)
    if not directory.has(WEIGHTS):
        raise ModelError(f"{path} has no {WEIGHTS}: save the adapter as safetensors")
    family = family_named(config.architecture)
    assert family is not None  # an encoder takes no adapters
    file, entries = open_all(directory, [WEIGHTS])[0]
    stack.callback(file.close)
    by_module: dict[str, dict[str, SourceTensor]] = {}
    for theirs, entry in entries.items():
        match = _PAIR.fullmatch(theirs.removeprefix(_PREFIX))
        if match is None or not theirs.startswith(_PREFIX):
            raise ModelError(f"{path} has a tensor {theirs!r:.120}, {_why_not(theirs)}")
        if len(entry.shape) != 2:
            raise ModelError(f"{path} has {theirs!r:.120} in shape {list(entry.shape)}: a matrix expected")
        by_module.setdefault(match[1], {})[match[2]] = tensor_of(file, theirs, entry)
    return _our_pairs(by_module, scaling, family, config, path)


def _why_not(theirs: str) -> str:
    for part, what in (
        ("lora_embedding", "an adapter of embeddings"),
        ("lora_magnitude", "a part of DoRA"),
        ("modules_to_save", "a whole module"),
        (".bias", "a bias"),
    ):
        if part in theirs:
            return f"{what}, which cannot run"
    return "which is neither lora_A nor lora_B of a module"


def _our_pairs(
    by_module: Mapping[str, Mapping[str, SourceTensor]],
    scaling: _Scaling,
    family: Family,
    config: ModelConfig,
    path: Path,
) -> dict[str, Pair]:
    names = {**HF_LAYER, **family.hf_names}
    shapes = shapes_of_all(config, has_bias=False)
    pairs: dict[str, Pair] = {}
    for module, both in by_module.items():
        if set(both) != {"A", "B"}:
            raise ModelError(f"{path} has of {module!r:.120} only lora_{next(iter(both))}")
        stem, name, _ = layer_place(without_prefix(f"{module}.weight", family))
        scale = scaling.of(module, both["A"].shape[0], str(path))
        what = f"{path} has an adapter of {module!r:.120} that"
        if not stem or "experts" in name:
            kind = "experts" if stem else "embeddings, or of the head"
            raise ModelError(f"{path} has an adapter of {module!r:.120}: adapters of {kind} cannot run")
        try:
            renamed = list(our_tensors(name, names, both["B"], CutFor(stem, shapes, what)))
        except KeyError:
            raise ModelError(f"{what} {family.name} models do not have") from None
        for ours, part in renamed:
            b = half_split(ours, part, config) if family.hf_interleaved_heads else part
            put(pairs, ours, Pair(module, both["A"], b, scale), str(path))
    return pairs


def _checked(fields: Mapping[str, Any], path: Path) -> _Scaling:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path} is an adapter of the kind {kind!r:.40}; LORA can run")
    for key, what in _MUST_BE_OFF.items():
        if fields.get(key):
            raise ModelError(f"{path} has {what}, which cannot run: merge it with PEFT")
    if fields.get("bias", "none") != "none":
        raise ModelError(f"{path} has trained biases (bias: {fields['bias']!r:.40}), which cannot run")
    start = fields.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{path} began from weights that {start!r:.40} changed: save it with"
            " path_initial_model_for_weight_conversion"
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or not isinstance(alpha, int | float):
        raise ModelError(f"{path} has r {rank!r:.40} and lora_alpha {alpha!r:.40}: numbers expected")
    patterns = [fields.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    for pattern in patterns:
        if not isinstance(pattern, dict) or not all(_PLAIN_PATTERN.fullmatch(key) for key in pattern):
            raise ModelError(
                f"{path} has rank_pattern or alpha_pattern by expressions; plain names of modules are read"
            )
    return _Scaling(rank, alpha, patterns[0], patterns[1], bool(fields.get("use_rslora")))


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first name that the module ends with, as PEFT looks it up."""
    for pattern, value in patterns.items():
        name = pattern.replace("\\", "")
        whole = name.removeprefix("^")
        if module == whole or (name == whole and module.endswith(f".{whole}")):
            return value
    return default

"""Adapters as files have them: a directory that PEFT has saved (adapter_config.json and
adapter_model.safetensors), and a GGUF file that llama.cpp's `convert_lora_to_gguf.py` has written; every pair
is checked against the model's shapes.

Every setting that changes what the numbers mean, and is not listed here, is refused by its name."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phasewise._words import counted
from phasewise.cython_kernels._native import MAX_ADAPTERS
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families import family_named, family_of_gguf
from phasewise.serving.loaders.formats.gguf_file import open_gguf
from phasewise.serving.loaders.formats.gguf_model import field, tensor_in
from phasewise.serving.loaders.formats.model_directory import ModelDirectory, open_all, tensor_of
from phasewise.serving.loaders.layout import weight_shapes
from phasewise.serving.loaders.naming import Naming
from phasewise.serving.loaders.source import SourceTensor
from phasewise.serving.models.linears import Adapter, LowRank, Matrix, update_of
from phasewise.serving.models.packed_model import ModelConfig, PackedModel

MOST_RANK = 512
MOST_SCALE = 1e6


@dataclass(frozen=True)
class Pair:
    """A and B of one weight in an adapter's file. `theirs`: the file's name of the weight."""

    theirs: str
    a: SourceTensor
    b: SourceTensor
    scale: float


def checked(pair: Pair, shape: tuple[int, int], what: str) -> LowRank:
    """Read a pair's numbers for a weight of this shape (outputs, inputs). Raises ModelError, in one line."""
    (outputs, inputs), rank = shape, pair.a.shape[0]
    whose = f"{what}: {pair.theirs!r:.120}"
    if not 1 <= rank <= MOST_RANK:
        raise ModelError(f"{whose} has rank {rank}; 1 to {MOST_RANK} can run")
    if pair.a.shape != (rank, inputs) or pair.b.shape != (outputs, rank):
        raise ModelError(
            f"{whose} has A {list(pair.a.shape)} and B {list(pair.b.shape)} beside a weight of"
            f" {outputs} outputs and {inputs} inputs: it is another model's"
        )
    if not (math.isfinite(pair.scale) and abs(pair.scale) <= MOST_SCALE):
        raise ModelError(
            f"{whose} is scaled by {pair.scale!r:.40}: a number within {MOST_SCALE:.0e} expected"
        )
    return LowRank(_numbers(pair.a, whose), _numbers(pair.b, whose), float(np.float32(pair.scale)))


def _numbers(tensor: SourceTensor, whose: str) -> Matrix:
    if tensor.form.is_quantised:
        raise ModelError(f"{whose} is stored as {tensor.type_name}; F32, F16 and BF16 are read")
    rows = tensor.rows(0, tensor.shape[0])
    assert isinstance(rows, np.ndarray)
    numbers = np.ascontiguousarray(rows, np.float32)
    if not np.isfinite(numbers).all():
        raise ModelError(f"{whose} holds numbers that are not finite")
    return numbers


def parts_of(pairs: Mapping[str, Pair], config: ModelConfig, what: str) -> dict[str, LowRank]:
    """Read the numbers of all pairs, by our names of weights. `what`: the file in errors. Raises
    ModelError."""
    if not pairs:
        raise ModelError(f"{what} changes no weight")
    shapes = weight_shapes(config)
    adaptable = {weight for columns in _readers(config).values() for weight in columns}
    parts: dict[str, LowRank] = {}
    for ours, pair in pairs.items():
        if ours not in adaptable:
            raise ModelError(
                f"{what}: {pair.theirs!r:.120} is an adapter of something else than the projections of"
                " attention and of the feed-forward layer, which alone can run"
            )
        parts[ours] = checked(pair, shapes[ours], what)
    return parts


def adapter_of(name: str, parts: Mapping[str, LowRank], config: ModelConfig) -> Adapter:
    """Make the adapter, as a program reads it, of low-rank parts by our names of weights."""
    updates = {}
    for reader, columns in _readers(config).items():
        own = [(column, parts[weight]) for weight, column in columns.items() if weight in parts]
        if own:
            updates[reader] = update_of(own)
    return Adapter(name, _digest(parts), updates)


def _readers(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Weights by the product that adapters name, each with the first column of its outputs there."""
    readers: dict[str, dict[str, int]] = {}
    for i, layer in enumerate(config.layers):
        widths: dict[str, int] = {}
        for product in layer.products:
            first = widths.get(product.reader, 0)
            if product.reader:
                widths[product.reader] = first + sum(product.outputs.values())
                columns = {f"layers.{i}.{part}": column for part, column in product.columns(first)}
                readers.setdefault(f"layers.{i}.{product.reader}", {}).update(columns)
    return readers


def _digest(parts: Mapping[str, LowRank]) -> str:
    digest = hashlib.sha256()
    for name in sorted(parts):
        part = parts[name]
        head = f"{name} {part.a.shape} {part.b.shape} {part.scale.hex()}\n"
        digest.update(head.encode())
        for matrix in (part.a, part.b):
            digest.update(matrix.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


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
    """The pairs of a directory by PEFT, by our names of weights; `stack` closes their file. Raises ModelError
    in one line for adapters that cannot run."""
    directory = ModelDirectory(path)
    fields = directory.json(CONFIG)
    if fields is None:
        raise ModelError(f"{path} has no {CONFIG}: neither PEFT's directory nor a GGUF file")
    scaling = _checked(fields, path)
    if not directory.has(WEIGHTS):
        raise ModelError(f"{path} has no {WEIGHTS}: save the adapter as safetensors")
    family = family_named(config.architecture)
    assert family is not None  # an encoder takes no adapters
    ((file, entries),) = open_all(directory, [WEIGHTS], stack)
    by_module: dict[str, dict[str, SourceTensor]] = {}
    for theirs, entry in entries.items():
        match = _PAIR.fullmatch(theirs.removeprefix(_PREFIX))
        if match is None or not theirs.startswith(_PREFIX):
            raise ModelError(f"{path} has a tensor {theirs!r:.120}, {_why_not(theirs)}")
        if len(entry.shape) != 2:
            raise ModelError(f"{path} has {theirs!r:.120} in shape {list(entry.shape)}: a matrix expected")
        by_module.setdefault(match[1], {})[match[2]] = tensor_of(file, theirs, entry)

    return _our_pairs(
        {f"{module}.weight": both for module, both in by_module.items()},
        lambda name, rank: scaling.of(name.removesuffix(".weight"), rank, str(path)),
        family.hf_naming(config, str(path)),
    )


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
    by_name: Mapping[str, Mapping[str, SourceTensor]], scale_of: Callable[[str, int], float], naming: Naming
) -> dict[str, Pair]:
    """A and B of weights by the file's names, by ours. `scale_of(name, rank)`: a weight's scale."""
    pairs = dict[str, Pair]()
    for name, both in by_name.items():
        if len(both) != 2:
            raise ModelError(f"{naming.what} has of {name!r:.120} only lora_{next(iter(both))}")
        (stem, own, _), what = naming.place(name), f"{naming.what} has an adapter of {name!r:.120}"
        if not stem or "experts" in own or "_exps" in own:
            kind = "experts" if stem else "embeddings, or of the head"
            raise ModelError(f"{what}: adapters of {kind} cannot run")
        a, whole_b = (both[letter] for letter in sorted(both))
        scale = scale_of(name, a.shape[0])
        for ours, b in naming.ours(name, whole_b, f"{what} that"):
            if ours in pairs:
                raise ModelError(f"{naming.what} has the adapter of {name!r:.120} twice")
            pairs[ours] = Pair(name, a, b, scale)
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
    """The value of the first pattern that the module ends with, as PEFT looks it up."""
    for pattern, value in patterns.items():
        name = pattern.replace("\\", "")
        whole = name.removeprefix("^")
        if module == whole or (name == whole and module.endswith(f".{whole}")):
            return value
    return default


_GGUF_PAIR = re.compile(r"(.+)\.lora_([ab])", re.ASCII)


def gguf_pairs(path: Path, config: ModelConfig, stack: ExitStack) -> dict[str, Pair]:
    """The pairs of a GGUF file, by our names of weights; `stack` closes the file. Raises ModelError."""
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
    family = family_of_gguf(field(metadata, "general.architecture", str, "nothing"), str(path))
    by_module: dict[str, dict[str, SourceTensor]] = {}
    for theirs, info in header.tensors.items():
        match = _GGUF_PAIR.fullmatch(theirs)
        if match is None or len(info.shape) != 2:
            raise ModelError(
                f"{path} has a tensor {theirs!r:.120} that is neither lora_a nor lora_b of a matrix"
            )
        by_module.setdefault(match[1], {})[match[2]] = tensor_in(file, info)

    return _our_pairs(
        by_module, lambda _, rank: alpha / rank if alpha else 1.0, family.gguf_naming(config, str(path))
    )


def load_adapter(name: str, path: Path, config: ModelConfig) -> Adapter:
    """Load an adapter of PEFT's directory or of a GGUF file. Raises ModelError in one line for an adapter
    that cannot run beside this model."""
    return adapter_of(name, load_parts(path, config), config)


def load_parts(path: Path, config: ModelConfig) -> dict[str, LowRank]:
    """Load an adapter's numbers, by our names of the weights they are added to. Raises ModelError."""
    check_takes_adapters(config, path)
    if path.suffix == ".safetensors" and not path.is_dir():
        raise ModelError(f"{path} is only the numbers of an adapter: give the directory that holds it")
    with ExitStack() as stack:
        pairs = (peft_pairs if path.is_dir() else gguf_pairs)(path, config, stack)
        return parts_of(pairs, config, str(path))


def check_takes_adapters(config: ModelConfig, path: Path) -> None:
    """Raise ModelError for a model that takes no adapters. `path`: the adapter's, for the error."""
    if config.encoder is not None:
        raise ModelError(f"{path}: adapters are for models that generate text")
    reasons = (mixer.takes_no_adapters for layer in config.layers for mixer in layer.mixers)
    why = next(filter(None, reasons), "")
    if config.has_mixed_heads or any(form.shares for form in config.forms):
        why = "whose layers have heads of their own"
    if why:
        raise ModelError(f"{path}: {config.architecture} models, {why}, take no adapters")


def with_adapters(model: PackedModel, lora: Sequence[str]) -> PackedModel:
    """The model with adapters of `NAME=PATH` each, numbered in this order. Raises ModelError."""
    if not lora:
        return model
    named = named_paths(lora)
    if len(named) > MAX_ADAPTERS:
        raise ModelError(f"{counted(len(named), 'adapter')} of one model; at most {MAX_ADAPTERS} can run")
    if model.config.encoder is not None or model.embedding is not None:
        raise ModelError(f"{model.name} makes vectors: adapters are for models that generate text")
    adapters = tuple(load_adapter(name, path, model.config) for name, path in named)
    return replace(model, adapters=adapters)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def named_path(text: str) -> tuple[str, Path]:
    """The name and path of `NAME=PATH` or `PATH`. Raises ModelError for a name that requests cannot say."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        path = text
        name = Path(text).name.removesuffix(".gguf")
    if not NAME.fullmatch(name) or not path:
        raise ModelError(
            f"adapter {text!r:.120}: NAME=PATH expected, a name of letters, digits, '.', '_' and '-'"
        )
    return name, Path(path)


def named_paths(texts: Sequence[str]) -> list[tuple[str, Path]]:
    """The name and the path that each text states (`named_path`). ModelError where two adapters have one
    name."""
    named = [named_path(text) for text in texts]
    names = [name for name, _ in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ModelError(f"two adapters are called {twice}: give another name with NAME=PATH")
    return named

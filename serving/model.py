"""A model as the engine sees it: its shape, its packed weights, its tokenizer text.

Every loader ends in a `PackedModel`; nothing after it knows GGUF or safetensors. A `ModelConfig` that
exists has been checked, so the engine may multiply its numbers without fear.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
FORMATS = ("native", "f32", "bf16", "int8", "int4")

# Far beyond any published model, small enough that no product below leaves 63 bits.
LARGEST = {
    "n_layers": 1 << 10,
    "hidden": 1 << 17,
    "ffn": 1 << 20,
    "n_heads": 1 << 10,
    "n_kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "vocab_size": 1 << 22,
    "context_length": 1 << 26,
}

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies; `original_context` in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class FrequencyFactors:
    """One divisor per frequency, as GGUF files store Llama 3.1's scaling."""

    factors: tuple[float, ...]


Scaling = Llama3Scaling | LinearScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the first `dim` of a head, half-split pairs (i, i + dim/2)."""

    theta: float
    dim: int
    scaling: Scaling | None = None

    def inv_freq(self) -> npt.NDArray[np.float64]:
        """Radians per position, float64 [dim / 2]."""
        plain = self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return plain / factor
            case FrequencyFactors(factors):
                return plain / np.asarray(factors, dtype=np.float64)
            case Llama3Scaling():
                return _llama3(plain, self.scaling)


def _llama3(plain: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    """Keep short wavelengths, divide long ones by the factor, blend between (Llama 3.1's reference code)."""
    rotations = scaling.original_context * plain / (2 * math.pi)  # whole turns within the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    blended: npt.NDArray[np.float64] = keep * plain + (1 - keep) * plain / scaling.factor
    return blended


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder of the Llama family. Construction refuses shapes that no model can have."""

    architecture: str
    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    qk_norm: bool
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(f"architecture {self.architecture!r} is not one of {', '.join(ARCHITECTURES)}")
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise ModelError(f"{name} is {value!r}: a whole number from 1 to {largest} expected")
        if self.n_heads % self.n_kv_heads:
            raise ModelError(f"{self.n_heads} attention heads do not divide into {self.n_kv_heads} KV heads")
        if self.head_dim % 2 or self.rope.dim != self.head_dim:
            raise ModelError(f"RoPE over {self.rope.dim} of {self.head_dim} head dimensions is not supported")
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"the norm epsilon is {self.norm_eps!r}: a number between 0 and 1 expected")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"the sliding window is {self.sliding_window!r} tokens")
        self._check_rope()
        self._check_tokens()

    def _check_rope(self) -> None:
        with np.errstate(all="ignore"):
            try:
                inv_freq = self.rope.inv_freq()
            except (ArithmeticError, ValueError):
                inv_freq = np.array([math.nan])
        if inv_freq.shape != (self.head_dim // 2,) or not (np.isfinite(inv_freq) & (inv_freq > 0)).all():
            raise ModelError(f"these RoPE parameters give no usable frequencies: {self.rope}")

    def _check_tokens(self) -> None:
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and not 0 <= token < self.vocab_size:
                raise ModelError(f"special token {token} is outside the vocabulary of {self.vocab_size}")

    @property
    def q_rows(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class MappedFile:
    """The packed file that a model's arrays are views of. Another process can map the same one."""

    path: Path
    address: int
    """Where this process has its first byte."""
    n_bytes: int
    identity: tuple[int, int]
    """Device and inode: the path may get another file."""

    def open_again(self) -> int | None:
        """A descriptor of the same file; None if another one has its name by now."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) == self.identity:
            return fd
        os.close(fd)
        return None


@dataclass(frozen=True)
class PackedModel:
    """A model ready to run; weights and vectors are views over a file mapped read-only.

    weights: "embed" [vocab, hidden]; "lm_head" unless tied; per layer i "layers.{i}.qkv" (q, k, v rows),
    ".o", ".gate_up" (gate rows, then up rows), ".down". Parts whose packed kinds differ stay separate:
    ".q", ".k", ".v" or ".gate", ".up".
    vectors, float32: "final_norm"; per layer ".attn_norm", ".ffn_norm", maybe ".qkv_bias", ".q_norm",
    ".k_norm".
    content_hash names the source's content and the format, so equal models hash alike on every machine.
    """

    config: ModelConfig
    format: str
    name: str
    source: Path | str
    content_hash: str
    weights: Mapping[str, PackedWeight]
    vectors: Mapping[str, Vector]
    tokenizer_json: str
    chat_template: str | None
    weight_bytes: int
    file: MappedFile | None = None
    """None: the arrays are this process's own."""


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Plain JSON values; `config_from_json` is the inverse."""
    fields = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__ if name != "rope"}
    scaling = config.rope.scaling
    rope: dict[str, Any] = {"theta": config.rope.theta, "dim": config.rope.dim, "scaling": None}
    if scaling is not None:
        rope["scaling"] = {"kind": type(scaling).__name__, **vars(scaling)}
    return {**fields, "rope": rope}


def config_from_json(fields: Mapping[str, Any]) -> ModelConfig:
    """The config that `config_to_json` wrote; KeyError or TypeError for anything else."""
    values = dict(fields)
    rope = dict(values.pop("rope"))
    scaling = _scaling_from_json(rope.pop("scaling"))
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    return ModelConfig(rope=RopeSpec(**rope, scaling=scaling), **values)


def _scaling_from_json(fields: Mapping[str, Any] | None) -> Scaling | None:
    if fields is None:
        return None
    values = dict(fields)
    match values.pop("kind"):
        case "Llama3Scaling":
            return Llama3Scaling(**values)
        case "LinearScaling":
            return LinearScaling(**values)
        case _:
            return FrequencyFactors(tuple(values["factors"]))

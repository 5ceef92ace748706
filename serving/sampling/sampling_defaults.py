"""Sampling defaults of a model: what its authors state, else our own.

Sources: `generation_config.json` of Hugging Face directories (fields as in transformers' GenerationConfig)
and keys `general.sampling.*` of GGUF files (as llama.cpp writes them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Source = Literal["default", "model"]

_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling values for fields that a request leaves out. `top_k` None: no limit. `source`: "model" if the
    model's files state at least one of the first four values; those they leave out then have transformers'
    defaults (temperature 1, no cut)."""

    temperature: float = 0.7
    top_k: int | None = None
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    source: Source = "default"

    def with_overrides(
        self, temperature: float | None = None, top_p: float | None = None, min_p: float | None = None
    ) -> SamplingDefaults:
        """A copy with the values that an operator sets; None: unchanged."""
        given = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
        return replace(self, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SamplingDefaults:
        """The defaults that `to_json` wrote. ValueError for values that no sampler could use."""
        for name in _GGUF_KEYS:
            value = fields[name]
            number = _number(value)
            if not (name == "top_k" and value is None) and (number is None or not _usable(name, number)):
                raise ValueError(f"{name} is {value!r:.40}")
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """JSON object for `/v1/models` and packed files."""
        return asdict(self)


def stated_by_hf(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Defaults from a `generation_config.json`. Values that no sampler could use count as not stated."""
    return _stated({name: generation_config.get(name) for name in _GGUF_KEYS})


def stated_by_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Defaults from a GGUF file's metadata. Values that no sampler could use count as not stated."""
    return _stated({name: metadata.get(key) for name, key in _GGUF_KEYS.items()})


def _stated(fields: Mapping[str, Any]) -> SamplingDefaults:
    numbers = {name: _number(value) for name, value in fields.items()}
    usable = {name: value for name, value in numbers.items() if value is not None and _usable(name, value)}
    penalty = usable.pop("repetition_penalty", 1.0)
    if not usable:
        return SamplingDefaults(repetition_penalty=penalty)
    top_k = int(usable.get("top_k", 0))
    return SamplingDefaults(
        temperature=usable.get("temperature", 1.0),
        top_k=top_k if top_k > 0 else None,
        top_p=usable.get("top_p", 1.0),
        min_p=usable.get("min_p", 0.0),
        repetition_penalty=penalty,
        source="model",
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return round(float(value), 6)  # GGUF keeps float32: 0.95 reads as 0.949999988


_BOUNDS = {
    "temperature": (0, 100),
    "top_k": (-1, 2**31 - 1),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


def _usable(name: str, value: float) -> bool:
    least, most = _BOUNDS[name]
    return least <= value <= most and (name != "top_k" or value == int(value))

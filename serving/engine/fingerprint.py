"""The identity of a server's arithmetic: two answers of one fingerprint to one seeded request are equal.

Everything that an answer's bits depend on is a component. What they do not depend on is none: cores, ranks,
schedules, pools, the place of keys and values, drafts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from phasewise.cython_kernels._native import compute_paths, isa_active
from phasewise.serving.models.forward import resolve_kv_format
from phasewise.serving.models.packed_model import LongScaling, PackedModel, config_to_json

if TYPE_CHECKING:
    from phasewise.cython_kernels.schedules import ScheduleLookup
    from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
    from phasewise.tuner.plans import Phase

ARITHMETIC_VERSION = 1
"""Raised whenever any kernel gives another bit on any instruction set."""
SAMPLER_VERSION = 1
"""Raised whenever equal logits, settings and seed may choose another token."""
_DIGITS = 24
_TILES = "prompts by tiles"


@dataclass(frozen=True)
class Fingerprint:
    """The components of a fingerprint: SHA-256 in hexadecimal where nothing else is said."""

    weights: str
    config: str
    tokenizer: str
    template: str
    """The chat template; empty without one."""
    weight_format: str
    kv_format: str
    arithmetic: str
    """Version, instruction set, and a digest of the compute path of every weight: `1/avx2/0123...`."""
    sampler: str
    """Version, and a digest of the numbers that numpy gives it here: its exponential depends on the CPU."""
    context: int | None = None
    """Most positions of a sequence, where the model's rotation depends on it (LongRoPE)."""
    defaults: str = ""
    """The assumptions where a request states nothing; a receipt states everything."""

    @property
    def has_one_arithmetic(self) -> bool:
        """True if a token's numbers are the same whichever phase computes it."""
        return not self.arithmetic.endswith(_TILES)

    def told(self) -> str:
        """The short form, OpenAI's `system_fingerprint`."""
        return _told(self)

    def differences(self, other: Fingerprint) -> list[str]:
        """The components in which they differ, the servers' defaults apart."""
        names = [one.name for one in fields(self) if one.name != "defaults"]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fingerprint:
        """The same, of a server with these defaults of requests."""
        return replace(self, defaults=digest_of(defaults))


def fingerprint_of(
    model: PackedModel, kv_format: str, schedules: Mapping[Phase, ScheduleLookup] | None, positions: int
) -> Fingerprint:
    """The fingerprint of a model as it is computed in this process.

    kv_format: as asked for. positions: most of one sequence.
    """
    config = config_to_json(model.config)
    del config["context_length"]
    rotations = [model.config.rope, *(kind.rope for kind in model.config.kinds)]
    is_long = any(one is not None and isinstance(one.scaling, LongScaling) for one in rotations)
    return Fingerprint(
        weights=model.content_hash,
        config=digest_of(config),
        tokenizer=_sha256(model.tokenizer_json),
        template="" if model.chat_template is None else _sha256(model.chat_template),
        weight_format=model.format,
        kv_format=resolve_kv_format(model, kv_format),
        arithmetic=f"{ARITHMETIC_VERSION}/{isa_active()}/{_paths(model, schedules)}",
        sampler=f"{SAMPLER_VERSION}/{_numpy_probe()}",
        context=positions if is_long else None,
    )


def defaults_told(
    sampling: SamplingDefaults, tool_format: str, context_length: int, *, allow_special: bool
) -> dict[str, Any]:
    """The assumptions about what a request does not say, for `Fingerprint.with_defaults`."""
    return {
        "sampling": sampling.to_json(),
        "tool_format": tool_format,
        "context_length": context_length,
        "allow_special": allow_special,
    }


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value in its one canonical form: names in order, no spaces."""
    return _sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def _paths(model: PackedModel, schedules: Mapping[Phase, ScheduleLookup] | None) -> str:
    """By which path every weight is multiplied. All phases of a model share one, but for tiles."""
    lookup = schedules["prefill"] if schedules else None
    found, has_tiles = [], False
    for name, weight in model.products().items():
        path, n_parts = (None, 1) if lookup is None else lookup.arithmetic(weight)
        path = path or compute_paths(weight.kind, weight.group)[0]
        has_tiles = has_tiles or (lookup is not None and lookup.own_path(weight) is not None)
        found.append((name, weight.kind, weight.group, path, n_parts))
    return digest_of(sorted(found))[:_DIGITS] + (f"/{_TILES}" if has_tiles else "")


@cache
def _numpy_probe() -> str:
    """A digest of exponentials, their sums and drawn numbers as the sampler gets them of numpy."""
    exponents = -np.geomspace(1e-6, 80, 4096, dtype=np.float32)
    weights = np.exp(exponents)
    drawn = np.random.Generator(np.random.PCG64(41)).random(16)
    sums = np.add.reduceat(weights, np.arange(0, weights.size, 256))
    return hashlib.sha256(weights.tobytes() + sums.tobytes() + drawn.tobytes()).hexdigest()[:_DIGITS]


@lru_cache(maxsize=64)
def _told(fingerprint: Fingerprint) -> str:
    return f"fp_{digest_of(asdict(fingerprint))[:_DIGITS]}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

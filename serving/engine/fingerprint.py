"""The identity of a server's arithmetic: one seeded request gets equal answers under equal fingerprints. Its
components are all that an answer's bits depend on. Cores, ranks, schedules, pools, placement of keys and
values, and drafts are none."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from phasewise.cython_kernels._native import compute_paths, isa_active
from phasewise.cython_kernels.schedules import OF_ONE_INSTRUCTION_SET, SAME_BITS
from phasewise.serving.models.config_json import config_to_json
from phasewise.serving.models.forward import resolve_kv_format
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.rope import LongScaling

if TYPE_CHECKING:
    from phasewise.cython_kernels.packing import PackedWeight
    from phasewise.cython_kernels.schedules import ScheduleLookup
    from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
    from phasewise.tuner.plans import Phase

ARITHMETIC_VERSION = 2
"""Raised when any kernel gives other bits on any instruction set (docs/arithmetic.md)."""
SAMPLER_VERSION = 2
"""Raised when equal logits, settings and seed may choose another token."""
_DIGITS = 24
_EVERY = "every"


@dataclass(frozen=True)
class Fingerprint:
    """Components of a fingerprint, each a SHA-256 in hexadecimal unless noted."""

    weights: str
    config: str
    tokenizer: str
    template: str
    """Hash of the chat template; empty: there is none."""
    weight_format: str
    kv_format: str
    arithmetic: str
    """Version, place, and a digest of every weight's compute path: `2/every/0123...`. The place is `every`,
    `tiles` (a tile unit), or an instruction set with its own rounding."""
    sampler: str
    """Sampler version, and a digest of numpy's sums and random numbers on this machine."""
    context: int | None = None
    """Most positions of a sequence, if the model's rotation depends on it (LongRoPE); else None."""
    adapter: str = ""
    """Content hash of the adapter; empty: the base model."""
    defaults: str = ""
    """Digest of the defaults for fields that a request leaves out."""
    paths: str = field(default="", compare=False)
    """Readable list of the compute paths of all products, the most common first. Not a component:
    `arithmetic` has their digest."""

    @cached_property
    def short(self) -> str:
        """The short form, as in OpenAI's `system_fingerprint`."""
        components = asdict(self)
        del components["paths"]
        if not self.adapter:  # as it was before there were adapters
            del components["adapter"]
        return f"fp_{digest_of(components)[:_DIGITS]}"

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the components that differ, the servers' defaults apart."""
        names = [part.name for part in fields(self) if part.compare and part.name != "defaults"]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def of_keys_and_values(self) -> dict[str, str | int | None]:
        """Components that decide the bits of keys and values."""
        names = ("weights", "config", "weight_format", "kv_format", "arithmetic", "context")
        return {name: getattr(self, name) for name in names}

    def with_adapter(self, content_hash: str) -> Fingerprint:
        """A copy for the same model with an adapter."""
        return replace(self, adapter=content_hash)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fingerprint:
        """A copy for a server with these request defaults."""
        return replace(self, defaults=digest_of(defaults))


def fingerprint_of(
    model: PackedModel, kv_format: str, schedules: Mapping[Phase, ScheduleLookup] | None, positions: int
) -> Fingerprint:
    """The fingerprint of a model as this process computes it. `kv_format`: format asked for. `positions`:
    most positions of one sequence."""
    config = config_to_json(model.config)
    del config["context_length"]
    rotations = [kind.rope for kind in model.config.kinds if kind.rope is not None]
    is_long = any(isinstance(rotation.scaling, LongScaling) for rotation in rotations)
    return Fingerprint(
        weights=model.content_hash,
        config=digest_of(config),
        tokenizer=_sha256(model.tokenizer_json),
        template="" if model.chat_template is None else _sha256(model.chat_template),
        weight_format=model.format,
        kv_format=resolve_kv_format(model, kv_format),
        arithmetic=f"{ARITHMETIC_VERSION}/{arithmetic_of(model, schedules)}",
        sampler=f"{SAMPLER_VERSION}/{_numpy_probe()}",
        context=positions if is_long else None,
        paths=_paths(model, schedules),
    )


def defaults_told(
    sampling: SamplingDefaults, tool_format: str, context_length: int, *, allow_special: bool
) -> dict[str, Any]:
    """Defaults for fields that a request leaves out, for `Fingerprint.with_defaults`."""
    return {
        "sampling": sampling.to_json(),
        "tool_format": tool_format,
        "context_length": context_length,
        "allow_special": allow_special,
    }


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form: names sorted, no spaces."""
    return _sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def arithmetic_of(model: PackedModel, schedules: Mapping[Phase, ScheduleLookup] | None) -> str:
    """The instruction sets on which the bits are equal, and a digest of every weight's compute path. All
    phases of a model share the paths."""
    lookup = schedules["prefill"] if schedules else None
    products = [
        (name, weight.kind, weight.group, SAME_BITS.get(path, path), n_parts)
        for name, weight, path, n_parts in _products(model, lookup)
    ]
    used = {path for _, _, _, path, _ in products}
    return f"{_place_of(used)}/{digest_of(sorted(products))[:_DIGITS]}"


def _place_of(paths: Set[str]) -> str:
    """`every`, `tiles` (only the tile unit's own sums), or the active instruction set."""
    own = paths & OF_ONE_INSTRUCTION_SET
    return _EVERY if not own else "tiles" if own == {"bf16_tile"} else isa_active()


def _products(
    model: PackedModel, lookup: ScheduleLookup | None
) -> Iterator[tuple[str, PackedWeight, str, int]]:
    """Name, weight, compute path and number of k parts of every product."""
    for name, weight in model.products().items():
        path, n_parts = (None, 1) if lookup is None else lookup.arithmetic(weight)
        yield name, weight, path or compute_paths(weight.kind, weight.group)[0], n_parts


def _paths(model: PackedModel, schedules: Mapping[Phase, ScheduleLookup] | None) -> str:
    products = _products(model, schedules["prefill"] if schedules else None)
    return ", ".join(path for path, _ in Counter(path for _, _, path, _ in products).most_common())


@cache
def _numpy_probe() -> str:
    """A digest of numpy's sums and random numbers, as the sampler uses them."""
    weights = np.square(np.square(np.arange(1, 4097, dtype=np.float32) / np.float32(4099)))
    rows = np.einsum("ij->i", weights.reshape(16, 256))
    sums = np.concatenate([rows, [weights.sum()], [weights[:4001].sum()]]).astype(np.float32)
    drawn = np.random.Generator(np.random.PCG64(41)).random(16)
    return hashlib.sha256(sums.tobytes() + drawn.tobytes()).hexdigest()[:_DIGITS]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

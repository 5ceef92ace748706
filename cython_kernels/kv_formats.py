"""Formats in which keys and values may be stored: by name, and what one position of one KV head then
takes.
"""

from __future__ import annotations

from phasewise.cython_kernels import _native

KV_FORMATS: tuple[str, ...] = _native.KV_FORMATS
"""Names of the formats: `f32`, `f16`, `bf16`; `int16` and `int8` with a scale for each key and each value;
`int4` with two for every 32 numbers."""


def kv_slot_bytes(kv_format: str, head_dim: int, latent: bool = False) -> int:
    """Bytes of one position's key and value of one KV head; with latent attention one vector is both."""
    return int(_native.kv_slot_bytes(kv_format, head_dim, latent))

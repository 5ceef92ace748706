"""Results of `workflows.replay.bits_check` on sound machines: the same on every instruction set.

They are those of `serving.engine.fingerprint.ARITHMETIC_VERSION` 2. `bits_check.known_now` gives KNOWN.
"""

from __future__ import annotations

from collections.abc import Mapping

KNOWN: Mapping[str, str] = {
    "f32": "93aa784c9e72553f",
    "f16": "fff9e4ea96d293fa",
    "bf16": "baafbffdabbc84b7",
    "int8": "5abdb555756b131b",
    "int4": "3d0c079d5abeca0a",
    "int16": "ed5422b15f6a4490",
}
"""By the format of keys and values, of weights of `bits_check.KINDS`."""

KNOWN_OF_BLOCKS = "ad3acb72f79cefbb"
"""The result of K-quants by `--arithmetic blocks`, on every CPU, and by default where a tile unit multiplies
them. `bits_check.of_blocks` gives it.
"""

KNOWN_OF_BF16 = "19113e673134f290"
"""The result of bf16 weights by `--arithmetic canonical`, on every CPU."""

KNOWN_OF_DOTS: Mapping[str, Mapping[str, str]] = {
    "avx512_bf16": {"bf16_dot": "8c1fc1f43ae93e9a"},
    "avx512_fp16": {"f16_fma": "2cd0203608012e26"},
    "amx": {"bf16_tile": "b2d32cfe5d078e39"},
}
"""Results of bf16 weights by an instruction set's dots, by its name and their path.
`python -m tests.support.kernels.emulated_native` gives them, by emulated dots.
"""

SPECIFIED = frozenset({"bf16_dot", "bf16_tile"})
"""Paths whose rounding is Intel's word, where that of others is IEEE's: other results may be right too."""

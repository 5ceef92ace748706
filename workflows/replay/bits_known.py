"""Results of `workflows.replay.bits_check` on sound machines, by instruction set and format of keys and
values.

They are those of `serving.engine.fingerprint.ARITHMETIC_VERSION` 1. `bits_check.known_now` gives a machine's
rows.
"""

from __future__ import annotations

from collections.abc import Mapping

KNOWN: Mapping[str, Mapping[str, str]] = {
    "portable": {
        "f32": "79ecdcd54a7d8479",
        "f16": "8125bd0cf0f02c4a",
        "bf16": "445a049de943189e",
        "int8": "4166622f5463e04a",
        "int4": "07f8a317bf3ba07a",
        "int16": "2919763bc52d57e7",
    },
    "avx2": {
        "f32": "50cb0669a7180d8e",
        "f16": "2c8487ae26b029c9",
        "bf16": "44cf554816a5f082",
        "int8": "e90a020f151d7f9c",
        "int4": "bd12649a2a2d6671",
        "int16": "ef585ec5b67d315e",
    },
    "avx_vnni": {
        "f32": "50cb0669a7180d8e",
        "f16": "2c8487ae26b029c9",
        "bf16": "44cf554816a5f082",
        "int8": "3adabc6fb3aae6c9",
        "int4": "bd12649a2a2d6671",
        "int16": "c6690dccff8df07f",
    },
    "avx512": {
        "f32": "7ba48f11bd92d274",
        "f16": "0ad5a6459ab50bfb",
        "bf16": "1dd84a064e29c19d",
        "int8": "8c6b265df1d68e0e",
        "int4": "a2e17bca01eff277",
        "int16": "f2af8fe68b9a1505",
    },
    "avx512_vnni": {
        "f32": "7ba48f11bd92d274",
        "f16": "0ad5a6459ab50bfb",
        "bf16": "1dd84a064e29c19d",
        "int8": "ff0bbea7fef39c5a",
        "int4": "a2e17bca01eff277",
        "int16": "6157f318725019e3",
    },
    "avx512_bf16": {
        "f32": "d753cd3509bdd071",
        "f16": "e69fdbd951979bfc",
        "bf16": "4fa8e458efeacda4",
        "int8": "ca8d545091a5549f",
        "int4": "c6f57f6aa8c4954f",
        "int16": "1d1a4db1192b1724",
    },
    "avx512_fp16": {
        "f32": "0dcc7fafe590d42d",
        "f16": "0ce0a01f055be125",
        "bf16": "0f679cee36c496e0",
        "int8": "ae6865fd38d1ed0d",
        "int4": "e09f1df1e91fa1f5",
        "int16": "ba9f569a1f8fbb6c",
    },
}


def is_known(isa: str) -> bool:
    """True if the results of this instruction set are known."""
    return isa in KNOWN

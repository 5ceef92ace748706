"""Results of `workflows.bits_check` on sound machines, by instruction set and format of keys and values.

They are those of `serving.fingerprint.ARITHMETIC_VERSION` 1. `bits_check.known_now` gives a machine's rows.
"""

from __future__ import annotations

from collections.abc import Mapping

KNOWN: Mapping[str, Mapping[str, str]] = {
    "portable": {
        "f32": "05e14258210799ce",
        "f16": "d86a6ca08ca69d06",
        "bf16": "d3f3a21ed8bdc66a",
        "int8": "697231adf5a013ca",
        "int4": "bb36c6ee6f46ca81",
        "int16": "84e0105233a47340",
    },
    "avx2": {
        "f32": "dbe809b0ea8ad086",
        "f16": "be4657969e5b90d7",
        "bf16": "a0b1d1f2aff901de",
        "int8": "dee62a457858dc6b",
        "int4": "49d5c644d55afb9e",
        "int16": "0bd0849eaea964ff",
    },
    "avx_vnni": {
        "f32": "dbe809b0ea8ad086",
        "f16": "be4657969e5b90d7",
        "bf16": "a0b1d1f2aff901de",
        "int8": "4131db51e47dfd48",
        "int4": "49d5c644d55afb9e",
        "int16": "40cf747a5adc9935",
    },
    "avx512": {
        "f32": "1db6a26357cacd30",
        "f16": "e79d4882b64efdd2",
        "bf16": "b9abb7ac9e0a61cf",
        "int8": "9e3b6fcf0f72fd07",
        "int4": "8c71933772677ab4",
        "int16": "4da11fad68f16f8b",
    },
    "avx512_vnni": {
        "f32": "1db6a26357cacd30",
        "f16": "e79d4882b64efdd2",
        "bf16": "b9abb7ac9e0a61cf",
        "int8": "edfe5107bebcf8a2",
        "int4": "8c71933772677ab4",
        "int16": "8cb742056a95924e",
    },
    "avx512_bf16": {
        "f32": "48bc9e9b1315023b",
        "f16": "c37434ed10a57317",
        "bf16": "1497d7e16cd8ce21",
        "int8": "8c48caf98a1f39f2",
        "int4": "e89fc4554616f32b",
        "int16": "a307e903f8867e52",
    },
    "avx512_fp16": {
        "f32": "a427c77234a2466a",
        "f16": "c6ddca36fc2ee841",
        "bf16": "c962947fdc048db3",
        "int8": "dfe0278f5032f344",
        "int4": "d76a0b05e91c34b3",
        "int16": "22c0e1ce7db1339d",
    },
}


def is_known(isa: str) -> bool:
    """True if the results of this instruction set are known."""
    return isa in KNOWN

"""The operations that give other bits on another instruction set: exactly these, and no others.

`python -m tests.support.isa_operations` prints the list for this machine. What is taken off stays off;
an operation that comes to differ is a change of the arithmetic
(`serving.engine.fingerprint.ARITHMETIC_VERSION`).
"""

from __future__ import annotations

import pytest

from phasewise.cython_kernels import isa
from tests.support.isa_operations import differences, results

_ATTENTION = {f"attention over {one}" for one in ("f32", "f16", "bf16", "int8", "int16")}
_INTEGER_PRODUCTS = {
    *("q8", "q8 f32", "q8 min", "q8 group 16", "q4", "q4 min", "q4 min f32"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq4_nl", "mxfp4", "q5_0", "q5_1"),
}
_GELU = {"gelu", "gelu_tanh", "gelu of edges", "gelu_tanh of edges"}

DIFFERENCES = {
    ("portable", "avx2"): {
        *("layernorm", "exponential", "softmax", "logsumexp", "capped", "rope"),
        *("gate of silu", "gate of gelu_tanh", "attention over int4", "product of f32"),
        *_GELU,
        *_ATTENTION,
        *(f"product of {one}" for one in _INTEGER_PRODUCTS),
    },
    ("avx2", "avx_vnni"): {"attention over int8", "attention over int16"},
    ("avx_vnni", "avx512"): {
        *("softmax", "logsumexp"),
        *(f"gate of {one}{x}" for one in ("silu", "gelu_tanh", "clamped_silu") for x in ("", " of edges")),
        *_GELU,
        *_ATTENTION,
    },
    ("avx512", "avx512_vnni"): {"attention over int8", "attention over int16"},
    ("avx512_vnni", "avx512_bf16"): {"product of bf16"},
    ("avx512_bf16", "avx512_fp16"): {"product of bf16"},
}
"""By neighbours on the ladder."""

HERE = [pair for pair in DIFFERENCES if set(pair) <= set(isa.usable())]


@pytest.mark.parametrize("pair", HERE, ids="-".join)
def test_exactly_the_listed_operations_differ(pair: tuple[str, str]) -> None:
    assert set(differences(*pair)) == DIFFERENCES[pair]


@pytest.mark.parametrize("name", isa.usable())
def test_an_operation_gives_the_same_bits_twice(name: str) -> None:
    assert differences(name, name) == []


def test_every_listed_operation_is_there() -> None:
    assert set().union(*DIFFERENCES.values()) <= {name for name, _ in results()}

"""The rounding by which sparse int4 weights are judged, and the tensors that it rounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sparse_int4 import GROUP, round_linear_layers, rounded


@pytest.mark.parametrize("bits", [3, 4])
def test_rounding_keeps_zeros_and_stays_within_half_a_step(bits: int) -> None:
    weights = np.random.default_rng(bits).standard_normal((7, 3 * GROUP), np.float32)
    weights[:, ::2] = 0
    weights[2] = 0

    got = rounded(weights, bits)

    steps = np.abs(weights.reshape(7, -1, GROUP)).max(axis=2, keepdims=True) / (2 ** (bits - 1) - 1)
    error = np.abs(got - weights).reshape(steps.shape[0], -1, GROUP)
    assert (got[weights == 0] == 0).all()
    assert (error <= steps * (0.5 + 2**-11 * 2**bits)).all()
    assert len(np.unique(got[0, :GROUP])) <= 2**bits - 1


def test_only_linear_layers_of_a_file_are_rounded(tmp_path: Path) -> None:
    words = np.random.default_rng(0).standard_normal((2, 4, GROUP)).astype(np.float32).view(np.uint32) >> 16
    raw = words.astype(np.uint16).tobytes()
    entry = {"dtype": "BF16", "shape": [4, GROUP]}
    table = json.dumps(
        {
            "model.layers.0.mlp.up_proj.weight": entry | {"data_offsets": [0, len(raw) // 2]},
            "model.embed_tokens.weight": entry | {"data_offsets": [len(raw) // 2, len(raw)]},
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(table).to_bytes(8, "little") + table + raw)

    round_linear_layers(tmp_path, 4)

    after = path.read_bytes()[8 + len(table) :]
    assert len(after) == len(raw)
    assert after[len(raw) // 2 :] == raw[len(raw) // 2 :]
    numbers = (np.frombuffer(after[: len(raw) // 2], np.uint16).astype(np.uint32) << 16).view(np.float32)
    for row in numbers.reshape(4, GROUP):
        assert len(np.unique(row)) <= 15

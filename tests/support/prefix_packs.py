"""Packs without a model: rows that are drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phasewise.serving.prefix_store.blocks import RecordShape, write_record
from phasewise.serving.prefix_store.pack_file import PackFacts, pack_head

IDENTITY = {"weights": "w", "arithmetic": "2/every/0", "kv_format": "int8"}
SHAPE = RecordShape(2, 24)


def write_pack(
    path: Path,
    token_ids: Sequence[int],
    identity: Mapping[str, Any] = IDENTITY,
    shape: RecordShape = SHAPE,
    seed: int = 1,
) -> Path:
    """A whole pack of these tokens."""
    facts = PackFacts("tiny", identity, shape, tuple(token_ids))
    rng = random.Random(seed)
    parts = [pack_head(facts)]
    for block in facts.blocks:
        rows = rng.randbytes(shape.state_bytes if block.is_state else shape.rows_bytes(block.n_tokens))
        parts += [bytes(part) for part in write_record(facts.naming, block, 0.0, rows)]
    path.write_bytes(b"".join(parts))
    return path

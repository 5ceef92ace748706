"""Opening of a store from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise.serving.errors import ServingError
from phasewise.serving.prefix_store.blocks import RecordShape, identity_digest
from phasewise.serving.prefix_store.folder import PrefixFolder
from phasewise.serving.prefix_store.store import PrefixStore

LEAST_BLOCKS = 4
"""Fewest blocks that a folder must have room for: a smaller one would evict what it has just written."""


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """Settings of the folder for prompt prefixes, a path on the host that computes."""

    folder: str
    limit_bytes: int = 8 << 30


def open_store(
    settings: PrefixSettings, model: str, identity: Mapping[str, Any], shape: RecordShape
) -> PrefixStore:
    """A store for this identity and shape, which the caller starts. ServingError: the folder cannot be
    used."""
    if settings.limit_bytes < LEAST_BLOCKS * shape.most_bytes:
        least = -(-LEAST_BLOCKS * shape.most_bytes >> 20)
        raise ServingError(
            f"a prefix cache of {settings.limit_bytes} bytes is too small: a block of this model has "
            f"{shape.most_bytes}; prefix_cache_bytes = '{least}M' is the least"
        )
    folder = PrefixFolder.open(Path(settings.folder), settings.limit_bytes)
    folder.describe_identity(identity_digest(identity), model, identity)
    return PrefixStore(identity_digest(identity), shape, folder)

"""Damaged model files: whatever the damage, a model or a `ModelError` comes of it, soon, in little memory."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import pytest

from tests.support.models.damaged_files import Target, damaged, open_target, targets
from tests.support.models.tiny_models import (
    TinyShape,
    safetensors_bytes,
    tiny_gguf,
    tiny_weights,
    write_tiny_hf,
)
from tests.support.tiers import n_examples

CASES = n_examples(150, soak=10_000)
SLOWEST_S = 10.0  # of one case: a hang, on however busy a machine
GROWTH_BYTES = 400 << 20
TINY = TinyShape(n_layers=1, hidden=32, ffn=32, n_heads=2, n_kv_heads=1, head_dim=16, vocab_size=261)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(
    name: str, healthy: bytes, header_bytes: int, target: Path, load: Path, cache: Path, cases: int = CASES
) -> dict[str, int]:
    target.write_bytes(healthy)
    return watch(Target(name, target, load, header_bytes), cases, cache)


def watch(target: Target, cases: int, cache: Path) -> dict[str, int]:
    """Numbers of damaged files that load and that are refused; each refusal says why in one line."""
    counts = {"refused": 0, "loaded": 0}
    before = peak_bytes()
    for case in damaged(target, range(cases), cache):
        counts["refused" if case.outcome == "refused" else "loaded"] += 1
        assert case.seconds < SLOWEST_S, f"case {case.number} took too long"
    assert peak_bytes() - before < GROWTH_BYTES
    return counts


def test_damaged_gguf_files_load_or_are_refused(tmp_path: Path) -> None:
    healthy = tiny_gguf("llama", {"": "Q4_1", "attn_v": "Q8_0"}, shape=TINY).to_bytes()
    header_bytes = len(healthy) - sum(len(raw) for *_, raw in tiny_gguf("llama", shape=TINY).tensors) // 4
    path = tmp_path / "fuzz.gguf"

    counts = fuzz("gguf", healthy, header_bytes, path, path, tmp_path)

    assert counts["refused"] > CASES // 4
    assert counts["loaded"] > 0


@pytest.mark.parametrize("victim", ["model.safetensors", "config.json"])
def test_damaged_safetensors_directories_load_or_are_refused(tmp_path: Path, victim: str) -> None:
    directory = write_tiny_hf(tmp_path / "fuzz", "qwen2", "bfloat16", shape=TINY)
    healthy = (directory / victim).read_bytes()
    weights = safetensors_bytes(tiny_weights("qwen2", TINY), "bfloat16")
    header_bytes = 8 + struct.unpack_from("<Q", weights)[0] if victim.startswith("model") else len(healthy)

    counts = fuzz(victim, healthy, header_bytes, directory / victim, directory, tmp_path)

    assert counts["refused"] > CASES // 4
    assert counts["loaded"] > 0


def test_a_damaged_index_loads_or_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "fuzz", shards=2, shape=TINY)
    index = directory / "model.safetensors.index.json"
    healthy = index.read_bytes()

    counts = fuzz("index", healthy, len(healthy), index, directory, tmp_path)

    assert counts["refused"] > CASES // 4


@pytest.mark.many
@pytest.mark.parametrize("name", targets())
def test_damaged_files_of_every_block_type_and_family_load_or_are_refused(tmp_path: Path, name: str) -> None:
    """A fiftieth of the cases for each; tests/soak/fuzz_models.py draws them all."""
    cases = max(CASES // 50, 2)

    counts = watch(open_target(name, tmp_path), cases, tmp_path)

    assert counts["loaded"] + counts["refused"] == cases

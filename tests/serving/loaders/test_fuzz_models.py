"""Damaged model files: whatever the damage, a model or a `ModelError` comes of it, soon, in little memory."""

from __future__ import annotations

import os
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.model import PackedModel
from tests.support import family_models
from tests.support.tiers import n_examples
from tests.support.tiny_models import TinyShape, safetensors_bytes, tiny_gguf, tiny_weights, write_tiny_hf

CASES = n_examples(150, soak=10_000)
SLOWEST_S = 10.0  # of one case: a hang, on however busy a machine
GROWTH_BYTES = 400 << 20
TINY = TinyShape(n_layers=1, hidden=32, ffn=32, n_heads=2, n_kv_heads=1, head_dim=16, vocab_size=261)
BLOCKS = TinyShape(n_layers=1, hidden=256, ffn=256, n_heads=4, n_kv_heads=1, head_dim=64, vocab_size=261)
NUMBERS = (
    0,
    1,
    7,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
)

Damage = Callable[[bytearray, random.Random, int], None]


def flip_bits(raw: bytearray, rng: random.Random, reach: int) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        raw[rng.randrange(reach)] ^= 1 << rng.randrange(8)


def overwrite_bytes(raw: bytearray, rng: random.Random, reach: int) -> None:
    at = rng.randrange(reach)
    raw[at : at + rng.randint(1, 16)] = rng.randbytes(rng.randint(1, 16))


def cut_short(raw: bytearray, rng: random.Random, reach: int) -> None:
    del raw[rng.randrange(rng.choice([reach, len(raw)])) :]


def plant_number(raw: bytearray, rng: random.Random, reach: int) -> None:
    """A number that breaks counts, lengths and sizes, where one may be."""
    form, mask = rng.choice([("<I", 0xFFFFFFFF), ("<Q", (1 << 64) - 1)])
    at = rng.randrange(reach)
    piece = struct.pack(form, (rng.choice(NUMBERS) + rng.choice([0, 0, 1, -1])) & mask)
    raw[at : at + len(piece)] = piece


def move_piece(raw: bytearray, rng: random.Random, reach: int) -> None:
    start = rng.randrange(reach)
    piece = raw[start : start + rng.randint(1, 64)]
    at = rng.randrange(reach)
    if rng.random() < 0.5:
        raw[at : at + len(piece)] = piece
    else:
        raw[at:at] = piece


def edit_digits(raw: bytearray, rng: random.Random, reach: int) -> None:
    """Change a number in a JSON header; elsewhere, flip bits."""
    digits = [at for at in range(8, min(reach, len(raw))) if chr(raw[at]).isdigit()]
    if not digits:
        return flip_bits(raw, rng, reach)
    raw[rng.choice(digits)] = rng.choice(b'0123456789-.eE"[]{},: n')
    return None


DAMAGES: tuple[Damage, ...] = (flip_bits, overwrite_bytes, cut_short, plant_number, move_piece, edit_digits)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def outcome(path: Path, weight_format: str, cache: Path) -> str:
    """Load the model, or be told in one line why not; any exception but ModelError is the test's failure."""
    try:
        model = load_model(str(path), weight_format, cache)
    except ModelError as error:
        message = str(error)
    else:
        assert isinstance(model, PackedModel)
        assert model.weight_bytes > 0
        return "loaded"
    assert "\n" not in message
    assert len(message) < 2000
    return "refused"


def fuzz(
    name: str, healthy: bytes, header_bytes: int, target: Path, load: Path, cache: Path, cases: int = CASES
) -> dict[str, int]:
    counts = {"refused": 0, "loaded": 0}
    before = peak_bytes()
    for case in range(cases):
        rng = random.Random(f"{name} {case}")
        raw = bytearray(healthy)
        for _ in range(rng.choice([1, 1, 1, 3])):
            if raw:
                reach = rng.choice([min(256, header_bytes), header_bytes, header_bytes, len(healthy)])
                rng.choice(DAMAGES)(raw, rng, max(1, min(reach, len(raw))))
        target.write_bytes(raw)
        os.utime(target, ns=(case, case))  # two cases within one tick of the clock must not look alike
        started = time.monotonic()
        counts[outcome(load, rng.choice(["native", "int8", "bf16"]), cache)] += 1
        assert time.monotonic() - started < SLOWEST_S, f"case {case} took too long"
    assert peak_bytes() - before < GROWTH_BYTES
    return counts


def test_damaged_gguf_files_load_or_are_refused(tmp_path: Path) -> None:
    healthy = tiny_gguf("llama", {"": "Q4_1", "attn_v": "Q8_0"}, shape=TINY).to_bytes()
    header_bytes = len(healthy) - sum(len(raw) for *_, raw in tiny_gguf("llama", shape=TINY).tensors) // 4
    path = tmp_path / "fuzz.gguf"

    counts = fuzz("gguf", healthy, header_bytes, path, path, tmp_path)

    assert counts["refused"] > CASES // 4
    assert counts["loaded"] > 0


@pytest.mark.parametrize(
    "type_name",
    ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"],
)
def test_damaged_files_of_blocks_load_or_are_refused(tmp_path: Path, type_name: str) -> None:
    """Blocks anywhere, header and data: a tenth of the cases for each type, all of them in the full run."""
    healthy = tiny_gguf("llama", type_name, shape=BLOCKS).to_bytes()
    path = tmp_path / "fuzz.gguf"
    cases = CASES if "PHASEWISE_FUZZ_CASES" in os.environ else CASES // 10

    counts = fuzz(f"gguf {type_name}", healthy, len(healthy), path, path, tmp_path, cases)

    assert counts["loaded"] + counts["refused"] == cases


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


@pytest.mark.parametrize("name", family_models.FAMILY_CASES)
@pytest.mark.parametrize("victim", ["gguf", "config.json"])
def test_damaged_files_of_every_family_load_or_are_refused(tmp_path: Path, name: str, victim: str) -> None:
    """A fiftieth of the cases for each family, all of them in the full run."""
    cases = CASES if "PHASEWISE_FUZZ_CASES" in os.environ else max(CASES // 50, 2)
    if victim == "gguf":
        load = target = family_models.write_family_gguf(tmp_path / "fuzz.gguf", name)
    else:
        load = family_models.write_family_hf(tmp_path / "fuzz", name)
        target = load / victim
    healthy = target.read_bytes()
    header_bytes = min(len(healthy), 12000)

    counts = fuzz(f"{name} {victim}", healthy, header_bytes, target, load, tmp_path, cases)

    assert counts["loaded"] + counts["refused"] == cases

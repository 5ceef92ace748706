"""Model files damaged by chance: bits flipped, bytes written over, moved or cut away, numbers planted."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from phasewise.cython_kernels.packing import BLOCK_KINDS
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.encoder.pooling import check_numbers
from phasewise.serving.errors import ModelError, ServingError, StepFailed
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks
from phasewise.serving.sampling.sampling import GREEDY, Sampler
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from phasewise.workflows.prune.run import prune
from phasewise.workflows.prune.settings import Pattern, PruneSettings
from tests.support.models import (
    encoder_gguf_files,
    encoder_models,
    family_cases,
    family_gguf_files,
    family_models,
    quantised_models,
)
from tests.support.models.tiny_models import TinyShape, tiny_gguf, write_tiny_hf

NUMBERS = (
    *(0, 1, 7, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1),
    (1 << 64) - 1,
)

Damage = Callable[[bytearray, random.Random, int], None]


def flip_bits(raw: bytearray, rng: random.Random, reach: int) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        raw[rng.randrange(reach)] ^= 1 << rng.randrange(8)


def overwrite_bytes(raw: bytearray, rng: random.Random, reach: int) -> None:
    start = rng.randrange(reach)
    raw[start : start + rng.randint(1, 16)] = rng.randbytes(rng.randint(1, 16))


def cut_short(raw: bytearray, rng: random.Random, reach: int) -> None:
    del raw[rng.randrange(rng.choice([reach, len(raw)])) :]


def plant_number(raw: bytearray, rng: random.Random, reach: int) -> None:
    """A number that breaks counts, lengths and sizes, where one may be."""
    form, mask = rng.choice([("<I", 0xFFFFFFFF), ("<Q", (1 << 64) - 1)])
    start = rng.randrange(reach)
    piece = struct.pack(form, (rng.choice(NUMBERS) + rng.choice([0, 0, 1, -1])) & mask)
    raw[start : start + len(piece)] = piece


def move_piece(raw: bytearray, rng: random.Random, reach: int) -> None:
    start = rng.randrange(reach)
    piece = raw[start : start + rng.randint(1, 64)]
    target = rng.randrange(reach)
    if rng.random() < 0.5:
        raw[target : target + len(piece)] = piece
    else:
        raw[target:target] = piece


def edit_digits(raw: bytearray, rng: random.Random, reach: int) -> None:
    """Change a number in a JSON header; elsewhere, flip bits."""
    digits = [index for index in range(8, min(reach, len(raw))) if chr(raw[index]).isdigit()]
    if not digits:
        return flip_bits(raw, rng, reach)
    raw[rng.choice(digits)] = rng.choice(b'0123456789-.eE"[]{},: n')
    return None


DAMAGES: tuple[Damage, ...] = (flip_bits, overwrite_bytes, cut_short, plant_number, move_piece, edit_digits)


BLOCK_TYPES = tuple(kind.upper() for kind in BLOCK_KINDS if kind != "fp8")
GRID_TYPES = (
    *("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "F16"),
)
BLOCKS = TinyShape(n_layers=1, hidden=256, ffn=256, n_heads=4, n_kv_heads=1, head_dim=64, vocab_size=261)
TINY = TinyShape(n_layers=1, hidden=64, ffn=96, n_heads=2, n_kv_heads=1, head_dim=32, vocab_size=261)
ENCODERS = ("bert", "xlm-roberta", "nomic-bert", "modernbert", "jina-bert", "qwen3-reranker", "cross-bert")
MXFP4 = "gpt-oss-mxfp4"
BITMASKS = {"bitmask": Pattern(0.5), "bitmask-24": Pattern(0.5, 2, 4)}
"""Directories whose linear layers are sparse matrices of compressed-tensors."""
_HEADER_BYTES = 12_000
_RUN_IDS = (1, 2, 3, 5, 8)

Outcome = Literal["refused", "loaded", "ran"]


class Target(NamedTuple):
    """A file that is damaged, and what is loaded then: the same file, or the folder that it lies in."""

    name: str
    victim: Path
    load: Path
    header_bytes: int


def targets() -> list[str]:
    """Every block type in a GGUF file; files of families and encoders; sparse matrices; a packed file."""
    families = [
        f"{name} {victim}"
        for name, case in family_cases.FAMILY_CASES.items()
        for victim in (*(("gguf",) if case.gguf else ()), "config.json", "model.safetensors")
    ]
    sparse = [*(f"{name} model.safetensors" for name in BITMASKS), "sparse packed"]
    encoders = [
        f"{name} encoder-{victim}"
        for name in ENCODERS
        for victim in ("gguf", "config.json", "tokenizer.json", "model.safetensors")
    ]
    quantised = [
        f"{name} {victim}"
        for name in quantised_models.CASES
        for victim in (quantised_models.CASES[name].file_name, "model.safetensors")
    ]
    return [
        *(f"{block_type} blocks" for block_type in (*BLOCK_TYPES, *GRID_TYPES)),
        *families,
        f"{MXFP4} model.safetensors",
        *encoders,
        *sparse,
        *quantised,
    ]


def open_target(name: str, folder: Path) -> Target:
    """One of `targets`, written healthy into `folder`."""
    subject, kind = name.rsplit(" ", 1)
    if kind == "blocks":
        path = folder / "fuzz.gguf"
        healthy = tiny_gguf("llama", subject, shape=BLOCKS).to_bytes()
        path.write_bytes(healthy)
        return Target(name, path, path, _HEADER_BYTES)
    if kind == "encoder-gguf":
        path = encoder_gguf_files.write_encoder_gguf(folder / "fuzz.gguf", subject)
        return Target(name, path, path, _HEADER_BYTES)
    if kind.startswith("encoder-"):
        load = encoder_models.write_encoder(folder / "fuzz", subject)
        return Target(name, load / kind.removeprefix("encoder-"), load, _HEADER_BYTES)
    if kind == "packed":
        return _packed_target(name, folder)
    if kind == "gguf":
        path = family_gguf_files.write_family_gguf(folder / "fuzz.gguf", subject)
        return Target(name, path, path, _HEADER_BYTES)
    load = folder / "fuzz"
    if subject in BITMASKS:
        whole = write_tiny_hf(folder / "whole", "llama", shape=TINY)
        prune(PruneSettings(str(whole), load, BITMASKS[subject], storage="bitmask"))
    elif subject in quantised_models.CASES:
        quantised_models.write_quantised_hf(load, quantised_models.CASES[subject])
    elif subject == MXFP4:
        family_models.write_mxfp4_hf(load)
    else:
        family_models.write_family_hf(load, subject)
    return Target(name, load / kind, load, _HEADER_BYTES)


def _packed_target(name: str, folder: Path) -> Target:
    """The packed file of a model whose weights are stored sparse, in the cache that `folder` is."""
    source = write_tiny_hf(folder / "fuzz", "llama", "bfloat16", shape=TINY)
    load_model(str(source), "native", folder, storage=StorageChoice("always"))
    (packed,) = (folder / "packed").iterdir()
    return Target(name, packed, source, packed.stat().st_size)


@dataclass(frozen=True)
class Case:
    """One damaged file, and what became of it."""

    number: int
    outcome: Outcome
    seconds: float
    problem: str | None = None
    """The one line of a refusal, or of a step that failed."""


def damaged(target: Target, numbers: range, cache: Path, *, run_one_in: int = 4) -> Iterator[Case]:
    """Load the target damaged in as many ways, and run one in `run_one_in` of what loads.

    AssertionError where a problem is not told in one line; what else is raised is no answer at all."""
    healthy = target.victim.read_bytes()
    for number in numbers:
        rng = random.Random(f"{target.name} {number}")
        raw = bytearray(healthy)
        for _ in range(rng.choice([1, 1, 1, 3])):
            if raw:
                header = min(target.header_bytes, len(healthy))
                reach = rng.choice([min(256, header), header, header, len(healthy)])
                rng.choice(DAMAGES)(raw, rng, max(1, min(reach, len(raw))))
        target.victim.write_bytes(raw)
        os.utime(target.victim, ns=(number, number))  # two cases within one tick must not look alike
        weight_format = rng.choice(["native", "native", "int8", "bf16"])
        if target.name.endswith(" packed"):
            weight_format = "native"  # the one that the file is of
        began_s = time.monotonic()
        outcome, problem = _outcome(target.load, weight_format, cache, runs=rng.randrange(run_one_in) == 0)
        if problem is not None:
            assert "\n" not in problem, problem
            assert len(problem) < 2000, problem
        yield Case(number, outcome, time.monotonic() - began_s, problem)
    target.victim.write_bytes(healthy)


def _embed(model: PackedModel) -> None:
    assert model.embedding is not None
    ids = [token_id % model.config.vocab_size for token_id in _RUN_IDS][: model.embedding.max_tokens]
    with Embedder(model, (0,), pinned=False) as embedder:
        check_numbers(embedder.embed([Tokens(ids), Tokens(ids[:1])]))


def _outcome(path: Path, weight_format: str, cache: Path, *, runs: bool) -> tuple[Outcome, str | None]:
    """Whatever can be is stored sparse, so that damaged streams meet kernels too."""
    try:
        model = load_model(str(path), weight_format, cache, storage=StorageChoice("always"))
        assert isinstance(model, PackedModel)
        assert model.weight_bytes > 0
    except ModelError as error:
        return "refused", str(error)
    if not runs:
        return "loaded", None
    try:
        _run(model)
    except ServingError as error:
        return "ran", str(error)
    return "ran", None


def _run(model: PackedModel) -> None:
    """A prompt and two tokens after it, or one input of an encoder, on one thread. Weights that are no
    numbers give StepFailed."""
    if model.embedding is not None:
        _embed(model)
        return
    plans = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}
    ids = [token_id % model.config.vocab_size for token_id in _RUN_IDS]
    sampler = Sampler(GREEDY, ids, model.config.vocab_size)
    ranks = open_ranks(model, plans, RankOptions(KvSettings(32), 8, 1, pinned=False))
    try:
        logits = ranks.forward(Batch("prefill", (SequenceSlice(ids, 0, 0, True),)))
        for position in (len(ids), len(ids) + 1):
            if not np.isfinite(logits).all():
                raise StepFailed("the logits are not numbers")
            token_id = sampler.sample(logits[0]).token_id
            logits = ranks.forward(Batch("decode", (SequenceSlice([token_id], position, 0, True),)))
    finally:
        ranks.close()

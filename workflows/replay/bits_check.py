"""The arithmetic of this machine against known results: broken builds and faulty cores are found early.

A small model of drawn weights, in every kind of weight that is common, is computed by each usable instruction
set and, by the one in use, on each core. Nothing is read or downloaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from phasewise.cython_kernels.packing import PackedWeight
    from phasewise.serving.models.packed_model import PackedModel


BUDGET_S = 60.0
"""Seconds after which cores that have had no turn are left unchecked, which is reported."""
KINDS = ("q4_k", "q6_k", "q8", "q4", "f32")
"""The kind of weights in each layer; all of these kinds give the same bits everywhere."""
BLOCK_KINDS, BLOCK_PATH = ("q4_k", "q6_k"), "int8_block"
"""Kinds of weights with a second arithmetic, the same everywhere (`--arithmetic blocks`), and its path."""
_WIDTH, _HEAD, _VOCAB = 256, 64, 320
_TOKENS, _DECODED = 48, 8
_DIGITS = 16
_CANONICAL_PATH = "fma"
"""The path of bf16 weights on CPUs without dots of 16 bits, and everywhere by `--arithmetic canonical`."""


@dataclass(frozen=True)
class BitsOutcome:
    """The outcome of one check of a model's logits.

    arithmetic: `every` for the arithmetic of all CPUs, else the path of one instruction set. problem: None
    where all bits are right. is_known: False where results were compared only with each other.
    """

    isa: str
    weights: str
    arithmetic: str
    kv_format: str
    core: int
    is_known: bool
    problem: str | None


def check_bits(report: Report = silent) -> list[BitsOutcome]:
    """Check instruction sets and cores. Takes seconds, on machines of many cores at most about a minute."""
    from phasewise.cython_kernels import isa
    from phasewise.topology import read_machine

    cores, model = read_machine().allowed_pus, known_model(KINDS)
    of_bf16, of_blocks = known_model(("bf16",)), known_model(BLOCK_KINDS)
    outcomes, until_s = [], time.monotonic() + BUDGET_S
    for name in isa.usable():
        with isa.using(name):
            outcomes += [_outcome(model, kv_format, KNOWN[kv_format], cores[0]) for kv_format in KNOWN]
            outcomes += _outcomes_of_bf16(of_bf16, cores[0])
            outcomes.append(_outcome(of_blocks, "f32", KNOWN_OF_BLOCKS, cores[0], BLOCK_PATH))
    done = 1
    for core in cores[1:]:
        if time.monotonic() > until_s:
            break
        outcomes.append(_outcome(model, "f32", KNOWN["f32"], core))
        done += 1
    if done < len(cores):
        report(f"{done} of {counted(len(cores), 'core')} were checked in {BUDGET_S:.0f} s")
    return outcomes


def paths_of_bf16() -> tuple[str, ...]:
    """The compute paths of bf16 weights by default, and by `--arithmetic canonical`."""
    from phasewise.cython_kernels._native import compute_paths

    return tuple(dict.fromkeys((compute_paths("bf16", 0)[0], _CANONICAL_PATH)))


def _outcomes_of_bf16(model: PackedModel, core: int) -> Iterator[BitsOutcome]:
    """Check bf16 weights on a core: by the default path, and by the canonical one where that is another."""
    from phasewise.cython_kernels import isa

    for path in paths_of_bf16():
        expected = KNOWN_OF_BF16 if path == _CANONICAL_PATH else KNOWN_OF_DOTS.get(isa.active(), {}).get(path)
        yield _outcome(model, "f32", expected, core, path)


def _outcome(
    model: PackedModel, kv_format: str, expected: str | None, core: int, path: str = _CANONICAL_PATH
) -> BitsOutcome:
    """path: compute path of bf16 weights."""
    from phasewise.cython_kernels import isa

    (digest, is_one), problem = computed(model, kv_format, core, path), None
    if path in SPECIFIED and digest != expected:
        expected = None  # another maker's rounding may be as right
    if not is_one:
        problem = "a token computed alone has other logits than in its prompt"
    elif expected is not None and digest != expected:
        problem = f"the logits are {digest}, and known are {expected}"
    arithmetic = "every" if path == _CANONICAL_PATH else path
    kinds = dict.fromkeys(weight.kind for name, weight in model.weights.items() if name.startswith("layers."))
    told, is_known = ", ".join(kinds), expected is not None
    return BitsOutcome(isa.active(), told, arithmetic, kv_format, core, is_known, problem)


def computed(model: PackedModel, kv_format: str, core: int, path: str = _CANONICAL_PATH) -> tuple[str, bool]:
    """A digest of the logits after each token of a prompt; True if tokens one by one give the same.

    path: of weights that can use it; all others, and all weights by `fma`, have the arithmetic of every CPU.
    """
    from phasewise.cython_kernels.schedules import CanonicalBut
    from phasewise.serving.batch import Batch, SequenceSlice
    from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions
    from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan

    ids = tuple(7 * position % _VOCAB for position in range(1, _TOKENS + 1))
    plans: dict[Phase, ServicePlan] = {phase: ServicePlan(phase, (RankCores((core,)),)) for phase in PHASES}
    first = _TOKENS - _DECODED
    schedules = dict.fromkeys(PHASES, CanonicalBut(None if path == _CANONICAL_PATH else path))
    options = RankOptions(KvSettings(2 * 64, kv_format), 64, 1, schedules=schedules)
    ranks = LocalRanks(model, plans, options)
    try:
        rows = ranks.all_logits(Batch("prefill", (SequenceSlice(ids, 0, 0, True),))).copy()
        ranks.forward(Batch("prefill", (SequenceSlice(ids[:first], 0, 64, True),)))
        is_one = True
        for position in range(first, _TOKENS):
            alone = ranks.forward(
                Batch("decode", (SequenceSlice(ids[position : position + 1], position, 64, True),))
            )
            is_one = is_one and alone[0].tobytes() == rows[position].tobytes()
    finally:
        ranks.close()
    return hashlib.sha256(rows.tobytes()).hexdigest()[:_DIGITS], is_one


def known_model(kinds: Sequence[str]) -> PackedModel:
    """Build a model with a layer of each kind: the same numbers on all machines, since none is rounded."""
    import numpy as np

    from phasewise.serving.models.packed_model import LayerKind, ModelConfig, PackedModel, alike
    from phasewise.serving.models.rope import RopeSpec

    rng = np.random.default_rng(np.random.PCG64(41))
    config = ModelConfig(
        architecture="llama",
        forms=alike(len(kinds), LayerKind(None, RopeSpec(10000.0, _HEAD)), _WIDTH),
        hidden=_WIDTH,
        n_heads=_WIDTH // _HEAD,
        n_kv_heads=2,
        head_dim=_HEAD,
        vocab_size=_VOCAB,
        context_length=_TOKENS,
        norm_eps=2.0**-17,
        tied_embeddings=True,
    )
    ones = np.ones(_WIDTH, dtype=np.float32)
    weights, vectors = {"embed": _weight("f32", _VOCAB, rng)}, {"final_norm": ones}
    for layer, kind in enumerate(kinds):
        name = f"layers.{layer}"
        weights[f"{name}.qkv"] = _weight(kind, _WIDTH + 4 * _HEAD, rng)
        weights[f"{name}.o"] = _weight(kind, _WIDTH, rng)
        weights[f"{name}.gate_up"] = _weight(kind, 2 * _WIDTH, rng)
        weights[f"{name}.down"] = _weight(kind, _WIDTH, rng)
        vectors |= {f"{name}.attn_norm": ones, f"{name}.ffn_norm": ones}
    n_bytes = sum(weight.nbytes for weight in weights.values())
    return PackedModel(config, "native", "bits", "", "", weights, vectors, "", None, n_bytes)


def _weight(kind: str, n: int, rng: np.random.Generator) -> PackedWeight:
    """Draw a weight, of a size that keeps the model's stream of activations in range."""
    import numpy as np

    from phasewise.cython_kernels import packing
    from phasewise.cython_kernels.blocks import BLOCKS, BlockRows

    def below(top: int, *shape: int) -> npt.NDArray[np.uint8]:
        return rng.integers(0, top, shape, dtype=np.uint8)

    def scales(*shape: int) -> npt.NDArray[np.float16]:
        return (rng.integers(1, 64, shape) / 2.0**15).astype(np.float16)

    if kind in ("f32", "bf16"):
        drawn = (rng.integers(-128, 128, (n, _WIDTH)) / 2.0**10).astype(np.float32)
        return packing.pack_dense(drawn, kind)  # type: ignore[arg-type]
    if kind in ("q8", "q4"):
        bits, groups = (8 if kind == "q8" else 4), packing.groups_of(_WIDTH, 32)
        size = np.float16(1 if kind == "q8" else 16)
        rows = packing.QuantRows(
            below(1 << bits, n, _WIDTH), scales(n, groups) * size / 8, None, 1 << (bits - 1), 32, bits
        )
        return packing.pack_quant(rows)
    form = BLOCKS[kind]
    n_subs, n_blocks = _WIDTH // form.group, _WIDTH // form.inputs
    sub_top = {"super_halves": 16, "super_mins": 64}.get(form.scaling, 2 * form.sub_zero)
    return packing.pack_blocks(
        BlockRows(
            kind,
            below(1 << form.code_bits, n, _WIDTH),
            scales(n, n_blocks) / np.float16(64),
            scales(n, n_blocks) / np.float16(64) if form.has_mins else None,
            below(sub_top, n, n_subs) if form.has_subs else None,
            below(sub_top, n, n_subs) if form.has_subs and form.has_mins else None,
        )
    )


KNOWN: Mapping[str, str] = {
    "f32": "93aa784c9e72553f",
    "f16": "fff9e4ea96d293fa",
    "bf16": "baafbffdabbc84b7",
    "int8": "5abdb555756b131b",
    "int4": "3d0c079d5abeca0a",
    "int16": "ed5422b15f6a4490",
}
"""Known digests of the logits with weights of KINDS, by the format of keys and values."""

KNOWN_OF_BLOCKS = "ad3acb72f79cefbb"
"""Known digest of K-quants by `--arithmetic blocks`, on every CPU, and by default where a tile unit
multiplies them; `python -m tests.support.kernels.emulated_native` computes it.
"""

KNOWN_OF_BF16 = "19113e673134f290"
"""Known digest of bf16 weights by `--arithmetic canonical`, on every CPU."""

KNOWN_OF_DOTS: Mapping[str, Mapping[str, str]] = {
    "avx512_bf16": {"bf16_dot": "8c1fc1f43ae93e9a"},
    "avx512_fp16": {"f16_fma": "2cd0203608012e26"},
    "amx": {"bf16_tile": "b2d32cfe5d078e39"},
}
"""Known digests of bf16 weights by an instruction set's dots, by its name and their path. `python -m
tests.support.kernels.emulated_native` computes these digests by emulated dots.
"""

SPECIFIED = frozenset({"bf16_dot", "bf16_tile"})
"""Paths whose rounding Intel specifies, not IEEE 754: other results may be right too."""

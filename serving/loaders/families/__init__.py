"""The table of families that can run, by the names that config.json and GGUF files give them.

A new family is a file beside this one, or a part of one with families like it, and a line here
(docs/guide/model-families.md).
"""

from __future__ import annotations

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.deepseek import DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE
from phasewise.serving.loaders.families.dense import ERNIE4_5, EXAONE4, HUNYUAN, HUNYUAN_MOE, SEED_OSS
from phasewise.serving.loaders.families.encoders import ENCODERS_BY_GGUF, ENCODERS_BY_HF
from phasewise.serving.loaders.families.family import ACTIVATION_NAMES, Family
from phasewise.serving.loaders.families.gemma import EMBEDDING_GEMMA, GEMMA, GEMMA2, GEMMA3
from phasewise.serving.loaders.families.gemma3n import GEMMA3N
from phasewise.serving.loaders.families.gemma4 import GEMMA4
from phasewise.serving.loaders.families.hybrid_mixtures import KIMI_LINEAR, NEMOTRON_H
from phasewise.serving.loaders.families.hybrids import FALCON_H1, GRANITE, GRANITE_HYBRID, GRANITE_MOE, LFM2
from phasewise.serving.loaders.families.indexed import DEEPSEEK32, GLM_DSA
from phasewise.serving.loaders.families.llama import (
    APERTUS,
    ARCEE,
    COHERE2,
    LLAMA,
    MISTRAL,
    MISTRAL3,
    MIXTRAL,
    OLMO2,
    OLMO3,
    OLMOE,
    PHI3,
    SMOLLM3,
    STARCODER2,
)
from phasewise.serving.loaders.families.llama4 import LLAMA4
from phasewise.serving.loaders.families.mixtures import GLM4, GLM4_MOE, GPT_OSS, MINIMAX_M2, PHIMOE
from phasewise.serving.loaders.families.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from phasewise.serving.loaders.families.routed import BAILING2, DOTS1, ERNIE4_5_MOE, EXAONE_MOE, HY3, LFM2_MOE

__all__ = ["ACTIVATION_NAMES", "Family", "family_of_gguf", "family_of_hf"]

FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, GEMMA3N, GEMMA4, PHI3, OLMO2, OLMOE,
    GRANITE, GRANITE_MOE, GRANITE_HYBRID, SMOLLM3, GPT_OSS, ARCEE, LFM2, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE,
    LLAMA4, GLM4, GLM4_MOE, MINIMAX_M2, MISTRAL3, COHERE2, STARCODER2,
    DEEPSEEK2, DEEPSEEK3, DEEPSEEK32, GLM4_MOE_LITE, GLM_DSA,
    FALCON_H1, NEMOTRON_H, KIMI_LINEAR,
    QWEN2_MOE, QWEN3_VL, QWEN3_VL_MOE, GEMMA, OLMO3, SEED_OSS, EXAONE4, ERNIE4_5,
    HUNYUAN, HUNYUAN_MOE, DOTS1, BAILING2, ERNIE4_5_MOE, LFM2_MOE,
    APERTUS, PHIMOE, EXAONE_MOE, HY3, EMBEDDING_GEMMA,
)  # fmt: skip


REFUSED = dict.fromkeys(("deepseek_v4", "deepseek4"), "attention over positions that an indexer chooses")
"""Architectures that users ask for, in names of either format, and what in them has no arithmetic here."""

BY_HF = {name: family for family in FAMILIES for name in family.names(family.hf)}
BY_GGUF = {name: family for family in FAMILIES for name in family.names(family.gguf)}


def family_of_hf(model_type: str) -> Family:
    """The family of config.json's `model_type`. Raises ModelError for a model that cannot run."""
    if model_type in REFUSED:
        raise ModelError(
            f"config.json describes a {model_type!r} model, which has {REFUSED[model_type]}: it cannot run"
        )
    if model_type not in BY_HF:
        runnable = ", ".join([*BY_HF, *ENCODERS_BY_HF])
        raise ModelError(f"config.json describes a {model_type!r:.60} model; {runnable} can run")
    return BY_HF[model_type]


def family_named(name: str) -> Family | None:
    """The family of a config's `architecture`; None for an encoder's."""
    return next((family for family in FAMILIES if family.name == name), None)


def family_of_gguf(architecture: str, what: str) -> Family:
    """The family of `general.architecture` in the file `what`. Raises ModelError if it cannot run."""
    if architecture in REFUSED:
        raise ModelError(
            f"{what} holds a {architecture!r} model, which has {REFUSED[architecture]}: it cannot run"
        )
    if architecture not in BY_GGUF:
        runnable = ", ".join([*BY_GGUF, *ENCODERS_BY_GGUF])
        raise ModelError(f"{what} holds a {architecture!r:.60} model; {runnable} can run")
    return BY_GGUF[architecture]

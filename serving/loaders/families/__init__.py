"""The table of families that can run, by the names that config.json and GGUF files give them.

A new family is a constant of a file with families like it, or of a file of its own, which is named here
(docs/guide/model-families.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families import (
    deepseek,
    gemma,
    gemma4,
    hybrids,
    llama,
    mixtures,
    qwen,
    routed,
)
from phasewise.serving.loaders.families.encoders import ENCODERS_BY_GGUF, ENCODERS_BY_HF
from phasewise.serving.loaders.families.family import ACTIVATION_NAMES, Family

__all__ = ["ACTIVATION_NAMES", "Family", "family_of_gguf", "family_of_hf"]

FILES = llama, qwen, gemma, gemma4, hybrids, mixtures, deepseek, routed
FAMILIES: tuple[Family, ...] = tuple(
    {own.name: own for file in FILES for own in vars(file).values() if isinstance(own, Family)}.values()
)
"""Every family that is a constant of a file."""


REFUSED = dict.fromkeys(("deepseek_v4", "deepseek4"), "attention over runs of positions compressed to one")
"""Architectures that users ask for, in names of either format, and what in them has no arithmetic here."""

BY_HF = {name: family for family in FAMILIES for name in family.names(family.hf)}
BY_GGUF = {name: family for family in FAMILIES for name in family.names(family.gguf)}


def family_of_hf(model_type: str) -> Family:
    """The family of config.json's `model_type`. Raises ModelError for a model that cannot run."""
    return _found(model_type, BY_HF, ENCODERS_BY_HF, "config.json describes")


def family_of_gguf(architecture: str, what: str) -> Family:
    """The family of `general.architecture` in the file `what`. Raises ModelError if it cannot run."""
    return _found(architecture, BY_GGUF, ENCODERS_BY_GGUF, f"{what} holds")


def _found(name: str, families: Mapping[str, Family], encoders: Iterable[str], says: str) -> Family:
    if name in REFUSED:
        raise ModelError(f"{says} a {name!r} model, which has {REFUSED[name]}: it cannot run")
    if name not in families:
        raise ModelError(f"{says} a {name!r:.60} model; {', '.join([*families, *encoders])} can run")
    return families[name]


def family_named(name: str) -> Family | None:
    """The family of a config's `architecture`; None for an encoder's."""
    return next((family for family in FAMILIES if family.name == name), None)

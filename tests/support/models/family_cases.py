"""The tiny models of every family (tests/data/families.json): the config of each, and the prompts that its
reference answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.models.tiny_models import TinyShape

N_GREEDY = 64
FULL = "full_attention"
CHECKED_STEPS = (0, 1, 31, 63)
SHAPE = TinyShape()
N_LONG_PROMPT = 8192


@dataclass(frozen=True)
class FamilyCase:
    """`fields`: of config.json; `gguf`: the architecture's name there, "" where no file of it is written. Of
    prompts longer than `context_length` there is no reference: LongRoPE has its short factors up to there."""

    fields: Mapping[str, Any]
    gguf: str = ""
    interleaved: bool = False
    unit_norms: bool = False
    whole_kv_b: bool = False
    prompt_lengths: tuple[int, ...] = (9, 90)
    context_length: int = 256
    prompt_seeds: tuple[int, ...] = ()
    """Of the prompts: such that no two logits of the reference are close at the top. None: the lengths."""
    logit_size: float = 1.0
    """The factor of the last norm's weights: logits of tied embeddings would be small, and close."""
    has_reference: bool = True
    """False where converted files alone have the case: transformers answers beside them."""
    long: Mapping[str, Any] = field(default_factory=dict)
    """Changes of config.json, of windows and YaRN, for a context beyond both."""

    @property
    def model_type(self) -> str:
        return str(self.fields["model_type"])


ALL_CASES = {
    name: FamilyCase(**record)
    for name, record in json.loads((Path(__file__).parents[2] / "data" / "families.json").read_text()).items()
}
FAMILY_CASES = {name: case for name, case in ALL_CASES.items() if case.has_reference}
LONG_CASES = {name: case.long for name, case in ALL_CASES.items() if case.long}

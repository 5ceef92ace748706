"""The table of encoders, by the names that config.json and GGUF files give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise.serving.loaders.families.bert import BERT, NOMIC_BERT, ROBERTA, EncoderFamily
from phasewise.serving.loaders.families.gte import GTE
from phasewise.serving.loaders.families.jina import JINA_BERT, JINA_V3
from phasewise.serving.loaders.families.modern_bert import MODERN_BERT

ENCODERS = (BERT, ROBERTA, NOMIC_BERT, MODERN_BERT, JINA_BERT, JINA_V3, GTE)
ENCODERS_BY_HF = {name: family for family in ENCODERS for name in family.hf}
ENCODERS_BY_GGUF = {family.gguf: family for family in reversed(ENCODERS) if family.gguf is not None}


def encoder_of_hf(fields: Mapping[str, Any]) -> EncoderFamily | None:
    """The family of config.json's fields; None where it describes no encoder."""
    family = ENCODERS_BY_HF.get(str(fields.get("model_type")))
    positions = fields.get("position_embedding_type")
    if family is BERT and positions in JINA_BERT.position_kinds:
        return JINA_BERT
    if family is ROBERTA and positions in JINA_V3.position_kinds:
        return JINA_V3
    return family

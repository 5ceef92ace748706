"""The table of families that can run, by the names that config.json and GGUF files give them.

A new family is a file beside this one and a line here (docs/guide/model-families.md).
"""

from __future__ import annotations

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.cohere import COHERE2
from phasewise.serving.loaders.families.deepseek import DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE
from phasewise.serving.loaders.families.encoders import ENCODERS_BY_GGUF, ENCODERS_BY_HF
from phasewise.serving.loaders.families.family import (
    ACTIVATION_NAMES,
    Family,
    HeadParts,
    HeadStack,
    LatentTensor,
    Names,
    OtherForm,
    TensorCut,
    TurnedTail,
)
from phasewise.serving.loaders.families.gemma import GEMMA2, GEMMA3
from phasewise.serving.loaders.families.glm import GLM4, GLM4_MOE
from phasewise.serving.loaders.families.gpt_oss import GPT_OSS
from phasewise.serving.loaders.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from phasewise.serving.loaders.families.lfm import LFM2
from phasewise.serving.loaders.families.llama import LLAMA, MISTRAL, MIXTRAL
from phasewise.serving.loaders.families.minimax import MINIMAX_M2
from phasewise.serving.loaders.families.ministral import MISTRAL3
from phasewise.serving.loaders.families.olmo import OLMO2, OLMOE
from phasewise.serving.loaders.families.phi import PHI3
from phasewise.serving.loaders.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from phasewise.serving.loaders.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from phasewise.serving.loaders.families.smollm import ARCEE, SMOLLM3
from phasewise.serving.loaders.families.starcoder import STARCODER2

__all__ = [
    "ACTIVATION_NAMES",
    "FAMILIES",
    "Family",
    "HeadParts",
    "HeadStack",
    "LatentTensor",
    "Names",
    "OtherForm",
    "TensorCut",
    "TurnedTail",
    "family_of_gguf",
    "family_of_hf",
]

FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, PHI3, OLMO2, OLMOE, GRANITE,
    GRANITE_MOE, GRANITE_HYBRID, SMOLLM3, GPT_OSS, ARCEE, LFM2, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE,
    GLM4, GLM4_MOE, MINIMAX_M2, MISTRAL3, COHERE2, STARCODER2,
    DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE,
)  # fmt: skip

_BY_HF = {name: family for family in FAMILIES for name in family.hf}
_BY_GGUF = {name: family for family in FAMILIES for name in family.gguf}


def family_of_hf(model_type: str) -> Family:
    """By config.json's `model_type`; ModelError for one that cannot run."""
    if model_type not in _BY_HF:
        runnable = ", ".join([*_BY_HF, *ENCODERS_BY_HF])
        raise ModelError(f"config.json describes a {model_type!r:.60} model; {runnable} can run")
    return _BY_HF[model_type]


def family_of_gguf(architecture: str, what: str) -> Family:
    """By `general.architecture` of the file `what`; ModelError for one that cannot run."""
    if architecture not in _BY_GGUF:
        runnable = ", ".join([*_BY_GGUF, *ENCODERS_BY_GGUF])
        raise ModelError(f"{what} holds a {architecture!r:.60} model; {runnable} can run")
    return _BY_GGUF[architecture]

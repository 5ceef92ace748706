"""The tiny models of `family_cases` as llama.cpp's converter wants them: with the fields of published
configurations that it reads, and a tokenizer that it can write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.models.family_cases import ALL_CASES, FULL, SHAPE
from tests.support.models.family_models import write_family_hf
from tests.support.peers import ask, llama_cpp_source

PRE = "gpt-2"
"""The way of cutting of the tiny vocabulary: the converter would know a published one by its tokens."""
CONTROLS = (
    *("<|user|>", "[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|observation|>", "<|assistant|>"),
    "<eop>",
)
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_ARCHITECTURES = {
    "bailing_moe": "BailingMoeV2ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
NOT_CONVERTED: Mapping[str, str] = {
    "gemma3n": "the converter takes a table of all tokens in each layer for granted",
    "cohere2-biases": "llama.cpp has no biases there: the converter refuses those that are not zero",
    "nemotron-h-mixed": "the converter knows no such pattern",
    "llama4": "files state no chunks: llama.cpp's are of 8,192 positions, as in llama4-file",
}
CONVERTED = tuple(name for name in ALL_CASES if name not in NOT_CONVERTED)


WITHOUT_HEADS = ("qwen3next", "qwen35", "qwen35moe")


@cache
def transformers_classes() -> dict[str, str | None]:
    """By kind of model; None where transformers has none."""
    kinds = sorted({case.model_type for case in ALL_CASES.values()})
    classes: dict[str, str | None] = ask("transformers_classes", "transformers", model_types=kinds)
    return classes


def converted(name: str, folder: Path) -> tuple[Path, Path]:
    """The Hugging Face directory and the GGUF file of a family's tiny model."""
    source = str(llama_cpp_source())
    directory = write_convertible(folder / name, name, transformers_classes()[ALL_CASES[name].model_type])
    file = folder / f"{name}.gguf"
    options = ["--outtype", "f32", *(["--no-nextn"] if name in WITHOUT_HEADS else [])]
    asked = {"source": source, "folder": str(directory), "gguf": str(file), "pre": PRE, "options": options}
    asked["as_it_is"] = name == "nemotron-h"  # transformers' defaults describe a mixture
    ask("converted", "torch", **asked)
    return directory, file


def published_fields(name: str) -> dict[str, Any]:
    """Fields that a published config.json has beside the case's own, or has otherwise."""
    case = ALL_CASES[name]
    fields: dict[str, Any] = {}
    if case.model_type == "granitemoehybrid":
        kinds = ["attention" if kind == FULL else kind for kind in case.fields["layer_types"]]
        fields = {"layer_types": kinds, "position_embedding_type": "rope" if name == "granite4" else "nope"}
    if case.model_type in ("minimax_m2", "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe_lite"):
        fields = _SIGMOID
    if case.model_type == "kimi_linear":
        fields = {"moe_router_activation_func": "sigmoid"}
    if case.model_type in ("ministral3", "starcoder2"):  # of which GGUF files tell no window
        fields = {"sliding_window": None}
    if case.model_type == "cohere2":
        fields = {"rotary_pct": 1.0}
    if case.model_type == "nemotron_h":
        fields = {"hidden_act": None}
        if name == "nemotron-h":
            letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
            pattern = "".join(letters[kind] for kind in case.fields["layers_block_type"])
            fields["hybrid_override_pattern"] = pattern
    return fields


def write_convertible(folder: Path, name: str, architecture: str | None) -> Path:
    """A Hugging Face directory. architecture: transformers' class; None where it has none."""
    of_case = _ARCHITECTURES.get(ALL_CASES[name].model_type, architecture or "")
    write_family_hf(folder, name, {"architectures": [of_case], **published_fields(name)})
    file = folder / "tokenizer.json"
    document = _with_controls(json.loads(file.read_text()))
    if name.startswith("gemma4"):
        document["model"] |= {"byte_fallback": True}
        document["decoder"] = {"type": "Sequence", "decoders": [document["decoder"]]}
    file.write_text(json.dumps(document))
    kind = "GPT2Tokenizer" if name.startswith("phi") else "PreTrainedTokenizerFast"
    settings = {"tokenizer_class": kind, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if name in ("gemma", "gemma2", "ernie4.5", "ernie4.5-moe"):
        (folder / "tokenizer.model").write_bytes(sentence_pieces())
    return folder


def sentence_pieces() -> bytes:
    """A model of SentencePiece with a character for each token."""
    kinds = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    kinds += [(chr(ord("\u4e00") + index), 1) for index in range(SHAPE.vocab_size - len(kinds))]
    pieces = [b"\x0a" + _counted(text.encode()) + b"\x18" + bytes([kind]) for text, kind in kinds]
    return b"".join(b"\x0a" + _counted(piece) for piece in pieces)


def _counted(content: bytes) -> bytes:
    return bytes([len(content)]) + content


def _with_controls(document: dict[str, Any]) -> dict[str, Any]:
    """With a merge, and the control tokens that some families' converters look for, in place of the last."""
    by_id = {token_id: token for token, token_id in document["model"]["vocab"].items()}
    added = {token["id"]: token for token in document["added_tokens"]}
    example = document["added_tokens"][0]
    new = {max(by_id) - index: text for index, text in enumerate(CONTROLS) if text not in by_id.values()}
    added |= {token_id: {**example, "id": token_id, "content": text} for token_id, text in new.items()}
    merged = min(token_id for token_id in added if token_id > 255)
    del added[merged]
    vocabulary = {text: token_id for token_id, text in {**by_id, **new, merged: "th"}.items()}
    document["model"] |= {"vocab": vocabulary, "merges": ["t h"]}
    return {**document, "added_tokens": list(added.values())}

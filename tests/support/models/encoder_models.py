"""Tiny random embedding models (tests/data/encoders.json) as sentence-transformers would save them.

The same bits come out wherever this runs, so that tests can hold them against what sentence-transformers made
of them (tests/data/make_embeddings.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.reference_models import FIXTURES, raw_values
from tests.support.models.tiny_models import safetensors_bytes

Arrays = dict[str, np.ndarray]

HIDDEN, HEADS, LAYERS, CONTEXT, MAX_TOKENS = 48, 4, 2, 96, 64
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
TEXTS = (
    "the cat sat on the mat",
    "",
    "A dog.",
    "unusualwords naïve 北京 ☕ !?",
    "one two three four five six seven " * 2,
)
LONG = "a cat is not a dog, and seven of one, two or three unusual words. " * 9
"""More tokens than one chunk of attention holds."""
EDGES = tuple("cat " * n_words for n_words in (9, 10, 11, 12, 21, 22, 23))
"""Texts of 2 tokens more, about as long as a window of 24 tokens, or half of it."""
PAIRS = (("the cat", "sat on a mat"), ("what is a dog?", "a dog is not a cat. " * 4), ("", "cat"))


LONG_CONTEXT = 352


@dataclass(frozen=True)
class EncoderCase:
    """`fields`: of config.json but for `vocab_size`; `pooling`: of 1_Pooling/config.json, None for a
    cross-encoder."""

    fields: Mapping[str, Any]
    pooling: str | None
    normalised: bool = True
    max_tokens: int = MAX_TOKENS
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    @property
    def model_type(self) -> str:
        return str(self.fields["model_type"])

    @property
    def texts(self) -> tuple[str, ...]:
        edges = EDGES if self.model_type == "gemma3_text" else ()
        return TEXTS if self.max_tokens == MAX_TOKENS else (*TEXTS, LONG, *edges)


CASES = {
    name: EncoderCase(**record)
    for name, record in json.loads((FIXTURES.parent / "encoders.json").read_text()).items()
}
TASKS: dict[str, str] = CASES["jina-v3"].fields["task_instructions"]
"""jina v3's tasks, and texts in the place of its instructions, of words that the tiny tokenizer knows."""


def words() -> list[str]:
    """WordPiece's vocabulary: letters, a few words, and the marks around texts."""
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    signs = list("0123456789.,!?-'")
    text = "the cat sat on mat dog one two three four five six seven what is not of to in"
    return [
        *SPECIAL,
        *letters,
        *(f"##{letter}" for letter in letters),
        *signs,
        *text.split(),
        "##words",
        "北",
    ]


def pieces() -> list[tuple[str, float]]:
    """XLM-R's kind of vocabulary: pieces with scores, the marks first."""
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    texts = ["▁the", "▁cat", "▁dog", "▁one", "▁two", "▁three", "at", "ou", "er", "▁s", "▁", ".", "?", "A"]
    scored = [(piece, -2.0 - rank / 8) for rank, piece in enumerate(texts)]
    scored += [(letter, -6.0 - rank / 16) for rank, letter in enumerate(letters)]
    return [(token, 0.0) for token in ROBERTA_SPECIAL] + scored


def has_pieces(name: str) -> bool:
    """True if the vocabulary is XLM-R's kind."""
    return CASES[name].model_type in ("roberta", "xlm-roberta")


def tokenizer_of(name: str) -> Any:
    """A tokenizers.Tokenizer as such a model has it; BERT's pads and truncates, as MiniLM's file says."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    if has_pieces(name):
        tokenizer = tokenizers.Tokenizer(models.Unigram(pieces(), unk_id=3))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        tokenizer.add_special_tokens(list(ROBERTA_SPECIAL))
        return tokenizer
    vocabulary = {word: token_id for token_id, word in enumerate(words())}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if name == "qwen3-reranker":
        tokenizer.decoder = decoders.Metaspace()
    elif name == "qwen3":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A [SEP]", special_tokens=[("[SEP]", 3)]
        )
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    tokenizer.add_special_tokens(list(SPECIAL))
    if name == "bert":
        tokenizer.enable_truncation(32)
        tokenizer.enable_padding(length=32)
    return tokenizer


def encoder_weights(name: str) -> Arrays:
    """Every tensor by its published name, float32."""
    shapes = json.loads((FIXTURES / "encoder_shapes.json").read_text())[name]
    return {key: raw_values(f"{name} {key}", tuple(shape)) for key, shape in shapes.items()}


def write_encoder(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> Path:
    """The model's directory. changes: fields of config.json."""
    case = CASES[name]
    n_tokens = len(pieces()) if has_pieces(name) else len(words())
    fields = {**case.fields, "vocab_size": n_tokens}
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", {**fields, **(changes or {})})
    weights = encoder_weights(name)
    if name == "bert":  # as old checkpoints have it
        weights["embeddings.position_ids"] = np.arange(CONTEXT, dtype=np.int64).reshape(1, -1)
    dense = {key: weights.pop(key) for key in list(weights) if "_Dense/" in key}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    (folder / "tokenizer.json").write_text(tokenizer_of(name).to_str(), encoding="utf-8")
    marks = ROBERTA_SPECIAL if has_pieces(name) else SPECIAL
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT if case.max_tokens == MAX_TOKENS else LONG_CONTEXT,
            "pad_token": marks[1] if has_pieces(name) else marks[0],
            "padding_side": "left" if case.model_type == "qwen3" else "right",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        },
    )
    if case.pooling is not None:
        _write_modules(folder, case, dense)
    if case.prompts:
        prompts = {"prompts": dict(case.prompts), "default_prompt_name": case.default_prompt}
        _write(folder / "config_sentence_transformers.json", prompts)
    if name == "qwen3-reranker":
        _write_reranker(folder)
    return folder


YES, NO = "one", "not"
"""The words of the tiny reranker's two answers."""
RERANK_TEMPLATE = (
    "the "
    "{{ (messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first) or 'is it' }}"
    "? what {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    " dog {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    " is not one?"
)


def _write_reranker(folder: Path) -> None:
    """As sentence-transformers has a decoder that answers yes or no: modules, their settings, a template."""
    kinds = {
        "": "base.modules.transformer.Transformer",
        "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore",
    }
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(entries), encoding="utf-8")
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    _write(
        folder / "1_LogitScore" / "config.json",
        {"true_token_id": words().index(YES), "false_token_id": words().index(NO)},
    )
    logits = {"method": "forward", "method_output_name": "logits"}
    _write(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "text-generation",
            "modality_config": {"text": logits, "message": {**logits, "format": "flat"}},
            "module_output_name": "causal_logits",
        },
    )
    _write(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder", "prompts": {}})
    (folder / "chat_template.jinja").write_text(RERANK_TEMPLATE, encoding="utf-8")


def _write_modules(folder: Path, case: EncoderCase, dense: Arrays) -> None:
    """dense: matrices by folder and name."""
    kinds = ["Transformer", "Pooling", *("Dense" for _ in dense), *(["Normalize"] if case.normalised else [])]
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    for name, matrix in dense.items():
        path, key = name.split("/")
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "model.safetensors").write_bytes(safetensors_bytes({key: matrix}))
        _write(
            folder / path / "config.json",
            {
                "in_features": matrix.shape[1],
                "out_features": matrix.shape[0],
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
        )
    (folder / "modules.json").write_text(json.dumps(entries), encoding="utf-8")
    _write(folder / "sentence_bert_config.json", {"max_seq_length": case.max_tokens, "do_lower_case": False})
    (folder / "1_Pooling").mkdir(exist_ok=True)
    _write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": HIDDEN,
            "pooling_mode_cls_token": case.pooling == "cls",
            "pooling_mode_mean_tokens": case.pooling == "mean",
            "pooling_mode_lasttoken": case.pooling == "lasttoken",
        },
    )


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields), encoding="utf-8")


def poison_weights(folder: Path) -> None:
    """Make half of the weights of a directory NaN."""
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    n_values = len(raw) // 8
    raw[-4 * n_values :] = b"\xff\xff\xff\x7f" * n_values
    path.write_bytes(raw)

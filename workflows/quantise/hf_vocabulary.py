"""A tokenizer.json as the `tokenizer.ggml` keys of a GGUF file, checked by reading them back.

llama.cpp has a name for each way to cut a text into words before merging. The one that gives the
tokenizer's own tokens on a text of many scripts is taken; where none does, the tokenizer is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from phasewise._json import read_json
from phasewise.serving.errors import ModelError
from phasewise.serving.text.gguf_vocab import PRE_TOKENIZERS as KNOWN
from phasewise.serving.text.gguf_vocab import TokenKind, tokenizer_from_gguf
from phasewise.serving.text.tokenizer import Tokenizer
from phasewise.workflows.errors import WorkflowError

if TYPE_CHECKING:
    from phasewise.serving.loaders.source import ModelSource

PRE_TOKENIZERS = tuple({pre: name for name, pre in [*KNOWN.items()][::-1] if pre.byte_level}.values())[::-1]
"""One name for each way of cutting that `gguf_vocab` knows."""
SAMPLE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶‍🌫️ (multiple emojis concatenated) ✅"
    " 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333"
    " 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======="
    " нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure?"
    " 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL HELLO World camelCase HTTPServer"
    " x=[1,2];\r\n\tdef f(a_b): return a//b  # ñandú Ünïcödé مرحبا שלום हिन्दी ไทย 日本語テキスト 한국어"
)
"""Scripts, numbers, spaces and contractions in which the ways differ; the first half as llama.cpp has it."""
Keys = Mapping[str, Any]


def vocabulary_keys(source: ModelSource) -> dict[str, Any]:
    """Keys and plain values. WorkflowError where GGUF files have no such tokenizer."""
    text = source.tokenizer_json()
    document = read_json(text)
    tokenizer = Tokenizer.from_json(text, source.config)
    keys = _tokens(document, source)
    keys |= _specials(source, tokenizer)
    for candidate in _candidates(document, keys):
        if _gives(candidate, tokenizer, source):
            return candidate
    raise WorkflowError(
        f"{source.name} has a tokenizer of which GGUF files would make other tokens: convert the model"
        " with llama.cpp, and quantise the GGUF file"
    )


def _tokens(document: dict[str, Any], source: ModelSource) -> dict[str, Any]:
    model = document.get("model") or {}
    if model.get("type") != "BPE" or not model.get("merges"):
        raise WorkflowError(
            f"{source.name} has a tokenizer of the kind {model.get('type')!r:.40}: BPE with merges can be"
            " written"
        )
    size, vocabulary = source.config.vocab_size, dict(model["vocab"])
    kinds: dict[int, TokenKind] = {}
    for added in document.get("added_tokens") or ():
        vocabulary[added["content"]] = added["id"]
        kinds[added["id"]] = TokenKind.CONTROL if added["special"] else TokenKind.USER_DEFINED
    if (unknown := vocabulary.get(model.get("unk_token"))) is not None and model.get("byte_fallback"):
        kinds[unknown] = TokenKind.UNKNOWN
    by_id = {token_id: token for token, token_id in vocabulary.items()}
    if by_id and max(by_id) >= size:
        raise WorkflowError(f"{source.name} has token {max(by_id)} and {size} rows of embeddings")
    tokens = [by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(size)]
    types = [
        kinds.get(token_id, _kind(token) if token_id in by_id else TokenKind.UNUSED)
        for token_id, token in enumerate(tokens)
    ]
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [int(kind) for kind in types]}


def _kind(token: str) -> TokenKind:
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return TokenKind.BYTE if is_byte else TokenKind.NORMAL


def _specials(source: ModelSource, tokenizer: Tokenizer) -> dict[str, Any]:
    config = source.config
    keys: dict[str, Any] = {}
    if config.bos_token_id is not None:
        keys["tokenizer.ggml.bos_token_id"] = config.bos_token_id
        begins = tokenizer.encode("a", True)[:1] == [config.bos_token_id]
        keys["tokenizer.ggml.add_bos_token"] = begins
    else:
        keys["tokenizer.ggml.add_bos_token"] = False
    for name, token_id in zip(("eos", "eot", "eom"), config.eos_token_ids, strict=False):
        keys[f"tokenizer.ggml.{name}_token_id"] = token_id
    if source.chat_template is not None:
        keys["tokenizer.chat_template"] = source.chat_template
    return keys


def _candidates(document: dict[str, Any], keys: Keys) -> Iterator[dict[str, Any]]:
    model = document["model"]
    if model.get("byte_fallback"):
        scores = [-float(token_id) for token_id in range(len(keys["tokenizer.ggml.tokens"]))]
        common = {**keys, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        yield from ({**common, "tokenizer.ggml.add_space_prefix": prefix} for prefix in (True, False))
        return
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    common = {**keys, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
    for name in PRE_TOKENIZERS:
        yield {**common, "tokenizer.ggml.pre": name}


def _gives(keys: Keys, tokenizer: Tokenizer, source: ModelSource) -> bool:
    """True if a reader of the file cuts the sample into the same tokens, with and without special ones."""
    try:
        written = Tokenizer.from_json(tokenizer_from_gguf(keys), source.config)
    except ModelError:
        return False
    return all(
        written.encode(SAMPLE, special) == tokenizer.encode(SAMPLE, special) for special in (False, True)
    )

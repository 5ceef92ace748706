"""Damaged and hostile vocabularies end in one clear error, never in wrong tokens."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import dataclass
from typing import Any

import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.text.gguf_vocab import PRE_TOKENIZERS, tokenizer_from_gguf
from phasewise.serving.text.tokenizer import Tokenizer
from tests.support.models.tiny_vocabs import (
    byte_level_metadata,
    merged_pieces_metadata,
    sentence_piece_metadata,
)

BYTE_LEVEL = byte_level_metadata("smollm")
PIECES = sentence_piece_metadata()
TOKENS: list[str] = list(BYTE_LEVEL["tokenizer.ggml.tokens"])  # type: ignore[call-overload]


@dataclass(frozen=True)
class Facts:
    vocab_size: int = 1 << 20
    bos_token_id: int | None = None
    add_bos: bool = False


@pytest.mark.parametrize("ends", ["\n" * 4, "\n" * 65, "\n" * (1 << 20)])
def test_a_run_of_line_ends_to_which_no_merges_lead_is_refused(ends: str) -> None:
    """llama.cpp finds such a token all the same."""
    metadata = merged_pieces_metadata()
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    kinds: Any = metadata["tokenizer.ggml.token_type"]

    with pytest.raises(ModelError, match=f"token of {len(ends)} line ends"):
        tokenizer_from_gguf(
            {**metadata, "tokenizer.ggml.tokens": [*tokens, ends], "tokenizer.ggml.token_type": [*kinds, 1]}
        )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pre": "no-such-cutter"}, "no-such-cutter"),
        ({"model": "rwkv"}, "rwkv"),
        ({"model": None}, "None"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": []}, "empty"),
        ({"tokens": "abc"}, "not a list"),
        ({"tokens": [1, 2]}, "not a string"),
        ({"tokens": [*TOKENS, TOKENS[300]]}, "twice"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["absent tokens"]}, "absent tokens"),
        ({"merges": ["nospace"]}, "nospace"),
        ({"merges": [""]}, "merge 0"),
        ({"token_type": [1]}, "1 entry"),
        ({"add_bos_token": True, "bos_token_id": 1 << 30}, "bos_token_id"),
        ({"add_bos_token": True, "bos_token_id": -1}, "bos_token_id"),
        ({"add_bos_token": True, "bos_token_id": "1"}, "bos_token_id"),
        ({"add_eos_token": True, "eos_token_id": 1 << 30}, "eos_token_id"),
    ],
)
def test_a_damaged_vocabulary_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    metadata = BYTE_LEVEL | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}

    with pytest.raises(ModelError) as refused:
        tokenizer_from_gguf(metadata)

    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_pre_tokenizer_lists_the_known_ones() -> None:
    with pytest.raises(ModelError) as refused:
        tokenizer_from_gguf(byte_level_metadata("no-such-cutter"))

    assert all(name in str(refused.value) for name in PRE_TOKENIZERS)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"model": {"type": "BPE"}}', "\x00", '{"version": "1.0"}', "9" * 10_000]
)
def test_what_is_no_tokenizer_json_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_json(text)


def test_a_decoder_that_we_do_not_know_is_named() -> None:
    fields = json.loads(tokenizer_from_gguf(BYTE_LEVEL)) | {
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}
    }

    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.from_json(json.dumps(fields))


def test_a_token_beyond_the_models_rows_is_refused() -> None:
    with pytest.raises(ModelError, match="only 100 rows"):
        Tokenizer.from_json(tokenizer_from_gguf(BYTE_LEVEL), Facts(vocab_size=100))


def test_the_beginning_is_added_once_where_the_configuration_wants_it() -> None:
    adds_none = tokenizer_from_gguf(BYTE_LEVEL)
    adds_one = tokenizer_from_gguf(BYTE_LEVEL | {"tokenizer.ggml.add_bos_token": True})
    wanted = Facts(bos_token_id=1, add_bos=True)

    for text in (adds_none, adds_one):
        ids = Tokenizer.from_json(text, wanted).encode("a", add_special=True)

        assert ids[0] == 1
        assert ids.count(1) == 1
    assert 1 not in Tokenizer.from_json(adds_none, wanted).encode("a", add_special=False)


@pytest.mark.parametrize("seed", range(40))
def test_a_bitten_tokenizer_json_is_read_or_refused(seed: int) -> None:
    """Bytes overwritten anywhere: a ModelError, or a tokenizer that still cuts text."""
    rng = random.Random(seed)
    text = list(tokenizer_from_gguf(PIECES if seed % 2 else BYTE_LEVEL))
    for _ in range(rng.randrange(1, 5)):
        text[rng.randrange(len(text))] = rng.choice('"{}[],:0-x\\')

    with contextlib.suppress(ModelError):
        tokenizer = Tokenizer.from_json("".join(text), Facts())
        tokenizer.decode(tokenizer.encode("the of and\n1", add_special=True))

"""Small made-up vocabularies of both kinds: as GGUF metadata, and as files that hold nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from phasewise.serving.text.gguf_vocab import PRE_TOKENIZERS, PreTokenizer
from tests.support.models.mixed_text import CODE, WORDS, mixed_lines
from tests.support.models.tiny_models import byte_characters

N_MERGED = 1500
"""Tokens of more than one character."""
LONGEST = 7
"""Characters in the longest of them."""
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user made|>")
KINDS = (2, 3, 3, 3, 3, 4)


def byte_level_metadata(pre: str) -> dict[str, object]:
    """A "gpt2" vocabulary whose tokens cross the borders of words, so that the pre-tokenizer shows."""
    visible = byte_characters()
    texts = ["".join(visible[byte] for byte in text.encode()) for text in _sample()]
    merged = _frequent(texts)
    tokens = [*SPECIAL, *visible, *merged]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*KINDS, *[1] * (len(tokens) - len(SPECIAL))],
        "tokenizer.ggml.merges": [f"{token[:-1]} {token[-1]}" for token in merged],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentence_piece_metadata(**settings: object) -> dict[str, object]:
    """A "llama" vocabulary with scores and bytes to fall back on. `settings`: tokenizer.ggml keys."""
    texts = ["\u2581" + text.replace(" ", "\u2581") for text in _sample()]
    merged = _frequent(texts)
    pieces = [*merged, *sorted({character for token in merged for character in token})]
    scores = [0.0] * (len(SPECIAL) + 256) + [-float(index) for index in range(len(pieces))]
    return _of_pieces("llama", pieces, {"scores": scores} | settings)


def merged_pieces_metadata(**settings: object) -> dict[str, object]:
    """A "gemma4" vocabulary: pieces and merges, of which some join line ends. `settings`: tokenizer.ggml
    keys."""
    texts = [text.replace(" ", "\u2581").replace("\n", "") for text in _sample()]
    merged = _frequent(texts)
    single = sorted({character for token in merged for character in token} | {"\n"})
    merges = [*(f"{token[:-1]} {token[-1]}" for token in merged), "\n \n", "\n\n \n"]
    own = {"merges": merges, "add_bos_token": False}
    return _of_pieces("gemma4", [*merged, *single, "\n\n", "\n\n\n"], own | settings)


def _of_pieces(model: str, pieces: list[str], settings: dict[str, object]) -> dict[str, object]:
    """A vocabulary with bytes to fall back on."""
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "tokenizer.ggml.token_type": [*KINDS, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in settings.items()}


def write_vocabulary(path: Path, metadata: Mapping[str, object]) -> None:
    """A GGUF file with these metadata and no tensors."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _sample() -> list[str]:
    return [*mixed_lines(400, seed=7), *CODE * 3, " ".join(WORDS)]


def _frequent(texts: Iterable[str]) -> list[str]:
    """The most frequent strings of 2 to LONGEST characters, short ones first, with all their prefixes."""
    counts: Counter[str] = Counter()
    for text in texts:
        for length in range(2, LONGEST + 1):
            counts.update(text[index : index + length] for index in range(len(text) - length + 1))
    ranked = sorted(counts, key=lambda string: (-counts[string], len(string), string))[:N_MERGED]
    return sorted(ranked, key=lambda string: (len(string), ranked.index(string)))


FIRST_NAMES: Mapping[PreTokenizer, str] = {pre: name for name, pre in [*PRE_TOKENIZERS.items()][::-1]}
"""One name for each way of cutting."""
TINY_VOCABULARIES: Mapping[str, Callable[[], dict[str, object]]] = {
    **{name: partial(byte_level_metadata, name) for pre, name in FIRST_NAMES.items() if pre.byte_level},
    **{
        name: partial(merged_pieces_metadata, model="gpt2", pre=name)
        for name in ("granite-embed-multi-311m", "sarvam-moe")
    },
    "whitespace-words": partial(merged_pieces_metadata, model="whitespace", pre="whitespace"),
    "merged-pieces": merged_pieces_metadata,
    "sentence-pieces": sentence_piece_metadata,
    "sentence-pieces-bare": partial(
        sentence_piece_metadata, add_space_prefix=False, add_bos_token=False, add_eos_token=True
    ),
}
"""One for every way of cutting that we know, by the name under which its fixture is kept."""

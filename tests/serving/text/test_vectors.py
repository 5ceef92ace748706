"""llama.cpp's own vocabularies, vectors and names of pre-tokenizers, from its source."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from phasewise.serving.loaders.formats.gguf_file import open_gguf
from phasewise.serving.text.gguf_vocab import PRE_TOKENIZERS, tokenizer_from_gguf
from phasewise.serving.text.tokenizer import TextCutter, Tokenizer
from tests.support.models.mixed_text import mixed_lines
from tests.support.models.tiny_vocabs import byte_level_metadata, merged_pieces_metadata, write_vocabulary
from tests.support.peers import ask, llama_cpp_source

BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"
VOCABULARIES = (
    *("aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4"),
    *("gpt-2", "gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3", "qwen2", "qwen35"),
    *("refact", "starcoder"),
)
_FIRST = {rules: name for name, rules in reversed(PRE_TOKENIZERS.items())}
_OTHERS = sorted(PRE_TOKENIZERS.keys() - _FIRST.values())
"""Names of the same rules as another one."""
WITHOUT_VECTORS = {"aquila", "baichuan", "gpt-neox", "nomic-bert-moe"}


@dataclass(frozen=True)
class Facts:
    vocab_size: int = 1 << 20
    bos_token_id: int | None = None
    add_bos: bool = False


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_of_llama_cpp_gives_its_vectors(name: str) -> None:
    path = llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"
    cut = _cutter(path)

    if name in WITHOUT_VECTORS:
        assert cut("Hello world")
        return
    texts = _read(path, ".inp").removesuffix(BETWEEN_TEXTS).split(BETWEEN_TEXTS)
    expected = [[int(token_id) for token_id in line.split()] for line in _read(path, ".out").splitlines()]
    assert [cut(text) for text in texts] == expected


def _cutter(path: Path) -> Callable[[str], list[int]]:
    file, header = open_gguf(path)
    file.close()
    text = tokenizer_from_gguf(header.metadata)
    if header.metadata["tokenizer.ggml.model"] in ("bert", "t5"):
        encoder = TextCutter.from_json(text, Facts())
        return lambda content: encoder.cut([content], add_special=False)[0][0]
    decoder = Tokenizer.from_json(text)
    return lambda content: decoder.encode(content, add_special=False)


def _read(path: Path, suffix: str) -> str:
    return path.with_name(path.name + suffix).read_bytes().decode()


def test_every_name_that_llama_cpp_compares_with_is_known() -> None:
    source = (llama_cpp_source() / "src" / "llama-vocab.cpp").read_text()

    assert set(re.findall(r'tokenizer_pre == "([^"]+)"', source)) == set(PRE_TOKENIZERS)


@pytest.mark.many
@pytest.mark.parametrize(
    "name", [*_FIRST.values(), *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS)]
)
def test_llama_cpp_cuts_alike_by_each_name(name: str, tmp_path: Path) -> None:
    """Beginnings included: a default of the name."""
    if PRE_TOKENIZERS[name].byte_level:
        metadata = byte_level_metadata(name)
    else:
        model = "whitespace" if name == "whitespace" else "gpt2"
        metadata = merged_pieces_metadata(model=model, pre=name)
        del metadata["tokenizer.ggml.add_bos_token"]
    path, lines = tmp_path / "vocabulary.gguf", list(mixed_lines(50, seed=17))
    write_vocabulary(path, metadata)
    ours = Tokenizer.from_json(tokenizer_from_gguf(metadata))

    theirs = ask("llama_cpp_tokens", "llama_cpp", gguf=str(path), texts=lines, add_special=True)

    assert [ours.encode(line, add_special=True) for line in lines] == theirs

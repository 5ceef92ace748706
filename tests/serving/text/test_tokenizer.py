"""Token ids beside llama.cpp's vectors and transformers', and the laws of turning tokens back into text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.loaders.formats.gguf_file import open_gguf
from phasewise.serving.text.gguf_vocab import PRE_TOKENIZERS, tokenizer_from_gguf
from phasewise.serving.text.tokenizer import DetokenizeStream, TextCutter, Tokenizer
from tests.support.models.mixed_text import mixed_lines
from tests.support.models.tiny_vocabs import (
    TINY_VOCABULARIES,
    byte_level_metadata,
    merged_pieces_metadata,
    sentence_piece_metadata,
    write_vocabulary,
)
from tests.support.models.token_blocks import BLOCK, N_LINES, block_hashes
from tests.support.peers import ask, llama_cpp_source
from tests.support.tiers import first_is_smoke, n_examples

FIXTURE = Path(__file__).parents[2] / "data" / "reference" / "tokens.json"
DEFAULT_MODEL = "smollm2-135m-instruct"
N_LIVE_LINES = n_examples(1000, soak=10_000)


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(TINY_VOCABULARIES[name]()))


@cache
def default_model() -> tuple[Path, Tokenizer]:
    """The default model's file and its tokenizer; skips where the file is not."""
    from phasewise.serving.loaders import open_source
    from phasewise.serving.loaders.fetching.registry import KNOWN, known_path
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate

    root = cache_root()
    path = known_path(KNOWN[DEFAULT_MODEL], root)
    if not path.is_file():
        pytest.skip(f"the default model is not here; `phasewise models pull {DEFAULT_MODEL}` fetches it")
    with open_source(locate(str(path), root, print)) as source:
        return path, Tokenizer(source.tokenizer_json(), source.config)


def _assert_blocks(own_tokenizer: Tokenizer, name: str) -> None:
    n_blocks = n_examples(N_LINES // BLOCK)
    lines = list(itertools.islice(mixed_lines(N_LINES), n_blocks * BLOCK))
    hashes = block_hashes([own_tokenizer.encode(line, add_special=True) for line in lines])
    expected = json.loads(FIXTURE.read_text())["blocks"][name][:n_blocks]
    differing = [
        index for index, (ours, theirs) in enumerate(zip(hashes, expected, strict=True)) if ours != theirs
    ]
    assert not differing, (
        f"llama.cpp cuts some of lines {differing[0] * BLOCK} to {differing[0] * BLOCK + BLOCK} otherwise"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_smoke(TINY_VOCABULARIES))
def test_ten_thousand_lines_are_cut_as_by_llama_cpp(name: str) -> None:
    """The vocabularies' tokens cross the borders of words, so the pre-tokenizer must be right as well."""
    _assert_blocks(tokenizer(name), name)


def test_the_default_model_cuts_ten_thousand_lines_as_llama_cpp_does() -> None:
    _assert_blocks(default_model()[1], DEFAULT_MODEL)


@pytest.mark.many
@pytest.mark.parametrize(("add_special", "name"), [*zip(itertools.cycle((False, True)), TINY_VOCABULARIES)])
def test_llama_cpp_gives_the_same_ids_now(name: str, add_special: bool, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_vocabulary(path, TINY_VOCABULARIES[name]())
    lines = list(mixed_lines(N_LIVE_LINES, seed=3))

    theirs = ask("llama_cpp_tokens", "llama_cpp", gguf=str(path), texts=lines, add_special=add_special)

    assert [tokenizer(name).encode(line, add_special) for line in lines] == theirs


def test_llama_cpp_gives_the_same_ids_for_the_default_model_now() -> None:
    path, ours = default_model()
    lines = list(mixed_lines(N_LIVE_LINES, seed=5))

    theirs = ask("llama_cpp_tokens", "llama_cpp", gguf=str(path), texts=lines, add_special=True)

    assert [ours.encode(line, add_special=True) for line in lines] == theirs


@pytest.mark.many
@pytest.mark.parametrize("add_special", [False, True])
@pytest.mark.parametrize("name", ["smollm", "llama-bpe", "qwen2", "sentence-pieces", "metaspace"])
def test_transformers_gives_the_same_ids_for_a_tokenizer_json_now(
    name: str, add_special: bool, tmp_path: Path
) -> None:
    """And the same text for what is valid UTF-8."""
    text = _with_metaspace() if name == "metaspace" else tokenizer_from_gguf(TINY_VOCABULARIES[name]())
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ours, lines = Tokenizer(text), list(mixed_lines(N_LIVE_LINES, seed=11))

    theirs = ask(
        "transformers_tokens", "transformers", folder=str(tmp_path), texts=lines, add_special=add_special
    )

    ids = [ours.encode(line, add_special) for line in lines]
    assert ids == theirs["ids"]
    assert [_text(ours, line_ids) for line_ids in ids] == theirs["texts"]


def _with_metaspace() -> str:
    """A SentencePiece-style tokenizer.json as newer converters write it, without a normalizer."""
    fields = json.loads(tokenizer_from_gguf(sentence_piece_metadata()))
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    return json.dumps(fields | {"normalizer": None, "pre_tokenizer": metaspace})


EVERY_KIND = pytest.mark.parametrize("name", ["smollm", "tekken", "sentence-pieces", "sentence-pieces-bare"])


def _stream(ours: Tokenizer, ids: Sequence[int], shown: frozenset[int] = frozenset()) -> str:
    stream = DetokenizeStream(ours, shown)
    return "".join([*map(stream.push, ids), stream.flush()])


def _text(ours: Tokenizer, ids: Sequence[int], shown: frozenset[int] = frozenset()) -> str:
    """The text of tokens without the space that SentencePiece-style vocabularies put in front."""
    adds_space = b"".join(map(ours.piece, ours.encode("a", False))).startswith(b" ")
    return _stream(ours, ids, shown).removeprefix(" " if adds_space else "")


@EVERY_KIND
@given(text=st.text())
def test_text_comes_back_from_its_tokens(name: str, text: str) -> None:
    ours = tokenizer(name)

    ids = ours.encode(text, add_special=False)

    assert _text(ours, ids, ours.special_ids) == text


@EVERY_KIND
@given(ids=st.lists(st.integers(-2, 2500)), shows_special=st.booleans())
def test_a_stream_adds_up_to_the_text_of_the_tokens_bytes(
    name: str, ids: list[int], shows_special: bool
) -> None:
    """Any ids, those without a name included."""
    ours = tokenizer(name)
    shown = ours.special_ids if shows_special else frozenset[int]()

    written = [token_id for token_id in ids if token_id in shown or token_id not in ours.special_ids]

    assert _stream(ours, ids, shown) == b"".join(map(ours.piece, written)).decode("utf-8", "replace")


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    ours = tokenizer("smollm")
    first_byte = ours.encode("\U0001f600", add_special=False)[0]
    stream = DetokenizeStream(ours)

    assert stream.push(first_byte) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_read_in_text_but_not_written() -> None:
    ours = tokenizer("smollm")
    ids = ours.encode("<|im_start|>a<|im_end|><|user made|>", add_special=False)

    assert ids[0] == ours.id_of("<|im_start|>")
    assert _stream(ours, ids) == "a<|user made|>"
    assert _stream(ours, ids, ours.special_ids) == "<|im_start|>a<|im_end|><|user made|>"


def test_an_answer_keeps_its_first_space() -> None:
    ours = tokenizer("sentence-pieces")
    ids = ours.encode("the of", add_special=False)

    assert _stream(ours, ids) == " the of"


def test_beginning_and_end_stand_where_the_metadata_say() -> None:
    bare, both = tokenizer("sentence-pieces-bare"), _with_flags(add_bos_token=True, add_eos_token=True)

    assert bare.encode("", add_special=True) == [2]
    assert both.encode("", add_special=True) == [1, 2]
    assert both.encode("", add_special=False) == []
    assert tokenizer("llama-bpe").encode("", add_special=True) == [1]
    assert tokenizer("qwen2").encode("", add_special=True) == []


def _with_flags(**flags: bool) -> Tokenizer:
    settings = {f"tokenizer.ggml.{key}": value for key, value in flags.items()}
    return Tokenizer(tokenizer_from_gguf(byte_level_metadata("smollm") | settings))


@EVERY_KIND
def test_half_a_surrogate_pair_reads_as_a_replacement_character(name: str) -> None:
    ours = tokenizer(name)

    assert ours.encode("a\ud800b", add_special=False) == ours.encode("a\ufffdb", add_special=False)
    assert ours.encode("\ud83d\ude00", add_special=False) == ours.encode("\U0001f600", add_special=False)


@pytest.mark.many
@EVERY_KIND
@pytest.mark.parametrize("unit", ["a", " ", "\n", "1", "é", "the of and ", "\x00", "'"])
def test_a_long_text_is_cut_in_time_that_grows_with_its_length(name: str, unit: str) -> None:
    """No assertion on time: a quadratic cut of these would run for minutes."""
    text = unit * (200_000 // len(unit))

    ids = tokenizer(name).encode(text, add_special=False)

    assert _text(tokenizer(name), ids) == text


def test_an_end_marker_that_a_file_calls_normal_is_found_whole_and_written_out() -> None:
    """As llama.cpp finds it; but an answer that contains it, such as HTML, keeps it."""
    metadata = byte_level_metadata("qwen2")
    tokens, kinds = [*_listed(metadata, "tokens"), "<EOT>"], [*_listed(metadata, "token_type"), 1]
    changed = metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    ours = Tokenizer(tokenizer_from_gguf(changed))

    ids = ours.encode("a<EOT>b", add_special=False)

    assert len(tokens) - 1 in ids
    assert _stream(ours, ids) == "a<EOT>b"


def test_a_byte_that_the_vocabulary_lacks_is_dropped_but_stays_a_border() -> None:
    """The tokens to its left and right do not join; llama.cpp does the same."""
    metadata = byte_level_metadata("gpt-2")
    hole, joined = "\u0100", ["e s", "s t"]  # U+0100 writes the byte 0
    tokens = [token for token in _listed(metadata, "tokens") if hole not in str(token)]
    kinds = [2, 3, 3, 3, 3, 4, *[1] * (len(tokens) - 6)]
    changed = metadata | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": joined,
    }
    ours = Tokenizer(tokenizer_from_gguf(changed))

    assert [ours.token(token_id) for token_id in ours.encode("es", add_special=False)] == ["es"]
    assert [ours.token(token_id) for token_id in ours.encode("e\x00s", add_special=False)] == ["e", "s"]


def test_phi_3s_control_tokens_take_the_spaces_behind_them() -> None:
    """By the model's name, as in llama.cpp."""
    named = Tokenizer(tokenizer_from_gguf(sentence_piece_metadata() | {"general.name": "Phi-3 mini"}))

    assert named.encode("<|im_start|>\n a", False) == named.encode("<|im_start|>a", False)
    assert named.encode("<s>\n a", False) != named.encode("<s>a", False)


@pytest.mark.parametrize(
    ("model", "tokens", "expected"),
    [
        ("bert", ["[CLS]", "[SEP]", "[UNK]", "▁a", "▁b"], ([0, 3, 1, 4, 1], 3)),
        ("t5", ["<s>", "</s>", "<unk>", "▁a", "▁b"], ([0, 3, 1, 1, 4, 1], 6)),
    ],
)
def test_pairs_of_an_encoder_have_their_tokens_around_them(
    model: str, tokens: list[str], expected: tuple[list[int], int]
) -> None:
    """As BERT and XLM-R were trained, whose second text has a type of its own or not."""
    names = ("bos", "eos" if model == "t5" else "seperator", "unknown")
    ids = {f"tokenizer.ggml.{name}_token_id": token_id for token_id, name in enumerate(names)}
    metadata = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens, **ids}

    assert TextCutter(tokenizer_from_gguf(metadata)).cut([("a", "b")]) == [expected]


def _listed(metadata: dict[str, object], key: str) -> list[object]:
    values = metadata[f"tokenizer.ggml.{key}"]
    assert isinstance(values, list)
    return values


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
        encoder = TextCutter(text, Facts())
        return lambda content: encoder.cut([content], add_special=False)[0][0]
    decoder = Tokenizer(text)
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
    ours = Tokenizer(tokenizer_from_gguf(metadata))

    theirs = ask("llama_cpp_tokens", "llama_cpp", gguf=str(path), texts=lines, add_special=True)

    assert [ours.encode(line, add_special=True) for line in lines] == theirs

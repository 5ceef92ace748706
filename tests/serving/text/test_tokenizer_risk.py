"""A stranger's tokenizer.json: what could take minutes or gigabytes runs within bounds, all else as ever."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.errors import ModelError, RequestError
from phasewise.serving.text.confined_tokenizer import (
    BOUNDS,
    KNOWN_PATTERNS,
    ConfinedTokenizer,
    growth_of,
    risk_of,
    without_programs,
)
from phasewise.serving.text.gguf_vocab import tokenizer_from_gguf
from phasewise.serving.text.tokenizer import TextCutter, Tokenizer
from tests.serving.sandbox.test_confined import descendants, peaks
from tests.support.models.encoder_models import CASES, tokenizer_of
from tests.support.models.tiny_models import tokenizer_json
from tests.support.models.tiny_vocabs import TINY_VOCABULARIES
from tests.support.tiers import examples

MIB = 1 << 20
FIRST = {"Sequence": {"id": "A", "type_id": 0}}
SECOND = {"Sequence": {"id": "B", "type_id": 1}}
MARK = {"SpecialToken": {"id": "x", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS = {"vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##"}


@dataclass(frozen=True)
class Facts:
    vocab_size: int = 1 << 20
    bos_token_id: int | None = None
    add_bos: bool = False


def changed(**parts: Any) -> str:
    """The tiny model's tokenizer.json with other parts."""
    return json.dumps({**json.loads(tokenizer_json()), **parts})


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


def cut_by(*parts: Any) -> str:
    return changed(pre_tokenizer={"type": "Sequence", "pretokenizers": list(parts)})


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def charsmap(longest: int) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + b"\0" * 4 + b"x" * longest + b"\0").decode()


# ---- what ordinary tokenizers are --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_encoders_are_harmless(name: str) -> None:
    assert risk_of(tokenizer_of(name).to_str()) is None


@pytest.mark.many
@pytest.mark.parametrize("name", TINY_VOCABULARIES)
def test_what_is_written_for_gguf_is_harmless(name: str) -> None:
    assert risk_of(tokenizer_from_gguf(TINY_VOCABULARIES[name]())) is None


@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS))
def test_known_patterns_are_patterns(pattern: str) -> None:
    tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "9" * 10_000, "[" * 100_000, '{"version": "1.0"}'])
def test_what_is_no_tokenizer_is_left_to_who_reads_it(text: str) -> None:
    assert risk_of(text) is None
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(text)


# ---- the law of growth -------------------------------------------------------------------------------------

LETTERS = "ab é北"
PATTERNS = ["a", "[ab]", "b+", " {2,}", "a?b", r"\s", "[^a]{1,3}", "b*", "a?"]
BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
contents = st.text(LETTERS, max_size=4)
normalizers = st.one_of(
    st.builds(replace, st.text(LETTERS, min_size=1, max_size=2), contents),
    st.builds(replace, st.sampled_from(PATTERNS), contents, st.just("Regex")),
    st.builds(lambda text: {"type": "Prepend", "prepend": text}, st.text(LETTERS, min_size=1, max_size=4)),
    st.sampled_from([{"type": "NFC"}, {"type": "Lowercase"}, {"type": "ByteLevel"}, BERT, STRIP]),
)


@examples(200)
@given(pipeline=st.lists(normalizers, max_size=5), text=st.text(LETTERS, max_size=12))
def test_no_pipeline_makes_a_text_longer_than_is_foreseen(pipeline: list[Any], text: str) -> None:
    whole = tokenizers.Tokenizer.from_str(changed(normalizer=sequence(*pipeline)))
    growth = growth_of(sequence(*pipeline))

    assert whole.normalizer is not None
    try:
        n_bytes = len(whole.normalizer.normalize_str(text).encode())
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return  # the library gave up: nothing was made

    assert n_bytes <= growth.factor * len(text.encode()) + growth.added
    assert (risk_of(changed(normalizer=sequence(*pipeline))) is None) == growth.is_small


# ---- the same tokens either way ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both() -> tuple[tokenizers.Tokenizer, ConfinedTokenizer]:
    text = tokenizer_of("bert").to_str()
    return tokenizers.Tokenizer.from_str(text), ConfinedTokenizer(text)


@examples(60)
@given(text=st.text(max_size=40), other=st.text(max_size=20), most=st.integers(4, 12))
def test_a_confined_tokenizer_cuts_as_the_library_does(
    both: tuple[tokenizers.Tokenizer, ConfinedTokenizer], text: str, other: str, most: int
) -> None:
    plain, confined = both
    plain.no_truncation()
    plain.no_padding()
    bare = plain.encode(text, add_special_tokens=False)
    spans = [bare.ids, [list(span) for span in bare.offsets]]

    assert confined.cut("ids", text, special=True) == plain.encode(text).ids
    assert confined.cut("ids", text, special=False) == bare.ids
    assert confined.cut("spans", text, special=False) == spans
    plain.enable_truncation(most, strategy="longest_first")
    for given_text in (text, (text, other)):
        encoding = plain.encode(*([given_text] if isinstance(given_text, str) else given_text))
        assert confined.cut("typed", given_text, special=True, most=most) == [encoding.ids, encoding.type_ids]


def test_a_risky_tokenizer_gives_the_tokens_that_its_author_meant() -> None:
    """One pattern that is not known, and harmless all the same."""
    risky = changed(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                split("(?:a|b)+"),
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    )
    assert risk_of(risky) is not None
    whole, ours = tokenizers.Tokenizer.from_str(risky), Tokenizer(risky, Facts())
    cutter = TextCutter(risky, Facts())

    for text in ("", "abba", "hello abba", "é ab\n"):
        assert ours.encode(text, False) == whole.encode(text, add_special_tokens=False).ids
        assert ours.encode_marked(text, "x") == whole.encode(text, add_special_tokens=False).ids
        assert b"".join(map(ours.piece, ours.encode(text, False))).decode() == text
        assert cutter.cut([text]) == [(whole.encode(text).ids, None)]
    for token_id in range(whole.get_vocab_size() + 1):
        assert ours.token(token_id) == whole.id_to_token(token_id)


# ---- attacks -----------------------------------------------------------------------------------------------

GROWING = {
    "replace by replace": {"normalizer": sequence(*[replace("a", "a" * 64)] * 8)},
    "one that is long": {"normalizer": replace("a", "a" * (1 << 23))},
    "in sequences of sequences": {"normalizer": sequence(*[sequence(*[replace("a", "aa")] * 8)] * 7)},
    "an empty pattern": {"normalizer": sequence(*[replace("", "aaaa", "Regex")] * 20)},
    "bytes of bytes": {"normalizer": sequence(*[{"type": "ByteLevel"}] * 40)},
    "in turns": {"normalizer": sequence(*[replace("a", "bbbb"), replace("b", "aaaa")] * 12)},
    "prepend, then replace": {
        "normalizer": sequence({"type": "Prepend", "prepend": "a" * 4000}, *[replace("a", "a" * 8)] * 7)
    },
    "a template of many": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [MARK] * 5000 + [FIRST],
            "pair": [FIRST, SECOND],
            "special_tokens": {"x": {"id": "x", "ids": [0] * 5000, "tokens": ["x"] * 5000}},
        }
    },
}


@pytest.mark.many
@pytest.mark.parametrize("name", GROWING)
def test_a_few_characters_do_not_become_gigabytes(name: str) -> None:
    """Neither when it is opened nor when a text is cut; this process stays as it is, and its child small."""
    text = changed(**GROWING[name])
    before = set(descendants())
    assert risk_of(text) is not None

    with pytest.raises((ModelError, RequestError)):
        Tokenizer(text, Facts(bos_token_id=0, add_bos=True)).encode("aé", add_special=True)

    grown = [peak for pid, peak in peaks().items() if pid not in before]
    assert all(peak < BOUNDS.memory_bytes + 300 * MIB for peak in grown)


@pytest.mark.parametrize("longest", [10, 65, 1 << 20])
def test_tables_of_characters_are_looked_at(longest: int) -> None:
    text = changed(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap(longest)})

    assert (risk_of(text) is None) == (longest <= 64)


BACKTRACKING = ["(a*)*b", "(a|aa)+$", "(.*)(.*)(.*)(.*)(.*)[^ab!]", r"(a+)\1+[bc]", "a*a*a*b"]


@pytest.mark.many
@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
@pytest.mark.parametrize("pattern", BACKTRACKING)
def test_a_pattern_that_tries_for_ever_is_ended_without_a_word(
    pattern: str, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    part = split(pattern) if place == "pre_tokenizer" else replace(pattern, "", "Regex")
    text = changed(**{place: part})
    assert risk_of(text) is not None
    tokenizer = Tokenizer(text, Facts())

    for _ in range(2):
        with pytest.raises(RequestError) as refused:
            tokenizer.encode("a" * 30_000 + "!b", add_special=False)
        assert "\n" not in str(refused.value)

    assert tokenizer.encode("", add_special=False) == []  # and goes on with the next
    assert capfd.readouterr().err == ""


OTHER_WAYS = {
    "two keys": tokenizer_json().replace('"normalizer"', '"normalizer": null, "normalizer"', 1),
    "an unknown part": changed(normalizer={"type": "Script"}),
    "a part without a type": changed(pre_tokenizer={"Split": {}}),
    "words without end": changed(model={"type": "WordPiece", **WORDS, "max_input_chars_per_word": 1 << 30}),
    "tokens without end": changed(model={"type": "Unigram", "vocab": [["a" * 5000, 0.0]], "unk_id": 0}),
    "a repeated text": changed(
        post_processor={"type": "TemplateProcessing", "single": [FIRST] * 9, "pair": [], "special_tokens": {}}
    ),
    "bytes of bytes": cut_by(*[BYTES] * 12),
    "a thousand parts": cut_by(*[{"type": "Digits", "individual_digits": True}] * 1000),
    "a text to look for": changed(normalizer=replace("a" * 5000, "")),
    "a decoder's pattern": changed(
        decoder={"type": "Sequence", "decoders": [replace("((a{999}){999}){999}", "", "Regex"), BYTES]}
    ),
}


@pytest.mark.many
@pytest.mark.parametrize("name", OTHER_WAYS)
def test_other_ways_to_take_long_are_seen(name: str) -> None:
    assert risk_of(OTHER_WAYS[name]) is not None


@pytest.mark.many
@pytest.mark.parametrize("name", OTHER_WAYS)
def test_what_is_left_of_it_here_has_no_programs(name: str) -> None:
    left = json.loads(without_programs(OTHER_WAYS[name]))

    assert (left["normalizer"], left["pre_tokenizer"], left["post_processor"]) == (None, None, None)
    assert risk_of(json.dumps(left | {"model": None})) is None

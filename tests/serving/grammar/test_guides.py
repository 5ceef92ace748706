"""Grammars: every token keeps them, the end comes only where they may end, bombs are refused."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.engine.messages import Submit
from phasewise.serving.errors import QueueFull, RequestError
from phasewise.serving.grammar.grammar_limits import pattern_weight
from phasewise.serving.grammar.guides import ANY_OBJECT, Grammar, Guide, GuideCompiler, TokenView
from phasewise.serving.sampling.sampling import GREEDY, SampledToken, Sampler, SamplingParams, sample_rows
from phasewise.serving.sandbox.confined import CancelToken, Unserved
from phasewise.serving.text.gguf_vocab import tokenizer_from_gguf
from phasewise.serving.text.tokenizer import Tokenizer
from tests.support.models.tiny_vocabs import TINY_VOCABULARIES
from tests.support.servers.api_bombs import PATTERNS, schema_bombs
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, make_engine, piece, run_all, text_of
from tests.support.tiers import examples

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@cache
def compiler() -> GuideCompiler:
    return GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))


def logits_of(rng: np.random.Generator, size: int = VOCAB_SIZE) -> np.ndarray:
    return (rng.standard_normal(size) * 3).astype(np.float32)


def answer(guide: Guide, seed: int, most: int = 400, **params: object) -> tuple[bytes, bool]:
    """The text of a model that says anything, under `guide`, and whether it came to an end."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(SamplingParams(seed=seed, **params), (), VOCAB_SIZE, guide.fresh())  # type: ignore[arg-type]
    said = b""
    for _ in range(most):
        token_id = sampler.sample(logits_of(rng)).token_id
        if token_id == END:
            assert not sampler.cut_short
            return said, True
        said += piece(token_id)
    return said, False


@examples(30)
@given(
    seed=st.integers(0, 2**32),
    params=st.sampled_from(
        [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"repetition_penalty": 1.5}]
    ),
)
def test_an_answer_by_schema_is_valid_wherever_it_ends(seed: int, params: dict[str, float]) -> None:
    said, ended = answer(compiler().compile(Grammar.of_schema(PERSON)), seed, **params)

    if ended:
        person = json.loads(said)
        assert list(person) == ["name", "age"]
        assert isinstance(person["name"], str)
        assert isinstance(person["age"], int)


@pytest.mark.parametrize("seed", range(10))
def test_a_pattern_is_matched_as_a_whole(seed: int) -> None:
    said, ended = answer(compiler().compile(Grammar.of_pattern("[0-9]{3}-[a-z]{2,4}")), seed)

    assert ended
    assert re.fullmatch(rb"[0-9]{3}-[a-z]{2,4}", said)


def test_the_end_comes_only_where_the_grammar_may_end() -> None:
    wanting_end = np.zeros(VOCAB_SIZE, dtype=np.float32)
    wanting_end[END] = 50.0
    sampler = Sampler(GREEDY, (), VOCAB_SIZE, compiler().compile(Grammar.of_pattern("ab?")).fresh())

    said = [sampler.sample(wanting_end).token_id for _ in range(2)]

    assert said == [ord("a"), END]


def test_log_probabilities_stay_the_models_own() -> None:
    logits = logits_of(np.random.default_rng(1))
    guide = compiler().compile(Grammar.of_choices(["x"]))
    params = SamplingParams(temperature=0.0, top_logprobs=2)

    free = Sampler(params, (), VOCAB_SIZE).sample(logits)
    guided = Sampler(params, (), VOCAB_SIZE, guide.fresh()).sample(logits)

    assert guided.token_id == ord("x")
    assert guided.top == free.top
    assert guided.logprob is not None
    assert guided.logprob < free.top[0][1]


def test_guided_and_free_rows_share_a_batch_without_seeing_each_other() -> None:
    logits = np.stack([logits_of(np.random.default_rng(seed)) for seed in range(3)])
    guide = compiler().compile(Grammar.of_choices(["x", "y"]))
    samplers = [Sampler(GREEDY, (), VOCAB_SIZE, row_guide) for row_guide in (None, guide.fresh(), None)]
    before = logits.copy()

    rows = sample_rows(logits, samplers)

    assert (logits == before).all()
    assert rows[0] == SampledToken(int(logits[0].argmax()))
    assert rows[2] == SampledToken(int(logits[2].argmax()))
    assert piece(rows[1].token_id) in (b"x", b"y")


def test_a_guide_that_cannot_go_on_ends_the_answer_and_says_so() -> None:
    """Here by a token that breaks the grammar; a bound on its own work acts the same."""
    guide = compiler().compile(Grammar.of_pattern("abc")).fresh()
    guide.advance(ord("z"))
    sampler = Sampler(GREEDY, (), VOCAB_SIZE, guide)

    assert sampler.sample(np.zeros(VOCAB_SIZE, dtype=np.float32)).token_id == END
    assert sampler.cut_short


class StuckAfterTwo:
    """Lets two tokens through, then none."""

    end_token_id = END

    def __init__(self) -> None:
        self.n_said = 0

    def fresh(self) -> StuckAfterTwo:
        return StuckAfterTwo()

    def forbid(self, logits: np.ndarray) -> bool:
        return self.n_said < 2

    def advance(self, token_id: int) -> None:
        self.n_said += 1


def test_the_engine_ends_an_answer_whose_guide_is_stuck_and_no_other() -> None:
    engine = make_engine()
    stuck = Submit("stuck", (97,), 8, GREEDY, guide=StuckAfterTwo())

    outs = run_all(engine, stuck, Submit("free", (97,), 8, GREEDY))

    assert (text_of(outs["stuck"]), outs["stuck"][-1].finish_reason) == ("bc", "length")  # type: ignore[union-attr]
    assert text_of(outs["free"]) == "bcdefghi"


@pytest.mark.many
@pytest.mark.parametrize("name", TINY_VOCABULARIES)
def test_every_kind_of_vocabulary_spells_texts_and_no_special_token(name: str) -> None:
    metadata = TINY_VOCABULARIES[name]()
    tokenizer, size = Tokenizer(tokenizer_from_gguf(metadata)), len(metadata["tokenizer.ggml.tokens"])
    view = TokenView(
        size + 7, frozenset({size - 1}), tokenizer.special_ids, tokenizer.piece, tokenizer.encode
    )
    specials = [tokenizer.token(token_id) or "" for token_id in sorted(tokenizer.special_ids)]

    for text in ('{"a": 12}', " b", "b ", "\n", "ä", *specials):
        ids = view.tokens_of(text.encode())
        spelled = b"".join(map(tokenizer.piece, ids))
        assert not tokenizer.special_ids.intersection(ids)
        assert text.encode().startswith(spelled)


def test_a_text_that_names_the_end_token_does_not_end_the_answer() -> None:
    end = "<end>"

    def encode_special(text: str, _add: bool) -> list[int]:
        parts = text.split(end)
        ids = encode(parts[0])
        for part in parts[1:]:
            ids += [END, *encode(part)]
        return ids

    def named(token_id: int) -> bytes:
        return end.encode() if token_id == END else piece(token_id)

    special = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), named, encode_special))
    said, ended = answer(special.compile(Grammar.of_schema({"const": f"a{end}b"})), 0)

    assert (said, ended) == (f'"a{end}b"'.encode(), True)


def _refusal(make: Callable[[], Grammar]) -> str | None:
    """Why the grammar is refused; None where a few tokens of it could be said."""
    try:
        guide = compiler().compile(make())
    except RequestError as error:
        return str(error)
    sampler, rng = Sampler(GREEDY, (), VOCAB_SIZE, guide.fresh()), np.random.default_rng(0)
    assert all(sampler.sample(logits_of(rng)).token_id < VOCAB_SIZE for _ in range(20))
    return None


@pytest.mark.many
@pytest.mark.parametrize("name", schema_bombs())
def test_a_schema_bomb_is_refused_in_one_line_or_harmless(name: str) -> None:
    why = _refusal(lambda: Grammar.of_schema(schema_bombs()[name]))

    assert why is None or (len(why) < 500 and "\n" not in why)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[:20])
def test_a_pattern_bomb_is_refused_in_one_line_or_harmless(pattern: str) -> None:
    why = _refusal(lambda: Grammar.of_pattern(pattern))

    assert why is None or (len(why) < 500 and "\n" not in why)


@given(st.text(alphabet="ab()[]{}|*+?^\\,0123", max_size=40))
def test_any_text_has_a_weight(pattern: str) -> None:
    assert pattern_weight(pattern) >= 0


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="uniqueItems"):
        compiler().compile(Grammar.of_schema({"type": "array", "uniqueItems": True}))
    with pytest.raises(RequestError, match="Unsatisfiable"):
        compiler().compile(Grammar.of_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}))


def test_without_end_tokens_there_are_no_guides() -> None:
    endless = GuideCompiler(TokenView(VOCAB_SIZE, frozenset(), frozenset({END}), piece, encode))

    with pytest.raises(RequestError, match="no end token"):
        endless.compile(ANY_OBJECT)


def test_threads_that_ask_for_one_grammar_all_get_it() -> None:
    compiled: list[Guide] = []
    fresh = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))
    threads = [
        threading.Thread(target=lambda: compiled.append(fresh.compile(Grammar.of_schema(PERSON))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(compiled) == 6
    assert all(answer(guide, 3) == answer(compiled[0], 3) for guide in compiled)


def _together(n_patterns: int, keyword: str = "allOf") -> dict[str, object]:
    return {keyword: [{"type": "string", "pattern": f".*a.{{{index}}}b.*"} for index in range(n_patterns)]}


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        (_together(3), False),
        (_together(16), True),
        (_together(30), True),
        ({"properties": {"x": {"items": _together(16)}}}, True),
        (_together(30, "anyOf"), False),
        ({"allOf": [_together(20, "anyOf")] * 4}, True),
        ({"type": "integer", "multipleOf": 999983}, True),
        ({"type": "integer", "multipleOf": 1000}, False),
        ({"type": "number", "multipleOf": 0.01}, False),
        ({"type": "number", "multipleOf": 1e300}, False),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, True),
        ({"properties": {f"p{index}": {"multipleOf": 10007} for index in range(100)}}, False),
    ],
)
def test_constraints_that_must_hold_together_are_weighed_together(
    schema: dict[str, object], refused: bool
) -> None:
    if refused:
        with pytest.raises(RequestError, match="at a time"):
            Grammar.of_schema(schema)
    else:
        Grammar.of_schema(schema)


def test_a_compilation_that_is_refused_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema that passes the weighing, and would take gigabytes: others are compiled at once after it."""
    own = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))
    bomb = Grammar("json_schema", json.dumps(_together(30)))
    try:
        before = _resident_bytes()
        with pytest.raises(RequestError, match="too complex"):
            own.compile(bomb)
        grown = _resident_bytes() - before
        with monkeypatch.context() as patch:
            patch.setattr(own, "_compile_checked", lambda *_: pytest.fail("it is compiled again"))
            with pytest.raises(RequestError, match="too complex"):
                own.compile(bomb)

        assert own.compile(ANY_OBJECT) is not None
        assert grown < 32 << 20
    finally:
        own.close()


class ProverOfABusyMachine:
    """Gets to a job when it is asked for the second time."""

    def __init__(self) -> None:
        self.n_asked = 0

    def start(self) -> None:
        pass

    def ask(self, _request: bytes, _cancel: CancelToken | None) -> bytes:
        self.n_asked += 1
        if self.n_asked == 1:
            raise Unserved("the machine did not get to it within 30 s")
        return b"1"


def test_a_grammar_that_a_busy_machine_did_not_compile_is_compiled_when_it_is_asked_again() -> None:
    own = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))
    vars(own)["_prover"] = ProverOfABusyMachine()

    with pytest.raises(QueueFull, match=r"^the grammar was not compiled: [^\n]+; try again later$"):
        own.compile(Grammar.of_schema(PERSON))

    assert own.compile(Grammar.of_schema(PERSON)) is not None


def _resident_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

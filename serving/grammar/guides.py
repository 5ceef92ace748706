"""Structured output: guides forbid, token by token, whatever would break a grammar. llguidance parses; this
module adds our vocabulary in llguidance's form, the bounds of grammars from requests, a cache of compiled
grammars, and the masks on logits."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from phasewise.serving.errors import QueueFull, RequestError, ServingError
from phasewise.serving.grammar.grammar_limits import (
    JSON_OPTIONS,
    checked_choices,
    checked_pattern,
    checked_schema,
)
from phasewise.serving.processes.headroom import return_free_memory
from phasewise.serving.sandbox.confined import (
    Bounds,
    CancelToken,
    ConfinedProcess,
    JobRefused,
    Overrun,
    Unserved,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_COMPILED = 32
_MOST_COMPILED_BYTES = 24 << 20
_LARGE_BYTES = 1 << 20
"""A compilation that takes more leaves holes in the heap, which malloc would keep."""
_MOST_LARK_CHARACTERS = 256 * 1024
BOUNDS = Bounds(seconds=1.0, memory_bytes=96 << 20)
"""Limits of one compilation. A common schema takes some milliseconds and megabytes."""
_STACK_BYTES = 64 * 1024 * 1024  # llguidance follows references by recursion
_LONGEST_TOKEN_BYTES = 64
_UNHELD = re.compile(r'"(\w+)"|Unknown (format)|^(oneOf)', re.MULTILINE)
"""Matches the keywords in llguidance's warnings."""

_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,  # 1 to 2 kB each, for every answer
    "max_grammar_size": 50_000,
}


@runtime_checkable
class Guide(Protocol):
    """Position of one answer in its grammar. Used by one thread at a time."""

    def fresh(self) -> Guide:
        """A guide at the grammar's beginning. Thread-safe on a guide that is never advanced."""
        ...

    def forbid(self, logits: npt.NDArray[np.float32]) -> bool:
        """Set forbidden tokens' logits to -inf. False: all are forbidden, and `logits` is unchanged."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance by the answer's next token, which `forbid` has allowed."""
        ...

    @property
    def end_token_id(self) -> int:
        """The token that ends an answer when no other token can follow."""
        ...

    @property
    def recipe(self) -> GuideRecipe:
        """The guide as data, from which another process makes an equal guide (`late_guides.guide_of`)."""
        ...


class Grammar(NamedTuple):
    """Required form of an answer: JSON for a schema, text that a pattern matches as a whole, or text of our
    own grammar in llguidance's Lark."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    @classmethod
    def of_schema(cls, schema: object) -> Grammar:
        """Grammar of a JSON schema. RequestError: the schema is too large."""
        return cls("json_schema", checked_schema(schema))

    @classmethod
    def of_pattern(cls, pattern: str) -> Grammar:
        """Grammar of a regular expression. RequestError: the pattern is too large."""
        return cls("regex", checked_pattern(pattern))

    @classmethod
    def of_choices(cls, choices: list[str]) -> Grammar:
        """Grammar of exactly one of these texts. RequestError: there are too many."""
        return cls("regex", checked_choices(choices))

    @classmethod
    def of_lark(cls, text: str) -> Grammar:
        """Grammar in Lark that we wrote around schemas of a request. RequestError: it is too large."""
        if len(text) > _MOST_LARK_CHARACTERS:
            raise RequestError(
                f"the schemas of all tools have more than {_MOST_LARK_CHARACTERS} characters together; "
                "offer fewer or simpler tools"
            )
        return cls("lark", text)


@dataclass(frozen=True, slots=True)
class CallMarks:
    """Texts that begin tool calls. `only_first`: True: only white space may precede them."""

    triggers: tuple[bytes, ...]
    only_first: bool


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Marks around a model's thoughts. `is_open`: True: the prompt has begun a thought. `opening_token`:
    single token that spells `opening`, allowed first whatever the grammar says; None: there is none."""

    opening: bytes
    closing: bytes
    is_open: bool
    opening_token: int | None


@dataclass(frozen=True, slots=True)
class GuideRecipe:
    """A guide as data: its grammar, and what may precede it. Thoughts come before calls."""

    grammar: Grammar
    n_bytes: int = 0
    """Bytes of the compiled grammar, as measured by the process that proved it."""
    calls: CallMarks | None = None
    thoughts: ThoughtMarks | None = None


ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


@dataclass(frozen=True)
class TokenView:
    """A vocabulary as grammars see it. `vocab_size`: columns of the logits; unused ids have empty pieces."""

    vocab_size: int
    end_token_ids: frozenset[int]
    special_ids: frozenset[int]
    piece: Callable[[int], bytes]
    encode: Callable[[str, bool], list[int]]

    @cached_property
    def pieces(self) -> list[bytes]:
        return [self.piece(token_id) for token_id in range(self.vocab_size)]

    def as_told(self) -> bytes:
        """The vocabulary as JSON for the grammar job of the confined process."""
        return json.dumps(
            {
                "pieces": [piece.decode("latin-1") for piece in self.pieces],
                "ends": sorted(self.end_token_ids),
                "specials": sorted(self.special_ids),
            }
        ).encode()

    def tokens_of(self, text: bytes) -> list[int]:
        """Tokens that spell exactly these bytes within a text, cut as the tokenizer would if possible.
        Special tokens are excluded: their text is data here, and must not end an answer."""
        try:
            ids = self._encode_within(text.decode())
        except UnicodeDecodeError:
            ids = []
        spelled = b"".join(self.pieces[token_id] for token_id in ids)
        if spelled == text and not self.special_ids.intersection(ids):
            return ids
        return self._longest_first(text)

    def _encode_within(self, text: str) -> list[int]:
        if not self._opening:
            return self.encode(text, False)
        ids = self.encode(f"\n{text}", False)
        return ids[len(self._opening) :] if ids[: len(self._opening)] == self._opening else []

    @cached_property
    def _opening(self) -> list[int]:
        """Tokens of a newline to put before a text if the tokenizer adds a space there; else empty."""
        spelled = b"".join(self.pieces[token_id] for token_id in self.encode("a", False))
        return [] if spelled == b"a" else self.encode("\n", False)

    @cached_property
    def _id_of_piece(self) -> dict[bytes, int]:
        plain = (
            token_id
            for token_id in range(self.vocab_size)
            if token_id not in self.special_ids and self.pieces[token_id]
        )
        return {self.pieces[token_id]: token_id for token_id in plain}

    def _longest_first(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + _LONGEST_TOKEN_BYTES), start, -1):
                token_id = self._id_of_piece.get(text[start:end])
                if token_id is not None:
                    ids.append(token_id)
                    break
            else:
                return ids  # the vocabulary cannot spell it
            start = end
        return ids


class _Kept(NamedTuple):
    """Cached outcome of one grammar: a matcher at its beginning or a refusal, and its bytes."""

    outcome: LLMatcher | str
    n_bytes: int


class GuideCompiler:
    """Compiles grammars into guides for one vocabulary. Thread-safe; nothing is loaded before the first call.
    A confined process compiles each grammar first, within bounds of memory and time (`confined`); a proven
    grammar is compiled again here."""

    def __init__(self, tokens: TokenView, bounds: Bounds = BOUNDS) -> None:
        self.tokens = tokens
        self._bounds = bounds
        self._first_use = threading.Lock()
        self._compiling = threading.Lock()
        self._cache_lock = threading.Lock()
        self._cache: OrderedDict[Grammar, _Kept] = OrderedDict()

    def warm(self) -> None:
        """Load everything now that the first grammar would wait for: some tenths of a second."""
        with suppress(ServingError):  # the first grammar will say what is wrong
            self.compile(ANY_OBJECT)

    def _load(self) -> None:
        with self._first_use:
            _ = self._tokenizer
            self._prover.start()

    def close(self) -> None:
        """End the confined process; the next grammar restarts it."""
        with self._first_use:
            self._prover.close()

    def compile(self, grammar: Grammar, cancel: CancelToken | None = None) -> MatcherGuide:
        """A guide at the beginning of `grammar`, to be copied by `fresh`. Blocks: not for the event loop.
        `cancel`: ends the compilation. RequestError: the grammar is refused. QueueFull: the machine did not
        get to it. Abandoned: `cancel` has ended."""
        if not self.tokens.end_token_ids:
            raise RequestError("this model names no end token, so its answers cannot be held to a grammar")
        return self._guide(grammar, self._known(grammar) or self._compile_checked(grammar, cancel))

    def compile_proven(self, grammar: Grammar, n_bytes: int) -> Guide:
        """A guide for a grammar proven by another process, to `n_bytes`. RequestError: it is refused."""
        with self._first_use:
            _ = self._tokenizer
        return self._guide(grammar, self._known(grammar) or self._compile_here(grammar, n_bytes))

    def known(self, grammar: Grammar) -> MatcherGuide | None:
        """The guide of a grammar in the cache; None: it is not there. Does not block."""
        kept = self._known(grammar)
        return None if kept is None or isinstance(kept.outcome, str) else self._guide(grammar, kept)

    def _guide(self, grammar: Grammar, kept: _Kept) -> MatcherGuide:
        if isinstance(kept.outcome, str):
            raise RequestError(kept.outcome)
        recipe = GuideRecipe(grammar, kept.n_bytes)
        return MatcherGuide(recipe, kept.outcome, self.tokens.vocab_size, min(self.tokens.end_token_ids))

    def _known(self, grammar: Grammar) -> _Kept | None:
        with self._cache_lock:
            kept = self._cache.get(grammar)
            if kept is not None:
                self._cache.move_to_end(grammar)
            return kept

    def _keep(self, grammar: Grammar, kept: _Kept) -> _Kept:
        with self._cache_lock:
            self._cache[grammar] = kept
            self._make_room(0)
        return kept

    def _make_room(self, n_bytes: int) -> None:
        """Drop the grammars that were used longest ago until `n_bytes` more fit."""
        while self._cache and (
            len(self._cache) > _MOST_COMPILED
            or sum(kept.n_bytes + len(grammar.text) for grammar, kept in self._cache.items()) + n_bytes
            > _MOST_COMPILED_BYTES
        ):
            self._cache.popitem(last=False)

    def _compile_checked(self, grammar: Grammar, cancel: CancelToken | None) -> _Kept:
        """Compile a grammar in the confined process, then here: one at a time, on one core."""
        self._load()
        try:
            n_bytes = int(self._prover.ask(json.dumps(grammar).encode(), cancel))
        except Unserved as error:
            raise QueueFull(f"the grammar was not compiled: {error}; try again later", 1) from error
        except JobRefused as error:
            return self._keep(grammar, _Kept(str(error), 0))
        except Overrun as error:
            return self._keep(grammar, _Kept(f"the grammar is too complex: {error}; make it simpler", 0))
        return self._compile_here(grammar, n_bytes)

    def _compile_here(self, grammar: Grammar, n_bytes: int) -> _Kept:
        with self._compiling:
            kept = self._known(grammar)
            if kept is not None:
                return kept
            with self._cache_lock:
                self._make_room(n_bytes)
            outcome = _with_stack(lambda: compile_grammar(grammar, self._tokenizer, self.tokens.vocab_size))
            if n_bytes > _LARGE_BYTES:
                return_free_memory()
            return self._keep(grammar, _Kept(outcome, n_bytes))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return open_tokenizer(self.tokens)

    @cached_property
    def _prover(self) -> ConfinedProcess:
        return ConfinedProcess("grammar", self.tokens.as_told(), self._bounds)


def open_tokenizer(tokens: TokenView) -> LLTokenizer:
    """The vocabulary as llguidance's token tree."""
    from llguidance import LLTokenizer

    ends = sorted(tokens.end_token_ids)
    return LLTokenizer(_Wrapped(tokens, ends[0]), tokens.vocab_size, ends)  # type: ignore[arg-type]


class _Wrapped:
    """A TokenView with the attributes that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: TokenView, end_token_id: int) -> None:
        self.eos_token_id = end_token_id
        self.tokens = tokens.pieces
        self.special_token_ids = sorted(tokens.special_ids)
        self._tokens_of = tokens.tokens_of

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokens_of(text.encode() if isinstance(text, str) else text)


class MatcherGuide:
    """A `Guide` over a matcher of llguidance."""

    def __init__(self, recipe: GuideRecipe, matcher: LLMatcher, vocab_size: int, end_token_id: int) -> None:
        self.recipe = recipe
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
        self.end_token_id = end_token_id

    @property
    def unheld(self) -> frozenset[str]:
        """Keywords of the schemas that the grammar does not enforce."""
        told = "\n".join(self._matcher.get_grammar_warnings())
        return frozenset(filter(None, chain.from_iterable(_UNHELD.findall(told))))

    def fresh(self) -> MatcherGuide:
        return MatcherGuide(self.recipe, self._matcher.deep_copy(), self._vocab_size, self.end_token_id)

    def forbid(self, logits: npt.NDArray[np.float32]) -> bool:
        allowed = _allowed(self._matcher, self._mask, self._vocab_size)
        n_allowed = 0 if self._matcher.is_error() else np.count_nonzero(allowed)
        if n_allowed == 0:
            return False
        if 2 * n_allowed < self._vocab_size:
            ids = np.flatnonzero(allowed)
            kept = logits[ids]
            logits.fill(-np.inf)
            logits[ids] = kept
        else:
            logits[np.flatnonzero(allowed == 0)] = -np.inf
        return True

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)  # where it fails, the next `forbid` says so


def _allowed(matcher: LLMatcher, mask: npt.NDArray[np.uint32], vocab_size: int) -> npt.NDArray[np.uint8]:
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size)


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer, vocab_size: int) -> LLMatcher | str:
    """The grammar's matcher with its first mask computed, or the reason why there is none."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
    try:
        matcher = LLMatcher(tokenizer, _for_llguidance(grammar), log_level=0, limits=limits)
    except ValueError as error:  # JSON that Rust does not read, such as half a surrogate pair
        return f"the grammar cannot be used: {_in_one_line(str(error))}"
    if not matcher.is_error():
        allowed = _allowed(matcher, np.zeros((vocab_size + 31) // 32, dtype=np.uint32), vocab_size)
        if not matcher.is_error() and allowed.any():
            return matcher
    return f"the grammar cannot be used: {_in_one_line(matcher.get_error()) or 'no text is allowed by it'}"


def _for_llguidance(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "lark":
        return grammar.text
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_json_schema(grammar.text, overrides={**JSON_OPTIONS, "lenient": False})  # type: ignore[arg-type]


def _in_one_line(message: str) -> str:
    if message.startswith("panic"):
        return "it is too complex"
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]


def _with_stack(work: Callable[[], LLMatcher | str]) -> LLMatcher | str:
    """Run `work` on a thread with a large stack, and return its result."""
    outcome: Future[LLMatcher | str] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # the one that waits gets it
            outcome.set_exception(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        # No daemon: where the interpreter ends under one, unwinding through llguidance's frames is a crash.
        threading.Thread(target=run, name="grammar").start()
    finally:
        threading.stack_size(before)
    return outcome.result()

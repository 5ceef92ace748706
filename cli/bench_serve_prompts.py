"""Prompts of a wished number of tokens, different for every request so that no cache has seen them.

Where a server takes token ids they are drawn at random, and the number is exact. Else they are common words,
and the server's own count of two probes says how many tokens a word has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from phasewise.cli.bench_serve_client import Prompt

ID_RANGE = (1000, 30000)
"""Plain tokens in the vocabularies of all common models: neither special ones nor beyond the end."""

_TEXT = """
the of and to in is that for it was on with as be by at this had not are but from or have an they which
one you were all her she there would their we him been has when who will no more if out so what up its
about into than them can only other time new some could these two may first then do any like my now over
such our man me even most made after also did many off before must well back through years where much
your way down should because long each just state those people too make world own see men work how still
good
"""
WORDS = tuple(_TEXT.split())
"""One token each, with the space before, in almost every vocabulary that knows English."""

FEW, MANY = 32, 96
"""Words of the two probes."""

PROBE_TOKENS = 16
MOST_ADDED = 2
"""Tokens that a server may put before ids: the one that opens a text."""


class Prompts(Protocol):
    """Prompts by number; the same for the same number and seed."""

    def __call__(self, index: int, n_tokens: int) -> Prompt: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class IdPrompts:
    """Random token ids. `added`: tokens that the server puts before them."""

    seed: int
    low: int = ID_RANGE[0]
    high: int = ID_RANGE[1]
    added: int = 0

    def __call__(self, index: int, n_tokens: int) -> Prompt:
        drawn = np.random.default_rng((self.seed, index)).integers(
            self.low, self.high, max(1, n_tokens - self.added)
        )
        ids: list[int] = drawn.tolist()
        return ids

    def describe(self) -> str:
        return "random token ids"


@dataclass(frozen=True)
class TextPrompts:
    """Random words. `added`: tokens of an empty prompt, such as a chat template's."""

    seed: int
    tokens_a_word: float = 1.0
    added: float = 0.0
    is_measured: bool = False

    def __call__(self, index: int, n_tokens: int) -> Prompt:
        return words(self.seed, index, max(1, round((n_tokens - self.added) / self.tokens_a_word)))

    def describe(self) -> str:
        if not self.is_measured:
            return "random words, taken for a token each: the server does not count them"
        return f"random words, {self.tokens_a_word:.2f} tokens each and {self.added:.0f} around them"


Count: TypeAlias = Callable[[Prompt], Awaitable[int | None]]
"""How many tokens a server finds in a prompt; None where it refuses or does not say."""


async def calibrated(count: Count, seed: int, *, may_use_ids: bool) -> Prompts:
    """Token ids where the server takes them and counts as many; else words, by what it counts."""
    if may_use_ids:
        found = await count(IdPrompts(seed)(0, PROBE_TOKENS))
        if found is not None and PROBE_TOKENS <= found <= PROBE_TOKENS + MOST_ADDED:
            return IdPrompts(seed, added=found - PROBE_TOKENS)
    few, many = await count(words(seed, 0, FEW)), await count(words(seed, 0, MANY))
    if few is None or many is None or many <= few:
        return TextPrompts(seed)
    tokens_a_word = (many - few) / (MANY - FEW)
    return TextPrompts(seed, tokens_a_word, max(0.0, few - FEW * tokens_a_word), is_measured=True)


def words(seed: int, index: int, n_words: int) -> str:
    """Every word once before one comes again, so that a few words are like many."""
    rng = np.random.default_rng((seed, index))
    order = np.concatenate([rng.permutation(len(WORDS)) for _ in range(-(-n_words // len(WORDS)))])
    return " " + " ".join(WORDS[at] for at in order[:n_words])

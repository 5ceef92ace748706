"""Prompts of a given number of tokens, different for every request so that no prefix cache has them.

If the server accepts token ids, they are drawn at random and the number is exact. Otherwise prompts are
common words, and the server's token counts of two probes give the tokens per word.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from phasewise.loadtest.client import Prompt
from phasewise.tuner.config.lengths import RequestLengths

ID_RANGE = (1000, 30000)
"""Token ids that are plain tokens in the vocabularies of all common models."""

_TEXT = """
the of and to in is that for it was on with as be by at this had not are but from or have an they which
one you were all her she there would their we him been has when who will no more if out so what up its
about into than them can only other time new some could these two may first then do any like my now over
such our man me even most made after also did many off before must well back through years where much
your way down should because long each just state those people too make world own see men work how still
good
"""
WORDS = tuple(_TEXT.split())
"""Words that are each one token, with the space before, in almost every English vocabulary."""

FEW, MANY = 32, 96
"""Numbers of words in the two probes that measure the tokens per word."""

_OF_BLOCKS = 1 << 62
"""Element of a block's random seed, in the place where a prompt's seed has the prompt's index."""

PROBE_TOKENS = 16
MOST_ADDED = 2
"""Most tokens that a server may put before the ids, such as a begin-of-text token."""

Prompts: TypeAlias = Callable[[int, RequestLengths], Prompt]
"""Makes the prompt of a request from the request's index; equal blocks are equal beginnings of prompts."""

T = TypeVar("T")
Draw: TypeAlias = Callable[[tuple[int, ...], int], list[T]]


def _drawn(draw: Draw[T], seed: tuple[int, int], count: int, blocks: Sequence[int], of_block: int) -> list[T]:
    """Draw a prompt's parts, `of_block` for each leading block. seed: the run's, and the prompt's index."""
    parts = [part for block in blocks for part in draw((seed[0], _OF_BLOCKS, block), of_block)]
    if len(parts) < count:
        parts += draw(seed, count - len(parts))
    return parts[:count]


@dataclass(frozen=True)
class IdPrompts:
    """Prompts of random token ids. `added`: tokens that the server puts before the ids."""

    seed: int
    added: int = 0

    def __call__(self, index: int, request: RequestLengths) -> Prompt:
        count = max(1, request.prompt_tokens - self.added)
        return _drawn(_ids, (self.seed, index), count, request.blocks, request.block_tokens)

    def describe(self) -> str:
        return f"random token ids of seed {self.seed}"


@dataclass(frozen=True)
class TextPrompts:
    """Prompts of random words. `added`: tokens of an empty prompt, such as a chat template's."""

    seed: int
    tokens_a_word: float = 1.0
    added: float = 0.0
    is_measured: bool = False

    def __call__(self, index: int, request: RequestLengths) -> Prompt:
        count = max(1, round((request.prompt_tokens - self.added) / self.tokens_a_word))
        n_of_block = max(1, round(request.block_tokens / self.tokens_a_word))
        return _text(_drawn(words, (self.seed, index), count, request.blocks, n_of_block))

    def describe(self) -> str:
        if not self.is_measured:
            return f"random words of seed {self.seed}, taken for a token each: the server does not count them"
        each, around = f"{self.tokens_a_word:.2f} tokens each", f"{self.added:.0f} around them"
        return f"random words of seed {self.seed}, {each} and {around}"


Count: TypeAlias = Callable[[Prompt], Awaitable[int | None]]
"""The number of tokens that a server counts in a prompt; None where it refuses or gives no count."""


async def calibrated(count: Count, seed: int, *, may_use_ids: bool) -> IdPrompts | TextPrompts:
    """Make prompts: of token ids if the server accepts ids and counts as many, otherwise of words."""
    if may_use_ids:
        n_counted = await count(_ids((seed, 0), PROBE_TOKENS))
        if n_counted is not None and PROBE_TOKENS <= n_counted <= PROBE_TOKENS + MOST_ADDED:
            return IdPrompts(seed, added=n_counted - PROBE_TOKENS)
    few, many = [await count(_text(words((seed, 0), n_words))) for n_words in (FEW, MANY)]
    if few is None or many is None or many <= few:
        return TextPrompts(seed)
    tokens_a_word = (many - few) / (MANY - FEW)
    return TextPrompts(seed, tokens_a_word, max(0.0, few - FEW * tokens_a_word), is_measured=True)


def _text(drawn: Sequence[str]) -> str:
    return "".join(f" {word}" for word in drawn)


def words(seed: tuple[int, ...], count: int) -> list[str]:
    """Draw words. Every word appears once before any repeats, so short texts are like long."""
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(WORDS)) for _ in range(-(-count // len(WORDS)))])
    return [WORDS[position] for position in order[:count]]


def _ids(seed: tuple[int, ...], count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(*ID_RANGE, count).tolist()
    return ids

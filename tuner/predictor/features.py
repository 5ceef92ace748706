"""A prompt as numbers: a bag of hashed pieces of its text, and a few figures about the request.

Pieces are tokens, pairs of neighbours, and the first and last telling tokens, each hashed into its own region
of one table. A piece weighs more the fewer prompts have it (inverse document frequency, bounded), so that
pieces of every prompt, such as a chat template's tokens, weigh nothing. All computations are on arrays over
the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phasewise.tuner.predictor.log import PromptFacts

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

REGION_BITS = 13
REGION_ROWS = 1 << REGION_BITS
TOKENS, PAIRS, FIRST, LAST, SYSTEM = range(5)
"""Regions of the table of pieces."""
N_ROWS = REGION_ROWS * 5
EDGE_TOKENS = 4
"""The number of telling tokens that count as first, and as last."""
TELLING = 0.5
"""Inverse document frequency from which a token is telling: it distinguishes prompts."""
MOST_RARITY = 1.5
FEWEST_PROMPTS = 2
"""A piece of fewer prompts weighs nothing, since nothing general can be learnt from it."""
MAX_TOKENS_READ = 2048
"""The longest prompt that is read whole; of a longer one both ends are read."""
N_FIGURES = 7

_MULTIPLIER = np.uint64(
    0x9E3779B97F4A7C15
)  # 2^64 / golden ratio: multiplicative hashing (Knuth, vol. 3, 6.4)


class Bag(NamedTuple):
    """The table rows of a prompt's pieces, with weights whose squares add up to 1 (or no pieces)."""

    rows: Ints
    weights: Floats


def pieces_of(facts: PromptFacts, rarity: Floats) -> Ints:
    """The table rows of all of a prompt's pieces. `rarity`: by row; decides which tokens are telling."""
    tokens = _read(facts.token_ids)
    words = _rows(TOKENS, tokens)
    pairs = _rows(PAIRS, tokens[:-1] * np.uint64(1_000_003) + tokens[1:])
    telling = tokens[rarity[words] >= TELLING]
    first, last = telling[:EDGE_TOKENS], telling[-EDGE_TOKENS:][::-1]
    system = [] if facts.system_prompt_id is None else [_text_number(facts.system_prompt_id)]
    return np.concatenate(
        [
            words,
            pairs,
            _rows(FIRST, _numbered(first)),
            _rows(LAST, _numbered(last)),
            _rows(SYSTEM, np.array(system, dtype=np.uint64)),
        ]
    )


def bag_of(facts: PromptFacts, rarity: Floats) -> Bag:
    """A prompt's pieces with their weights."""
    rows = pieces_of(facts, rarity)
    weights = rarity[rows]
    length = float(np.sqrt(np.dot(weights, weights)))
    return Bag(rows, weights / np.float32(length)) if length else Bag(rows[:0], weights[:0])


def learn_rarity(prompts: Sequence[PromptFacts]) -> Floats:
    """The inverse document frequency of each row: log((N + 1) / (prompts with the piece + 1)), bounded; 0
    where every prompt has the piece."""
    plain = _rarity(prompts, np.zeros(N_ROWS, np.float32))
    return _rarity(prompts, plain)  # the second time the first and last telling tokens are known


def _rarity(prompts: Sequence[PromptFacts], earlier: Floats) -> Floats:
    having = np.zeros(N_ROWS, np.int64)
    for facts in prompts:
        having[np.unique(pieces_of(facts, earlier))] += 1
    rarity = np.minimum(np.log((len(prompts) + 1) / (having + 1)), MOST_RARITY)
    return np.where(having >= FEWEST_PROMPTS, rarity, 0).astype(np.float32)


def figures_of(facts: PromptFacts) -> Floats:
    """The figures of a request beside its text, not yet scaled: [N_FIGURES]."""
    n_tokens = len(facts.token_ids)
    n_different = len(set(facts.token_ids[:MAX_TOKENS_READ]))
    return np.array(
        [
            np.log1p(n_tokens),
            n_tokens / 512,
            n_different / max(1, min(n_tokens, MAX_TOKENS_READ)),
            facts.temperature,
            facts.temperature == 0,
            np.log(facts.limit),
            np.log(max(1, facts.n_messages)),
        ],
        dtype=np.float32,
    )


def _read(token_ids: Sequence[int]) -> npt.NDArray[np.uint64]:
    if len(token_ids) > MAX_TOKENS_READ:
        half = MAX_TOKENS_READ // 2
        token_ids = [*token_ids[:half], *token_ids[-half:]]
    return np.array(token_ids, dtype=np.uint64)


def _numbered(tokens: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each token combined with its position into one number."""
    return np.array(
        [token * EDGE_TOKENS + place for place, token in enumerate(tokens.tolist())], dtype=np.uint64
    )


def _rows(region: int, numbers: npt.NDArray[np.uint64]) -> Ints:
    mixed = (numbers + np.uint64(region + 1)) * _MULTIPLIER
    return (mixed >> np.uint64(64 - REGION_BITS)).astype(np.int64) + region * REGION_ROWS


def _text_number(text: str) -> int:
    """The FNV-1a hash of the text's first 256 bytes, 64 bits."""
    number = 0xCBF29CE484222325
    for byte in text.encode("utf-8", "surrogatepass")[:256]:
        number = (number ^ byte) * 0x100000001B3 % (1 << 64)
    return number

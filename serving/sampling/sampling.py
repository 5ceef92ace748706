"""Sampling from logits to the next token of each sequence.

Order, as in transformers and vLLM: penalties and bias on the logits, temperature, then top-k, top-p and min-p
on the probabilities that the filter before left. A request draws one number per token from its own generator,
so that its result depends on its seed and logits alone, never on the rest of the batch. Log-probabilities are
the model's own: before penalties, bias and temperature.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import argmax, exponential
from phasewise.cython_kernels.exact import logarithm
from phasewise.serving.errors import RequestError, StepFailed
from phasewise.serving.grammar.guides import Guide

FloatVector = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

_BLOCK = 256  # weights summed at a time
_LEAST_WEIGHTS = (1e-2, 1e-4, 1e-6)  # of the likeliest's: a nucleus seldom reaches below the first
_FOLDED_TO = 64  # columns for each of the k largest that are looked for
_GREEDY_BELOW = 1e-4  # temperatures under this are 0: logits divided by less overflow
_MAX_SEED = 2**64


class _Scratch(threading.local):
    """Reusable rows of each thread: allocating memory of this size costs more than the work done in it."""

    def __init__(self) -> None:
        self._rows: dict[str, FloatVector] = {}

    def row(self, name: str, size: int) -> FloatVector:
        row = self._rows.get(name)
        if row is None or row.size < size:
            row = self._rows[name] = np.empty(size, dtype=np.float32)
        return row[:size]


_scratch = _Scratch()


def _require(holds: bool, name: str, wanted: str, got: object) -> None:
    if not holds:
        raise RequestError(f"{name} must be {wanted}, not {got}", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Temperature 0 is greedy, whatever the filters say."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # on prompt and answer: divides positive logits, multiplies others
    frequency_penalty: float = 0.0  # on the answer, times the number of occurrences
    presence_penalty: float = 0.0  # on the answer, once
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    """Likeliest tokens to report beside the sampled one, with log-probabilities; None: no
    log-probabilities."""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", "between 0 and 100", self.temperature)
        _require(self.top_k is None or self.top_k >= 1, "top_k", "at least 1", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        penalty = self.repetition_penalty
        _require(0.01 <= penalty <= 100, "repetition_penalty", "between 0.01 and 100", penalty)
        for name in ("frequency_penalty", "presence_penalty"):
            _require(abs(getattr(self, name)) <= 2, name, "between -2 and 2", getattr(self, name))
        for bias in self.logit_bias.values():
            _require(abs(bias) <= 100, "logit_bias", "between -100 and 100", bias)

    @property
    def reshapes_logits(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or bool(self.logit_bias)
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW


GREEDY = SamplingParams(temperature=0.0)


class SampledToken(NamedTuple):
    """A sampled token. `logprob`: None unless asked for. `top`: (token id, log-probability), likeliest first.
    `begin`: index of the answer's character where the token begins, reported with its log-probability."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    begin: int = 0


class PromptToken(NamedTuple):
    """A prompt token as the model sees it after the tokens before it; for the first all but its id is None.
    `top`: (token id, log-probability), likeliest first. `rank`: 1 is the likeliest."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()


class RowWitness(Protocol):
    """Receives the unchanged row of logits that each token is sampled from."""

    def add(self, logits: FloatVector) -> None: ...


class Sampler:
    """State of one request's sampling: its generator, the tokens so far, its grammar guide. `witness`:
    receives every row of logits, for a receipt. `cut_short`: True if the guide could not go on, so that the
    last token is an end token that was not sampled."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        guide: Guide | None = None,
        witness: RowWitness | None = None,
    ) -> None:
        self.params = params
        self.guide = guide
        self.witness = witness
        self.cut_short = False
        self._check_ids(vocab_size)
        seed = secrets.randbits(64) if params.seed is None else params.seed % _MAX_SEED
        self._rng = None if params.is_greedy else np.random.Generator(np.random.PCG64(seed))
        self._uniforms: deque[float] = deque()  # drawn, but not used yet
        self._answer = _Tally(())
        self._seen = _Tally(prompt_token_ids if params.repetition_penalty != 1.0 else ())
        self._biased = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias))
        self._biases = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=self._biased.size)

    @property
    def needs_largest_alone(self) -> bool:
        """True if sampling needs only the largest logit of a row."""
        params = self.params
        is_plain = params.is_greedy and not params.reshapes_logits and params.top_logprobs is None
        return is_plain and self.guide is None and self.witness is None

    def begin_after(self, token_ids: Sequence[int]) -> None:
        """Continue after `token_ids`, sampled elsewhere with one number of the generator each."""
        if self._rng is not None:
            self._rng.random(len(token_ids))
        for token_id in token_ids:
            if self.guide is not None:
                self.guide.advance(token_id)
            if self.params.reshapes_logits:
                self._answer.add(token_id)
                self._seen.add(token_id)

    def sample(self, logits: FloatVector, against: tuple[int, FloatVector] | None = None) -> SampledToken:
        """Sample a token from `logits` (float32 [vocab], unchanged). StepFailed: they are not numbers.
        `against`: a draft, and the probabilities (float32 [vocab]) that it was drawn from: accept the draft
        as often as the target distribution allows, else draw from the positive part of target minus these,
        which has the same distribution (Leviathan et al. 2023, section 2.3 and appendix A.1)."""
        params = self.params
        if self.witness is not None:
            self.witness.add(logits)
        shaped = self._reshape(logits) if params.reshapes_logits else logits
        if self.guide is None:
            token_id = self._choose(shaped, against)
        else:
            token_id = self._choose_guided(shaped, self.guide, against)
        if params.reshapes_logits:
            self._answer.add(token_id)
            self._seen.add(token_id)
        if params.top_logprobs is None:
            return SampledToken(token_id)
        return _with_logprobs(logits, token_id, params.top_logprobs)

    def propose(
        self, logits: FloatVector, n_ahead: int, rng: np.random.Generator
    ) -> tuple[int, FloatVector | None]:
        """Draft the token that will be sampled after `n_ahead` others, from a draft model's logits. Greedy:
        the likeliest token. With a seed: the token at the number that the generator will draw. Else: a token
        drawn by `rng`, and the probabilities (float32 [vocab]) it was drawn from."""
        params = self.params
        if params.is_greedy:
            return int(logits.argmax()), None
        if params.seed is not None:
            return _draw(logits, params, self._uniform_ahead(n_ahead)), None
        chances = _probabilities(logits, params)
        return _place(chances, float(rng.random())), chances

    def _choose(self, shaped: FloatVector, against: tuple[int, FloatVector] | None) -> int:
        token_id = int(shaped.argmax())
        _require_finite(float(shaped[token_id]))
        if self._rng is None:
            return token_id
        if against is None:
            return _draw(shaped, self.params, self._uniform())
        drafted, chances = against
        wanted = _probabilities(shaped, self.params)
        if self._uniform() * chances[drafted] < wanted[drafted]:
            return drafted
        left = np.maximum(wanted - chances, 0)
        return _place(left if left.any() else wanted, self._uniform())

    def _uniform(self) -> float:
        """Take the next number of the request's generator."""
        self._uniform_ahead(0)
        return self._uniforms.popleft()

    def _uniform_ahead(self, n_ahead: int) -> float:
        """The number that the generator will give after `n_ahead` others."""
        assert self._rng is not None
        while len(self._uniforms) <= n_ahead:
            self._uniforms.append(float(self._rng.random()))
        return self._uniforms[n_ahead]

    def _choose_guided(
        self, shaped: FloatVector, guide: Guide, against: tuple[int, FloatVector] | None
    ) -> int:
        _require_finite(float(shaped.max()))
        allowed = shaped if self.params.reshapes_logits else _copied(shaped)
        if not guide.forbid(allowed):
            self.cut_short = True
            return guide.end_token_id
        token_id = self._choose(allowed, against)
        guide.advance(token_id)
        return token_id

    def _reshape(self, logits: FloatVector) -> FloatVector:
        params, shaped = self.params, _copied(logits)
        if params.repetition_penalty != 1.0:
            seen = shaped[self._seen.ids]
            penalty = np.float32(params.repetition_penalty)
            shaped[self._seen.ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if params.frequency_penalty or params.presence_penalty:
            said = self._answer
            shaped[said.ids] -= params.frequency_penalty * said.counts + params.presence_penalty
        shaped[self._biased] += self._biases
        return shaped

    def _check_ids(self, vocab_size: int) -> None:
        for token_id in self.params.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"logit_bias names token {token_id}, but ids are 0 to {vocab_size - 1}", "logit_bias"
                )


class _Tally:
    """Distinct tokens so far and their counts, as growing arrays."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        for token_id in token_ids:
            self.add(token_id)

    @property
    def ids(self) -> TokenIds:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> FloatVector:
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == self._ids.size:
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._ids[place], self._counts[place] = token_id, 0
        self._counts[place] += 1


def sample_rows(logits: npt.NDArray[np.float32], samplers: Sequence[Sampler]) -> list[SampledToken]:
    """Sample one token for each row of `logits` (float32 [n, vocab]) by the sampler of the same index."""
    if all(sampler.needs_largest_alone for sampler in samplers):
        return _greedy_rows(logits)
    return [sampler.sample(row) for sampler, row in zip(samplers, logits, strict=True)]


def score_rows(
    logits: npt.NDArray[np.float32], token_ids: Sequence[int], n_top: int
) -> Iterator[PromptToken]:
    """For each row of `logits` (float32 [n, vocab]) the token of the same index, with its log-probability,
    rank and the `n_top` likeliest tokens. StepFailed: the logits are not numbers."""
    for row, token_id in zip(logits, token_ids, strict=True):
        _require_finite(float(row.max()))
        _, logprob, top, _ = _with_logprobs(row, token_id, n_top)
        yield PromptToken(token_id, logprob, 1 + int(np.count_nonzero(row > row[token_id])), top)


def sample_run(
    logits: npt.NDArray[np.float32],
    sampler: Sampler,
    draft: Sequence[int],
    chances: Sequence[FloatVector],
    end_token_ids: Container[int],
) -> list[SampledToken]:
    """Sample the tokens that one step gives to an answer: the accepted drafts, then the token after them.
    `logits`: float32 [1 + drafts, vocab], after the answer's last token and after each draft. Tokens are
    sampled as without drafts; the first that differs from its draft, or an end token, ends the run.
    `chances`: the probabilities of each draft drawn at random, for a request without a seed; else empty."""
    run: list[SampledToken] = []
    by_chance = bool(chances) and sampler.params.seed is None and not sampler.params.is_greedy
    for n, row in enumerate(logits):
        is_drafted = n < len(draft)
        token = sampler.sample(row, (draft[n], chances[n]) if is_drafted and by_chance else None)
        run.append(token)
        if not is_drafted or token.token_id != draft[n] or token.token_id in end_token_ids:
            break
    return run


def _greedy_rows(logits: npt.NDArray[np.float32]) -> list[SampledToken]:
    token_ids = [int(argmax(row)) for row in logits]
    for row, token_id in enumerate(token_ids):
        _require_finite(float(logits[row, token_id]))
    return [SampledToken(token_id) for token_id in token_ids]


def _copied(logits: FloatVector) -> FloatVector:
    """A copy of a row in scratch memory, valid until the next call."""
    copy = _scratch.row("logits", logits.size)
    np.copyto(copy, logits)
    return copy


def _draw(logits: FloatVector, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the filtered distribution, laid out by token id."""
    ids, weights = _filtered(logits, params)
    place = _place(weights, uniform)
    return place if ids is None else int(ids[place])


def _probabilities(logits: FloatVector, params: SamplingParams) -> FloatVector:
    """The filtered distribution, float32 [vocab], in memory of its own."""
    ids, weights = _filtered(logits, params)
    scale = np.float32(1 / float(_block_sums(weights).sum()))
    if ids is None:
        return weights * scale
    probabilities = np.zeros(logits.size, dtype=np.float32)
    probabilities[ids] = weights * scale
    return probabilities


def _filtered(logits: FloatVector, params: SamplingParams) -> tuple[TokenIds | None, FloatVector]:
    """Tokens that the filters leave, ascending (None: all), and their weights, in a scratch row."""
    ids: TokenIds | None = None
    if params.top_k is not None and params.top_k < logits.size:
        ids = _largest(logits, params.top_k)
        logits = logits[ids]
    weights = _weights(logits, params.temperature)
    if params.top_p < 1.0 or params.min_p > 0.0:
        kept = _nucleus(weights, params.top_p, params.min_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def _weights(logits: FloatVector, temperature: float) -> FloatVector:
    """exp(logit / temperature), scaled so that the largest is 1, in a scratch row."""
    weights = _scratch.row("weights", logits.size)
    np.subtract(logits, logits.max(), out=weights)
    if temperature != 1.0:
        np.multiply(weights, np.float32(1 / temperature), out=weights)
    return exponential(weights, weights)


def _nucleus(weights: FloatVector, top_p: float, min_p: float) -> TokenIds:
    """Indexes that top-p and then min-p leave, ascending. The largest weight is 1."""
    if top_p == 1.0:
        return np.flatnonzero(weights >= np.float32(min_p))
    share = top_p * float(_block_sums(weights).sum())
    for least in (*_LEAST_WEIGHTS, 0.0):
        places = np.flatnonzero(weights >= np.float32(least))
        if float(weights[places].sum(dtype=np.float64)) >= share:
            break
    falling = np.sort(weights[places])[::-1]
    sums = np.cumsum(falling, dtype=np.float64)
    n_kept = min(int(np.searchsorted(sums, share, side="left")) + 1, falling.size)
    if min_p > 0.0:
        n_kept = min(n_kept, max(1, int(np.count_nonzero(falling >= np.float32(min_p)))))
    return places[_at_least(weights[places], falling[n_kept - 1], n_kept)]


def _largest(values: FloatVector, n: int) -> TokenIds:
    """Indexes of the `n` largest values, ascending; of equal values at the border the first are kept."""
    near = np.flatnonzero(values >= _below_largest(values, n))
    values = values[near]
    return near[_at_least(values, np.partition(values, values.size - n)[values.size - n], n)]


def _below_largest(values: FloatVector, n: int) -> np.float32:
    """A value that `n` values reach, and not many more: the n-th largest maximum of disjoint columns."""
    columns, size = values, values.size
    folded = _scratch.row("columns", size)
    while size >= 2 * n * _FOLDED_TO:
        size //= 2
        np.maximum(columns[:size], columns[size : 2 * size], out=folded[:size])
        columns = folded
    return np.float32(np.partition(columns[:size], size - n)[size - n])


def _at_least(values: FloatVector, least: np.float32, n: int) -> TokenIds:
    """Indexes, ascending, of the `n` values from `least` up; of equals at the border the first are kept."""
    places = np.flatnonzero(values >= least)
    if places.size > n:
        at_border = np.flatnonzero(values[places] == least)
        places = np.delete(places, at_border[at_border.size - (places.size - n) :])
    return places


def _block_sums(weights: FloatVector) -> npt.NDArray[np.float64]:
    """Sums of blocks of `_BLOCK` weights; the last block is the rest."""
    n_whole = weights.size // _BLOCK
    whole = np.einsum("ij->i", weights[: n_whole * _BLOCK].reshape(n_whole, _BLOCK))
    rest = weights[n_whole * _BLOCK :].sum(keepdims=True)
    return np.concatenate([whole, rest]).astype(np.float64)


def _place(weights: FloatVector, share: float) -> int:
    """The index at which the running sum of `weights` passes `share` of the whole; never at a weight of 0.
    Searches block sums, then one block: a running sum over the vocabulary would be slow."""
    sums = np.cumsum(_block_sums(weights))
    wanted = share * float(sums[-1])
    block = _passing(sums, wanted)
    inner = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + _passing(inner, wanted - float(sums[block - 1]) if block else wanted)


def _passing(sums: npt.NDArray[np.float64], wanted: float) -> int:
    """The first index whose running sum is above `wanted`, or by rounding the last with a weight."""
    last = int(np.searchsorted(sums, sums[-1], side="left"))
    return min(int(np.searchsorted(sums, wanted, side="right")), last)


def _with_logprobs(logits: FloatVector, token_id: int, n_top: int) -> SampledToken:
    peak = float(logits.max())
    normaliser = peak + logarithm(float(_block_sums(_weights(logits, 1.0)).sum()))
    ids = _largest(logits, min(n_top, logits.size)) if n_top else np.empty(0, dtype=np.int64)
    ids = ids[np.lexsort((ids, -logits[ids]))]
    top = tuple((int(top_id), float(logits[top_id]) - normaliser) for top_id in ids)
    return SampledToken(token_id, float(logits[token_id]) - normaliser, top)


def _require_finite(largest_logit: float) -> None:
    if not math.isfinite(largest_logit):
        raise StepFailed("the model's logits are not numbers; its weights or its file may be damaged")

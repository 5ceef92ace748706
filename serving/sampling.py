"""From logits to the next token of each sequence.

Order, as in transformers and vLLM: penalties and bias on the logits, temperature, then top-k, top-p and min-p
on the probabilities, each on what the one before left. A request draws from its own generator, one number per
token, so what it gets depends on its seed and its logits alone, never on who else is in the batch.
Log-probabilities are those of the model itself: before penalties, bias and temperature.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import argmax
from phasewise.serving.errors import RequestError, StepFailed
from phasewise.serving.guides import Guide

FloatVector = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

_BLOCK = 256  # weights summed at a time
_GREEDY_BELOW = 1e-4  # temperatures under this are 0: logits divided by less overflow
_MAX_SEED = 2**64


def _require(holds: bool, name: str, wanted: str, got: object) -> None:
    if not holds:
        raise RequestError(f"{name} must be {wanted}, not {got}", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request chooses its tokens. Temperature 0 is greedy, whatever the other filters say."""

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
    """None: no log-probabilities. 0: that of the sampled token. n: those of the n likeliest too."""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", "between 0 and 100", self.temperature)
        _require(self.top_k is None or self.top_k >= 1, "top_k", "at least 1", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        _require(0 < self.repetition_penalty <= 100, "repetition_penalty", "above 0", self.repetition_penalty)
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

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the largest logit is asked for."""
        return self.is_greedy and not self.reshapes_logits and self.top_logprobs is None


GREEDY = SamplingParams(temperature=0.0)


class SampledToken(NamedTuple):
    """`logprob` is None unless asked for; `top` holds (token id, log-probability), likeliest first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The state that one request's choice of tokens depends on: its generator, the tokens seen, its guide.

    `cut_short` says that the guide could not go on, so the last token is an end token that nobody chose.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        guide: Guide | None = None,
    ) -> None:
        self.params = params
        self.guide = guide
        self.cut_short = False
        self._check_ids(vocab_size)
        seed = secrets.randbits(64) if params.seed is None else params.seed % _MAX_SEED
        self._rng = None if params.is_greedy else np.random.Generator(np.random.PCG64(seed))
        self._answer: Counter[int] = Counter()
        self._seen = set(prompt_token_ids) if params.repetition_penalty != 1.0 else set()

    def sample(self, logits: FloatVector) -> SampledToken:
        """Choose from `logits` (float32 [vocab], not changed). StepFailed if none of them is a number."""
        params = self.params
        shaped = self._reshape(logits) if params.reshapes_logits else logits
        token_id = self._choose(shaped) if self.guide is None else self._choose_guided(shaped, self.guide)
        if params.reshapes_logits:
            self._answer[token_id] += 1
            self._seen.add(token_id)
        if params.top_logprobs is None:
            return SampledToken(token_id)
        return _with_logprobs(logits, token_id, params.top_logprobs)

    def _choose(self, shaped: FloatVector) -> int:
        token_id = int(shaped.argmax())
        _require_finite(float(shaped[token_id]))
        if self._rng is not None:
            token_id = _draw(shaped, self.params, float(self._rng.random()))
        return token_id

    def _choose_guided(self, shaped: FloatVector, guide: Guide) -> int:
        _require_finite(float(shaped.max()))
        allowed = shaped.copy()
        if not guide.forbid(allowed):
            self.cut_short = True
            return guide.end_token_id
        token_id = self._choose(allowed)
        guide.advance(token_id)
        return token_id

    def _reshape(self, logits: FloatVector) -> FloatVector:
        params, shaped = self.params, logits.astype(np.float32, copy=True)
        if params.repetition_penalty != 1.0 and self._seen:
            ids = np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))
            seen = shaped[ids]
            penalty = np.float32(params.repetition_penalty)
            shaped[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._answer and (params.frequency_penalty or params.presence_penalty):
            ids = np.fromiter(self._answer.keys(), dtype=np.int64, count=len(self._answer))
            counts = np.fromiter(self._answer.values(), dtype=np.float32, count=len(self._answer))
            shaped[ids] -= params.frequency_penalty * counts + params.presence_penalty
        for token_id, bias in params.logit_bias.items():
            shaped[token_id] += bias
        return shaped

    def _check_ids(self, vocab_size: int) -> None:
        for token_id in self.params.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"logit_bias names token {token_id}, but ids are 0 to {vocab_size - 1}", "logit_bias"
                )


def sample_rows(logits: npt.NDArray[np.float32], samplers: Sequence[Sampler]) -> list[SampledToken]:
    """One token for each row of `logits` (float32 [n, vocab]) by the sampler of the same index."""
    if all(sampler.guide is None and sampler.params.is_plain_greedy for sampler in samplers):
        return _greedy_rows(logits)
    return [sampler.sample(row) for sampler, row in zip(samplers, logits, strict=True)]


def _greedy_rows(logits: npt.NDArray[np.float32]) -> list[SampledToken]:
    token_ids = [int(argmax(row)) for row in logits]
    for row, token_id in enumerate(token_ids):
        _require_finite(float(logits[row, token_id]))
    return [SampledToken(token_id) for token_id in token_ids]


def _draw(logits: FloatVector, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the filtered distribution, laid out by token id."""
    ids: TokenIds | None = None  # None: all of them
    if params.top_k is not None and params.top_k < logits.size:
        ids = _largest(logits, params.top_k)
        logits = logits[ids]
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    if params.top_p < 1.0 or params.min_p > 0.0:
        kept = _nucleus(weights, params.top_p, params.min_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    place = _place(weights, uniform, "right")
    return place if ids is None else int(ids[place])


def _nucleus(weights: FloatVector, top_p: float, min_p: float) -> TokenIds:
    """The places that top-p and then min-p leave, ascending. The largest weight is 1."""
    falling = np.sort(weights)[::-1]
    if top_p < 1.0:
        falling = falling[: _place(falling, top_p, "left") + 1]
    if min_p > 0.0:
        falling = falling[: max(1, int(np.count_nonzero(falling >= min_p)))]
    return _at_least(weights, falling[-1], falling.size)


def _largest(values: FloatVector, n: int) -> TokenIds:
    return _at_least(values, np.partition(values, values.size - n)[values.size - n], n)


def _at_least(values: FloatVector, least: np.float32, n: int) -> TokenIds:
    """The `n` places, ascending, of the values from `least` up; among equals at the border the first stay."""
    places = np.flatnonzero(values >= least)
    if places.size > n:
        at_border = np.flatnonzero(values[places] == least)
        places = np.delete(places, at_border[at_border.size - (places.size - n) :])
    return places


def _place(weights: FloatVector, share: float, side: Literal["left", "right"]) -> int:
    """Where the running sum of `weights` reaches ("left") or passes ("right") `share` of the whole.

    In two steps, blocks and then one block: one running sum over a vocabulary takes as long as all the rest.
    """
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64))
    wanted = share * sums[-1]
    block = min(int(np.searchsorted(sums, wanted, side=side)), sums.size - 1)
    inner = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    if block:
        inner += sums[block - 1]
    return block * _BLOCK + min(int(np.searchsorted(inner, wanted, side=side)), inner.size - 1)


def _with_logprobs(logits: FloatVector, token_id: int, n_top: int) -> SampledToken:
    scores = logits.astype(np.float64)
    peak = scores.max()
    normaliser = peak + math.log(np.exp(scores - peak).sum())
    n_top = min(n_top, scores.size)
    ids = np.argpartition(-scores, n_top - 1)[:n_top] if n_top else np.empty(0, dtype=np.int64)
    ids = ids[np.lexsort((ids, -scores[ids]))]
    top = tuple((int(one), float(scores[one] - normaliser)) for one in ids)
    return SampledToken(token_id, float(scores[token_id] - normaliser), top)


def _require_finite(largest_logit: float) -> None:
    if not math.isfinite(largest_logit):
        raise StepFailed("the model's logits are not numbers; its weights or its file may be damaged")

"""A request that an engine answers: its sampler, and the text of its tokens so far."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.engine.messages import Answer, Evidence, GivenOut, Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.processes.restarts import MOST_RERUNS
from phasewise.serving.ranks.first_rank import Ranks
from phasewise.serving.sampling.sampling import PromptToken, SampledToken, Sampler, score_rows
from phasewise.serving.scheduling.request import Request, space_of

CHECKPOINT_TOKENS = 16
"""Tokens of an answer for each digest of logits."""


class LogitChain:
    """Digests of the logits that one answer was sampled from, each of a row and the digest before it. Of
    CHECKPOINT_TOKENS rows only the first is digested: the others follow from the same keys and values, and
    would slow a small model by percents. Rows are those before penalties, bias, temperature and grammar."""

    def __init__(self, n_rows: int = 0, digests: Sequence[str] = ()) -> None:
        """Continue a chain of `n_rows` rows, which had these digests."""
        self._links = list(digests)
        self._n_rows = n_rows
        self._n_told = len(self._links)

    def add(self, logits: npt.NDArray[np.float32]) -> None:
        """Add the row of the next token, float32 [vocab]."""
        if self._n_rows % CHECKPOINT_TOKENS == 0:
            link = hashlib.sha256(self._links[-1].encode() if self._links else b"")
            link.update(np.ascontiguousarray(logits, dtype="<f4").data)
            self._links.append(link.hexdigest())
        self._n_rows += 1

    def take_new(self) -> tuple[str, ...]:
        """The digests made since the last call."""
        new = tuple(self._links[self._n_told :])
        self._n_told = len(self._links)
        return new

    def digests(self, n_tokens: int) -> tuple[str, ...]:
        """The digests of the first `n_tokens` tokens."""
        return tuple(self._links[: n_digests(n_tokens)])


def n_digests(n_tokens: int) -> int:
    return -(-n_tokens // CHECKPOINT_TOKENS)


ROWS_AT_ONCE = 64
"""Most rows of logits in memory at a time."""


class PromptScores:
    """Log-probabilities of one prompt's tokens. `n_top`: number of likeliest tokens at each position."""

    def __init__(self, token_ids: tuple[int, ...], n_top: int) -> None:
        self._token_ids = token_ids
        self._n_top = n_top
        self._scored = [PromptToken(token_id) for token_id in token_ids[:1]]

    @property
    def is_whole(self) -> bool:
        """True once every token is scored."""
        return len(self._scored) == len(self._token_ids)

    @property
    def tokens(self) -> tuple[PromptToken, ...]:
        """The prompt's tokens scored so far."""
        return tuple(self._scored)

    def add(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Score tokens from `logits` (float32 [n, vocab]), the rows after the tokens from position `start`
        on. Rows of a preempted prompt that is computed again are skipped."""
        n_known = len(self._scored) - 1 - start
        assert n_known >= 0, "rows come in their order"
        token_ids = self._token_ids[start + 1 + n_known : start + 1 + len(logits)]
        self._scored += score_rows(logits[n_known : n_known + len(token_ids)], token_ids, self._n_top)


def forward_scored(ranks: Ranks, batch: Batch, scores: Mapping[str, PromptScores]) -> npt.NDArray[np.float32]:
    """Compute a prefill batch like `Ranks.forward`, and score the prompts in `scores` (by request id)."""
    parts = list(zip(batch.request_ids, batch.slices, strict=True))
    plain = tuple(piece for name, piece in parts if name not in scores)
    rows = iter(ranks.forward(batch._replace(slices=plain)).copy() if plain else ())
    logits = []
    for name, piece in parts:
        last = _scored(ranks, piece, scores[name]) if name in scores else None
        if piece.wants_logits:
            logits.append(next(rows) if last is None else last)
    return np.stack(logits) if logits else np.empty((0, 0), dtype=np.float32)


def _scored(ranks: Ranks, piece: SequenceSlice, scores: PromptScores) -> npt.NDArray[np.float32]:
    """Score a slice's tokens, and return the logits after its last token."""
    for begin in range(0, len(piece.token_ids), ROWS_AT_ONCE):
        token_ids = piece.token_ids[begin : begin + ROWS_AT_ONCE]
        part = piece._replace(token_ids=token_ids, start=piece.start + begin, wants_logits=True)
        rows = ranks.all_logits(Batch("prefill", (part,)))
        scores.add(part.start, rows)
    last: npt.NDArray[np.float32] = rows[-1].copy()
    return last


_NOTHING = GivenOut()


@dataclass(slots=True)
class GivenSoFar:
    """The part of one answer given out so far. `n_reruns`: number of losses in a row without a new token."""

    request: Submit
    n_reruns: int = 0
    was_computed: bool = False
    """True if a step with this request has begun, so that the request may be what caused a loss."""
    _token_ids: list[int] = field(default_factory=list)
    _n_characters: int = 0
    _n_cached: int | None = None
    _logit_digests: list[str] = field(default_factory=list)
    _has_prompt: bool = False

    @property
    def has_begun(self) -> bool:
        """True if the client has anything of the answer, from this engine or one before."""
        is_given = bool(self._n_characters or self._token_ids or self._has_prompt)
        return is_given or self.request.given is not None

    @property
    def n_cached(self) -> int | None:
        """Number of reused prompt tokens that the client was told; None: not told yet."""
        return self._n_cached if self.request.given is None else self.request.given.n_cached

    def add(self, answer: Answer) -> None:
        """Record a piece of the answer that is given out."""
        self.was_computed = True
        self._token_ids += [token.token_id for token in answer.tokens]
        self._n_characters += len(answer.text)
        self._logit_digests += answer.logit_digests
        self._has_prompt = self._has_prompt or answer.prompt is not None
        if self._n_cached is None:
            self._n_cached = answer.n_cached

    def after(self, lost: ServingError, n_places: int = 1) -> GivenSoFar | ServingError:
        """The request to run again after a loss, or the error that it ends with. `n_places`: engines that it
        may run on, each of which may be lost for another reason."""
        n_reruns = 0 if self._token_ids else self.n_reruns
        if self.was_computed and n_reruns >= MOST_RERUNS * n_places:
            return lost
        n_reruns += self.was_computed
        if not self.has_begun:
            return GivenSoFar(self.request, n_reruns)
        before = self.request.given or _NOTHING
        token_ids = before.token_ids + tuple(self._token_ids)
        digests = (*before.logit_digests, *self._logit_digests)[: n_digests(len(token_ids))]
        n_characters = before.n_characters + self._n_characters
        given = GivenOut(token_ids, n_characters, self.n_cached or 0, digests)
        return GivenSoFar(replace(self.request, prompt_logprobs=None, given=given), n_reruns)


class TokenStream(Protocol):
    """Incremental decoder: gives out whole characters only, until `flush`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class AnswerText:
    """Text of one answer: takes tokens, gives out text up to a stop string."""

    def __init__(self, stream: TokenStream, stop: tuple[str, ...] = ()) -> None:
        self._stream = stream
        self._stop = stop
        self._held = ""
        self._n_given = 0  # characters given out
        self._tokens: deque[tuple[int, SampledToken]] = deque()  # with the character at which each begins
        self.stop_text: str | None = None
        """The stop string that ended the answer; None: none so far."""

    @property
    def stopped(self) -> bool:
        return self.stop_text is not None

    def begin_after(self, token_ids: Sequence[int], n_given: int) -> None:
        """Continue after `token_ids`, of whose text another engine gave out `n_given` characters."""
        text = "".join(self._stream.push(token_id) for token_id in token_ids)
        self._held, self._n_given = text[n_given:], n_given

    def push(self, token: SampledToken) -> None:
        """Add a token of the answer. Sets `stop_text` when a stop string is complete."""
        self._tokens.append((self._n_given + len(self._held), token))
        self._held += self._stream.push(token.token_id)
        if self._stop:
            self._cut_at_stop()

    def push_end(self, token: SampledToken) -> None:
        """Add the model's end token, which counts but has no text."""
        self._tokens.append((self._n_given + len(self._held), token))

    def take(self, *, finished: bool) -> tuple[str, tuple[SampledToken, ...]]:
        """The text and tokens that can be given out now: all that is left if `finished` or `stopped`."""
        if finished and not self.stopped:
            self._held += self._stream.flush()
            self._cut_at_stop()
        n_kept = 0 if finished or self.stopped or not self._stop else self._n_ambiguous()
        n_given = len(self._held) - n_kept
        text, self._held = self._held[:n_given], self._held[n_given:]
        self._n_given += len(text)
        return text, self._begun(everything=finished and not self.stopped)

    def _cut_at_stop(self) -> None:
        """End the text before the stop string that is complete first, however tokens cut it."""
        places = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if places:
            place, self.stop_text = min(places, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self._held = self._held[:place]

    def _n_ambiguous(self) -> int:
        """Length of the longest end of the held text that may begin a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _begun(self, *, everything: bool) -> tuple[SampledToken, ...]:
        tokens, ready = self._tokens, []
        while tokens and (everything or tokens[0][0] < self._n_given):
            begin, token = tokens.popleft()
            ready.append(token if token.logprob is None else token._replace(begin=begin))
        return tuple(ready)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens as the engine sees them. `open_stream`: makes the decoder of one answer, which also
    shows the control tokens passed to it."""

    size: int
    end_token_ids: frozenset[int]
    open_stream: Callable[[frozenset[int]], TokenStream]


@dataclass(slots=True)
class LiveRequest:
    """A request being answered. `adapter`: number and content hash; number 0: the base model."""

    given: GivenSoFar
    max_tokens: int
    sampler: Sampler
    text: AnswerText
    end_token_ids: frozenset[int]
    adapter: tuple[int, str]
    chain: LogitChain | None = None
    """Digests of the answer's logits for a receipt, with all tokens in `token_ids`; None: no receipt."""
    token_ids: list[int] = field(default_factory=list)
    scores: PromptScores | None = None
    """Log-probabilities of the prompt; None: not wanted, or given out."""
    n_drafted: int = 0
    n_accepted: int = 0

    @classmethod
    def of(
        cls, given: GivenSoFar, max_tokens: int, vocabulary: Vocabulary, adapter: tuple[int, str]
    ) -> LiveRequest:
        """A request at the beginning of its answer, or after the part that was given out."""
        message = given.request
        guide = None if message.compiled is None else message.compiled.fresh()
        before = message.given or _NOTHING
        chain = LogitChain(len(before.token_ids), before.logit_digests) if message.receipt else None
        sampler = Sampler(message.sampling, message.prompt_token_ids, vocabulary.size, guide, chain)
        text = AnswerText(vocabulary.open_stream(message.shown), message.stop)
        ends = frozenset() if message.ignore_eos else vocabulary.end_token_ids | message.ends
        n_top = message.prompt_logprobs
        scores = None if n_top is None else PromptScores(message.prompt_token_ids, n_top)
        sampler.begin_after(before.token_ids)
        text.begin_after(before.token_ids, before.n_characters)
        return cls(given, max_tokens, sampler, text, ends, adapter, chain, [*before.token_ids], scores)

    @property
    def message(self) -> Submit:
        return self.given.request

    def push(self, run: Sequence[SampledToken]) -> int:
        """Add sampled tokens up to a stop string, and return their number."""
        for n_new, token in enumerate(run, start=1):
            if token.token_id in self.end_token_ids:
                self.text.push_end(token)
            else:
                self.text.push(token)
            if self.text.stopped:
                return n_new
        return len(run)

    def evidence(
        self, run: Sequence[SampledToken], *, is_last: bool
    ) -> tuple[Evidence | None, tuple[str, ...]]:
        """The evidence for a receipt, with the answer's last tokens, and the digests made for `run`."""
        if self.chain is None:
            return None, ()
        self.token_ids += [token.token_id for token in run]
        whole = Evidence(tuple(self.token_ids), self.chain.digests(len(self.token_ids)))
        return whole if is_last else None, self.chain.take_new()

    @property
    def request(self) -> Request:
        """The request as the scheduler sees it."""
        message = self.message
        adapter, adapter_hash = self.adapter
        is_prompt = message.part == "prompt"
        return Request(
            message.request_id,
            message.prompt_token_ids,
            1 if is_prompt else self.max_tokens,
            self.end_token_ids,
            None if is_prompt else message.estimate,
            space_of(message.cache_space, adapter_hash),
            is_prompt,
            message.client,
            takes_over=message.prompt_logprobs is None,
            in_shadow=message.in_shadow,
            adapter=adapter,
            given=() if message.given is None else message.given.token_ids,
            turns=message.turns,
        )

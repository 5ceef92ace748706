"""A request that an engine answers: what its tokens are chosen with, and the text they have made so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from phasewise.serving.engine.answer_text import AnswerText, GivenSoFar, TokenStream
from phasewise.serving.engine.logit_chain import LogitChain
from phasewise.serving.engine.messages import Evidence, Submit
from phasewise.serving.engine.prompt_progress import PromptScores
from phasewise.serving.sampling.sampling import SampledToken, Sampler
from phasewise.serving.scheduling.held_prefixes import space_of
from phasewise.serving.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The engine's view of a model's tokens.

    `open_stream` makes the decoder of one answer; it gives out the texts of the control tokens named to it.
    """

    size: int
    end_token_ids: frozenset[int]
    open_stream: Callable[[frozenset[int]], TokenStream]


@dataclass(slots=True)
class LiveRequest:
    """A request on its way. adapter: its number and content hash; 0: the model alone."""

    given: GivenSoFar
    max_tokens: int
    sampler: Sampler
    text: AnswerText
    end_token_ids: frozenset[int]
    adapter: tuple[int, str]
    chain: LogitChain | None = None
    """Digests of its logits, where it shall have a receipt; `token_ids` are then its tokens so far."""
    token_ids: list[int] = field(default_factory=list)
    scores: PromptScores | None = None
    """Log-probabilities of its prompt, where it wants them; None once they were given out."""
    n_drafted: int = 0
    n_accepted: int = 0

    @classmethod
    def of(
        cls, given: GivenSoFar, max_tokens: int, vocabulary: Vocabulary, adapter: tuple[int, str]
    ) -> LiveRequest:
        """At the beginning of its answer, or after the part of it that was given out."""
        message = given.request
        guide = None if message.guide is None else message.guide.fresh()
        before = message.given
        chain = LogitChain() if message.receipt else None
        if message.receipt and before is not None:
            chain = LogitChain(len(before.token_ids), before.logit_digests)
        sampler = Sampler(message.sampling, message.prompt_token_ids, vocabulary.size, guide, chain)
        text = AnswerText(vocabulary.open_stream(message.shown), message.stop)
        end_token_ids = frozenset() if message.ignore_eos else vocabulary.end_token_ids
        n_top = message.prompt_logprobs
        scores = None if n_top is None else PromptScores(message.prompt_token_ids, n_top)
        live = cls(given, max_tokens, sampler, text, end_token_ids, adapter, chain, scores=scores)
        if before is not None:
            sampler.begin_after(before.token_ids)
            text.begin_after(before.token_ids, before.n_characters)
            live.token_ids += before.token_ids
        return live

    @property
    def message(self) -> Submit:
        return self.given.request

    @property
    def request(self) -> Request:
        """As the scheduler sees it."""
        message = self.message
        adapter, adapter_hash = self.adapter
        return Request(
            message.request_id,
            message.prompt_token_ids,
            self.max_tokens,
            self.end_token_ids,
            message.estimate,
            space_of(message.cache_space, adapter_hash),
            client=message.client,
            takes_over=message.prompt_logprobs is None,
            in_shadow=message.in_shadow,
            adapter=adapter,
            given=() if message.given is None else message.given.token_ids,
            turns=message.turns,
        )

    def evidence(self, run: list[SampledToken], *, has_ended: bool) -> Evidence | None:
        """The evidence once it has ended, where it shall have a receipt. run: its newest tokens."""
        if self.chain is None:
            return None
        self.token_ids += [token.token_id for token in run]
        if not has_ended:
            return None
        return Evidence(tuple(self.token_ids), self.chain.digests(len(self.token_ids)))

    def new_digests(self) -> tuple[str, ...]:
        """Those of logits that were seen since the piece before."""
        return () if self.chain is None else self.chain.take_new()

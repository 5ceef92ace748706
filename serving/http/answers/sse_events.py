"""Server-sent events of a streamed answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from phasewise.serving.engine.messages import Answer, DraftCounts, Failure, Progress
from phasewise.serving.http.answers.openai_objects import Json, Reply, Used
from phasewise.serving.http.answers.signs_of_life import COMMENT
from phasewise.serving.http.errors import ApiError

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"
_A_TEXT = "\0"


@dataclass(slots=True)
class _Said:
    """The output of `of` for one choice so far. Tokens are not kept: with log-probabilities they are
    megabytes.
    """

    n_generated: int = 0
    n_cached: int = 0
    drafts: DraftCounts | None = None


class _Frame(NamedTuple):
    """The bytes around the text of one choice, in an event that carries text alone."""

    before: str
    after: str


class Events:
    """Those of one stream, made of its pieces as they come."""

    sign_of_life = COMMENT

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._head = encode(reply.rendering.head(streamed=True))[:-1]
        self._said = [_Said() for _ in reply.requests]
        self._frames: dict[str, _Frame] = {}
        """By request; only for requests whose events mostly carry text alone."""
        for index, request in enumerate(reply.requests):
            if (
                reply.rendering.is_plain
                and request.sampling.top_logprobs is None
                and not reply.continuous_usage
            ):
                self._frames[request.request_id] = self._frame(index)

    def opening(self) -> bytes:
        """Before the first piece."""
        openings = [self._reply.rendering.opening(index) for index in range(len(self._said))]
        return "".join([self._event(opening) for opening in openings if opening is not None]).encode()

    def of(self, pieces: Iterable[tuple[int, Answer | Progress]]) -> bytes:
        """(Index of the request, piece)."""
        return "".join([self._of_piece(index, piece) for index, piece in pieces]).encode()

    def of_text(self, outs: Iterable[Answer | Failure | Progress]) -> bytes | None:
        """The same, quickly, where each has text and nothing else to say; None: ask `of`.

        Nothing is counted: the last piece of a choice tells its tokens.
        """
        said: list[str] = []
        for out in outs:
            frame = self._frames.get(out.request_id)
            if frame is None or not isinstance(out, Answer):
                return None
            if out.finish_reason is not None or not out.text:
                return None
            said += frame.before, encode(out.text), frame.after
        return "".join(said).encode() or None

    def failed(self, error: ApiError) -> bytes:
        """In place of the rest."""
        return f"data: {encode(error.body())}\n\n".encode()

    def closing(self) -> bytes:
        """After the last piece."""
        return self.total() + DONE

    def total(self) -> bytes:
        """The usage event, once the last piece has come; nothing where the request did not ask."""
        if not self._reply.include_usage:
            return b""
        return f'data: {self._head},"choices":[],"usage":{encode(self._usage())}}}\n\n'.encode()

    def _of_piece(self, index: int, piece: Answer | Progress) -> str:
        return self._delta(index, piece) if isinstance(piece, Answer) else self._progress(index, piece)

    def _progress(self, index: int, progress: Progress) -> str:
        """As llama-server tells it; of a prompt's first choice, for the others take it over."""
        if index % self._reply.n_choices_per_prompt:
            return ""
        said = {
            "total": progress.n_prompt,
            "cache": progress.n_cached,
            "processed": progress.n_computed,
            "time_ms": progress.took_ns // 1_000_000,
        }
        choice = encode(self._reply.rendering.waiting(index))
        return f'data: {self._head},"choices":[{choice}],"prompt_progress":{encode(said)}}}\n\n'

    def _delta(self, index: int, piece: Answer) -> str:
        said = self._said[index]
        delta = None
        if piece.text or piece.tokens or piece.finish_reason or piece.prompt:
            delta = self._reply.rendering.delta(index, piece)
        if delta is not None:
            delta = self._reply.with_receipt(index, delta, piece)
        said.n_generated, said.n_cached, said.drafts = piece.n_generated, piece.n_cached, piece.drafts
        return "" if delta is None else self._event(delta, counted=self._reply.continuous_usage)

    def _event(self, choice: Json, *, counted: bool = False) -> str:
        so_far = f',"usage":{encode(self._usage())}' if counted else ""
        return f'data: {self._head},"choices":[{encode(choice)}]{so_far}}}\n\n'

    def _usage(self) -> Json:
        return self._reply.usage([Used(said.n_generated, said.n_cached, said.drafts) for said in self._said])

    def _frame(self, index: int) -> _Frame:
        delta = self._reply.rendering.delta(index, Answer("", _A_TEXT, (), 1, 0))
        assert delta is not None
        whole = self._event(delta)
        before, _, after = whole.rpartition(encode(_A_TEXT))
        return _Frame(before, after)

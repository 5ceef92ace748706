"""A server whose model answers by a script, over the fake engine: one token for each byte."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from phasewise.serving.grammar.guides import GuideCompiler, TokenView
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.http.routes.app import ServerContext
from phasewise.serving.sandbox.confined import CancelToken
from phasewise.serving.text.chat_template import ChatTemplate, Conversation
from phasewise.serving.tools.dialect import dialect_of
from tests.support.servers.fake_engine import END, VOCAB_SIZE, FakeRanks, encode, piece
from tests.support.servers.fake_server import FakeServer, fake_server

Script = Callable[[str], str]
"""From a prompt to the answer."""


class ScriptedRanks(FakeRanks):
    """Says what `script` says to the prompt, unless a guide forbids it. `opening`: what prompts end with."""

    def __init__(self, opening: str) -> None:
        super().__init__(lambda token_id: token_id)
        self.script: Script = lambda _prompt: ""
        self._opening = opening.encode()
        self.certainty = 1.0
        """Large: what `script` says is said at any temperature."""

    def _logits(self, wanted: int) -> np.ndarray:
        return super()._logits(wanted) * np.float32(self.certainty)

    def choose_by(self, seen: np.ndarray) -> int:
        text = bytes(int(token_id) for token_id in seen if token_id < END)
        prompt, opening, said = text.rpartition(self._opening)
        answer = self.script((prompt + opening).decode("utf-8", "ignore")).encode()
        return answer[len(said)] if len(said) < len(answer) else END


Scripted = tuple[FakeServer, ScriptedRanks]
"""A server, and the ranks that tell its script."""


@contextlib.contextmanager
def scripted_server(
    template: str,
    opening: str,
    context: int = 4000,
    surroundings: ServerContext | None = None,
    limits: HttpLimits | None = None,
) -> Iterator[Scripted]:
    """A server of a model with this chat template, whose prompts end with `opening`."""
    ranks = ScriptedRanks(opening)
    written = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    guides = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))
    dialect = dialect_of(template, lambda _text: None, frozenset(), turn=written.turn_form())

    def encode_chat(chat: Conversation, _cancel: CancelToken) -> list[int]:
        return encode(written.render(chat.messages, tools=chat.tools or None, variables=chat.variables))

    def model(served: ServedModel) -> ServedModel:
        return replace(served, guides=guides, dialect=dialect, encode_chat=encode_chat)

    with (
        fake_server(limits, model=model, ranks=ranks, context=context, surroundings=surroundings) as server,
        contextlib.closing(guides),
    ):
        yield server, ranks

"""The numbers of a prompt that a response tells: vLLM's `prompt_logprobs`, and OpenAI's `echo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.serving.engine.messages import Submit
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.requests.schemas import CompletionRequest


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that an answer's text begins with. n_top: likeliest tokens of each place; None: no numbers."""

    text: str
    n_top: int | None

    @property
    def has_logprobs(self) -> bool:
        """True if it comes with log-probabilities, which are known once it is computed."""
        return self.n_top is not None


@dataclass(frozen=True, slots=True)
class Scoring:
    """The numbers of its prompts that a response tells.

    n_top: likeliest tokens of each place in `prompt_logprobs`; None: there is no such field. echoes: of each
    choice; none: nothing is echoed.
    """

    n_top: int | None = None
    echoes: tuple[Echo, ...] = ()

    def echo(self, index: int) -> Echo | None:
        """That of a choice."""
        return self.echoes[index] if self.echoes else None


NOT_SCORED = Scoring()
"""Nothing."""


def echoes_of(body: CompletionRequest, requests: Sequence[Submit], model: ServedModel) -> tuple[Echo, ...]:
    """For each choice its prompt: a text as it was sent, tokens as the text that they spell."""
    if not body.echo:
        return ()
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    n_choices = body.n or 1
    if not isinstance(texts[0], str):
        firsts = requests[::n_choices]
        texts = [
            b"".join(map(model.piece, request.prompt_token_ids)).decode("utf-8", "replace")
            for request in firsts
        ]
    return tuple(Echo(str(text), body.logprobs) for text in texts for _ in range(n_choices))


def text_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """The character of `text` at which each token begins.

    A token that the text does not spell, such as one that every prompt begins with, takes no place. The
    tokens of a sentence may begin with a space that it has not.
    """
    spelled, byte_index, n_characters, offsets = text.encode(), 0, 0, []
    for piece in pieces:
        is_inside = byte_index < len(spelled) and spelled[byte_index] & 0xC0 == 0x80
        offsets.append(n_characters - is_inside)
        if byte_index == 0 and piece[:1] == b" " and not spelled.startswith(piece):
            piece = piece[1:]
        if spelled.startswith(piece, byte_index):
            byte_index += len(piece)
            n_characters += sum(byte & 0xC0 != 0x80 for byte in piece)
    return offsets

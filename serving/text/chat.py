"""Conversations written out by a model's own template, in a confined process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from phasewise.serving.errors import ModelError, QueueFull
from phasewise.serving.sandbox.confined import (
    Bounds,
    CancelToken,
    ConfinedError,
    ConfinedProcess,
    JobRefused,
    Overrun,
    Unserved,
)
from phasewise.serving.text.chat_template import ChatTemplateError
from phasewise.serving.text.tokenizer import Tokenizer
from phasewise.serving.text.turn_form import TurnForm

BOUNDS = Bounds(seconds=2.0, memory_bytes=256 << 20, start_s=30.0)
"""Bounds of rendering one conversation. An ordinary one takes less than a millisecond."""
MOST_CHARACTERS = 1 << 24
_LONG_BYTES = 256 * 1024


class ChatPrompt(NamedTuple):
    """A conversation written out. `mark`: the character that breaks control texts in contents; "": none."""

    text: str
    mark: str


class Conversation(NamedTuple):
    """The input of a chat template. `variables`: further names for the template, such as enable_thinking."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}


class Conversations:
    """Writes conversations out by one template, in confined processes. Any thread may call; short
    conversations do not wait for long ones."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_texts: Sequence[str],
        bounds: Bounds = BOUNDS,
    ) -> None:
        """`special_tokens`: texts by templates' names of them. `control_texts`: texts that are plain text in
        contents."""
        told = json.dumps(
            {
                "source": source,
                "special_tokens": dict(special_tokens),
                "control_texts": list(control_texts),
                "most_characters": MOST_CHARACTERS,
            }
        ).encode()
        self.turn = TurnForm()
        """The form in which the template writes turns, known after `start`."""
        self._short, self._long = (ConfinedProcess("template", told, bounds) for _ in range(2))

    def start(self, *, with_form: bool = True) -> None:
        """Read the template and the form of its turns. ModelError where the template cannot be used."""
        try:
            self._short.start()
        except JobRefused as error:
            raise ModelError(str(error)) from error
        except ConfinedError as error:
            raise ModelError(f"the model's chat template cannot be read: {error}; give another") from error
        if with_form:
            with suppress(ConfinedError):  # a template that takes too long has no known form
                self.turn = TurnForm.from_json(self._short.ask(b"null"))

    def write(self, conversation: Conversation, cancel: CancelToken | None = None) -> ChatPrompt:
        """The prompt of a conversation, with the opening of the answer. ChatTemplateError where the template
        fails, QueueFull where the machine is too busy. When `cancel` ends, the template is stopped."""
        request = json.dumps({**conversation._asdict(), "lacks": self.turn.lacks}).encode()
        process = self._short if len(request) <= _LONG_BYTES else self._long
        try:
            answer = process.ask(request, cancel)
        except JobRefused as error:
            raise ChatTemplateError(str(error)) from error
        except Unserved as error:
            raise QueueFull(f"the conversation was not written out: {error}; try again later", 1) from error
        except Overrun as error:
            raise ChatTemplateError(f"the model's chat template was stopped: {error}") from error
        n_mark = answer[0]
        mark, text = answer[1 : 1 + n_mark], answer[1 + n_mark :]
        return ChatPrompt(text.decode("utf-8", "surrogatepass"), mark.decode())

    def close(self) -> None:
        for process in (self._short, self._long):
            process.close()


def special_tokens_of(
    tokenizer: Tokenizer, bos_token_id: int | None, eos_token_ids: Sequence[int]
) -> dict[str, str]:
    """The texts of a model's special tokens, under the names by which templates know them."""
    ids = {"bos_token": bos_token_id, "eos_token": next(iter(eos_token_ids), None)}
    texts = {name: tokenizer.token(token_id) for name, token_id in ids.items() if token_id is not None}
    return {name: text for name, text in texts.items() if text is not None}

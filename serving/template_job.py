"""What the confined process does with chat templates: it renders them."""

from __future__ import annotations

import json
from collections.abc import Callable

from phasewise.serving.chat_template import ChatTemplate, ChatTemplateError
from phasewise.serving.confined import JobRefused
from phasewise.serving.control_texts import ControlTexts
from phasewise.serving.errors import ModelError


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job: messages in; the mark (none, or three bytes of UTF-8) behind its length, and the text, out."""
    known = json.loads(told)
    try:
        template = ChatTemplate(known["source"], known["special_tokens"])
    except ModelError as error:
        raise JobRefused(str(error)) from error
    control_texts = ControlTexts(known["control_texts"])

    def render(request: bytes) -> bytes:
        try:
            messages, mark = control_texts.broken(json.loads(request))
            text = template.render(messages)
        except (ChatTemplateError, ValueError) as error:
            raise JobRefused(str(error)) from error
        if len(text) > known["most_characters"]:
            raise JobRefused(f"the conversation is written out in {len(text)} characters, which is too long")
        written = mark.encode()
        return bytes([len(written)]) + written + text.encode("utf-8", "surrogatepass")

    return render

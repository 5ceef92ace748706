"""The template job of the confined process: it renders chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.sandbox.confined import JobRefused
from phasewise.serving.text.chat_template import ChatTemplate, ChatTemplateError
from phasewise.serving.text.control_texts import ControlTexts
from phasewise.serving.text.conversation_shapes import LAST_RESORT, plain_tools, shaped


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job: a `chat.Conversation` in; out the mark (0 or 3 bytes) behind its length, and the text.

    null in: out the form of the template's turns.
    """
    settings = json.loads(told)
    try:
        template = ChatTemplate(settings["source"], settings["special_tokens"])
    except ModelError as error:
        raise JobRefused(str(error)) from error
    control_texts = ControlTexts(settings["control_texts"])

    def render(request: bytes) -> bytes:
        asked = json.loads(request)
        if asked is None:
            return template.turn_form().to_json()
        try:
            given, mark = control_texts.broken(asked)
            text = _rendered(template, given)
        except (ChatTemplateError, ValueError) as error:
            raise JobRefused(str(error)) from error
        if len(text) > settings["most_characters"]:
            raise JobRefused(
                f"the conversation is written out in {counted(len(text), 'character')}, which is too long"
            )
        written = mark.encode()
        return bytes([len(written)]) + written + text.encode("utf-8", "surrogatepass")

    return render


def _rendered(template: ChatTemplate, given: Mapping[str, Any]) -> str:
    """The conversation without the shapes that the template lacks; where it is still refused, without any."""
    lacks = given["lacks"]
    tools = plain_tools(given["tools"]) if "bare schemas" in lacks else given["tools"]
    try:
        return template.render(shaped(given["messages"], lacks), True, tools or None, given["variables"])
    except ChatTemplateError:
        messages = shaped(given["messages"], LAST_RESORT)
        if messages == given["messages"]:
            raise
        try:
            return template.render(messages, True, plain_tools(tools) or None, given["variables"])
        except ChatTemplateError:
            pass
        raise

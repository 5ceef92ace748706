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
            text = rendered(template, given)
        except (ChatTemplateError, ValueError) as error:
            raise JobRefused(str(error)) from error
        if len(text) > settings["most_characters"]:
            raise JobRefused(
                f"the conversation is written out in {counted(len(text), 'character')}, which is too long"
            )
        written = mark.encode()
        return bytes([len(written)]) + written + text.encode("utf-8", "surrogatepass")

    return render


def rendered(template: ChatTemplate, given: Mapping[str, Any]) -> str:
    """The conversation without the shapes that the template lacks. Where it is still refused: with an empty
    list of tools in place of none and without an effort, which few templates know; then without any shape
    that a template may lack.
    """
    lacks, variables = given["lacks"], given["variables"]
    tools = plain_tools(given["tools"]) if "bare schemas" in lacks else given["tools"]
    messages = shaped(given["messages"], lacks)
    fewer = {name: value for name, value in variables.items() if name != "reasoning_effort"}
    ways = [
        (messages, tools or None, variables),
        (messages, tools, fewer),
        (shaped(given["messages"], LAST_RESORT), plain_tools(tools), fewer),
    ]
    first: ChatTemplateError | None = None
    for way_messages, way_tools, way_variables in ways:
        try:
            return template.render(way_messages, True, way_tools, way_variables)
        except ChatTemplateError as error:
            first = first or error
    assert first is not None
    raise first

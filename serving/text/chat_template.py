"""A conversation written out as one prompt, by the template that came with the model, and the job of the
confined process that does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from phasewise._words import counted
from phasewise.serving.errors import ModelError, RequestError
from phasewise.serving.sandbox.confined import JobRefused
from phasewise.serving.sandbox.template_sandbox import RefusedError, compile_template, write_out
from phasewise.serving.text.control_texts import ControlTexts
from phasewise.serving.text.conversation_shapes import LAST_RESORT, plain_tools, shaped
from phasewise.serving.text.turn_analysis import form_of
from phasewise.serving.text.turn_form import TurnForm

Message = Mapping[str, Any]
_MOST_FORM_BYTES = 16 * 1024
"""Marks are short: a form that takes more is none that a model was taught."""


class ChatTemplateError(RequestError):
    """This conversation cannot be written out by the model's template, often because the template says so."""


class ChatTemplate:
    """A model's chat template, compiled. Safe to share between threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps the names templates use (`bos_token`, `eos_token`, ...) to the tokens' texts.

        Raises ModelError for a template that cannot be read.
        """
        try:
            self._template = compile_template(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ModelError(f"the model's chat template cannot be read: {reason}; give another") from error
        self._special_tokens, self._source = dict(special_tokens), source

    def turn_form(self) -> TurnForm:
        """The form of the turns that it writes, found by some tens of renderings."""

        def write(messages: Any, tools: Any, opens: bool, variables: Mapping[str, Any]) -> str | None:
            try:
                return self.render(messages, opens, tools or None, variables)
            except ChatTemplateError:
                return None

        form = form_of(write, self._source)
        return form if len(form.to_json()) <= _MOST_FORM_BYTES else TurnForm(lacks=form.lacks)

    def _older_names(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Templates of Fireworks read this in place of `tools`; others give it another meaning."""
        if "datetime" not in self._source:
            return {}
        return {"functions": json.dumps(tools, indent=2), "datetime": datetime.now().strftime("%b %d %Y")}

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation, special tokens spelled out: encode it with `add_special=False`.

        `variables` are further names for the template, such as `enable_thinking`. All values must be plain
        JSON ones. Raises ChatTemplateError.
        """
        names = self._special_tokens | {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._older_names(tools or ()),
            **(variables or {}),
        }
        try:
            return write_out(self._template, names)
        except RefusedError as error:
            raise ChatTemplateError(
                f"the model's chat template refuses this conversation: {error}"
            ) from error
        except MemoryError:
            raise
        except Exception as error:  # a template is a stranger's program, and may fail in any way
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ChatTemplateError(
                f"the model's chat template fails on this conversation ({reason}); check roles and contents"
            ) from error


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

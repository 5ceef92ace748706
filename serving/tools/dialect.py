"""The format of a model's calls and thoughts: the one of its chat template, unless an operator says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phasewise.serving.errors import ServingError
from phasewise.serving.tools import thinking
from phasewise.serving.tools.gpt_oss import GptOss
from phasewise.serving.tools.hermes import Hermes
from phasewise.serving.tools.llama_json import LlamaJson
from phasewise.serving.tools.mistral import ARGUMENTS, Mistral
from phasewise.serving.tools.parts import PlainReader, Reader, Trimmed
from phasewise.serving.tools.pythonic import Pythonic
from phasewise.serving.tools.thinking import ThinkingReader
from phasewise.serving.tools.tool_format import ToolFormat

FORMATS = ("hermes", "llama3-json", "pythonic", "mistral", "gpt-oss")
_USES_TOOLS = re.compile(r"{[%{][^}]*\btools\b")
_LOOKED_AT_TOKENS = 8


@dataclass(frozen=True)
class Dialect:
    """The form in which one model writes calls and thoughts.

    knows_tools: its template shows tools to it; else we write them into the conversation. thinks: it writes
    `<think>`. control: ids of the control tokens that `format` looks for, by their texts.
    think_token: the one that begins thoughts, where one token does.
    """

    format: ToolFormat
    knows_tools: bool
    thinks: bool
    control: Mapping[str, int]
    think_token: int | None = None

    @property
    def is_channelled(self) -> bool:
        """True if answers without calls have to be read too, because thoughts and text come in channels."""
        return isinstance(self.format, GptOss)

    @property
    def is_plain(self) -> bool:
        """True if answers without tools are nothing but text."""
        return not self.thinks and not self.is_channelled

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens that belong to the text of an answer that is read."""
        return frozenset(self.control.values())

    def opens_thought(self, prompt: Sequence[int], piece: Callable[[int], bytes]) -> bool:
        """True if a prompt ends within thoughts."""
        end = b"".join(map(piece, prompt[-_LOOKED_AT_TOKENS:]))
        return self.thinks and end.rstrip().endswith(thinking.OPENING.encode())

    def reader(
        self, names: frozenset[str] | None, *, in_thought: bool, calls_are_held: bool = False
    ) -> Reader:
        """The reader of one answer; `names`: functions that it may call, None: calls are text.

        calls_are_held: a grammar holds every call, so that arguments are given out as they come.
        """
        reader: Reader = PlainReader()
        if names is not None or self.is_channelled:
            reader = self.format.reader(names or frozenset(), is_held=calls_are_held)
        if self.thinks:
            reader = ThinkingReader(reader, is_open=in_thought)
        return Trimmed(reader)


def dialect_of(
    template: str, id_of: Callable[[str], int | None], special_ids: frozenset[int], forced: str = "auto"
) -> Dialect:
    """The dialect of a chat template. `forced`: one of FORMATS, or "auto". ServingError for another."""
    format = _format(template, forced)
    thinks = thinking.OPENING in template and not isinstance(format, GptOss)
    ids = {text: id_of(text) for text in (*format.control_texts, thinking.OPENING, thinking.CLOSING)}
    control = {
        text: token_id for text, token_id in ids.items() if token_id is not None and token_id in special_ids
    }
    return Dialect(
        format=format,
        knows_tools=_USES_TOOLS.search(template) is not None,
        thinks=thinks,
        control=control,
        think_token=ids[thinking.OPENING] if thinks else None,
    )


def _format(template: str, forced: str) -> ToolFormat:
    formats: tuple[ToolFormat, ...] = (
        GptOss(),
        Mistral(is_named=ARGUMENTS in template),
        Hermes(),
        Pythonic(),
        LlamaJson(),
    )
    if forced != "auto":
        forced_format = next((tool_format for tool_format in formats if tool_format.name == forced), None)
        if forced_format is None:
            raise ServingError(f"no tool format {forced!r}: give auto, {', '.join(FORMATS)}")
        return forced_format
    return next((tool_format for tool_format in formats if tool_format.fits(template)), Hermes())

"""The model as the HTTP layer knows it: its names, its limits, and text to tokens and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from phasewise.serving.pools.contract import Estimate


class PromptFacts(NamedTuple):
    """What is known of a request before it is answered, and may tell how long its answer becomes.

    `n_messages`: of the conversation; 1 for a completion. `system_prompt_id`: the same for the same system
    prompt, and tells nothing else of it; None where there is none.
    """

    token_ids: Sequence[int]
    temperature: float
    max_tokens: int | None
    n_messages: int
    system_prompt_id: str | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`names`: what a request may call it, the first of them being its id. `created_s`: Unix time.

    `context_length` is the most that a prompt and its answer may have together, in tokens. `render_chat`
    turns OpenAI messages into the prompt's text; None where the model has no chat template.
    """

    names: tuple[str, ...]
    created_s: int
    context_length: int
    vocab_size: int
    end_token_ids: frozenset[int]
    encode: Callable[[str, bool], list[int]]
    """(text, whether to add the model's own opening tokens) -> token ids."""
    piece: Callable[[int], bytes]
    """What a token adds to a text; maybe no whole character."""
    render_chat: Callable[[Sequence[dict[str, Any]]], str] | None
    estimate: Callable[[PromptFacts], Estimate] | None = None
    """How long an answer will be, asked on the thread that prepares a request; None where nobody knows."""

    @property
    def model_id(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one server accepts at a time. `api_keys` empty: no key is asked for."""

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    max_live_requests: int = 256
    """Answers in progress or waiting, each of the `n` choices counted; beyond it, 429."""

"""The model as the HTTP layer knows it: its names, its limits, and text to tokens and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from phasewise.serving.guides import GuideCompiler
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
    max_prompt_tokens: int | None = None
    """Longer prompts are refused; None: the context alone limits them."""
    estimate: Callable[[PromptFacts], Estimate] | None = None
    """How long an answer will be, asked on the thread that prepares a request; None where nobody knows."""
    guides: GuideCompiler | None = None
    """Compiles what an answer must look like; None where answers cannot be guided."""

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
    max_waiting_requests: int = 224
    """Of these, so many may wait while the engine has no room for them."""
    max_connections: int = 8192
    """Further ones are told to come back, and closed."""
    max_header_bytes: int = 32 * 1024
    header_s: float = 10.0
    """A connection that has not sent the head of its request by then is closed."""
    body_s: float = 60.0
    """The same for the body, from the end of the head."""
    keep_alive_s: float = 75.0
    """How long a connection may be idle between two requests."""
    max_pieces_unread: int = 1024
    """Of each choice. A streamed answer whose reader is further behind is aborted, the connection closed."""
    stalled_write_s: float = 30.0
    """A connection whose reader takes nothing for so long is closed."""
    drain_s: float = 30.0
    """What answers in progress get once the server has been told to end."""

"""Inputs of the HTTP layer: a model's names, limits and tokenizer, and the limits of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
from phasewise.serving.sandbox.confined import CancelToken
from phasewise.serving.tools.dialect import Dialect, dialect_of

if TYPE_CHECKING:
    from phasewise.serving.engine.fingerprint import Fingerprint
    from phasewise.serving.engine.messages import Submit
    from phasewise.serving.grammar.guides import GuideCompiler
    from phasewise.serving.pools.contract import Estimate
    from phasewise.serving.text.chat_template import Conversation


class ModelFacts(NamedTuple):
    """Facts about a model's weights for listings. `family`: the architecture as the model file names it."""

    family: str = ""
    n_parameters: int = 0
    n_bytes: int = 0
    format: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the server. `names`: names that requests may use, its id first. `created_s`: Unix time.
    `context_length`: the most tokens that a prompt and its answer may have together. `encode_chat` turns a
    conversation into the prompt's token ids, or raises Abandoned once the wait for it ends; None where the
    model has no chat template."""

    names: tuple[str, ...]
    created_s: int
    context_length: int
    vocab_size: int
    end_token_ids: frozenset[int]
    encode: Callable[[str, bool], list[int]]
    """Tokenizes a text. Arguments: the text, and whether to add the model's BOS tokens."""
    piece: Callable[[int], bytes]
    """The bytes that a token adds to a text; they may end within a character."""
    encode_chat: Callable[[Conversation, CancelToken], list[int]] | None
    max_prompt_tokens: int | None = None
    """Longer prompts are refused; None: limited only by `context_length`."""
    estimate: Callable[[Submit], Estimate] | None = None
    """Predicts the length of an answer, on the thread that prepares the request; None without a predictor."""
    guides: GuideCompiler | None = None
    """Compiles grammars of answers; None where answers cannot be guided."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Sampling defaults for fields that a request leaves out."""
    dialect: Dialect = field(default_factory=lambda: dialect_of("", lambda _text: None, frozenset()))
    """The syntax in which the model writes tool calls and thoughts."""

    fingerprint: Callable[[], Fingerprint | None] = lambda: None
    """The identity of the model's arithmetic; None until remote instances have reported theirs."""
    gives_receipts: bool = False
    """True if requests may ask for a receipt."""
    adapter: str = ""
    """Name of the LoRA adapter on the model `parent`; empty: a base model."""
    parent: str = ""
    """Id of the base model of an adapter."""
    facts: ModelFacts = field(default_factory=ModelFacts)

    @property
    def system_fingerprint(self) -> str | None:
        """Short form of the fingerprint."""
        fingerprint = self.fingerprint()
        return None if fingerprint is None else fingerprint.short

    @property
    def model_id(self) -> str:
        return self.names[0]

    @property
    def engine_id(self) -> str:
        """Id of the model whose engine computes the answers: the base model's for an adapter."""
        return self.parent or self.model_id


class ApiKey(str):
    """An API key with a label for logs and counters; the label does not reveal the key."""

    __slots__ = ("label",)
    label: str

    def __new__(cls, key: str, label: str) -> ApiKey:
        labelled = super().__new__(cls, key)
        labelled.label = label
        return labelled


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the load that one server accepts. `api_keys` empty: requests need no key. A key without a
    label gets its position as label, `key-1` the first."""

    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] = frozenset()
    """Host names that a request may name, without a port; empty: any."""
    max_body_bytes: int = 4 * 1024 * 1024
    max_unfinished_bytes: int = 64 * 1024 * 1024
    """Most bytes of all unfinished request bodies; beyond it the body that began first is refused."""
    max_live_requests: int = 256
    """Most answers in progress or waiting, each of the `n` choices counted; a further request gets 429."""
    max_sequences_per_key: int = 192
    """Most answers in progress or waiting of one client: an API key, or else an address."""
    max_response_bytes: int = 64 * 1024 * 1024
    """Most memory of a whole answer, or of a stream's unread part; all answers together get 8 times."""
    max_waiting_requests: int = 224
    """Most requests that may wait for room in the engine."""
    max_connections: int = 8192
    """Most open connections; a further one is answered with an error and closed."""
    max_connections_per_address: int = 2048
    """Most connections of one IPv4 address, or of one IPv6 /64 network."""
    max_header_bytes: int = 32 * 1024
    header_s: float = 10.0
    """Time within which a connection must send the head of its request; else it is closed."""
    body_s: float = 60.0
    """Time within which a request's body must come, counted from the end of the head."""
    keep_alive_s: float = 75.0
    """The time that a connection may be idle between two requests."""
    max_pieces_unread: int = 1024
    """Most unread pieces of a choice; beyond it the answer is aborted and its connection closed."""
    sign_of_life_s: float = 5.0
    """A stream that was silent for this time sends a comment, so that its reader does not give up."""
    stalled_write_s: float = 30.0
    """Time after which a connection whose reader takes nothing is closed."""
    drain_s: float = 30.0
    """The time that answers in progress have to end once the server was told to stop."""

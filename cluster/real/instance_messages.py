"""Messages between a front and its instances: JSON, checked on arrival as if a stranger had sent it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from phasewise.cluster.errors import first_line
from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Abort, Delivery, Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.pools.contract import Placement
from phasewise.serving.ranks.kv_share import KvPlace, KvShape


class WireError(ServingError):
    """A message has none of the known forms."""


# ---- to an instance --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendKvTo:
    """Order to send keys and values of a prompt to a block of another instance."""

    request_id: str
    n_prompt: int
    endpoint: str
    placement: Placement
    place: KvPlace | None
    """The memory that the block is in, where both instances are on one host; None: send frames."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Order to an instance to end."""


ToInstance = Submit | Abort | SendKvTo | Stop

# ---- from an instance ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts that instances must have in common to hand requests over."""

    version: str
    model_hash: str
    """SHA-256 of the model that instances run, in hexadecimal."""
    shape: KvShape
    vocab_size: int
    context_length: int
    fingerprint: Fingerprint
    """The fingerprint of model and arithmetic, on which an answer's bits depend; all instances share it."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Content hashes of the instance's adapters, by name."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Message of an instance: it is ready for requests."""

    identity: Identity
    pid: int
    host: str
    """Key of the host: equal for two processes that can map each other's memory."""
    kv_slots: int
    endpoint: str
    """The address at which the instance takes keys and values."""
    place: KvPlace
    plans: tuple[str, ...]
    kv_bytes: int = 0
    cpus: tuple[int, ...] = ()
    """The CPUs that the instance's threads are pinned to."""
    n_sparse_weights: int = 0
    """Number of weights that the instance stores sparse."""
    n_without_database: int = 0
    """Number of times that the instance has gone on without the tuning database."""


@dataclass(frozen=True, slots=True)
class PromptBegun:
    """Message of an instance: it is computing the prompt. The answer's instance may keep a block for this
    request; if this instance ends from now on, the request may be the cause."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Reply of an instance to `Abort`: it holds nothing of this request any more, and writes nothing."""

    request_id: str


@dataclass(frozen=True, slots=True)
class HandOverFailed:
    """Message of an instance: an attempt to hand over cannot go on. reason: one word for a counter."""

    request_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Message of an instance: it lives. turns: count of its engine's turns, which grows while it has work."""

    turns: int
    is_busy: bool
    n_handing_over: int
    """Number of prompts on their way from the instance, and of blocks that are being filled there."""
    refused: dict[str, int] = field(default_factory=dict)
    """Count of frames that the instance has thrown away since its start, by reason."""


@dataclass(frozen=True, slots=True)
class CannotStart:
    """Last message of an instance that does not become ready."""

    message: str


FromInstance = Ready | Delivery | PromptBegun | Dropped | HandOverFailed | Heartbeat | CannotStart

# A token that a guide forbids has the log-probability -inf.
_config = ConfigDict(ser_json_inf_nan="constants", arbitrary_types_allowed=True)
_kinds: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind, config=None if is_dataclass(kind) else _config)
    for kind in (*get_args(ToInstance), *get_args(FromInstance))
}


def write(message: ToInstance | FromInstance) -> bytes:
    """Write a message as the name of its kind, a space and JSON."""
    name = type(message).__name__
    return name.encode() + b" " + _kinds[name].dump_json(message)


def read_to_instance(raw: bytes) -> ToInstance:
    """Read a message to an instance. WireError: it is none."""
    message: ToInstance = _read(raw, get_args(ToInstance), "the front's")
    return message


def read_from_instance(raw: bytes) -> FromInstance:
    """Read a message from an instance. WireError: it is none."""
    message: FromInstance = _read(raw, get_args(FromInstance), "the instance's")
    return message


def _read(raw: bytes, kinds: Sequence[type], whose: str) -> Any:
    name, _, content = raw.partition(b" ")
    adapter = next((_kinds[kind.__name__] for kind in kinds if kind.__name__.encode() == name), None)
    if adapter is None:
        raise WireError(f"{whose} message cannot be read: it is of no known kind")
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        raise WireError(f"{whose} message cannot be read: {first_line(error)}") from None

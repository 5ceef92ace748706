"""Messages between a front and its instances: JSON, checked on arrival as if a stranger had sent it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from phasewise.cluster.errors import first_line
from phasewise.serving import errors
from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Answer, EngineLoad, Failure, Placed, Progress, StepStats, Submit
from phasewise.serving.errors import RequestError, ServingError, StepFailed
from phasewise.serving.grammar.guides import GuideRecipe
from phasewise.serving.pools.contract import Placement
from phasewise.serving.ranks.kv_share import KvPlace, KvShape
from phasewise.serving.scheduling.held_prefixes import HeldReport

Part = Literal["whole", "prompt", "answer"]


class WireError(ServingError):
    """A message has none of the known forms."""


# ---- to an instance --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Take:
    """Order to take a request on: all of it, its prompt alone, or its answer alone. guide: sources that the
    instance compiles to the request's guide, which itself is not sent. epoch: number of the attempt to hand
    the request over."""

    part: Part
    request: Submit
    guide: GuideRecipe | None = None
    epoch: int = 0
    kind: Literal["take"] = "take"


@dataclass(frozen=True, slots=True)
class Drop:
    """Order to free what a request holds. After the reply `Dropped` nothing is written for the request."""

    request_id: str
    kind: Literal["drop"] = "drop"


@dataclass(frozen=True, slots=True)
class SendKvTo:
    """Order to send keys and values of a prompt to a block of another instance."""

    request_id: str
    epoch: int
    n_prompt: int
    endpoint: str
    placement: Placement
    place: KvPlace | None
    """The memory that the block is in, where both instances are on one host; None: send frames."""
    kind: Literal["send_kv_to"] = "send_kv_to"


@dataclass(frozen=True, slots=True)
class Stop:
    """Order to an instance to end."""

    kind: Literal["stop"] = "stop"


ToInstance = Take | Drop | SendKvTo | Stop

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
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure on its way to the front, by the name of its class."""

    request_id: str
    error: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, failure: Failure) -> Failed:
        error = failure.error
        param = error.param if isinstance(error, RequestError) else None
        return cls(failure.request_id, type(error).__name__, str(error), param)

    def to_failure(self, request_id: str) -> Failure:
        named = getattr(errors, self.error, None)
        kind = named if isinstance(named, type) and issubclass(named, ServingError) else StepFailed
        if issubclass(kind, RequestError):
            return Failure(request_id, kind(self.message, self.param))
        return Failure(request_id, kind(self.message))


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """Message of an instance: what its engine delivers (`Delivery`)."""

    answers: tuple[Answer, ...]
    failures: tuple[Failed, ...]
    stats: StepStats | None
    load: EngineLoad
    placed: tuple[Placed, ...] = ()
    computed: tuple[str, ...] = ()
    arrived: tuple[str, ...] = ()
    progress: tuple[Progress, ...] = ()
    held: HeldReport | None = None
    """Changes of the prefixes that the instance holds since its last report."""
    kind: Literal["report"] = "report"


@dataclass(frozen=True, slots=True)
class PromptBegun:
    """Message of an instance: it is computing the prompt. The answer's instance may keep a block for this
    request; if this instance ends from now on, the request may be the cause."""

    request_id: str
    kind: Literal["prompt_begun"] = "prompt_begun"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Message of an instance: it holds nothing of this request any more."""

    request_id: str
    kind: Literal["dropped"] = "dropped"


@dataclass(frozen=True, slots=True)
class HandOverFailed:
    """Message of an instance: an attempt to hand over cannot go on. reason: one word for a counter."""

    request_id: str
    reason: str
    message: str
    kind: Literal["hand_over_failed"] = "hand_over_failed"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Message of an instance: it lives. turns: count of its engine's turns, which grows while it has work."""

    turns: int
    is_busy: bool
    n_handing_over: int
    """Number of prompts on their way from the instance, and of blocks that are being filled there."""
    refused: dict[str, int] = field(default_factory=dict)
    """Count of frames that the instance has thrown away since its start, by reason."""
    kind: Literal["heartbeat"] = "heartbeat"


@dataclass(frozen=True, slots=True)
class CannotStart:
    """Last message of an instance that does not become ready."""

    message: str
    kind: Literal["cannot_start"] = "cannot_start"


FromInstance = Ready | InstanceReport | PromptBegun | Dropped | HandOverFailed | Heartbeat | CannotStart

_by_kind = Field(discriminator="kind")
# A token that a guide forbids has the log-probability -inf. Guides themselves are never written or read.
_config = ConfigDict(ser_json_inf_nan="constants", arbitrary_types_allowed=True)
_to_instance: TypeAdapter[ToInstance] = TypeAdapter(Annotated[ToInstance, _by_kind], config=_config)
_from_instance: TypeAdapter[FromInstance] = TypeAdapter(Annotated[FromInstance, _by_kind], config=_config)


def write(message: ToInstance | FromInstance) -> bytes:
    """Write a message as JSON."""
    if isinstance(message, ToInstance):
        return _to_instance.dump_json(message)
    return _from_instance.dump_json(message)


def read_to_instance(raw: bytes) -> ToInstance:
    """Read a message to an instance; WireError for JSON that holds none."""
    try:
        return _to_instance.validate_json(raw)
    except ValidationError as error:
        raise WireError(f"the front's message cannot be read: {first_line(error)}") from None


def read_from_instance(raw: bytes) -> FromInstance:
    """Read a message from an instance; WireError for JSON that holds none."""
    try:
        return _from_instance.validate_json(raw)
    except ValidationError as error:
        raise WireError(f"the instance's message cannot be read: {first_line(error)}") from None

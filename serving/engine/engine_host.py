"""Interface between HTTP and the engine host: an engine on a thread, or a front over several instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Delivery, EngineLoad, Message
from phasewise.serving.errors import EngineLost


class InstanceInfo(NamedTuple):
    """A running instance: its node, its storage formats and its plans."""

    node: str
    """Address of the instance's node; empty: this host."""
    label: str
    """Node label `KEY=VALUE` that the instance was asked to run on; empty: none."""
    weight_format: str
    kv_format: str
    n_sparse_weights: int
    """Number of weights that are stored sparse."""
    prefill_plan: str
    """The instance's plan in words, e.g. `1 rank on core 0 (default)`."""
    decode_plan: str
    kv_bytes: int
    """Bytes of memory for keys and values."""


class InstanceState(NamedTuple):
    """State of one place for an instance. The front's counters never fall; the instance's restart with it."""

    name: str
    """Role and number of the instance, e.g. `prompt-0`."""
    role: str
    pool: str
    """Name of the pool that the instance is in now."""
    load: EngineLoad | None
    """The load that the instance reported last; None: it does not run."""
    restarts: int
    prompts: int
    """Number of requests whose prompts the instance was given."""
    prompt_tokens: int
    prefix_tokens_expected: int
    """Prompt tokens that the instance was expected to hold already when requests were routed."""
    answers: int
    prefix_tokens_held: int
    """Number of prefix tokens that the instance reports as held."""
    pool_changes: int
    handing_over: int
    """Number of prompts on their way from the instance, and of its blocks being filled."""
    hand_overs: int
    """Number of the instance's prompts that arrived at the answering instance."""
    hand_over_seconds: float
    """Total seconds from the end of a handed-over prompt to its arrival."""
    hand_over_bytes: int
    """Total bytes of handed-over keys and values."""
    reports_refused: int
    """Number of prefix reports refused as impossible."""
    info: InstanceInfo | None
    """Node, formats and plans of the instance; None: it does not run."""
    without_database: int = 0
    """Number of times that the instance went on without the tuning database, over all its starts."""


class Recoveries(NamedTuple):
    """Counters of recoveries since the start; none ever falls."""

    ranks_replaced: int = 0
    """Number of times that dead rank or instance processes were restarted."""
    requests_rerun: int = 0
    """Number of requests that ran again from the beginning because nothing had been given out."""
    answers_continued: int = 0
    """Number of answers that lost their ranks or instance and continued behind what was given out."""
    core_moves: int = 0
    """Number of times that an engine changed plans because its cores had changed."""


EngineState = Literal["starting", "running", "replacing", "lost"]

Deliver = Callable[[Delivery], None]
"""Called on the host's thread; must only pass the delivery on."""


class EngineHost(Protocol):
    """Takes messages from any thread, and gives results to the `Deliver` function it was made with."""

    @property
    def state(self) -> EngineState: ...

    @property
    def is_alive(self) -> bool:
        """True if the host can still answer, now or after a restart of dead processes."""
        ...

    @property
    def lost(self) -> EngineLost | None:
        """The reason why the host has given up for good; None: it has not."""
        ...

    def recoveries(self) -> Recoveries:
        """Counters of recoveries. Thread-safe."""
        ...

    def threads(self) -> Mapping[str, int]:
        """Number of threads of each phase now, the most over several models; empty if instances compute."""
        ...

    def fingerprint(self, model: str = "") -> Fingerprint | None:
        """Identity of the answering arithmetic; None: not yet known. `model`: model id, if there are
        several."""
        ...

    def instances(self) -> Sequence[InstanceState]:
        """States of the instances behind the host; empty if one engine does everything. Thread-safe."""
        ...

    def start(self) -> None: ...

    def send(self, message: Message) -> None: ...

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End every request. False: the step under way takes longer than `timeout_s`."""
        ...


class SharedCores(NamedTuple):
    """An engine's access to cores that other engines may compute on too."""

    turn: AbstractContextManager[None] = nullcontext()
    """Context entered for each step."""
    are_others_busy: Callable[[], bool] | None = None
    """True while other engines compute interactive requests; None: there are no other engines."""


OWN_CORES = SharedCores()

OpenHost = Callable[[Deliver, Callable[[], None], SharedCores], EngineHost]
"""Makes a host from `deliver`, `on_lost` (called once it has given up for good) and its cores."""

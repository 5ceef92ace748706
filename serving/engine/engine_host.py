"""The interface between HTTP and what computes its answers: an engine on a thread, or a front over several
instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Delivery, EngineLoad, Message
from phasewise.serving.errors import EngineLost


class InstanceInfo(NamedTuple):
    """An instance that runs: where, how its weights and keys and values are stored, and its plans."""

    node: str
    """The address of its node; empty: this host."""
    label: str
    """The node label that it was asked to be on, `KEY=VALUE`; empty: none."""
    weight_format: str
    kv_format: str
    n_sparse_weights: int
    """Weights that are stored sparse."""
    prefill_plan: str
    """Its plan in words, e.g. `1 rank on core 0 (default)`."""
    decode_plan: str
    kv_bytes: int
    """Memory for keys and values."""


class InstanceState(NamedTuple):
    """One place for an instance. What the front counts never falls; what the instance counts begins anew with
    each start of it."""

    name: str
    """Its role and number, e.g. `prompt-0`."""
    role: str
    pool: str
    """The one that it is in now."""
    load: EngineLoad | None
    """As it told last; None: it does not run."""
    restarts: int
    prompts: int
    """Requests whose prompts it was given."""
    prompt_tokens: int
    prefix_tokens_expected: int
    """Those of `prompt_tokens` that it was expected to have already when the request was routed."""
    answers: int
    prefix_tokens_held: int
    """Tokens of beginnings of prompts that it says it holds."""
    pool_changes: int
    handing_over: int
    """Prompts on their way from it, and blocks of it that are being filled."""
    hand_overs: int
    """Prompts of it that arrived at the instances which answer them."""
    hand_over_seconds: float
    """From the end of such a prompt to its arrival, all together."""
    hand_over_bytes: int
    """Their keys and values."""
    reports_refused: int
    """Reports of prefixes that could not be true."""
    info: InstanceInfo | None
    """None: it does not run."""
    without_database: int = 0
    """Times that it went on without the tuning database, of all its starts."""


class Recoveries(NamedTuple):
    """Counts since the start. They never fall."""

    ranks_replaced: int = 0
    """Times that processes which had died were started anew."""
    requests_rerun: int = 0
    """Requests that ran again from their beginning, because nothing of them had been given out."""
    answers_continued: int = 0
    """Answers that had begun when what computed them was lost, and went on after what was given out."""
    core_moves: int = 0
    """Times that an engine has gone on by other plans because its cores had changed."""


EngineState = Literal["starting", "running", "replacing", "lost"]

Deliver = Callable[[Delivery], None]
"""Called on the host's thread; must only hand the delivery on."""


class EngineHost(Protocol):
    """Takes messages from any thread; what comes of them goes to the `Deliver` that it was made with."""

    @property
    def state(self) -> EngineState: ...

    @property
    def is_alive(self) -> bool:
        """True if it can still answer, now or once what has died is replaced."""
        ...

    @property
    def lost(self) -> EngineLost | None:
        """The reason that nothing is computed any more; None while the engine can go on."""
        ...

    def recoveries(self) -> Recoveries:
        """Counts of what went wrong and was mended. Any thread may ask."""
        ...

    def threads(self) -> Mapping[str, int]:
        """Threads of each phase, as they run now; of several models the most. Nothing where instances
        compute."""
        ...

    def fingerprint(self, model: str = "") -> Fingerprint | None:
        """The identity of the arithmetic that answers; None until it is known. model: its id, of several."""
        ...

    def instances(self) -> Sequence[InstanceState]:
        """The instances behind it; none where one engine does everything. Any thread may ask."""
        ...

    def start(self) -> None: ...

    def send(self, message: Message) -> None: ...

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End every request. False: what is under way takes longer than `timeout_s`."""
        ...


class SharedCores(NamedTuple):
    """The cores of an engine, which others may compute on too."""

    turn: AbstractContextManager[None] = nullcontext()
    """Entered for each step."""
    are_others_busy: Callable[[], bool] | None = None
    """True while others compute for requests that are of no batch; None: there are no others."""


OWN_CORES = SharedCores()

OpenHost = Callable[[Deliver, Callable[[], None], SharedCores], EngineHost]
"""Makes a host from `deliver`, `on_lost`, which it calls once it has given up, and its cores."""

"""The interface between HTTP and what computes its answers: an engine on a thread, or a front over several
instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.instance_state import InstanceState
from phasewise.serving.engine.messages import Delivery, Message
from phasewise.serving.errors import EngineLost

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
        """Why nothing is computed any more; None while there is hope."""
        ...

    @property
    def n_ranks_replaced(self) -> int:
        """Times that processes which had died were started anew."""
        ...

    @property
    def n_requests_rerun(self) -> int:
        """Requests that ran again from their beginning, because nothing of them had been given out."""
        ...

    @property
    def n_answers_continued(self) -> int:
        """Answers that had begun when what computed them was lost, and went on after what was given out."""
        ...

    @property
    def n_core_moves(self) -> int:
        """Times that an engine has gone on by other plans because its cores had changed."""
        ...

    def threads(self) -> Mapping[str, int]:
        """Threads of each phase, as they run now; of several models the most. Nothing where instances
        compute.
        """
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


OpenHost = Callable[[Deliver, Callable[[], None]], EngineHost]
"""Makes a host from `deliver` and `on_lost`, which it calls once it has given up."""

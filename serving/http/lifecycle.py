"""True if the server accepts requests: the engine's state, and whether the server is shutting down."""

from __future__ import annotations

import math
import time
from typing import Literal, Protocol

from phasewise.serving.engine.engine_host import EngineState
from phasewise.serving.http.errors import ApiError

ServiceState = Literal["starting", "running", "replacing", "lost", "draining"]

_SAYS = {
    "starting": "the server is starting",
    "lost": "the engine has stopped; restart the server",
}


class Computes(Protocol):
    """The part of a server that answers requests: the engine's thread, or the workers that embed."""

    @property
    def state(self) -> EngineState: ...
    @property
    def is_alive(self) -> bool: ...


class Lifecycle:
    """The state of one server from start to drain. What computes has been started."""

    def __init__(self, engine: Computes) -> None:
        self._engine = engine
        self._ends_at_s: float | None = None

    @property
    def state(self) -> ServiceState:
        return self._engine_state if self._ends_at_s is None else "draining"

    @property
    def is_draining(self) -> bool:
        return self._ends_at_s is not None

    @property
    def is_ready(self) -> bool:
        """True if new requests should be sent here."""
        return self.state == "running"

    @property
    def is_healthy(self) -> bool:
        """False: the engine has stopped for good, and only a restart of the server helps."""
        return self._engine_state != "lost"

    @property
    def _engine_state(self) -> EngineState:
        return self._engine.state if self._engine.is_alive else "lost"

    def drain(self, within_s: float) -> None:
        """Refuse new requests from now on."""
        self._ends_at_s = time.monotonic() + within_s

    def refusal(self) -> ApiError | None:
        """The error for a request that arrives now; None: accept it. It waits while ranks are replaced."""
        if self._ends_at_s is not None:
            left_s = math.ceil(max(1.0, self._ends_at_s - time.monotonic()))
            return ApiError(
                503,
                "the server is stopping and takes no new requests",
                code="server_stopping",
                retry_after_s=left_s,
                closes=True,
            )
        says = _SAYS.get(state := self._engine_state)
        if says is None:
            return None
        return ApiError(503, says, code="server_starting" if state == "starting" else "engine_stopped")

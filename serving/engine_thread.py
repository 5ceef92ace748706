"""The engine's own thread: messages in through a queue, deliveries out through a callback. It sleeps
when there is nothing to compute, and refuses everything once nothing can be computed any more."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from phasewise.serving.engine import Engine
from phasewise.serving.errors import RanksError, ServingError, StepFailed, Stopping
from phasewise.serving.messages import Abort, Delivery, Failure, Submit

log = logging.getLogger(__name__)

Message = Submit | Abort


class EngineThread:
    """Runs `engine` until `stop`. `deliver` is called on this thread and must only hand the delivery on."""

    def __init__(self, engine: Engine, deliver: Callable[[Delivery], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._lost: RanksError | None = None
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name="phasewise-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it can still answer."""
        return self._thread.is_alive() and self._lost is None

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """From any thread. What comes of it arrives through `deliver`."""
        self._inbox.put(message)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End every request and the thread. False: the step in progress takes longer than `timeout_s`."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._deliver(Delivery((), None, self._engine.load()))
        while True:
            try:
                if not self._take_messages():
                    break
                delivery = (
                    self._engine.step()
                )  # empty after a message that leaves nothing to do: tells the load
            except RanksError as error:
                log.error("%s", error)
                self._lost = error
                delivery = self._engine.fail_everything(error)
            except Exception as error:  # a bug in our own bookkeeping: nothing in progress can be trusted
                log.error("the engine failed between steps", exc_info=error)
                delivery = self._engine.fail_everything(StepFailed(f"the engine failed: {error}"))
            self._deliver(delivery)
        self._deliver(self._engine.fail_everything(Stopping("the server is stopping")))

    def _take_messages(self) -> bool:
        """Handle what has arrived, waiting for it while there is nothing to compute. False: stop."""
        wait = not self._engine.has_work
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if message is None:
                return False
            self._handle(message)
            wait = False

    def _handle(self, message: Message) -> None:
        match message:
            case Submit():
                try:
                    if self._lost is not None:
                        raise self._lost
                    self._engine.submit(message)
                except ServingError as error:
                    refusal = Failure(message.request_id, error)
                    self._deliver(Delivery((refusal,), None, self._engine.load()))
            case Abort(request_id):
                self._engine.abort(request_id)

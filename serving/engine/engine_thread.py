"""The engine's thread: messages in through a queue, deliveries out through a callback. The thread sleeps when
there is nothing to compute, restarts ranks that died, and refuses everything once that fails."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

from phasewise._words import counted
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_host import OWN_CORES, EngineHost, Recoveries, SharedCores
from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import (
    Abort,
    Arrived,
    Delivery,
    Failure,
    KvTargetReady,
    Message,
    StepStats,
    Submit,
)
from phasewise.serving.errors import (
    CoresMoved,
    EngineLost,
    RankLost,
    RanksError,
    ServingError,
    StepFailed,
    Stopping,
)
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.scheduling.pacing import PROMPT_SHARE

log = logging.getLogger(__name__)

LOOKS_AGAIN_S = 0.05
"""Seconds after which an engine that gives way to others looks again whether they still compute."""

CHECK = "PHASEWISE_CHECK"
"""Name of an environment variable: if not empty, scheduler and KV pool are checked after every step."""


class EngineThread(EngineHost):
    """Runs `engine` until `stop`. `deliver`: called on this thread, must only pass the delivery on.
    `on_lost`: called on this thread once the engine has given up; later requests are refused. `ends_on_bugs`:
    True: give up on an internal error too; False: end all requests and go on."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Delivery], None],
        on_lost: Callable[[], None] = lambda: None,
        cores: SharedCores = OWN_CORES,
        *,
        restarts: Restarts | None = None,
        ends_on_bugs: bool = False,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_lost = on_lost
        self._restarts = restarts or Restarts()
        self._ends_on_bugs = ends_on_bugs
        self._cores = cores
        self._checks = bool(os.environ.get(CHECK))
        self.n_turns = 0
        """Number of turns so far: if it stands still while there is work, the engine hangs."""
        self._n_ranks_replaced = 0
        self._n_requests_rerun = 0
        self._inbox: queue.SimpleQueue[Message | Literal["look", "stop"] | Callable[[], None]] = (
            queue.SimpleQueue()
        )
        self._stopping = threading.Event()
        self._has_told_pace = False
        self._is_idle = False
        """True if the last turn could compute nothing: only a message can change that."""
        self._thread = threading.Thread(target=self._run, name="phasewise-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """True if the engine can still answer, now or after a restart of its ranks."""
        return self._thread.is_alive() and self.state != "lost"

    def recoveries(self) -> Recoveries:
        n_moves = 0 if self._engine.cores is None else self._engine.cores.n_moves
        return Recoveries(self._n_ranks_replaced, self._n_requests_rerun, self._engine.n_continued, n_moves)

    def threads(self) -> Mapping[str, int]:
        """Number of threads of each phase now; empty if no watch is over the engine's cores."""
        plans = {} if self._engine.cores is None else self._engine.cores.plans
        n_running = self._engine.scheduler.n_running + self._engine.scheduler.n_in_shadow
        return {phase: len(plan.at(n_running).cores) for phase, plan in plans.items()}

    @property
    def is_computing(self) -> bool:
        """True if there is something to compute now, so that `n_turns` grows."""
        return self._engine.has_work and not self._is_idle

    def fingerprint(self, model: str = "") -> Fingerprint | None:
        """Identity of the engine's arithmetic, whatever `model` is."""
        return self._engine.fingerprint

    def start(self) -> None:
        for watched in (self._engine.ranks, self._engine.prefixes, self._engine.cores):
            if watched is not None:
                watched.watch(lambda: self._inbox.put("look"))
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def between_steps(self, act: Callable[[], None]) -> None:
        """Have the engine's thread call `act` while no step runs. May be called from any thread."""
        self._inbox.put(act)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End every request and the thread. False: the step under way takes longer than `timeout_s`."""
        self._stopping.set()
        self._inbox.put("stop")
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._give_up(RanksError(f"its thread failed: {error!r}"))
            raise

    def _work(self) -> None:
        self.state = "running"
        self._deliver(self._told_load())
        while True:
            try:
                if not self._take_messages():
                    break
                cores = self._engine.cores
                if cores is not None and cores.waiting is not None and self.lost is None:
                    self._move_cores()
                self._deliver(self._told_load() if self._gives_way() else self._turn())
                if self._checks:
                    self._engine.scheduler.check()
            except CoresMoved as move:
                self._open_on_other_cores(move)
            except RankLost as error:
                self._replace_ranks(error)
            except RanksError as error:
                self._give_up(error)
            except Exception as error:  # a bug in our own bookkeeping: nothing in progress can be trusted
                log.error("the engine failed between steps", exc_info=error)
                if self._ends_on_bugs:
                    self._give_up(RanksError(f"it failed between steps: {error!r}"))
                    continue
                self._deliver(self._engine.fail_everything(StepFailed(f"the engine failed: {error}")))
        self._deliver(self._engine.fail_everything(Stopping("the server is stopping")))

    def _gives_way(self) -> bool:
        """True if all requests are of batches while engines beside this one compute interactive requests."""
        if self._cores.are_others_busy is None or not self._cores.are_others_busy():
            return False
        scheduler = self._engine.scheduler
        return scheduler.has_work and not (scheduler.n_running or scheduler.n_waiting)

    def _told_load(self) -> Delivery:
        return Delivery((), None, self._engine.load())

    def _turn(self) -> Delivery:
        """Run a step; it computes nothing, and only reports the load, where a message left nothing to do."""
        self._is_idle = False
        reason = self._engine.ranks.lost
        if reason is not None and self.lost is None:
            raise RankLost(reason)
        with self._cores.turn:
            delivery = self._engine.step()
        self.n_turns += 1
        self._is_idle = delivery.stats is None
        if delivery.stats is not None and not self._has_told_pace:
            self._tell_pace(delivery.stats)
        return delivery

    def _tell_pace(self, stats: StepStats) -> None:
        """Warn, once, if a decode step alone takes longer than --tpot promises."""
        pacing = self._engine.pacing
        if pacing is None or pacing.is_kept:
            return
        self._has_told_pace = True
        log.warning(
            "a decode step of %s takes %.0f ms, more than the %.0f ms per token that --tpot promises: "
            "prompts get %.0f %% of the time while they wait; promise more, or let fewer answers run "
            "(--max-sequences)",
            counted(stats.n_sequences, "answer"),
            stats.duration_ns / 1e6,
            pacing.promise_ns / 1e6,
            100 * PROMPT_SHARE,
        )

    def _take_messages(self) -> bool:
        """Handle the messages in the queue; wait for one if there is nothing to compute. False: stop."""
        wait = self._is_idle or not self._engine.has_work or self._gives_way()
        while True:
            try:
                message = self._inbox.get(wait, LOOKS_AGAIN_S if wait and self._gives_way() else None)
            except queue.Empty:
                return True
            wait = False
            match message:
                case "stop":
                    return False
                case Submit():
                    self._take_on(message)
                case KvTargetReady(request_id):
                    self._engine.hand_over.target_ready(request_id)
                case Abort(request_id):
                    self._engine.abort(request_id)
                case Arrived(request_id, logits):
                    self._deliver(self._engine.arrived(request_id, logits))
                case "look":
                    pass
                case act:
                    act()

    def _take_on(self, request: Submit) -> None:
        try:
            if self.lost is not None:
                raise self.lost
            self._engine.submit(request)
        except ServingError as error:
            self._refuse(request, error)
        except Exception as error:
            self._refuse(request, StepFailed(f"the engine failed: {error}"))
            raise

    def _refuse(self, request: Submit, error: ServingError) -> None:
        self._deliver(Delivery((Failure(request.request_id, error),), None, self._engine.load()))

    # ---- cores that come and go --------------------------------------------------------------------------

    def _move_cores(self) -> None:
        """Change to plans for the present cores. CoresMoved: the ranks must be reopened first."""
        try:
            self._engine.move_cores()
        except CoresMoved:
            raise
        except RanksError as error:
            log.warning("the cores of this process have changed, and the plans stay: %s", error)

    def _open_on_other_cores(self, move: CoresMoved) -> None:
        self.state = "replacing"
        self._deliver(self._engine.recover(move))
        try:
            self._engine.ranks.reopen()
        except RanksError as error:
            self._replace_ranks(RankLost(str(error)))
        else:
            self.state = "running"

    # ---- ranks that died ---------------------------------------------------------------------------------

    def _replace_ranks(self, loss: RankLost) -> None:
        """End the requests that cannot continue, then restart the ranks for the others."""
        self.state = "replacing"
        n_continued_before = self._engine.n_continued
        delivery = self._engine.recover(loss)
        n_continued = self._engine.n_continued - n_continued_before
        n_again = delivery.load.n_waiting + delivery.load.n_in_shadow - n_continued
        self._n_requests_rerun += n_again
        log.error(
            "%s; %d requests end, %d answers go on, %d requests run again",
            loss,
            len(delivery.outs),
            n_continued,
            n_again,
        )
        self._deliver(delivery)
        reason: RanksError = loss
        while (pause_s := self._restarts.pause_s(time.monotonic())) is not None:
            if self._stopping.wait(pause_s):
                return
            with suppress(RanksError):  # they died because their cores went, or another time
                self._engine.move_cores()
            try:
                self._engine.ranks.reopen()
            except RanksError as error:
                log.error("the ranks cannot be started: %s", error)
                reason = error.with_traceback(None)  # its frames hold the memory of the ranks that failed
            else:
                self._n_ranks_replaced += 1
                self.state = "running"
                log.warning("the ranks were started anew")
                return
        self._give_up(reason)

    def _give_up(self, reason: RanksError) -> None:
        self.lost = EngineLost(f"the engine has given up: {reason}; start the server again")
        log.error("%s", self.lost)
        self.state = "lost"
        self._deliver(self._engine.fail_everything(self.lost))
        self._on_lost()

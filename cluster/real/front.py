"""Front over several instances, which HTTP sees as one engine host (`serving.engine.engine_host`).

A thread of its own routes requests (`routing`) and carries what instances say about hand-overs from one to
the other; `supervisor` starts their processes and notices those that end or hang. What it promises:

- a request whose instance ends goes on with another one: from its beginning, or after what was given out of
  its answer (`serving.engine.live_request`);
- an instance's block is given to another request only when no other instance can write to it any more: the
  prompt's instance has said `Dropped`, or its process has ended;
- every hand-over that fails is counted, and its request runs again as a whole, on one instance.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from phasewise._words import number
from phasewise.cluster.real.attempts import Attempt, ask_of, is_whole
from phasewise.cluster.real.instance import host_name
from phasewise.cluster.real.instance_messages import (
    CannotStart,
    Dropped,
    FromInstance,
    HandOverFailed,
    Heartbeat,
    PromptBegun,
    Ready,
    SendKvTo,
    Stop,
    ToInstance,
    WireError,
    read_from_instance,
    write,
)
from phasewise.cluster.real.supervisor import (
    FrontSettings,
    InstanceMember,
    Launcher,
    Supervisor,
    load_together,
)
from phasewise.cluster.routing import Assignment, Limits, ReportRefused, Role, Router
from phasewise.serving.engine.engine_host import Deliver, EngineHost, InstanceState, Recoveries
from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.live_request import GivenSoFar
from phasewise.serving.engine.messages import (
    Abort,
    Answer,
    Delivery,
    EngineLoad,
    Failure,
    HandOverCounts,
    Message,
    Submit,
)
from phasewise.serving.errors import EngineLost, ServingError, StepFailed, Stopping
from phasewise.serving.pools.contract import Placement
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.processes.sockets import Sockets, has_input
from phasewise.serving.scheduling.held_prefixes import block_keys
from phasewise.serving.scheduling.request import space_of

TICK_S = 0.1
"""Seconds between two looks at the instances' processes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrainPlace:
    """Order to give the instance of a place no request, and to stop the instance when it has none. undo: take
    an earlier order back."""

    index: int
    undo: bool = False


class Front(EngineHost):
    """An engine host made of instances with roles."""

    def __init__(
        self,
        roles: Sequence[Role],
        launcher: Launcher,
        settings: FrontSettings,
        deliver: Deliver,
        on_lost: Callable[[], None] = lambda: None,
        restarts: Callable[[], Restarts] = Restarts,
    ) -> None:
        self.settings = settings
        self._n_requests_rerun = 0
        self.n_divided = 0
        """Requests whose prompts were computed on one instance and answered by another."""
        self.n_continued = 0
        """Answers that had begun on an instance that ended, and were continued on another."""
        self.failed: Counter[str] = Counter()
        """Hand-overs that failed, by reason."""
        self._deliver = deliver
        self._on_lost = on_lost
        self._supervisor = Supervisor(roles, launcher, settings, restarts)
        self._members = self._supervisor.members
        limits = Limits(None, settings.split_above_tokens)
        self._router = Router([(role, 0) for role in roles], settings.policy, limits)
        for member in self._members:
            self._router.leave(member.index)
        self._requests: dict[str, Attempt] = {}
        self._attempts: dict[str, Attempt] = {}
        self._waiting: dict[str, GivenSoFar] = {}
        """Requests, with their answers so far, that no instance can take yet."""
        self._leaving: dict[str, Assignment] = {}
        """Attempts that were given up; the answer's instance is told when the prompt's stops writing."""
        self._epoch = 0
        self._inbox: queue.SimpleQueue[Message | DrainPlace] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._host = host_name()
        self._thread = threading.Thread(target=self._run, name="phasewise-front", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state != "lost"

    def recoveries(self) -> Recoveries:
        """Count instances that were ready and had to be started anew, as an engine counts ranks. Each
        instance follows its own cores, and reports them in its log."""
        return Recoveries(self._supervisor.n_replaced, self._n_requests_rerun, self.n_continued)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the instances that are ready, by place."""
        readies = ((member.index, member.ready) for member in self._members)
        return {index: ready.pid for index, ready in readies if ready is not None}

    @property
    def roles(self) -> tuple[Role, ...]:
        """The pool that each instance is in now."""
        return self._router.roles

    @property
    def refused_frames(self) -> Counter[str]:
        """Count the frames that the instances running now threw away, by reason."""
        return sum((Counter(member.refused) for member in self._members), Counter())

    def members(self) -> list[dict[str, object]]:
        """Facts of every instance's place, for people and scripts."""
        return self._supervisor.facts(self._router.roles)

    def instances(self) -> list[InstanceState]:
        """The state of every instance, for metrics."""
        return self._supervisor.states(self._router)

    def fingerprint(self, model: str = "") -> Fingerprint | None:
        """The fingerprint that all instances share; None before the first of them is ready."""
        readies = (member.ready for member in self._members)
        return next((ready.identity.fingerprint for ready in readies if ready is not None), None)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message | DrainPlace) -> None:
        """Send a message, from any thread. Results arrive through `deliver`, or are seen in `members`."""
        self._inbox.put(message)
        os.eventfd_write(self._wake, 1)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End every request and every instance."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with Sockets(self.settings.keys) as sockets:
                self._control, self._endpoint = sockets.listen(zmq.ROUTER, self.settings.endpoint)
                self._control.setsockopt(zmq.ROUTER_MANDATORY, 0)
                self._work()
        except BaseException as error:
            self._give_up(f"its front failed: {error!r}")
            raise
        finally:
            self._supervisor.close()

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_look_s = 0.0
        while not self._stopping.is_set():
            now_s = time.monotonic()
            if now_s >= next_look_s:
                self._look_after(now_s)
                next_look_s = now_s + TICK_S
            ready = dict(poller.poll(max(1, int(1000 * (next_look_s - time.monotonic())))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._take_messages()
            while has_input(self._control):
                name, raw = self._control.recv_multipart()[:2]
                self._hear(name.decode("ascii", "replace"), raw)
        for member in self._members:
            self._say(member, Stop())
        self._fail_everything(Stopping("the server is stopping"))
        self._supervisor.wait_for_ends(1.0)

    def _take_messages(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            match message:
                case Submit():
                    self._run_request(GivenSoFar(message))
                case Abort(request_id):
                    self._abort(request_id)
                case DrainPlace(index, undo):
                    self._drain(self._members[index], undo=undo)
                case _:
                    raise AssertionError(f"a front is not sent {message}")

    # ---- requests ----------------------------------------------------------------------------------------

    def _run_request(self, given: GivenSoFar, *, whole: bool = False) -> None:
        request = given.request
        if self.lost is not None:
            self._tell(Failure(request.request_id, self.lost))
            return
        if not self._router.has_machines:
            self._waiting[request.request_id] = given
            return
        ask = ask_of(request, self._prefix_of(request))
        assignment = self._router.assign(ask, whole=whole or is_whole(request))
        self._epoch += 1
        attempt = Attempt(given, self._epoch, assignment)
        self._requests[request.request_id] = self._attempts[attempt.attempt_id] = attempt
        if not attempt.is_divided:
            self._say(self._members[assignment.token], attempt.take("whole"))
            return
        self.n_divided += 1
        self._say(self._members[assignment.prompt], attempt.take("prompt"))

    def _prefix_of(self, request: Submit) -> tuple[int, ...]:
        """The keys of the request's prompt prefix, by which instances report the prefixes they hold; none
        where routing ignores prefixes."""
        ready = next((member.ready for member in self._members if member.ready is not None), None)
        if self.settings.policy != "prefix-aware" or ready is None or request.prompt_logprobs is not None:
            return ()
        space = space_of(request.cache_space, ready.identity.adapters.get(request.adapter, ""))
        return block_keys(request.known_token_ids, ready.identity.model_hash, space)

    def _begin_answer(self, attempt: Attempt) -> None:
        """Note that the prompt is being computed: the block that the other instance keeps will be filled."""
        attempt.is_expected = True
        self._say(self._members[attempt.assignment.token], attempt.take("answer"))

    def _abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        attempt = self._requests.get(request_id)
        if attempt is not None:
            self._forget(attempt)
            self._drop(attempt)

    def _forget(self, attempt: Attempt) -> None:
        """Forget an attempt: later messages of instances about it are ignored."""
        del self._requests[attempt.request_id]
        del self._attempts[attempt.attempt_id]
        self._router.finished(attempt.request_id)

    def _drop(self, attempt: Attempt) -> None:
        """Free an attempt's blocks, first on the prompt's instance, which may still be writing."""
        prompt, token = (self._members[index] for index in attempt.assignment)
        if attempt.is_divided and (prompt.ready is not None or prompt.ending is not None):
            self._leaving[attempt.attempt_id] = attempt.assignment
            self._say(prompt, Abort(attempt.attempt_id))
        else:
            self._say(token, Abort(attempt.attempt_id))

    def _end(self, attempt: Attempt, error: Exception) -> None:
        self._forget(attempt)
        self._drop(attempt)
        self._tell(Failure(attempt.request_id, error))

    def _run_again(self, attempt: Attempt, error: ServingError, *, whole: bool = False) -> None:
        """Run the attempt's request again, continuing after what its client has of the answer, or fail it if
        it cannot run again or has run too often."""
        again = attempt.given.after(error, n_places=len(self._members))
        if not isinstance(again, GivenSoFar):
            self._end(attempt, again)
            return
        self._forget(attempt)
        self._drop(attempt)
        self.n_continued += again.has_begun
        self._n_requests_rerun += not again.has_begun
        self._run_request(again, whole=whole)

    def _fail_hand_over(self, attempt: Attempt, reason: str, message: str) -> None:
        self.failed[reason] += 1
        log.warning("a hand-over of request %s failed (%s): %s", attempt.request.request_id, reason, message)
        error = StepFailed(f"keys and values could not be handed over: {message}")
        self._run_again(attempt, error, whole=True)

    def _fail_everything(self, error: Exception) -> None:
        for attempt in list(self._requests.values()):
            self._end(attempt, error)
        for request_id in list(self._waiting):
            del self._waiting[request_id]
            self._tell(Failure(request_id, error))

    # ---- what instances say ------------------------------------------------------------------------------

    def _hear(self, name: str, raw: bytes) -> None:
        member = self._supervisor.heard(name)
        if member is None:
            return
        try:
            message: FromInstance = read_from_instance(raw)
        except WireError as error:
            self._bury(member, str(error))
            return
        match message:
            case Ready():
                self._admit(member, message)
            case Delivery():
                self._hear_delivery(member, message)
            case Heartbeat():
                member.hear(message)
            case PromptBegun(attempt_id):
                attempt = self._attempts.get(attempt_id)
                if attempt is not None:
                    attempt.given.was_computed = True
                    if attempt.is_divided and not attempt.is_expected:
                        self._begin_answer(attempt)
            case Dropped(attempt_id):
                assignment = self._leaving.get(attempt_id)
                if assignment is not None and assignment.prompt == member.index:
                    del self._leaving[attempt_id]
                    self._say(self._members[assignment.token], Abort(attempt_id))
            case HandOverFailed(attempt_id, reason, words):
                attempt = self._attempts.get(attempt_id)
                if attempt is not None and attempt.is_divided:
                    self._fail_hand_over(attempt, reason, words)
            case CannotStart(words):
                if member.life == 1:  # the settings are at fault, or the host
                    self._give_up(f"instance {member.name} cannot start: {words}")
                self._bury(member, words)

    def _admit(self, member: InstanceMember, ready: Ready) -> None:
        problem = self._supervisor.admit(member, ready)
        if problem is not None:
            if member.life == 1:
                self._give_up(f"instance {member.name} does not fit: {problem}")
            self._bury(member, problem)
            return
        if not member.is_draining:
            self._router.back(member.index, ready.kv_slots)
        if self.lost is None and (self._supervisor.has_started or self.state == "replacing"):
            self.state = "replacing" if self._lacks_a_pool else "running"
            self._tell()
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for given in waiting:
            self._run_request(given)

    def _hear_load(self, member: InstanceMember, report: Delivery) -> None:
        member.load = report.load
        try:
            self._router.tells(member.index, report.load.best_token_ns / 1e9, report.held)
        except ReportRefused as error:
            member.reports_refused += 1
            log.warning("instance %s is not believed about prefixes any more: %s", member.name, error)

    def _hear_delivery(self, member: InstanceMember, report: Delivery) -> None:
        self._hear_load(member, report)
        outs: list[Answer | Failure] = []
        for placed in report.placed:
            self._send_kv_to(member, placed.request_id, placed.placement)
        for attempt_id in report.computed:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None:
                attempt.computed_s = member.heard_s
                self._router.prompt_done(attempt.request_id)
        for attempt_id in report.arrived:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None:
                prompt = self._members[attempt.assignment.prompt]
                took_s = 0.0 if attempt.computed_s is None else member.heard_s - attempt.computed_s
                n_prompt = len(attempt.request.known_token_ids)
                prompt.handed_over(n_prompt, took_s)
                self._say(prompt, Abort(attempt_id))
                self._router.prompt_done(attempt.request_id)
                attempt.is_arrived = True
        for out in report.outs:
            attempt = self._attempts.get(out.request_id)
            if attempt is None:
                continue
            if isinstance(out, Failure):
                self._forget(attempt)
                self._drop(attempt)
                outs.append(out._replace(request_id=attempt.request_id))
            elif attempt.assignment.token == member.index:
                outs.append(self._take_answer(attempt, out, member))
        progress = tuple(
            prompt._replace(request_id=attempt.request_id)
            for prompt in report.progress
            if (attempt := self._attempts.get(prompt.request_id)) is not None and attempt.tells_progress
        )
        self._deliver(Delivery(tuple(outs), report.stats, self._load(), progress=progress))

    def _take_answer(self, attempt: Attempt, answer: Answer, member: InstanceMember) -> Answer:
        attempt.given.add(answer)
        if answer.finish_reason is not None:
            self._forget(attempt)
        else:
            self._router.prompt_done(attempt.request_id)
        ready = member.ready
        is_near = ready is not None and ready.host.split("/")[0] == self._host.split("/")[0]
        at_ns = answer.at_ns if is_near else time.perf_counter_ns()
        return answer._replace(request_id=attempt.request_id, at_ns=at_ns)

    def _send_kv_to(self, token: InstanceMember, attempt_id: str, placement: Placement) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or token.ready is None or not attempt.is_divided:
            return
        prompt = self._members[attempt.assignment.prompt]
        if prompt.ready is None:
            return
        n_prompt = len(attempt.request.known_token_ids)
        attempt.has_kv_target = True
        place = token.ready.place if self._shares_memory(prompt.ready, token.ready) else None
        self._say(prompt, SendKvTo(attempt_id, n_prompt, token.ready.endpoint, placement, place))

    def _shares_memory(self, ready: Ready, other: Ready) -> bool:
        transfer = self.settings.kv_transfer
        return transfer == "shm" or (transfer == "auto" and ready.host == other.host)

    # ---- instances that end ------------------------------------------------------------------------------

    def _look_after(self, now_s: float) -> None:
        for member in self._supervisor.ended():
            self._writes_no_more(member)
        for member in self._members:
            if member.is_draining and not member.has_left and not self._has_requests(member):
                self._say(member, Stop())
                self._supervisor.leave(member)
        for member, problem in self._supervisor.look_after(self._endpoint, now_s):
            self._bury(member, problem)
        for attempt in list(self._attempts.values()):
            overdue = self._overdue(attempt, now_s) if attempt.is_divided else None
            if overdue is not None:
                self._fail_hand_over(attempt, *overdue)

    def _overdue(self, attempt: Attempt, now_s: float) -> tuple[str, str] | None:
        """Counter label and message for a hand-over that timed out; None for one that has time left."""
        patience_s = self.settings.hand_over_s
        prompt = self._members[attempt.assignment.prompt]
        if attempt.computed_s is None:
            is_lost = now_s - attempt.sent_s > patience_s and prompt.has_nothing
            return ("unreported", f"instance {prompt.name} lost the prompt") if is_lost else None
        is_late = attempt.has_kv_target and now_s - attempt.computed_s > patience_s
        return ("timeout", f"nothing came for {number(patience_s)} s") if is_late else None

    def _bury(self, member: InstanceMember, why: str) -> None:
        """Give up an instance that has ended or is of no use: requests run again, and it starts anew."""
        lost = self._supervisor.end(member, why)
        self._router.leave(member.index)
        for ended in self._supervisor.ended():
            self._writes_no_more(ended)
        if self.state == "running" and self._lacks_a_pool:
            self.state = "replacing"
        if self._supervisor.is_hopeless:
            self._give_up(str(lost))
        for attempt in list(self._attempts.values()):
            prompt, token = attempt.assignment
            if member.index == token or (member.index == prompt and attempt.is_divided):
                if attempt.is_divided:
                    self.failed["instance"] += 1
                self._run_again(attempt, lost)

    def _writes_no_more(self, member: InstanceMember) -> None:
        """Give back the blocks that an instance was filling: its process has ended."""
        for attempt_id, assignment in list(self._leaving.items()):
            if assignment.prompt == member.index:
                del self._leaving[attempt_id]
                self._say(self._members[assignment.token], Abort(attempt_id))

    def _drain(self, member: InstanceMember, *, undo: bool) -> None:
        if undo == (not member.is_draining):
            return
        if undo:
            self._supervisor.come_back(member)
            if member.ready is not None:
                self._router.back(member.index, member.ready.kv_slots)
            return
        if not any(other.ready and not other.is_draining for other in self._members if other is not member):
            log.error("instance %s is not drained: no other one takes requests", member.name)
            return
        member.is_draining = True
        self._router.leave(member.index)

    @property
    def _lacks_a_pool(self) -> bool:
        """True if a pool has no running instance, and not all of its instances were drained."""
        places = [*zip(self._members, self._router.roles, strict=True)]
        wanted = {pool for member, pool in places if not member.has_left}
        return bool(wanted - {pool for member, pool in places if member.ready is not None})

    def _has_requests(self, member: InstanceMember) -> bool:
        held = [*(attempt.assignment for attempt in self._attempts.values()), *self._leaving.values()]
        return member.ending is not None or any(member.index in assignment for assignment in held)

    def _give_up(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = EngineLost(f"the server has given up: {reason}")
        log.error("%s", self.lost)
        self.state = "lost"
        self._fail_everything(self.lost)
        self._on_lost()

    # ---- telling -----------------------------------------------------------------------------------------

    def _say(self, member: InstanceMember, message: ToInstance) -> None:
        if member.ready is not None:
            self._control.send_multipart([member.name.encode(), write(message)])

    def _tell(self, *outs: Answer | Failure) -> None:
        self._deliver(Delivery(outs, None, self._load()))

    def _load(self) -> EngineLoad:
        """The load of all instances together; requests without an instance count as waiting."""
        loads = [member.load for member in self._members if member.load is not None]
        n_in_shadow = sum(attempt.request.in_shadow for attempt in self._requests.values())
        n_assigned = len(self._requests) - n_in_shadow
        n_waiting = min(n_assigned, sum(load.n_waiting for load in loads))  # a divided one may wait twice
        n_without = sum(not given.request.in_shadow for given in self._waiting.values())
        return load_together(loads, n_waiting + n_without, n_assigned - n_waiting)._replace(
            hand_overs=HandOverCounts(self.n_divided, dict(self.failed), dict(self.refused_frames)),
            n_in_shadow=n_in_shadow,
        )

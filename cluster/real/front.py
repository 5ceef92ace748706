"""Front over several instances, which HTTP sees as one engine host (`serving.engine.engine_host`).

A thread of its own routes requests (`routing`) and carries what instances say about hand-overs from one to
the other; `supervisor` starts their processes and notices those that end or hang. What it promises:

- a request whose instance ends before anything of its answer was given out runs again, on another one;
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
from dataclasses import dataclass, field, replace

import zmq

from phasewise._words import number
from phasewise.cluster.real.instance import host_name
from phasewise.cluster.real.instance_messages import (
    Aim,
    Asked,
    Beat,
    CannotStart,
    Drop,
    Dropped,
    FromInstance,
    HandOverFailed,
    PromptBegun,
    Ready,
    Stop,
    Take,
    ToInstance,
    Told,
    WireError,
    read_from_instance,
    write,
)
from phasewise.cluster.real.supervisor import FrontSettings, InstanceMember, Launcher, Supervisor
from phasewise.cluster.routing import Ask, Assignment, Limits, Role, Router, SplitwisePolicy
from phasewise.serving.engine.engine_host import Deliver, EngineState
from phasewise.serving.engine.fingerprint import Fingerprint
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
from phasewise.serving.prefix_store.store import summed
from phasewise.serving.processes.restarts import MOST_RERUNS, Restarts
from phasewise.serving.processes.sockets import Sockets, has_input
from phasewise.serving.sampling.sampling import GREEDY

TICK_S = 0.1
"""The interval at which the instances' processes are looked at."""
DEFAULT_ANSWER_TOKENS = 256
"""Expected of an answer of which nothing is known, for routing alone."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempt:
    """A request on its way over instances."""

    request: Submit
    epoch: int
    assignment: Assignment
    n_reruns: int = 0
    sent_s: float = field(default_factory=time.monotonic)
    has_begun: bool = False
    is_expected: bool = False
    """The instance that answers knows of it."""
    is_arrived: bool = False
    is_aimed: bool = False
    computed_s: float | None = None

    @property
    def attempt_id(self) -> str:
        return f"{self.request.request_id}@{self.epoch}"

    @property
    def is_divided(self) -> bool:
        """True if an instance computes the prompt and another one waits for it."""
        return self.assignment.prompt != self.assignment.token and not self.is_arrived


@dataclass(slots=True)
class FrontCounts:
    """Counts since the start. They never fall."""

    divided: int = 0
    """Requests whose prompts were computed on one instance and answered by another."""
    failed: Counter[str] = field(default_factory=Counter)
    """Hand-overs that failed, by reason."""


class Front:
    """`serving.engine.engine_host.EngineHost` over instances with roles."""

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
        self.state: EngineState = "starting"
        self.lost: EngineLost | None = None
        self.n_requests_rerun = 0
        self.counts = FrontCounts()
        self._deliver = deliver
        self._on_lost = on_lost
        self._supervisor = Supervisor(roles, launcher, settings, restarts)
        self._members = self._supervisor.members
        limits = Limits(split_above_tokens=settings.split_above_tokens)
        self._router = Router(
            [(role, 0) for role in roles], SplitwisePolicy(limits), settings.repurpose_after_requests
        )
        for member in self._members:
            self._router.leave(member.index)
        self._requests: dict[str, _Attempt] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._waiting: dict[str, tuple[Submit, int]] = {}
        """Requests that no instance can take yet, and how often each ran before."""
        self._leaving: dict[str, Assignment] = {}
        """Attempts that were given up: the token's instance is told when the prompt's has stopped writing."""
        self._epoch = 0
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._host = host_name()
        self._thread = threading.Thread(target=self._run, name="phasewise-front", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state != "lost"

    @property
    def n_ranks_replaced(self) -> int:
        """Instances that had been ready and were started anew."""
        return self._supervisor.n_replaced

    @property
    def pids(self) -> dict[int, int]:
        """Processes of the instances that are ready, by place."""
        return {member.index: member.ready.pid for member in self._members if member.ready is not None}

    @property
    def roles(self) -> tuple[Role, ...]:
        """The pool that each instance is in now."""
        return self._router.roles

    @property
    def refused_frames(self) -> Counter[str]:
        """Frames that instances threw away, by reason: of those that run now."""
        return sum((Counter(member.refused) for member in self._members), Counter())

    def members(self) -> list[dict[str, object]]:
        """The facts of every place, for people and scripts."""
        return [member.facts(pool) for member, pool in zip(self._members, self._router.roles, strict=True)]

    def fingerprint(self, model: str = "") -> Fingerprint | None:
        """That of the instances, which all agree; None before the first of them is ready."""
        return next(
            (member.ready.identity.fingerprint for member in self._members if member.ready is not None), None
        )

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """From any thread. What comes of it arrives through `deliver`."""
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
                    self._run_request(message, 0)
                case Abort(request_id):
                    self._abort(request_id)
                case _:
                    raise AssertionError(f"a front is not sent {message}")

    # ---- requests ----------------------------------------------------------------------------------------

    def _run_request(self, request: Submit, n_reruns: int, *, whole: bool = False) -> None:
        if self.lost is not None:
            self._tell(Failure(request.request_id, self.lost))
            return
        if not self._router.has_machines:
            self._waiting[request.request_id] = request, n_reruns
            return
        n_prompt = len(request.prompt_token_ids)
        ask = Ask(request.request_id, n_prompt, _expected_tokens(request))
        whole = whole or request.prompt_logprobs is not None  # whoever answers gives them out
        whole = whole or request.in_shadow  # it gives way at once, which a block being sent cannot
        assignment = self._router.assign(ask, whole=whole)
        self._epoch += 1
        attempt = _Attempt(request, self._epoch, assignment, n_reruns)
        self._requests[request.request_id] = self._attempts[attempt.attempt_id] = attempt
        asked = Asked.of(request, attempt.attempt_id)
        token = self._members[assignment.token]
        if not attempt.is_divided:
            self._say(token, Take("whole", asked))
            return
        self.counts.divided += 1
        prompt_alone = replace(asked, sampling=GREEDY, stop=(), guide=None, estimate=None)
        self._say(self._members[assignment.prompt], Take("prompt", prompt_alone, attempt.epoch))

    def _begin_answer(self, attempt: _Attempt) -> None:
        """The prompt is being computed, so a block that the other instance keeps for it will be filled."""
        attempt.is_expected = True
        asked = Asked.of(attempt.request, attempt.attempt_id)
        self._say(self._members[attempt.assignment.token], Take("answer", asked, attempt.epoch))

    def _abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        attempt = self._requests.get(request_id)
        if attempt is not None:
            self._forget(attempt)
            self._drop(attempt)

    def _forget(self, attempt: _Attempt) -> None:
        """Nothing that instances say of this attempt is heard any more."""
        del self._requests[attempt.request.request_id]
        del self._attempts[attempt.attempt_id]
        self._router.finished(attempt.request.request_id)

    def _drop(self, attempt: _Attempt) -> None:
        """Free what it holds on instances: first where its prompt is computed, which may still be writing."""
        prompt, token = (self._members[index] for index in attempt.assignment)
        if attempt.is_divided and prompt.ready is not None:
            self._leaving[attempt.attempt_id] = attempt.assignment
            self._say(prompt, Drop(attempt.attempt_id))
        else:
            self._say(token, Drop(attempt.attempt_id))

    def _end(self, attempt: _Attempt, error: Exception) -> None:
        self._forget(attempt)
        self._drop(attempt)
        self._tell(Failure(attempt.request.request_id, error))

    def _run_again(self, attempt: _Attempt, error: ServingError, *, whole: bool = False) -> None:
        """From the start, unless something of the answer was given out, or it ran too often."""
        if attempt.has_begun or attempt.n_reruns >= MOST_RERUNS:
            self._end(attempt, error)
            return
        self._forget(attempt)
        self._drop(attempt)
        self.n_requests_rerun += 1
        self._run_request(attempt.request, attempt.n_reruns + 1, whole=whole)

    def _fail_hand_over(self, attempt: _Attempt, reason: str, message: str) -> None:
        self.counts.failed[reason] += 1
        log.warning("a hand-over failed (%s): %s", reason, message)
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
            case Told():
                self._hear_told(member, message)
            case Beat():
                member.beats(message)
            case PromptBegun(attempt_id):
                attempt = self._attempts.get(attempt_id)
                if attempt is not None and attempt.is_divided and not attempt.is_expected:
                    self._begin_answer(attempt)
            case Dropped(attempt_id):
                assignment = self._leaving.get(attempt_id)
                if assignment is not None and assignment.prompt == member.index:
                    del self._leaving[attempt_id]
                    self._say(self._members[assignment.token], Drop(attempt_id))
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
        self._router.back(member.index, ready.kv_slots)
        if self.lost is None and self._supervisor.has_started:
            self.state = "running"
            self._tell()
        for request, n_reruns in list(self._waiting.values()):
            del self._waiting[request.request_id]
            self._run_request(request, n_reruns)

    def _hear_told(self, member: InstanceMember, told: Told) -> None:
        member.load = told.load
        outs: list[Answer | Failure] = []
        for placed in told.placed:
            self._aim(member, placed.request_id, placed.placement)
        for attempt_id in told.computed:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None:
                attempt.computed_s = member.heard_s
                self._router.prompt_done(attempt.request.request_id)
        for attempt_id in told.arrived:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None:
                self._say(self._members[attempt.assignment.prompt], Drop(attempt_id))
                self._router.prompt_done(attempt.request.request_id)
                attempt.is_arrived = True
        for answer in told.answers:
            attempt = self._attempts.get(answer.request_id)
            if attempt is not None and attempt.assignment.token == member.index:
                outs.append(self._take_answer(attempt, answer, member))
        for failed in told.failures:
            attempt = self._attempts.get(failed.request_id)
            if attempt is not None:
                self._forget(attempt)
                self._drop(attempt)
                outs.append(failed.to_failure(attempt.request.request_id))
        progress = tuple(
            prompt._replace(request_id=self._attempts[prompt.request_id].request.request_id)
            for prompt in told.progress
            if prompt.request_id in self._attempts
        )
        self._deliver(Delivery(tuple(outs), told.stats, self._load(), progress=progress))

    def _take_answer(self, attempt: _Attempt, answer: Answer, member: InstanceMember) -> Answer:
        attempt.has_begun = attempt.has_begun or bool(answer.text or answer.tokens or answer.prompt)
        if answer.finish_reason is not None:
            self._forget(attempt)
        else:
            self._router.prompt_done(attempt.request.request_id)
        ready = member.ready
        is_near = ready is not None and ready.host.split("/")[0] == self._host.split("/")[0]
        at_ns = answer.at_ns if is_near else time.perf_counter_ns()
        return answer._replace(request_id=attempt.request.request_id, at_ns=at_ns)

    def _aim(self, token: InstanceMember, attempt_id: str, placement: Placement) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or token.ready is None or not attempt.is_divided:
            return
        prompt = self._members[attempt.assignment.prompt]
        if prompt.ready is None:
            return
        n_prompt = len(attempt.request.prompt_token_ids)
        attempt.is_aimed = True
        place = token.ready.place if self._shares_memory(prompt.ready, token.ready) else None
        self._say(prompt, Aim(attempt_id, attempt.epoch, n_prompt, token.ready.endpoint, placement, place))

    def _shares_memory(self, ready: Ready, other: Ready) -> bool:
        transfer = self.settings.kv_transfer
        return transfer == "shm" or (transfer == "auto" and ready.host == other.host)

    # ---- instances that end ------------------------------------------------------------------------------

    def _look_after(self, now_s: float) -> None:
        for member, problem in self._supervisor.look_after(self._endpoint, now_s):
            self._bury(member, problem)
        for attempt in list(self._attempts.values()):
            overdue = self._overdue(attempt, now_s) if attempt.is_divided else None
            if overdue is not None:
                self._fail_hand_over(attempt, *overdue)

    def _overdue(self, attempt: _Attempt, now_s: float) -> tuple[str, str] | None:
        """The counter's label and a message for a hand-over that timed out; None: it has not."""
        patience_s = self.settings.hand_over_s
        prompt = self._members[attempt.assignment.prompt]
        if attempt.computed_s is None:
            is_lost = now_s - attempt.sent_s > patience_s and prompt.has_nothing
            return ("unreported", f"instance {prompt.name} lost the prompt") if is_lost else None
        is_late = attempt.is_aimed and now_s - attempt.computed_s > patience_s
        return ("timeout", f"nothing came for {number(patience_s)} s") if is_late else None

    def _bury(self, member: InstanceMember, why: str) -> None:
        """The instance has ended or is of no use: what it had runs again, and it is started anew."""
        lost = self._supervisor.end(member, why)
        self._router.leave(member.index)
        for attempt_id, assignment in list(self._leaving.items()):
            if assignment.prompt == member.index:
                del self._leaving[attempt_id]
                self._say(self._members[assignment.token], Drop(attempt_id))
        if self.state == "running" and not self._router.has_machines:
            self.state = "replacing"
        if self._supervisor.is_hopeless:
            self._give_up(str(lost))
        for attempt in list(self._attempts.values()):
            prompt, token = attempt.assignment
            if member.index == token or (member.index == prompt and attempt.is_divided):
                if attempt.is_divided:
                    self.counts.failed["instance"] += 1
                self._run_again(attempt, lost)

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
        return EngineLoad(
            n_waiting + sum(not request.in_shadow for request, _ in self._waiting.values()),
            n_assigned - n_waiting,
            sum(load.kv_slots_used for load in loads),
            sum(load.kv_slots for load in loads),
            None,
            sum(load.preemptions for load in loads),
            sum(load.prefix_hits for load in loads),
            sum(load.prefix_tokens_reused for load in loads),
            sum(load.phase_switches for load in loads),
            sum(load.n_clients_waiting for load in loads),
            hand_overs=HandOverCounts(
                self.counts.divided, dict(self.counts.failed), dict(self.refused_frames)
            ),
            n_in_shadow=n_in_shadow,
            steps_over_tpot=sum(load.steps_over_tpot for load in loads),
            step_over_tpot_ms=max((load.step_over_tpot_ms for load in loads), default=0),
            stored=summed([load.stored for load in loads if load.stored is not None]),
            prompt_token_ns=_together_ns([load.prompt_token_ns for load in loads]),
        )


def _together_ns(times_ns: Sequence[float]) -> float:
    """Time a token of those that compute prompts at the same time; 0: none has computed one."""
    positive_ns = [time_ns for time_ns in times_ns if time_ns > 0]
    return 1 / sum(1 / time_ns for time_ns in positive_ns) if positive_ns else 0.0


def _expected_tokens(request: Submit) -> int:
    """The tokens that an answer is expected to have, at most what the request allows."""
    guess = DEFAULT_ANSWER_TOKENS if request.estimate is None else int(request.estimate.output_tokens)
    return min(guess, request.max_tokens) if request.max_tokens is not None else guess

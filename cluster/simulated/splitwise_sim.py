"""The authors' simulator, decision for decision: its two cluster schedulers (`token_jsq`, `mixed_pool`) and
its machine (`SplitwiseInstance`: mixed continuous batching with preemption, Splitwise IV-B).

It is a baseline, so its peculiarities are kept and named where they are:

- a request's tokens run as one task from the second token on; while no prompt comes, iterations of a batch
  are one event (`contiguous`), which a new task cuts at the next whole iteration;
- a token machine is chosen by memory, a prompt machine by pending tokens; `token_max_pending_batch_tokens` of
  the authors' configuration is never read;
- a prompt is never cut into chunks, even where it alone exceeds the most tokens of a batch;
- a transfer that finds no room on its target asks again after a second;
- the waiting tasks' numbers of preemptions change while they stand in a queue that is ordered by them.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.simulated_requests import Arrival, Life
from phasewise.cluster.simulated.steps import StepTimes
from phasewise.cluster.simulated.timeline import Event, Timeline

RETRY_S = 1.0
BYTES_PER_GIB = 1024**3

_QUEUED, _RUNNING, _BLOCKED = range(3)


@dataclass(frozen=True)
class PaperLimits:
    """Limits of one machine; the defaults are the authors'."""

    max_batch_size: int = 512
    max_batch_tokens: int = 2048
    max_preemptions: int = 4


@dataclass(frozen=True)
class PaperMachineType:
    """A machine as the authors' simulator sees it."""

    steps: StepTimes
    memory_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    limits: PaperLimits = PaperLimits()


class _Request:
    """A request, and the memory that it holds."""

    __slots__ = ("held_bytes", "life", "prompt", "seq", "token", "transfer_s")

    def __init__(self, life: Life) -> None:
        arrival = life.arrival
        self.life = life
        self.prompt = _Task(self, True, arrival.prompt_tokens)
        self.token = _Task(self, False, arrival.output_tokens - 1)
        self.held_bytes = 0
        self.transfer_s: float | None = None  # None: both tasks run on one machine

    @property
    def arrival_s(self) -> float:
        return self.life.arrival.at_s


class _Task:
    """The prompt of a request, or all its tokens but the first."""

    __slots__ = (
        "arrived",
        "is_prompt",
        "left",
        "n_tokens",
        "per_iteration",
        "preemptions",
        "request",
        "state",
    )

    def __init__(self, request: _Request, is_prompt: bool, n_tokens: int) -> None:
        self.request = request
        self.is_prompt = is_prompt
        self.n_tokens = n_tokens
        self.per_iteration = n_tokens if is_prompt else 1
        self.left = 1.0 if is_prompt else float(n_tokens)
        """Tokens that the task is still to generate."""
        self.preemptions = 0
        self.state = _QUEUED

    @property
    def held_tokens(self) -> int:
        return self.n_tokens + 1 if self.is_prompt else self.n_tokens


def _queue_key(task: _Task) -> tuple[int, float]:
    return task.preemptions, task.request.arrival_s


def _arrival_key(request: _Request) -> float:
    return request.arrival_s


class ClusterScheduler(Protocol):
    """Assigns a request's tasks to machines, and hears when a machine has nothing left."""

    def assign(self, request: _Request) -> tuple[PaperMachine, PaperMachine]: ...

    def machine_is_free(self, machine: PaperMachine) -> None: ...


class PaperMachine:
    """A machine of the authors' simulator (`SplitwiseInstance`)."""

    def __init__(self, index: int, home: str, kind: PaperMachineType, timeline: Timeline) -> None:
        self.index = index
        self.home = home
        self.kind = kind
        self.is_mixed = False
        self.memory_bytes = self.scheduled_bytes = kind.weight_bytes
        self.scheduled_tokens = 0
        self.busy_s = 0.0
        self.occupancy_s: dict[int, float] = defaultdict(float)
        """Seconds that batches took, by their active tokens (Fig. 17)."""
        self.pending: list[_Task] = []
        self._timeline = timeline
        self._cluster: _Cluster
        self._pending_prompts: list[_Task] = []
        self._blocked: list[_Task] = []
        self._requests: list[_Request] = []  # with tasks here, by arrival
        self._tasks: dict[_Request, list[_Task]] = {}
        self._batch: list[_Task] = []
        self._in_batch: set[_Task] = set()
        self._n_prompts = 0
        self._batch_tokens = 0
        self._iteration_s = 0.0
        self._n_iterations = 0.0
        self._end: Event | None = None
        self._paused = False
        self._run_start_s = 0.0

    def join(self, cluster: _Cluster) -> None:
        self._cluster = cluster

    def bytes_of(self, task: _Task) -> int:
        return task.held_tokens * self.kind.kv_bytes_per_token

    def has_room(self, n_bytes: int) -> bool:
        return self.memory_bytes + n_bytes <= self.kind.memory_bytes

    def allocate(self, n_bytes: int) -> None:
        self.memory_bytes += n_bytes

    def free(self, n_bytes: int) -> None:
        self.memory_bytes -= n_bytes
        self.scheduled_bytes -= n_bytes

    def arrive(self, task: _Task) -> None:
        """Queue a task that can run here now, or once its request's prompt is done here."""
        tasks = self._tasks.get(task.request)
        if tasks is None:
            insort(self._requests, task.request, key=_arrival_key)
            self._tasks[task.request] = [task]
        else:
            tasks.append(task)
        self._enqueue(task)
        limits = self.kind.limits
        if not self._batch:
            if self.has_room(self.bytes_of(task)):
                self._start()
        elif (
            len(self._batch) < limits.max_batch_size
            and self._batch_tokens + task.per_iteration <= limits.max_batch_tokens
        ):
            self._pause()
        elif task.is_prompt and self._n_prompts < len(self._batch):
            prompt_tokens = self._batch_tokens - (len(self._batch) - self._n_prompts)
            if prompt_tokens + task.n_tokens <= limits.max_batch_tokens:
                self._pause()

    def transfer_done(self) -> None:
        """Free the memory of keys and values that have left this machine: a task that waited for memory may
        run."""
        if not self.pending:
            return
        limits = self.kind.limits
        if not self._batch:
            if self.has_room(self.bytes_of(self.pending[0])):
                self._start()
        elif len(self._batch) < limits.max_batch_size and self._batch_tokens < limits.max_batch_tokens:
            self._pause()

    def _enqueue(self, task: _Task) -> None:
        insort(self.pending, task, key=_queue_key)
        if task.is_prompt:
            self._pending_prompts.append(task)

    def _dequeue(self, task: _Task) -> None:
        self.pending.remove(task)
        if task.state == _BLOCKED:
            self._blocked.remove(task)
        if task.is_prompt:
            self._pending_prompts.remove(task)

    def _start(self) -> None:
        """Choose a batch and run it: one iteration with prompts, else as many as all of it can take."""
        chosen = self._choose()
        kept = set(chosen)
        for task in [task for task in self._batch if task not in kept]:
            self._preempt(task)
        for task in chosen:
            if task not in self._in_batch:
                self._dequeue(task)
                self._enter(task)
        for request in self._requests:
            task = self._tasks[request][0]
            if task not in self._in_batch:
                task.preemptions += 1
        if not self._batch:
            if not self._requests:
                self._cluster.scheduler.machine_is_free(self)
            return
        prompt_tokens = 0
        for task in self._batch:
            if task.is_prompt:
                prompt_tokens += task.n_tokens
                if task.state == _QUEUED:
                    task.request.life.prompt_start_s = self._timeline.now_s
            if task.state == _QUEUED:
                held = self.bytes_of(task)
                self.allocate(held)
                task.request.held_bytes += held
            task.state = _RUNNING
        n_tokens = len(self._batch) - self._n_prompts
        self._iteration_s = self.kind.steps.iteration_s(prompt_tokens, n_tokens)
        self._n_iterations = 1 if self._n_prompts else min(task.left for task in self._batch)
        self._end_after(self._iteration_s * self._n_iterations)

    def _end_after(self, delay_s: float) -> None:
        if delay_s == 0:
            self._end = None
            self._complete()
        else:
            self._end = self._timeline.at(self._timeline.now_s + delay_s, self._complete)

    def _pause(self) -> None:
        """Cut contiguous iterations at the end of the one that runs, so that a new task can join."""
        if self._paused or self._n_prompts or self._end is None:
            return
        self._paused = True
        now_s = self._timeline.now_s
        start_s = self._end.at_s - self._iteration_s * self._n_iterations
        elapsed_s = now_s - start_s
        self._n_iterations = elapsed_s // self._iteration_s + 1
        self._end.cancel()
        self._end_after(self._iteration_s * self._n_iterations - elapsed_s)

    def _complete(self) -> None:
        self.occupancy_s[self._batch_tokens] += self._iteration_s * self._n_iterations
        done = []
        for task in self._batch:
            task.left -= self._n_iterations
            if task.left <= 0:
                done.append(task)
        for task in done:
            self._finish(task)
        self._paused = False
        self._start()

    def _finish(self, task: _Task) -> None:
        self.scheduled_tokens -= task.n_tokens if task.is_prompt else 1
        request = task.request
        if task.is_prompt:
            request.life.prompt_end_s = request.life.first_token_s = self._timeline.now_s
        else:
            self.free(request.held_bytes)
            request.held_bytes = 0
            request.life.end_s = self._timeline.now_s
        self._leave(task)
        tasks = self._tasks[request]
        tasks.remove(task)
        if not tasks:
            self._requests.remove(request)
            del self._tasks[request]
        if task.is_prompt and request.transfer_s is not None:
            self._cluster.send(request)

    def _enter(self, task: _Task) -> None:
        self._batch.append(task)
        self._in_batch.add(task)
        self._n_prompts += task.is_prompt
        if len(self._batch) == 1:
            self._run_start_s = self._timeline.now_s

    def _leave(self, task: _Task) -> None:
        self._batch.remove(task)
        self._in_batch.remove(task)
        self._n_prompts -= task.is_prompt
        if not self._batch:
            self.busy_s += self._timeline.now_s - self._run_start_s

    def _preempt(self, task: _Task) -> None:
        task.state = _BLOCKED
        self._leave(task)
        self._enqueue(task)
        self._blocked.append(task)

    def _choose(self) -> list[_Task]:
        """The next batch: what was preempted too often, prompts, blocked, running and new tokens."""
        batch = _Choice(self.kind, self.memory_bytes)
        most = self.kind.limits.max_preemptions
        for task in self.pending:
            if task.preemptions < most or batch.is_full_for(task):
                break
            batch.offer(task)
        for task in self._pending_prompts:
            if batch.is_full_for(task) or not batch.offer(task):
                break
        for task in self._blocked:
            if batch.is_full_for(task):
                break
            batch.offer(task)
        for task in self._batch:
            if batch.is_full_for(task):
                break
            batch.offer(task)
        for request in self._requests:
            if len(batch.tasks) == self.kind.limits.max_batch_size:
                break
            if request in batch.requests:
                continue
            task = self._tasks[request][0]
            if batch.is_full_for(task) or not batch.offer(task):
                break
        self._batch_tokens = batch.n_tokens
        return batch.tasks


class _Choice:
    """A batch that is being put together."""

    __slots__ = ("_kv", "_limits", "_room", "n_tokens", "requests", "tasks")

    def __init__(self, kind: PaperMachineType, memory_bytes: int) -> None:
        self._limits = kind.limits
        self._kv = kind.kv_bytes_per_token
        self._room = kind.memory_bytes - memory_bytes
        self.tasks: list[_Task] = []
        self.requests: set[_Request] = set()
        self.n_tokens = 0

    def is_full_for(self, task: _Task) -> bool:
        if len(self.tasks) == self._limits.max_batch_size:
            return True
        return bool(self.tasks) and self.n_tokens + task.per_iteration > self._limits.max_batch_tokens

    def offer(self, task: _Task) -> bool:
        """Take the task, unless its request is in already. False where it finds no memory."""
        if task.request in self.requests:
            return True
        if task.state == _QUEUED:
            n_bytes = task.held_tokens * self._kv
            if n_bytes > self._room:
                return False
            self._room -= n_bytes
        self.tasks.append(task)
        self.requests.add(task.request)
        self.n_tokens += task.per_iteration
        return True


class TokenJsq:
    """The authors' `TokenJSQScheduler`: both tasks of a request on the machine with the fewest pending
    tokens."""

    def __init__(self, machines: Sequence[PaperMachine]) -> None:
        self._machines = list(machines)

    def assign(self, request: _Request) -> tuple[PaperMachine, PaperMachine]:
        machine = min(self._machines, key=_scheduled_tokens)
        machine.scheduled_tokens += request.prompt.n_tokens + 1
        return machine, machine

    def machine_is_free(self, machine: PaperMachine) -> None:
        pass


class MixedPool:
    """The authors' `MixedPoolScheduler`: three pools; a machine is mixed from an overflow until it is
    empty."""

    def __init__(self, machines: Sequence[PaperMachine], prompt_max_pending_tokens: int = 8192) -> None:
        self._most_pending = prompt_max_pending_tokens
        self._prompt = [machine for machine in machines if machine.home == "prompt"]
        self._token = [machine for machine in machines if machine.home == "token"]
        self._mixed: list[PaperMachine] = []

    def assign(self, request: _Request) -> tuple[PaperMachine, PaperMachine]:
        prompt = self._prompt_machine(self._prompt, request) or self._prompt_machine(self._mixed, request)
        token = self._token_machine(self._token, request) or self._token_machine(self._mixed, request)
        if prompt is None and self._token:
            prompt = min(self._token, key=_scheduled_tokens)
            self._mix(prompt, self._token)
        if token is None and self._prompt:
            token = min(self._prompt, key=_scheduled_bytes)
            self._mix(token, self._prompt)
        if prompt is None or token is None:
            prompt = token = min([*self._prompt, *self._mixed, *self._token], key=_scheduled_tokens)
        of_prompt, of_token = prompt.bytes_of(request.prompt), token.bytes_of(request.token)
        prompt.scheduled_bytes += of_prompt
        token.scheduled_bytes += of_token
        if prompt is not token:
            token.scheduled_bytes += token.bytes_of(request.prompt)
        prompt.scheduled_tokens += request.prompt.n_tokens
        token.scheduled_tokens += 1
        return prompt, token

    def machine_is_free(self, machine: PaperMachine) -> None:
        if machine.is_mixed:
            machine.is_mixed = False
            self._mixed.remove(machine)
            (self._prompt if machine.home == "prompt" else self._token).append(machine)

    def _mix(self, machine: PaperMachine, pool: list[PaperMachine]) -> None:
        pool.remove(machine)
        self._mixed.append(machine)
        machine.is_mixed = True

    def _prompt_machine(self, pool: list[PaperMachine], request: _Request) -> PaperMachine | None:
        if not pool:
            return None
        best = min(pool, key=_scheduled_tokens)
        is_long = best.scheduled_tokens + request.prompt.n_tokens > self._most_pending
        return None if best.pending and is_long else best

    def _token_machine(self, pool: list[PaperMachine], request: _Request) -> PaperMachine | None:
        if not pool:
            return None
        best = min(pool, key=_scheduled_bytes)
        needed = best.bytes_of(request.prompt) + best.bytes_of(request.token)
        return None if best.scheduled_bytes + needed >= best.kind.memory_bytes else best


def _scheduled_tokens(machine: PaperMachine) -> int:
    return machine.scheduled_tokens


def _scheduled_bytes(machine: PaperMachine) -> int:
    return machine.scheduled_bytes


class _Cluster:
    """A simulated cluster: takes requests in, gives tasks to machines, moves keys and values between them."""

    def __init__(
        self, timeline: Timeline, scheduler: ClusterScheduler, link_bytes_per_s: Callable[[int, int], float]
    ) -> None:
        self.scheduler = scheduler
        self._timeline = timeline
        self._link_bytes_per_s = link_bytes_per_s
        self._token_machine: dict[_Request, tuple[PaperMachine, PaperMachine]] = {}

    def take(self, life: Life) -> None:
        request = _Request(life)
        prompt, token = self.scheduler.assign(request)
        life.prompt_machine, life.token_machine = prompt.index, token.index
        if prompt is token:
            prompt.arrive(request.prompt)
            prompt.arrive(request.token)
            return
        n_bytes = life.arrival.prompt_tokens * prompt.kind.kv_bytes_per_token
        request.transfer_s = n_bytes / self._link_bytes_per_s(prompt.index, token.index)
        self._token_machine[request] = prompt, token
        prompt.arrive(request.prompt)

    def send(self, request: _Request) -> None:
        """Send a request's keys and values from the machine of its prompt to the other one, when that has
        room."""
        source, target = self._token_machine[request]
        if not target.has_room(request.held_bytes):
            self._timeline.at(self._timeline.now_s + RETRY_S, lambda: self.send(request))
            return
        target.allocate(request.held_bytes)
        assert request.transfer_s is not None
        self._timeline.at(
            self._timeline.now_s + request.transfer_s, lambda: self._sent(request, source, target)
        )

    def _sent(self, request: _Request, source: PaperMachine, target: PaperMachine) -> None:
        source.free(request.held_bytes)
        request.life.kv_arrival_s = self._timeline.now_s
        del self._token_machine[request]
        target.arrive(request.token)
        source.transfer_done()


def run_splitwise_sim(
    arrivals: Sequence[Arrival],
    machines: Sequence[PaperMachine],
    timeline: Timeline,
    link_bytes_per_s: Callable[[int, int], float],
) -> list[Life]:
    """Run a trace to its end, one life per arrival, in the order of the trace.

    Machines of home "mixed" are a baseline under `TokenJsq`; else all are of home "prompt" or "token", under
    `MixedPool`. ClusterError for a cluster that can run nothing, or a request that fits no machine.
    """
    homes = {machine.home for machine in machines}
    if homes == {"mixed"}:
        scheduler: ClusterScheduler = TokenJsq(machines)
    elif homes == {"prompt", "token"}:
        scheduler = MixedPool(machines)
    else:
        raise ClusterError(
            "policy splitwise-sim needs mixed machines alone, or prompt and token machines; the cluster has "
            f"{', '.join(sorted(homes)) or 'none'}"
        )
    cluster = _Cluster(timeline, scheduler, link_bytes_per_s)
    for machine in machines:
        machine.join(cluster)
    lives = [Life(arrival) for arrival in arrivals]
    for life in lives:
        timeline.at(life.arrival.at_s, partial(cluster.take, life))
    timeline.run()
    return lives

"""Choice of the machines that compute a request's prompt and its answer (Splitwise IV-A). Pure: integers in,
an `Assignment` out; no clock, no sockets. A front over real instances and the simulator run the same code.

A router is told when a prompt is done and when a request has ended; from that it knows every queue. Machines
may report their pace and the prefixes of prompts that they hold (decision 0119). Pools are never stored. A
machine is in the mixed pool while it holds work of the kind that is not its own, and back in its own pool
when that is done (IV-A, "machine pool management").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from phasewise._words import counted
from phasewise.cluster.errors import ClusterError
from phasewise.serving.scheduling.held_prefixes import (
    BLOCK_TOKENS,
    KEY_BYTES,
    MOST_KEYS,
    MOST_STORED_BLOCKS,
    HeldReport,
)

AUTHORS_OVERFLOW_TOKENS = 8192
"""The authors' value of `Limits.prompt_overflow_tokens`, for an H100."""
OVERFLOW_S = 1.34
"""Seconds of the authors' machine for `AUTHORS_OVERFLOW_TOKENS` by their profile: Llama 2 70B, two H100."""

OWN_TOKEN_COUNTS = 4
"""Weight of a prompt's own tokens relative to those that wait before it: computing again what another machine
holds delays all later prompts too, the more the busier the machines are. Figures:
benchmarks/notes/clusters.md."""
UNLIKE = 2.0
"""Least ratio of two machines' times for a token at which they count as different kinds."""

Role = Literal["prompt", "token", "mixed"]
ROLES: tuple[Role, ...] = get_args(Role)


class Assignment(NamedTuple):
    """The machines of a request, by index. If they differ, keys and values go from `prompt` to `token`."""

    prompt: int
    token: int


class Ask(NamedTuple):
    """The facts of a request that a router needs."""

    request_id: str
    prompt_tokens: int
    answer_tokens: int
    """Tokens of the answer: expected, or the maximum."""
    prefix: tuple[int, ...] = ()
    """Keys of the prompt's whole blocks (`serving.scheduling.held_prefixes`); empty: prefixes are ignored."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits above which a queue is long, and a prompt is divided from its answer."""

    prompt_overflow_tokens: int | None = AUTHORS_OVERFLOW_TOKENS
    """Pending prompt tokens of a machine above which the next pool is asked. None: as many as the machine
    computes in `OVERFLOW_S` at its reported pace, and the authors' value before any report."""
    split_above_tokens: int = 0
    """Most tokens to be computed of a prompt that the answer's machine computes itself."""


# ---- blocks of tokens that a machine can take over: reported ones, and those that it will compute ---------


class ReportRefused(ClusterError):
    """A report of held prefixes that cannot be true."""


class HeldBlocks:
    """The prefix blocks of one machine, of which it can hold `most`. Reports are changes and are checked as a
    stranger's: after a false report a machine's reports are ignored until the machine is started anew."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: set[int] = set()
        self._coming: Counter[int] = Counter()
        self._n_reports = 0
        self._is_believed = True

    def __len__(self) -> int:
        return len(self._held)

    def hear(self, report: HeldReport) -> None:
        """Apply a report; the first report of a life replaces all before. ReportRefused for a report that
        cannot be true: from then on reports are ignored until the machine begins anew."""
        if report.number == 1:
            self._held.clear()
            self._n_reports, self._is_believed = 0, True
        if not self._is_believed:
            return
        mistake = self._mistake(report)
        if mistake is not None:
            self._held.clear()
            self._is_believed = False
            raise ReportRefused(mistake)
        self._n_reports = report.number
        self._held.difference_update(report.removed)
        self._held.update(report.added)

    def _mistake(self, report: HeldReport) -> str | None:
        """The reason, in one line, why a report cannot be true; None if it can."""
        added, removed = set(report.added), set(report.removed)
        if max(len(report.added), len(report.removed)) > MOST_KEYS:
            return f"a report of held prefixes has more than {MOST_KEYS} keys"
        if any(not 0 <= key < 1 << 8 * KEY_BYTES for key in added):
            return "it reports a key that is none"
        if report.number != self._n_reports + 1:
            return f"report {report.number} of held prefixes came after report {self._n_reports}"
        if len(added) != len(report.added) or added & self._held:
            return "it reports a prefix twice"
        if len(removed) != len(report.removed) or not removed <= self._held:
            return "it has forgotten a prefix that it did not report"
        n_held = len(self._held) + len(added) - len(removed)
        if n_held > self.most:
            return f"it reports {counted(n_held, 'block')} of prefixes, but has room for {self.most}"
        return None

    def expect(self, keys: Sequence[int]) -> None:
        """Count the blocks of a request on its way to the machine, which will hold them."""
        self._coming.update(keys)

    def ended(self, keys: Sequence[int]) -> None:
        """Take back what `expect` counted for an ended request: the machine reports the blocks that stay."""
        self._coming.subtract(keys)
        for key in keys:
            if self._coming[key] <= 0:
                del self._coming[key]

    def n_first(self, keys: Sequence[int]) -> int:
        """The number of these blocks, from the first on without a gap, that are on the machine or will be."""
        n_first = 0
        for key in keys:
            if key not in self._held and key not in self._coming:
                break
            n_first += 1
        return n_first


# ---- machines, and requests on their way -------------------------------------------------------------------


@dataclass(slots=True)
class _Machine:
    """A router's view of one machine."""

    index: int
    home: Role
    kv_slots: int
    blocks: HeldBlocks
    prompt_tokens: int = 0
    """Tokens that are still to be computed of the prompts assigned to the machine."""
    n_prompts: int = 0
    n_answers: int = 0
    kv_tokens: int = 0
    """Positions that the machine's requests hold or will need at their ends."""
    token_s: float = 0.0
    """Least seconds of one prompt token, as the machine reported it; 0 before any report."""
    is_here: bool = True
    """False after the machine has ended: it gets no requests until it is back."""
    pool: Role = "mixed"
    """The pool that the machine was in at the last look."""
    counts: RoutedCounts = field(default_factory=lambda: RoutedCounts())

    @property
    def role(self) -> Role:
        """The pool that the machine is in."""
        if self.home == "prompt" and self.n_answers:
            return "mixed"
        return "mixed" if self.home == "token" and self.n_prompts else self.home

    @property
    def pending_tokens(self) -> int:
        """The queue that JSQ compares (join the shortest): prompt tokens, and one token for each answer."""
        return self.prompt_tokens + self.n_answers

    def has_room(self, n_tokens: int) -> bool:
        return self.kv_tokens + n_tokens <= self.kv_slots

    def n_to_compute(self, ask: Ask) -> int:
        """Tokens of a prompt that the machine does not hold yet; at least the last one."""
        return max(1, ask.prompt_tokens - self.blocks.n_first(ask.prefix) * BLOCK_TOKENS)


@dataclass(slots=True)
class RoutedCounts:
    """Counts of the work that a machine was given since the start; none ever falls."""

    prompts: int = 0
    prompt_tokens: int = 0
    tokens_expected: int = 0
    """Prompt tokens, of `prompt_tokens`, that the machine was expected to hold already."""
    answers: int = 0
    pool_changes: int = 0
    """Times that the machine moved to another pool or back."""


class _Held(NamedTuple):
    """The work of a request that has not ended."""

    ask: Ask
    assignment: Assignment
    n_to_compute: int
    is_prompt_done: bool = False


Work = tuple[bool, float]
"""Length of a queue, by which machines are ordered: True where there is no room, then the length."""


class Router:
    """Assigns requests to machines of given roles and sizes, under one policy."""

    def __init__(self, machines: Iterable[tuple[Role, int]], policy: str, limits: Limits) -> None:
        """Make a router. machines: role and KV slots of each. policy: one of `POLICIES`."""
        self._machines = tuple(
            _Machine(index, role, kv_slots, HeldBlocks(_most_blocks(kv_slots)), pool=role)
            for index, (role, kv_slots) in enumerate(machines)
        )
        _check_roles({machine.home for machine in self._machines})
        self._queues_for, self._limits = POLICIES[policy], limits
        self._held: dict[str, _Held] = {}

    @property
    def roles(self) -> tuple[Role, ...]:
        """The pool that each machine is in now."""
        return tuple(machine.role for machine in self._machines)

    @property
    def counts(self) -> tuple[RoutedCounts, ...]:
        """Counts of the work that each machine was given."""
        return tuple(machine.counts for machine in self._machines)

    @property
    def has_machines(self) -> bool:
        """True if any machine can be given requests."""
        return any(machine.is_here for machine in self._machines)

    def n_blocks(self, index: int) -> int:
        """Number of prefix blocks that a machine reports to hold."""
        return len(self._machines[index].blocks)

    def leave(self, index: int) -> None:
        """Note that a machine has ended: no request goes there until `back`; earlier requests still count."""
        self._machines[index].is_here = False

    def back(self, index: int, kv_slots: int) -> None:
        """Note that a machine takes requests (again). One that was started anew reports its prefixes anew."""
        machine = self._machines[index]
        machine.is_here, machine.kv_slots, machine.token_s = True, kv_slots, 0.0
        machine.blocks.most = _most_blocks(kv_slots)

    def tells(self, index: int, token_s: float, report: HeldReport | None = None) -> None:
        """Note a machine's pace (`_Machine.token_s`) and changes of its held prefixes. ReportRefused for a
        report that cannot be true."""
        machine = self._machines[index]
        machine.token_s = token_s if 0 < token_s < math.inf else 0.0
        if report is not None:
            machine.blocks.hear(report)

    def assign(self, ask: Ask, *, whole: bool = False) -> Assignment:
        """Choose machines for a request, which counts in their queues until it is `finished`. whole: True for
        one machine for both phases. ClusterError if no machine is here."""
        if ask.request_id in self._held:
            raise ValueError(f"request {ask.request_id!r} is assigned already")
        here = [machine for machine in self._machines if machine.is_here]
        if not here:
            raise ClusterError("no machine of the cluster is running")
        assignment = self._choose(ask, here)
        if whole:
            assignment = Assignment(assignment.token, assignment.token)
        prompt, token = (self._machines[index] for index in assignment)
        n_to_compute = prompt.n_to_compute(ask)
        self._held[ask.request_id] = _Held(ask, assignment, n_to_compute)
        prompt.prompt_tokens += n_to_compute
        prompt.n_prompts += 1
        prompt.counts.prompts += 1
        prompt.counts.prompt_tokens += ask.prompt_tokens
        prompt.counts.tokens_expected += ask.prompt_tokens - n_to_compute
        token.n_answers += 1
        token.counts.answers += 1
        token.kv_tokens += ask.prompt_tokens + ask.answer_tokens
        if prompt is not token:
            prompt.kv_tokens += ask.prompt_tokens
        for index in set(assignment):
            self._machines[index].blocks.expect(ask.prefix)
        self._look(assignment)
        return assignment

    def _look(self, assignment: Assignment) -> None:
        """Count the changes of pool of the assignment's machines."""
        for index in set(assignment):
            machine = self._machines[index]
            if machine.role != machine.pool:
                machine.pool = machine.role
                machine.counts.pool_changes += 1

    def _choose(self, ask: Ask, here: Sequence[_Machine]) -> Assignment:
        """Choose machines for a request; while one kind is missing, the other machines do both phases."""
        if len(here) == len(self._machines) or _can_divide({machine.home for machine in here}):
            return _in_pools(ask, here, self._limits, self._queues_for(ask, here))
        least = min(here, key=lambda machine: machine.pending_tokens)
        return Assignment(least.index, least.index)

    def prompt_done(self, request_id: str) -> None:
        """Note that a request's prompt is computed and leaves its machine's queue; again, it does nothing."""
        held = self._held[request_id]
        if held.is_prompt_done:
            return
        self._held[request_id] = held._replace(is_prompt_done=True)
        machine = self._machines[held.assignment.prompt]
        machine.prompt_tokens -= held.n_to_compute
        machine.n_prompts -= 1
        if held.assignment.prompt != held.assignment.token:
            machine.kv_tokens -= held.ask.prompt_tokens
        self._look(held.assignment)

    def finished(self, request_id: str) -> None:
        """Note that a request has ended, for any reason, also before its prompt was done."""
        self.prompt_done(request_id)
        held = self._held.pop(request_id)
        machine = self._machines[held.assignment.token]
        machine.n_answers -= 1
        machine.kv_tokens -= held.ask.prompt_tokens + held.ask.answer_tokens
        for index in set(held.assignment):
            self._machines[index].blocks.ended(held.ask.prefix)
        self._look(held.assignment)


def _by_queue(ask: Ask, machines: Sequence[_Machine]) -> Callable[[_Machine], Work]:
    """Measure queues for joining the shortest queue in pools (`splitwise`): a machine's own kind first, then
    the mixed pool, then the opposite kind, whose machine becomes mixed by that. If all are full, both phases
    run on the least loaded machine.

    A prompt machine's queue is its pending tokens. A token machine's is the context that its steps read,
    since that is what fills its memory and makes its steps long; a token is pending for each answer all the
    time, so the number of answers alone would not tell long from short ones.
    """
    return lambda machine: (False, machine.pending_tokens)


def _by_work(ask: Ask, machines: Sequence[_Machine]) -> Callable[[_Machine], Work]:
    """Measure queues like `splitwise`, but as the work with this request included: tokens that the machine
    has yet to compute of earlier prompts and, `OWN_TOKEN_COUNTS` times, of this prompt. So a request goes to
    the machine that holds its prefix, unless the queue there is longer by that much than elsewhere; the other
    machine then holds the prefix too. A machine whose memory its requests will fill comes after those that
    have room.

    Seconds are compared if a machine takes `UNLIKE` times as long for a token as the fastest. Finer
    differences come from the steps that each happened to have: by them one of many idle machines would be
    given every prompt.

    An answer is placed as under `splitwise`, except where its machine already holds all but a short rest of
    the prompt: that machine computes the rest too, as for the next turn of a conversation.
    """
    least_s = min((machine.token_s for machine in machines if machine.token_s > 0), default=1.0)
    needed = ask.prompt_tokens + ask.answer_tokens

    def work(machine: _Machine) -> Work:
        n_tokens = machine.pending_tokens + OWN_TOKEN_COUNTS * machine.n_to_compute(ask)
        times_as_slow = machine.token_s / least_s
        return not machine.has_room(needed), n_tokens * (times_as_slow if times_as_slow >= UNLIKE else 1)

    return work


def _in_pools(
    ask: Ask, machines: Sequence[_Machine], limits: Limits, work: Callable[[_Machine], Work]
) -> Assignment:
    """Assign a request in pools: its prompt to the machine with the least `work`, its answer to the least
    loaded machine with room."""
    needed = ask.prompt_tokens + ask.answer_tokens
    token_pools: tuple[Role, ...] = ("token", "mixed", "prompt")
    token = _first_fit(machines, token_pools, _kv_load, lambda machine: machine.has_room(needed))
    near = [machine for machine in machines if machine.home == "token" and _is_near(machine, ask, limits)]
    if ask.prefix and near and token is not None:
        least = min(near, key=_kv_load)
        if least.has_room(needed) and least.kv_tokens <= token.kv_tokens + ask.prompt_tokens:
            return Assignment(least.index, least.index)
    if token is not None and ask.prompt_tokens <= limits.split_above_tokens:
        return Assignment(token.index, token.index)

    def is_short(machine: _Machine) -> bool:
        pending = machine.prompt_tokens
        return not pending or pending + machine.n_to_compute(ask) <= _overflow_tokens(machine, limits)

    prompt = _first_fit(machines, ("prompt", "mixed", "token"), work, is_short)
    if prompt is None or token is None:
        least = min(machines, key=work)
        return Assignment(least.index, least.index)
    if prompt.home == "mixed":  # such a machine is there to do both
        return Assignment(prompt.index, prompt.index if token.home == "mixed" else token.index)
    return Assignment(prompt.index, token.index)


def _is_near(machine: _Machine, ask: Ask, limits: Limits) -> bool:
    return machine.n_to_compute(ask) <= limits.split_above_tokens < ask.prompt_tokens


def _overflow_tokens(machine: _Machine, limits: Limits) -> float:
    if limits.prompt_overflow_tokens is not None:
        return limits.prompt_overflow_tokens
    return OVERFLOW_S / machine.token_s if machine.token_s > 0 else AUTHORS_OVERFLOW_TOKENS


POLICIES: Mapping[str, Callable[[Ask, Sequence[_Machine]], Callable[[_Machine], Work]]] = {
    "splitwise": _by_queue,
    "prefix-aware": _by_work,
}
"""The policies by name: functions that measure the queues that a request may join."""


def _first_fit(
    machines: Sequence[_Machine],
    pools: Sequence[Role],
    load: Callable[[_Machine], Work],
    fits: Callable[[_Machine], bool],
) -> _Machine | None:
    """The least loaded machine of the first pool whose least loaded machine fits; None if none fits."""
    for role in pools:
        pool = [machine for machine in machines if machine.role == role]
        if pool:
            least = min(pool, key=load)
            if fits(least):
                return least
    return None


def _most_blocks(kv_slots: int) -> int:
    """Most prefix blocks that a machine with this number of slots can hold in memory and on disk."""
    return kv_slots // BLOCK_TOKENS + MOST_STORED_BLOCKS


def _kv_load(machine: _Machine) -> Work:
    return False, machine.kv_tokens


def _can_divide(homes: set[Role]) -> bool:
    return "mixed" in homes or homes == {"prompt", "token"}


def _check_roles(homes: set[Role]) -> None:
    if not homes:
        raise ClusterError("a cluster needs at least one machine")
    if not _can_divide(homes):
        missing = "token" if homes == {"prompt"} else "prompt"
        raise ClusterError(
            f"a cluster without mixed machines needs prompt and token machines: add a {missing} one"
        )

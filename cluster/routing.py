"""Choice of the machines that compute a request's prompt and its answer (Splitwise IV-A). Pure: integers in,
an `Assignment` out; no clock, no sockets. A front over real instances and the simulator run the same code.

A router is told when a prompt is done and when a request has ended; from that alone it knows every queue.
Pools are never stored. A machine is in the mixed pool while it holds work of the kind that is not its own,
and back in its own pool when that is done (IV-A, "machine pool management"). One that is kept from its own
pool by `Limits.repurpose_after_requests` is moved to the other pool for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple, Protocol, get_args

from phasewise.cluster.errors import ClusterError

Role = Literal["prompt", "token", "mixed"]
ROLES: tuple[Role, ...] = get_args(Role)


class Assignment(NamedTuple):
    """Machines, by index. Where they differ, keys and values go from `prompt` to `token`."""

    prompt: int
    token: int


class Ask(NamedTuple):
    """The facts of a request that a router must know."""

    request_id: str
    prompt_tokens: int
    answer_tokens: int
    """Expected, or the most that it may become."""
    prefix: tuple[int, ...] = ()
    """Hashes of its prompt's beginnings, `Limits.prefix_block_tokens` tokens apart, the shortest first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a queue is long."""

    prompt_overflow_tokens: int = 8192
    """Pending prompt tokens of a machine beyond which the next pool is asked (the authors' value)."""
    split_above_tokens: int = 0
    """A prompt that is not longer is computed where its answer is."""
    prefix_block_tokens: int = 16
    repurpose_after_requests: int = 0
    """A machine that is given the other work of N requests before it is back in its own pool changes
    its pool for good; 0: never."""


@dataclass(slots=True)
class _Machine:
    """A router's view of one machine."""

    index: int
    home: Role
    kv_slots: int
    prompt_tokens: int = 0
    """Tokens of prompts that are assigned and not done."""
    n_prompts: int = 0
    n_answers: int = 0
    kv_tokens: int = 0
    """Positions that its requests hold or will need at their ends."""
    is_here: bool = True
    """False: it has ended, and gets no requests until it is back."""
    n_foreign: int = 0
    """Requests of the other kind that it was given since it left its own pool."""

    @property
    def role(self) -> Role:
        """The pool that it is in."""
        if self.home == "prompt" and self.n_answers:
            return "mixed"
        return "mixed" if self.home == "token" and self.n_prompts else self.home

    @property
    def is_displaced(self) -> bool:
        """True if it is in the mixed pool and belongs to another one."""
        return self.role != self.home

    @property
    def pending_tokens(self) -> int:
        """The queue that JSQ compares: prompt tokens, and one token for each answer."""
        return self.prompt_tokens + self.n_answers

    def has_room(self, n_tokens: int) -> bool:
        return self.kv_tokens + n_tokens <= self.kv_slots


class _Held(NamedTuple):
    """A request that has not ended."""

    ask: Ask
    assignment: Assignment
    is_prompt_done: bool


class Policy(Protocol):
    """Chooses; it changes nothing of the machines."""

    def choose(self, ask: Ask, machines: Sequence[_Machine]) -> Assignment: ...


class Router:
    """Requests on their way over machines of given roles and sizes, under one policy."""

    def __init__(
        self, machines: Iterable[tuple[Role, int]], policy: Policy, repurpose_after_requests: int = 0
    ) -> None:
        """machines: role, and KV slots that its pool has. repurpose_after_requests: as in `Limits`."""
        self.n_repurposed = 0
        self._machines = tuple(
            _Machine(index, role, kv_slots) for index, (role, kv_slots) in enumerate(machines)
        )
        _check_roles({machine.home for machine in self._machines})
        self._policy = policy
        self._repurpose_after = repurpose_after_requests
        self._held: dict[str, _Held] = {}

    @property
    def roles(self) -> tuple[Role, ...]:
        """The pool that each machine is in now."""
        return tuple(machine.role for machine in self._machines)

    @property
    def n_requests(self) -> int:
        return len(self._held)

    @property
    def has_machines(self) -> bool:
        """True if any machine can be given requests."""
        return any(machine.is_here for machine in self._machines)

    def leave(self, index: int) -> None:
        """A machine has ended: it is given no request until it is `back`. Those it had are still counted."""
        self._machines[index].is_here = False

    def back(self, index: int, kv_slots: int) -> None:
        """A machine can be given requests (again)."""
        self._machines[index].is_here = True
        self._machines[index].kv_slots = kv_slots

    def assign(self, ask: Ask, *, whole: bool = False) -> Assignment:
        """Choose machines for a request, which counts on them until it is `finished`.

        whole: one machine for both phases. ClusterError if no machine is here.
        """
        if ask.request_id in self._held:
            raise ValueError(f"request {ask.request_id!r} is assigned already")
        here = [machine for machine in self._machines if machine.is_here]
        if not here:
            raise ClusterError("no machine of the cluster is running")
        assignment = self._choose(ask, here)
        if whole:
            assignment = Assignment(assignment.token, assignment.token)
        self._held[ask.request_id] = _Held(ask, assignment, False)
        prompt, token = (self._machines[index] for index in assignment)
        for machine in (prompt, token):
            if not machine.is_displaced:
                machine.n_foreign = 0
        prompt.n_foreign += prompt.home == "token"
        token.n_foreign += token.home == "prompt"
        prompt.prompt_tokens += ask.prompt_tokens
        prompt.n_prompts += 1
        token.n_answers += 1
        token.kv_tokens += ask.prompt_tokens + ask.answer_tokens
        if prompt is not token:
            prompt.kv_tokens += ask.prompt_tokens
        if self._repurpose_after:
            self._repurpose()
        return assignment

    def _repurpose(self) -> None:
        """Move the machine that is kept busiest by the other kind of work to that kind.

        Not while machines of the other kind are displaced too: then both kinds have too few machines. A kind
        keeps one machine at least.
        """
        most = max(self._machines, key=lambda machine: machine.n_foreign)
        displaced = {machine.home for machine in self._machines if machine.is_displaced}
        n_alike = sum(machine.home == most.home for machine in self._machines)
        if most.n_foreign >= self._repurpose_after and n_alike > 1 and displaced == {most.home}:
            most.home = "token" if most.home == "prompt" else "prompt"
            most.n_foreign = 0
            self.n_repurposed += 1

    def _choose(self, ask: Ask, here: Sequence[_Machine]) -> Assignment:
        """Choose a machine; where one kind is missing for now, the others do both phases."""
        if len(here) == len(self._machines) or _can_divide({machine.home for machine in here}):
            return self._policy.choose(ask, here)
        least = min(here, key=_pending_tokens)
        return Assignment(least.index, least.index)

    def prompt_done(self, request_id: str) -> None:
        """Its prompt is computed, and has left the machine that did it. The second time: nothing."""
        held = self._held[request_id]
        if held.is_prompt_done:
            return
        self._held[request_id] = held._replace(is_prompt_done=True)
        machine = self._machines[held.assignment.prompt]
        machine.prompt_tokens -= held.ask.prompt_tokens
        machine.n_prompts -= 1
        if held.assignment.prompt != held.assignment.token:
            machine.kv_tokens -= held.ask.prompt_tokens

    def finished(self, request_id: str) -> None:
        """It has ended, for whatever reason, also before its prompt was done."""
        self.prompt_done(request_id)
        held = self._held.pop(request_id)
        machine = self._machines[held.assignment.token]
        machine.n_answers -= 1
        machine.kv_tokens -= held.ask.prompt_tokens + held.ask.answer_tokens

    def check(self) -> None:
        """Raise unless the machines' counts are the sums over the requests that have not ended."""
        for machine in self._machines:
            mine = [held for held in self._held.values() if machine.index in held.assignment]
            prompts = [
                held.ask.prompt_tokens
                for held in mine
                if held.assignment.prompt == machine.index and not held.is_prompt_done
            ]
            answers = [held for held in mine if held.assignment.token == machine.index]
            leaving = [
                held.ask.prompt_tokens
                for held in mine
                if held.assignment.token != machine.index and not held.is_prompt_done
            ]
            kv = sum(leaving) + sum(held.ask.prompt_tokens + held.ask.answer_tokens for held in answers)
            expected = (len(prompts), sum(prompts), len(answers), kv)
            load = (machine.n_prompts, machine.prompt_tokens, machine.n_answers, machine.kv_tokens)
            if expected != load:
                raise AssertionError(f"machine {machine.index} counts {load}, its requests are {expected}")


@dataclass(frozen=True, slots=True)
class SplitwisePolicy:
    """Join the shortest queue, in pools: a machine's own kind first, then the mixed pool, then the opposite
    kind, whose machine becomes mixed by that. Where all are full, both phases run on the least loaded.

    A prompt machine's queue is its pending tokens. A token machine's is the context that its steps read,
    since that is what fills its memory and makes its steps long; a token is pending for each answer all the
    time, so the number of answers alone would not tell long from short ones.
    """

    limits: Limits = Limits()

    def choose(self, ask: Ask, machines: Sequence[_Machine]) -> Assignment:
        needed = ask.prompt_tokens + ask.answer_tokens
        token = _first_fit(
            machines, ("token", "mixed", "prompt"), _kv_load, lambda machine: machine.has_room(needed)
        )
        if token is not None and ask.prompt_tokens <= self.limits.split_above_tokens:
            return Assignment(token.index, token.index)

        def is_short(machine: _Machine) -> bool:
            pending = machine.prompt_tokens
            return not pending or pending + ask.prompt_tokens <= self.limits.prompt_overflow_tokens

        prompt = _first_fit(machines, ("prompt", "mixed", "token"), _pending_tokens, is_short)
        if prompt is None or token is None:
            least = min(machines, key=_pending_tokens)
            return Assignment(least.index, least.index)
        if prompt.home == "mixed":  # such a machine is there to do both
            return Assignment(prompt.index, prompt.index if token.home == "mixed" else token.index)
        return Assignment(prompt.index, token.index)


class RoundRobinPolicy:
    """Each kind of machine in turn. Mixed machines do both phases of a request."""

    def __init__(self) -> None:
        self._prompts, self._tokens = count(), count()

    def choose(self, ask: Ask, machines: Sequence[_Machine]) -> Assignment:
        prompts = [machine for machine in machines if machine.home != "token"]
        prompt = prompts[next(self._prompts) % len(prompts)]
        if prompt.home == "mixed":
            return Assignment(prompt.index, prompt.index)
        tokens = [machine for machine in machines if machine.home != "prompt"]
        return Assignment(prompt.index, tokens[next(self._tokens) % len(tokens)].index)


@dataclass(slots=True)
class PrefixAwarePolicy:
    """A prompt goes where the least is left to compute: pending tokens, and those of its own whose keys and
    values are not there yet. The answer is placed as under `splitwise`; mixed machines do both phases.

    What a machine has computed is remembered by hash, the newest first, as much as its slots hold.
    """

    limits: Limits = Limits()
    _seen: dict[int, OrderedDict[int, None]] = field(default_factory=dict)

    def choose(self, ask: Ask, machines: Sequence[_Machine]) -> Assignment:
        able = [machine for machine in machines if machine.home != "token"]

        def to_compute(machine: _Machine) -> int:
            return machine.pending_tokens + ask.prompt_tokens - self._known_tokens(machine, ask)

        prompt = min(able, key=to_compute)
        self._remember(prompt, ask)
        if prompt.home == "mixed":
            return Assignment(prompt.index, prompt.index)
        token = SplitwisePolicy(self.limits).choose(ask, machines).token
        return Assignment(prompt.index, token)

    def _known_tokens(self, machine: _Machine, ask: Ask) -> int:
        seen = self._seen.get(machine.index, ())
        n_blocks = 0
        for block in ask.prefix:
            if block not in seen:
                break
            n_blocks += 1
        return min(n_blocks * self.limits.prefix_block_tokens, ask.prompt_tokens - 1)

    def _remember(self, machine: _Machine, ask: Ask) -> None:
        seen = self._seen.setdefault(machine.index, OrderedDict())
        for block in ask.prefix:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) * self.limits.prefix_block_tokens > machine.kv_slots:
            seen.popitem(last=False)


POLICIES: Mapping[str, Callable[[Limits], Policy]] = {
    "splitwise": SplitwisePolicy,
    "round-robin": lambda limits: RoundRobinPolicy(),
    "prefix-aware": PrefixAwarePolicy,
}


def _first_fit(
    machines: Sequence[_Machine],
    pools: Sequence[Role],
    load: Callable[[_Machine], int],
    fits: Callable[[_Machine], bool],
) -> _Machine | None:
    """The least loaded machine of the first pool whose least loaded machine fits."""
    for role in pools:
        pool = [machine for machine in machines if machine.role == role]
        if pool:
            least = min(pool, key=load)
            if fits(least):
                return least
    return None


def _pending_tokens(machine: _Machine) -> int:
    return machine.pending_tokens


def _kv_load(machine: _Machine) -> int:
    return machine.kv_tokens


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

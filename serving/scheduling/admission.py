"""Admission and preemption: the request that is admitted next, and the one that gives way. Pure.

Choices alone: `scheduler` carries them out, and its docstring has the policy. running: by age.
"""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.serving.errors import RequestError, check_context
from phasewise.serving.pools.contract import Demand, KvPool
from phasewise.serving.scheduling.client_shares import ClientShares
from phasewise.serving.scheduling.request import LiveSequence, Request
from phasewise.serving.scheduling.scheduler_terms import MOST_PREEMPTIONS, SchedulerLimits
from phasewise.serving.scheduling.waiting_line import WaitingLine


def refuse_impossible(request: Request, limits: SchedulerLimits, pool: KvPool) -> None:
    """RequestError for one that can never run."""
    if not request.prompt_token_ids:
        raise RequestError("the prompt has no tokens", "prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {request.max_tokens}", "max_tokens")
    room = min(limits.context_length, pool.longest)
    whose = "" if room == limits.context_length else " here (the KV cache holds no more)"
    check_context(room, len(request.prompt_token_ids), request.max_tokens, whose)


def next_to_admit(
    waiting: WaitingLine, running: Sequence[LiveSequence], shares: ClientShares
) -> tuple[LiveSequence | None, bool]:
    """The next request, and whether others give way for it: nothing runs of its client, or less than its
    share. Where no such client waits, the head of the line.

    Prompts that are held in vain wait for another instance, whose prompts may wait for this one: first comes
    what is answered here.
    """
    if held_in_vain(running) is not None:
        for sequence in waiting:
            if not (sequence.request.prefill_only or _must_become_oldest(sequence, waiting, running)):
                return sequence, False
    heads = [sequence for sequence in waiting.heads if not _must_become_oldest(sequence, waiting, running)]
    for sequence in heads:
        if shares.has_nothing(sequence.request.client):
            return sequence, True
    for sequence in heads:
        if shares.allows(sequence, demand_of(sequence).held_tokens):
            return sequence, True
    return (heads[0] if heads else None), False


def _must_become_oldest(
    sequence: LiveSequence, waiting: WaitingLine, running: Sequence[LiveSequence]
) -> bool:
    if sequence.n_preempted <= MOST_PREEMPTIONS:
        return False
    is_behind_running = bool(running) and running[0].age < sequence.age
    return is_behind_running or waiting.is_behind_older(sequence)


def last_to_come(
    growing: LiveSequence, running: Sequence[LiveSequence], shares: ClientShares
) -> LiveSequence | None:
    """The sequence that must give way for `growing` or an older one; None: pinned ones alone could.

    The youngest of clients that hold more than their share of the slots, else the youngest.
    """
    is_oldest = running[0] is growing
    greedy = [sequence for sequence in running[1:] if shares.takes_too_much(sequence.request.client)]
    for other in (*reversed(greedy), *reversed(running)):
        if other is growing:
            break
        if not other.is_pinned and (is_oldest or other.n_preempted < MOST_PREEMPTIONS):
            return other
    return None if is_oldest else growing


def held_in_vain(running: Sequence[LiveSequence]) -> LiveSequence | None:
    """The youngest prompt that no engine has a block for, where nothing runs that could be computed."""
    if any(sequence.n_pending and not sequence.awaits_kv for sequence in running):
        return None
    held = (sequence for sequence in reversed(running) if is_held(sequence) and not sequence.is_pinned)
    return next(held, None)


def demand_of(sequence: LiveSequence) -> Demand:
    """The slots that it needs to run."""
    return sequence.demand(in_full=sequence.n_preempted >= MOST_PREEMPTIONS)


def is_held(sequence: LiveSequence) -> bool:
    """True if it is a prompt that is computed, and waits for its hand-over."""
    return sequence.request.prefill_only and not sequence.n_pending

"""Members of the next step: which of the running requests have rows or prompt tokens in it. Pure.

running: by age. Interactive requests come first; those in shadow have what `ShadowRoom` says beside them, and
all of a step where nothing else can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.serving.scheduling.pacing import ShadowRoom
from phasewise.serving.scheduling.request import LiveSequence
from phasewise.serving.scheduling.sequence_states import SequenceStates
from phasewise.tuner.plans import Phase

LEAST_TOKENS = 16
"""The least part of a step: a panel of keys and values."""
FEW_TOKENS = 64
"""The tokens of each client beside one that waits for its first tokens: enough to use the weights well."""


class PrefillTurns:
    """Clients that have prompts to compute, in the order of their turns."""

    def __init__(self) -> None:
        self._order: list[str] = []

    def divide(
        self, sequences: Iterable[LiveSequence], room: int, starts: Callable[[LiveSequence], bool]
    ) -> dict[LiveSequence, int]:
        """Tokens of the next step, at most `room`, by sequence; those without any are left out.

        sequences: with prompts to compute, by age. starts: asked of one before it gets its first tokens;
        False: it can get none now.
        """
        queues: dict[str, list[LiveSequence]] = {}
        for sequence in sequences:
            queues.setdefault(sequence.request.client, []).append(sequence)
        self._order = [client for client in self._order if client in queues]
        self._order += [client for client in queues if client not in self._order]
        parts: dict[LiveSequence, int] = {}
        if not queues:
            return parts
        served: list[str] = []
        part = max(LEAST_TOKENS, room // len(queues))
        wanted = [sum(sequence.n_pending for sequence in queue) for queue in queues.values()]
        ending = [n_tokens for n_tokens in wanted if n_tokens <= part]
        if ending and max(wanted) > part:
            part = max(FEW_TOKENS, *ending)
            room = min(room, len(queues) * part)
        for most in (part, room) if len(queues) > 1 else (room,):
            for client in self._order:
                n_tokens = _fill(queues[client], min(most, room), parts, starts)
                room -= n_tokens
                if n_tokens and client not in served:
                    served.append(client)
        self._order = [client for client in self._order if client not in served] + served
        return parts


def _fill(
    queue: Iterable[LiveSequence],
    most: int,
    parts: dict[LiveSequence, int],
    starts: Callable[[LiveSequence], bool],
) -> int:
    """Give `most` tokens to one client's sequences, in their order. Returns how many they took."""
    left = most
    for sequence in queue:
        if left == 0:
            break
        if not (sequence in parts or starts(sequence)):
            continue
        n_tokens = min(sequence.n_pending - parts.get(sequence, 0), left)
        if n_tokens:
            parts[sequence] = parts.get(sequence, 0) + n_tokens
            left -= n_tokens
    return most - left


def running_of(running: Iterable[LiveSequence], *, in_shadow: bool) -> list[LiveSequence]:
    """The running requests in shadow, or those that are not."""
    return [sequence for sequence in running if sequence.request.in_shadow == in_shadow]


def is_all_shadow(running: Iterable[LiveSequence]) -> bool:
    """True if nothing can be computed but requests in shadow."""
    return not any(map(_can_go_on, running_of(running, in_shadow=False)))


def n_answering(running: Sequence[LiveSequence]) -> int:
    """Answers that wait for their next token; those in shadow count where nothing else can be computed."""
    counting = running if is_all_shadow(running) else running_of(running, in_shadow=False)
    return sum(not sequence.is_prefilling for sequence in counting)


def answers_in_step(
    running: Sequence[LiveSequence], most_rows: int | None, shadow: ShadowRoom, most_sequences: int
) -> list[LiveSequence]:
    """The answers that get a token in a decode step. most_rows: of interactive ones; None: all."""
    in_shadow = running_of(running, in_shadow=True)
    if is_all_shadow(running):
        return _in_turn(in_shadow, most_rows)
    answers = _in_turn(running_of(running, in_shadow=False), most_rows)
    if not answers:  # prompts wait, which a step of shadows alone would hold up
        return []
    rows = most_sequences - len(answers)
    return answers + _in_turn(in_shadow, rows if shadow.rows is None else min(rows, shadow.rows))


def _in_turn(running: Iterable[LiveSequence], most_rows: int | None) -> list[LiveSequence]:
    """Answers in the order of their last token, the longest ago first."""
    answering = [sequence for sequence in running if not sequence.is_prefilling]
    if most_rows is None or most_rows >= len(answering):
        return answering
    chosen = set(sorted(answering, key=lambda sequence: sequence.turn)[:most_rows])
    return [sequence for sequence in answering if sequence in chosen]


def prompts_in_step(
    running: Sequence[LiveSequence], room: int, shadow: ShadowRoom
) -> tuple[list[LiveSequence], int]:
    """The prompts that a prefill step may have parts of, all in shadow or none, and its tokens."""
    prompts = [sequence for sequence in running if sequence.can_prefill]
    own = running_of(prompts, in_shadow=False)
    if own:
        return own, room
    if shadow.chunk_tokens is not None and not is_all_shadow(running):
        room = min(room, shadow.chunk_tokens)
    return (prompts, room) if room else ([], 0)


def batch_of(
    phase: Phase,
    parts: Sequence[tuple[LiveSequence, tuple[int, ...]]],
    copies: Sequence[KvCopy],
    states: SequenceStates | None,
) -> Batch:
    """The step of these sequences, each with its tokens. states: give its copies; None: it makes none."""
    slices = []
    for sequence, token_ids in parts:
        assert sequence.placement is not None, f"{sequence} waits"
        base, _, table, ring, state = sequence.placement
        slices.append(
            SequenceSlice(
                token_ids,
                sequence.n_computed,
                base,
                len(token_ids) == sequence.n_pending,
                table,
                ring=ring,
                adapter=sequence.request.adapter,
                state=state or 0,
                keeps=() if states is None else states.keeps(sequence, len(token_ids)),
            )
        )
    names = tuple(sequence.request_id for sequence, _ in parts)
    n_in_shadow = sum(sequence.request.in_shadow for sequence, _ in parts)
    return Batch(phase, tuple(slices), names, tuple(copies), n_in_shadow)


def _can_go_on(sequence: LiveSequence) -> bool:
    return sequence.n_pending > 0 and not (sequence.awaits_kv or sequence.is_restored)

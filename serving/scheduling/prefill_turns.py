"""Fair division of a prefill chunk among clients. Pure.

Each client with prompts to compute gets an equal part of a step, its oldest prompt first; what a client does
not need goes to the others. Where a step has too few tokens for all of them, those that got none come first
in the next. So before a client's first token is computed, each other client has computed at most one part of
one step. A client whose prompts end with a step waits for its first tokens until the step does: such a step
has no more than what that client needs, or `FEW_TOKENS`, for each. One client alone is first come, first
served. Decision 0072.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from phasewise.serving.scheduling.request import LiveSequence

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

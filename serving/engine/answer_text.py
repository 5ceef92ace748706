"""The text of one answer as its tokens arrive, with stop strings found across token boundaries.

Text that may be the beginning of a stop string is held back until the next token decides; so is a token none
of whose text has been given out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from phasewise.serving.sampling.sampling import SampledToken


class TokenStream(Protocol):
    """Incremental decoder: never gives out a part of a character before `flush`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class AnswerText:
    """Fed with tokens, drained as text."""

    def __init__(self, stream: TokenStream, stop: tuple[str, ...] = ()) -> None:
        self._stream = stream
        self._stop = stop
        self._held = ""
        self._n_given = 0  # characters given out
        self._tokens: deque[tuple[int, SampledToken]] = deque()  # with the character at which each begins
        self.stop_text: str | None = None
        """The stop string that has ended the answer."""

    @property
    def stopped(self) -> bool:
        return self.stop_text is not None

    def begin_after(self, token_ids: Sequence[int], n_given: int) -> None:
        """Go on after these tokens, of whose text `n_given` characters were given out, by another one."""
        text = "".join(self._stream.push(token_id) for token_id in token_ids)
        self._held, self._n_given = text[n_given:], n_given

    def push(self, token: SampledToken) -> None:
        """A token of the answer. Sets `stop_text` when a stop string is complete."""
        self._tokens.append((self._n_given + len(self._held), token))
        self._held += self._stream.push(token.token_id)
        if self._stop:
            self._cut_at_stop()

    def push_end(self, token: SampledToken) -> None:
        """The model's end token: it counts, but has no text."""
        self._tokens.append((self._n_given + len(self._held), token))

    def take(self, *, finished: bool) -> tuple[str, tuple[SampledToken, ...]]:
        """The text that can be given out now: all that is left when `finished` or `stopped`."""
        if finished and not self.stopped:
            self._held += self._stream.flush()
            self._cut_at_stop()
        n_kept = 0 if finished or self.stopped or not self._stop else self._n_ambiguous()
        n_given = len(self._held) - n_kept
        text, self._held = self._held[:n_given], self._held[n_given:]
        self._n_given += len(text)
        return text, self._begun(everything=finished and not self.stopped)

    def _cut_at_stop(self) -> None:
        """The stop string that is complete first ends the text, however tokens cut it."""
        places = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if places:
            place, self.stop_text = min(places, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self._held = self._held[:place]

    def _n_ambiguous(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _begun(self, *, everything: bool) -> tuple[SampledToken, ...]:
        tokens, ready = self._tokens, []
        while tokens and (everything or tokens[0][0] < self._n_given):
            begin, token = tokens.popleft()
            ready.append(token if token.logprob is None else token._replace(begin=begin))
        return tuple(ready)

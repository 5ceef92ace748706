"""The drafts that lookup had at each token of an answer, as the length log keeps them, and the same drafts
again: for a simulation, or for a run whose drafts are to be right as often as they were.

A text has two characters for each token of the answer, the first one included: the length of the match
before it (base 36; 0: none), and how many of the drafts that followed the match came (hexadecimal).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from phasewise.serving.drafts.agreement import Agreement
from phasewise.serving.drafts.contract import MOST_DRAFTED
from phasewise.serving.drafts.lookup import LookupDrafter, chances_after, saw_after
from phasewise.serving.drafts.repeats import Repeats
from phasewise.serving.drafts.step_costs import StepCosts
from phasewise.serving.scheduling.request import LiveSequence

MOST_TOKENS = 1 << 15
"""The longest sequence that is looked through for a log."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Looked(NamedTuple):
    """For each token of an answer the tokens of the match before it, and how many drafts were right."""

    matched: tuple[int, ...]
    right: tuple[int, ...]

    def text(self) -> str:
        """As the module says."""
        pairs = zip(self.matched, self.right, strict=True)
        return "".join(f"{_DIGITS[matched]}{_DIGITS[right]}" for matched, right in pairs)

    @classmethod
    def of_text(cls, text: str) -> Looked:
        """The inverse of `text`. ValueError for another text."""
        if len(text) % 2 or not text.isascii():
            raise ValueError("two characters a token are expected")
        matched = tuple(_DIGITS.index(digit) for digit in text[::2])
        right = tuple(_DIGITS.index(digit) for digit in text[1::2])
        if max(right, default=0) > MOST_DRAFTED or any(
            n and not of for of, n in zip(matched, right, strict=True)
        ):
            raise ValueError("more drafts were right than there were")
        return cls(matched, right)


def looked_up(prompt: Sequence[int], answer: Sequence[int]) -> Looked:
    """Lookup's drafts for each token of `answer`; nothing for a sequence that is too long to look through."""
    if not prompt or not answer or len(prompt) + len(answer) > MOST_TOKENS:
        return Looked((), ())
    repeats = Repeats()
    repeats.extend((*prompt, answer[0]))
    matched, right = [0], [0]
    for index in range(1, len(answer)):
        drafts = repeats.following(MOST_DRAFTED)
        matched.append(repeats.n_matched)
        right.append(_n_alike(drafts, answer[index : index + MOST_DRAFTED]))
        repeats.push(answer[index])
    return Looked(tuple(matched), tuple(right))


def _n_alike(drafts: Sequence[int], came: Sequence[int]) -> int:
    for n, (draft, token) in enumerate(zip(drafts, came, strict=False)):
        if draft != token:
            return n
    return min(len(drafts), len(came))


class LoggedAnswer(NamedTuple):
    """An answer of a log. `token_ids`: those that it will have this time; fewer: all others are 0."""

    looked: Looked
    token_ids: Sequence[int] = ()

    def token(self, index: int) -> int:
        """The token at this place of the answer."""
        return self.token_ids[index] if index < len(self.token_ids) else 0


class _Again:
    """As `LiveLookup`, with the drafts of a logged answer."""

    def __init__(self, answer: LoggedAnswer, agreement: Agreement) -> None:
        self._answer = answer
        self._agreement = agreement
        self._at = 0

    def read(self, sequence: LiveSequence) -> None:
        matched, right = self._answer.looked
        for index in range(self._at, min(len(sequence.generated), len(matched))):
            saw_after(self._agreement, matched[index], right=right[index] > 0)
        self._at = len(sequence.generated)

    def chances(self, most: int) -> list[float]:
        return chances_after(self.n_matched, most, self._agreement)

    @property
    def n_matched(self) -> int:
        matched = self._answer.looked.matched
        return matched[self._at] if self._at < len(matched) else 0

    def following(self, most: int) -> tuple[int, ...]:
        right = min(most, self._answer.looked.right[self._at]) if self.n_matched else 0
        drafts = [self._answer.token(self._at + n) for n in range(most)]
        for n in range(right, most):
            drafts[n] = 0 if drafts[n] else 1
        return tuple(drafts)


def drafter_again(
    answer_of: Callable[[str], LoggedAnswer], most_rows: int, n_tokens: int | None
) -> LookupDrafter:
    """A drafter whose drafts are right where a log's were. answer_of: by a request's id."""
    return LookupDrafter(
        StepCosts(),
        most_rows,
        n_tokens,
        lambda request_id, agreement: _Again(answer_of(request_id), agreement),
    )

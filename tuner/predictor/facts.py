"""The facts of a request before it is answered, and of one that has been."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_ANSWER_TOKENS = 1 << 20
"""Tokens that an answer without a limit is taken to be limited to."""


class PromptFacts(NamedTuple):
    """The facts of a request before it is answered. `n_messages`: of the conversation; 1 for a completion.

    `system_prompt_id`: the same for the same system prompt; None where there is none. `max_tokens`: None
    where only the context limits the answer.
    """

    token_ids: Sequence[int]
    temperature: float = 0.0
    max_tokens: int | None = None
    n_messages: int = 1
    system_prompt_id: str | None = None
    text: str | None = None
    """The text that the user wrote, where it is known: an encoder reads it."""
    vector: npt.NDArray[np.float32] | None = None
    """The vector that an encoder made of the text."""

    @property
    def limit(self) -> int:
        """The longest answer there can be."""
        return MAX_ANSWER_TOKENS if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class Example:
    """A request and how long its answer became. `was_cut`: it ended at its limit, and would have gone on."""

    facts: PromptFacts
    output_tokens: int
    was_cut: bool

    @cached_property
    def prompt_key(self) -> bytes:
        """A key that is the same for the same prompt, whatever else was asked of it."""
        return hashlib.blake2b(
            np.asarray(self.facts.token_ids, dtype="<i8").tobytes(), digest_size=16
        ).digest()


def held_out(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """The examples kept and those held out: about `share` of the prompts, chosen by the prompt alone, are in
    the second list. So no prompt is ever in both, however often it was asked, and a prompt stays where it is
    as a log grows."""
    kept: list[Example] = []
    out: list[Example] = []
    for example in examples:
        (out if place_of(example, seed, b"held out") < share else kept).append(example)
    return kept, out


def part_of_folds(
    examples: Sequence[Example], fold: int, folds: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """The examples outside and inside a fold: a prompt is in one of `folds` parts, chosen by the prompt
    alone."""
    kept: list[Example] = []
    out: list[Example] = []
    for example in examples:
        (out if int(place_of(example, seed, b"folds") * folds) == fold else kept).append(example)
    return kept, out


def place_of(example: Example, seed: int, purpose: bytes) -> float:
    """A number from 0 to below 1, even over prompts, the same for the same prompt; another for another
    purpose."""
    salt = seed.to_bytes(8, "little")
    drawn = hashlib.blake2b(example.prompt_key, digest_size=6, salt=salt, person=purpose).digest()
    return int.from_bytes(drawn, "little") / (1 << 48)

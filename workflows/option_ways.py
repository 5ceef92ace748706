"""A way of running a command: the words in which `workflows.unused_options` says what it cannot follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Way:
    """A way of running a command, and the options that have no effect in it.

    where: as in `--draft has no effect with pools`. when: it is this way where any of these is set; none:
    always. unless: and where none of these is set. An option is set where its value is not its default;
    `--policy=paged` is set where that is its value, `--policies~odma` where its value contains that.
    makes_vectors: of MODEL; None: any model.
    """

    where: str
    refuses: tuple[str, ...]
    when: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    makes_vectors: bool | None = None
    instead: str = "leave that out"

    def holds(self, given: Mapping[str, GivenOption], model_makes_vectors: Callable[[], bool]) -> bool:
        """True where a run with these options is run in this way."""
        if self.when and not any(_is_set(condition, given) for condition in self.when):
            return False
        if any(_is_set(condition, given) for condition in self.unless):
            return False
        return self.makes_vectors is None or self.makes_vectors == model_makes_vectors()

    def refusal(self, flags: Sequence[str], given: Mapping[str, GivenOption]) -> str:
        """The line for options that were written, with those that made it this way."""
        chosen = ", ".join(
            flag
            for condition in self.when
            if (flag := re.split("[=~]", condition)[0]) not in self.where and _is_set(condition, given)
        )
        have = "has" if len(flags) == 1 else "have"
        return f"{', '.join(flags)} {have} no effect {self.where}{chosen and f' ({chosen})'}: {self.instead}"


class GivenOption(NamedTuple):
    """The value of an option. is_set: it is not the default. by_flag: it was written on the command line."""

    value: Any
    is_set: bool = False
    by_flag: bool = False


def _is_set(condition: str, given: Mapping[str, GivenOption]) -> bool:
    flag, equals, value = condition.partition("=")
    if equals:
        return flag in given and str(given[flag].value) == value
    flag, contains, value = condition.partition("~")
    if contains:
        return flag in given and value in str(given[flag].value)
    return flag in given and given[flag].is_set

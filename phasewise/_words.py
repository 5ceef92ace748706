"""Words for messages and tables: numbers, plurals, shares and ratios by one set of rules; suggestions for a
mistyped word; the reason of an error; the end of a process."""

from __future__ import annotations

import difflib
import math
import signal
from collections.abc import Iterable

NOTHING = "-"
"""The mark in place of a missing number."""

NO_VERDICT = "no verdict"
"""The words in place of a measured ratio that may well be 1."""

WIDEST = 1.25
"""Ratio of a gain's interval ends above which the machine was too busy for its timings to mean much."""

MOST_SHARE = 1.15
"""Highest share of a limit that is believed: a limit and a speed measured in one minute differ by this much
at most; above it the limit was measured too low."""

LEAST_BEGINNING = 3
"""Fewest letters of a word that are completed to a name."""

MOST_MEANT = 4
"""Most names in a message's suggestion."""

LOW_LIMIT = "-: faster than the limit, which was measured while the machine was busy"
"""The line under a table with a share above MOST_SHARE."""


def plural(count: float, singular: str, several: str | None = None) -> str:
    """The noun for a count: `singular` for one, else `several` or `singular` with an s."""
    if count == 1:
        return singular
    if several is not None:
        return several
    if singular.endswith("y") and singular[-2:-1] not in "aeiou":
        return f"{singular[:-1]}ies"
    return f"{singular}es" if singular.endswith(("s", "x", "z", "ch", "sh")) else f"{singular}s"


def meant(word: str, names: Iterable[str]) -> str:
    """The end of a message that suggests names, `; did you mean NAME?`: a few of `names` that begin with
    `word`, else the most similar name, in either case of letters. Empty where no name is near."""
    written = {name.lower(): name for name in sorted(names)}
    begun = (
        [name for name in written if name.startswith(word.lower())] if len(word) >= LEAST_BEGINNING else []
    )
    near = begun if 0 < len(begun) <= MOST_MEANT else difflib.get_close_matches(word.lower(), written, n=1)
    *others, last = [written[name] for name in near] or [""]
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def reason_of(error: BaseException) -> str:
    """The reason of an error, to follow a path in a message: the system's text, without number and path."""
    words: str | None = getattr(error, "strerror", None)
    return words or str(error)


def ending_of(code: int) -> str:
    """The end of a process in words by its exit code: `ended with exit code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # the real-time ones have no names
        return f"was killed by signal {-code}"


def counted(count: int, singular: str, several: str | None = None) -> str:
    """A count with its noun: `1 plan`, `3 plans`, `0 queries`."""
    return f"{count} {plural(count, singular, several)}"


def clock(seconds: float) -> str:
    """Minutes and whole seconds: `1:35`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def number(value: float, digits: int = 6) -> str:
    """Format `digits` significant digits, or all before the point, never an exponent: `1150`, `0.25`."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return _unsigned_zero(text.rstrip("0").rstrip(".") if "." in text else text)


def percent(value: float, places: int = 0) -> str:
    """Format a share of one in per cent: `39%`; a share that rounds to zero has no sign."""
    return f"{_unsigned_zero(f'{100 * value:.{places}f}')}%" if math.isfinite(value) else NOTHING


def limit_cell(share: float) -> str:
    """Format a share of a measured limit as a cell; `-` where the limit was measured too low."""
    told = share_of_limit(share)
    return NOTHING if told is None else percent(told)


def share_of_limit(share: float) -> float | None:
    """The share of a measured limit if at most MOST_SHARE; else None: the limit was measured too low."""
    return share if share <= MOST_SHARE else None


def multiple(ratio: float, places: int = 2) -> str:
    """Format a ratio: `2.41x`; from 100 on without decimals, `1150x`."""
    if not math.isfinite(ratio):
        return NOTHING
    return f"{_unsigned_zero(f'{ratio:.{places if abs(ratio) < 100 else 0}f}')}x"


def proven(ratio: float, low: float, high: float, places: int = 2) -> str:
    """Format a measured ratio like `multiple` if it `is_proven`, else as NO_VERDICT."""
    return multiple(ratio, places) if is_proven(ratio, low, high) else NO_VERDICT


def is_proven(ratio: float, low: float, high: float) -> bool:
    """True if the interval of a measured ratio excludes 1. A wide interval must exclude 1 also with its
    longer side on both sides, since one bad pair in a few stretches one side alone: 1.01 (1.00 to 18.41)
    proves nothing."""
    if not (low > 1 or 0 < high < 1):
        return False
    if high <= WIDEST * low:
        return True
    side = max(high / ratio, ratio / low) if low > 0 else math.inf
    return not 1 / side <= ratio <= side


def _unsigned_zero(text: str) -> str:
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text

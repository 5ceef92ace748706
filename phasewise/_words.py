"""Numbers in sentences and tables: plurals, shares, multiples and digits by one set of rules; the word that
was meant; the reason of an error; the end of a process.
"""

from __future__ import annotations

import difflib
import math
import re
import signal
from collections.abc import Iterable

NOTHING = "-"
"""The mark in place of a number that there is not."""

NO_VERDICT = "no verdict"
"""The words in place of a measured ratio that may as well be 1."""

WIDEST = 1.25
"""Ratio of the ends of a gain's interval beyond which the machine was too busy for timings to say much."""

MOST_SHARE = 1.15
"""The highest share of a limit that two measurements of one minute give; one above it had too low a limit."""

LEAST_BEGINNING = 3
"""The letters of a name from which on it may be told what was meant."""

MOST_MEANT = 4
"""The most names that a line gives of those that a word begins."""

LOW_LIMIT = "-: faster than the limit, which was measured while the machine was busy"
"""The line of a table with such a share."""


def plural(count: float, singular: str, several: str | None = None) -> str:
    """`singular` for a count of one, else `several` or `singular` with an s: `plan`, `plans`."""
    if count == 1:
        return singular
    if several is not None:
        return several
    if singular.endswith("y") and singular[-2:-1] not in "aeiou":
        return f"{singular[:-1]}ies"
    return f"{singular}es" if singular.endswith(("s", "x", "z", "ch", "sh")) else f"{singular}s"


def meant(word: str, names: Iterable[str]) -> str:
    """`; did you mean NAME?`, the end of a message: the few of `names` that begin with `word`, else the one
    that is much like it, in either case of letters. Else nothing.
    """
    written = {name.lower(): name for name in sorted(names)}
    begun = (
        [name for name in written if name.startswith(word.lower())] if len(word) >= LEAST_BEGINNING else []
    )
    near = begun if 0 < len(begun) <= MOST_MEANT else difflib.get_close_matches(word.lower(), written, n=1)
    *others, last = [written[name] for name in near] or [""]
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def reason_of(error: BaseException) -> str:
    """The words of an error behind a path that is named already: the system's, without number and path."""
    words: str | None = getattr(error, "strerror", None)
    return words or str(error)


_UNITS_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def ending_of(code: int) -> str:
    """The end of a process, by its code: `ended with exit code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # the real-time ones have no names
        return f"was killed by signal {-code}"


def bytes_of(text: str) -> int | None:
    """`512M`, `1.5GiB` or `4000000` in bytes, units being powers of 1024; None for anything else."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    return None if match is None else int(float(match[1]) * _UNITS_BYTES[match[2].lower()])


def counted(count: int, singular: str, several: str | None = None) -> str:
    """A count with its noun: `1 plan`, `3 plans`, `0 queries`."""
    return f"{count} {plural(count, singular, several)}"


def number(value: float, digits: int = 6) -> str:
    """`digits` significant digits or all before the point, never an exponent: `1150`, `0.25`."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return _unsigned_zero(text.rstrip("0").rstrip(".") if "." in text else text)


def percent(value: float, places: int = 0) -> str:
    """A share of one in per cent: `39%`; what rounds to nothing has no sign."""
    return f"{_unsigned_zero(f'{100 * value:.{places}f}')}%" if math.isfinite(value) else NOTHING


def limit_cell(share: float) -> str:
    """A share of a measured limit in a cell, `-` where the limit was measured too low."""
    told = share_of_limit(share)
    return NOTHING if told is None else percent(told)


def share_of_limit(share: float) -> float | None:
    """A share that may be told; None where the limit must have been measured too low."""
    return share if share <= MOST_SHARE else None


def multiple(ratio: float, places: int = 2) -> str:
    """A ratio: `2.41x`; from 100 on without places, `1150x`."""
    if not math.isfinite(ratio):
        return NOTHING
    return f"{_unsigned_zero(f'{ratio:.{places if abs(ratio) < 100 else 0}f}')}x"


def proven(ratio: float, low: float, high: float, places: int = 2) -> str:
    """A measured ratio that `is_proven`, as `multiple`; else that there is no verdict."""
    return multiple(ratio, places) if is_proven(ratio, low, high) else NO_VERDICT


def is_proven(ratio: float, low: float, high: float) -> bool:
    """True if a measured ratio's interval excludes 1, a wide one with its longer side on both sides.

    One bad pair in a few stretches one side alone: 1.01 (1.00 to 18.41) says nothing.
    """
    if not (low > 1 or 0 < high < 1):
        return False
    if high <= WIDEST * low:
        return True
    side = max(high / ratio, ratio / low) if low > 0 else math.inf
    return not 1 / side <= ratio <= side


def _unsigned_zero(text: str) -> str:
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text

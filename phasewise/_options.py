"""Options and arguments of commands: a field of a settings dataclass, or the default of a command's
parameter, carries what its flag, help and reference say. A class with VARIABLES = True, and those within it,
have a variable for each: PHASEWISE_ and the flag's name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

OPTION = "option"
"""The key of a field's `Option` in its metadata."""
REQUIRED: Any = MISSING
"""The default of an option or argument that a command needs."""
MOST_USED = "Most used"
"""The heading of `--help` that comes first."""

_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}
_UNITS_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class OptionError(ValueError):
    """The text of an option that cannot be read."""

    exit_code = 2


class NoEffect(OptionError):
    """An option was given that the chosen way of running does not use. `fields`: names of the parameters."""

    def __init__(self, fields: Sequence[str], where: str, instead: str = "leave that out") -> None:
        self.fields, self.where, self.instead = tuple(fields), where, instead
        super().__init__(self.naming([f"--{name.replace('_', '-')}" for name in fields]))

    def naming(self, flags: Sequence[str]) -> str:
        """The error's message with these flags."""
        have = "has" if len(flags) == 1 else "have"
        return f"{', '.join(flags)} {have} no effect {self.where}: {self.instead}"


def changed(settings: Any, *names: str) -> list[str]:
    """The named fields of a dataclass that differ from their defaults; without names, of all fields."""
    own = {each.name: each.default for each in fields(settings)}
    values = {name: getattr(settings, name) for name in names or own}
    return [name for name, value in values.items() if value != own[name] and value not in ([], ())]


def refuse_unused(where: str, given: Sequence[str], instead: str = "leave that out") -> None:
    """Raise NoEffect if any parameter is given. where: the way of running that does not use them. given:
    names of given parameters."""
    if given:
        raise NoEffect(given, where, instead)


@dataclass(frozen=True)
class Option:
    """The command-line option of a settings field.

    flags: empty for `--field-name`. kind: the option's type where the field's own is wider. written: the
    field's default as a user writes it, where `settings` have a parser. panel: the heading in `--help`; None:
    that of the class, `PANEL`. config_only: True for a line of the configuration file without a flag.
    is_argument: True for a word without a flag. settings: bounds, metavar, envvar and parser, by the names
    that typer has for them.
    """

    help: str
    flags: tuple[str, ...] = ()
    kind: Any = None
    written: str | None = None
    panel: str | None = None
    config_only: bool = False
    is_argument: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, default: Any = MISSING, *, repr: bool = True, **changed: Any) -> Any:
        """Make a dataclass field that has this option."""
        return field(default=default, repr=repr, metadata={OPTION: replace(self, **changed)})


def named(
    help_text: str,
    *flags: str,
    kind: Any = None,
    written: str | None = None,
    panel: str | None = None,
    config_only: bool = False,
    **settings: Any,
) -> Option:
    """Make an option that fields of several classes share."""
    return Option(help_text, flags, kind, written, panel, config_only, settings=settings)


def argument(default: Any, help_text: str, metavar: str, **settings: Any) -> Any:
    """Make the default of a command's parameter that is a word without a flag."""
    return Option(help_text, is_argument=True, settings={"metavar": metavar, **settings})(default)


def option(default: Any, help_text: str, *flags: str, repr: bool = True, **settings: Any) -> Any:
    """Make a dataclass field, or the default of a parameter, with an option of its own."""
    return named(help_text, *flags, **settings)(default, repr=repr)


def size(written: str | None, help_text: str, *flags: str, **settings: Any) -> Any:
    """Make a dataclass field of bytes, with an option of its own. written: the default; None: none."""
    default = None if written is None else parse_bytes(written)
    return option(
        default, help_text, *flags, written=written, parser=parse_bytes, metavar="BYTES", **settings
    )


def parse_budget(text: str) -> float:
    """Parse a duration such as `90`, `90s`, `1.5m` or `1h` into seconds."""
    seconds = _seconds(text)
    if not seconds:
        raise OptionError(f"a budget is written like 90s, 10m or 1h, not {text!r:.40}")
    return seconds


def parse_time(text: str) -> float:
    """Parse a time such as `0`, `30s`, `5m` or `1h` into seconds."""
    seconds = _seconds(text)
    if seconds is None:
        raise OptionError(f"a time is written like 30s, 5m or 1h, not {text!r:.40}")
    return seconds


def _seconds(text: str) -> float | None:
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smh]?)\s*", text)
    return None if match is None else float(match[1]) * _UNITS_S[match[2]]


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers such as `1` or `1,8,32`."""
    parts = [part.strip() for part in str(text).split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise OptionError(f"numbers are written like 1 or 1,8,32, not {text!r:.40}")
    return tuple(map(int, parts))


def parse_bytes(text: str) -> int:
    """Parse a size such as `512M`, `1.5GiB` or `4000000` into bytes, units being powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise OptionError(f"{text!r} is not a size such as 512M or 4GiB")
    return int(float(match[1]) * _UNITS_BYTES[match[2].lower()])

"""Settings: a dataclass's fields are a command's options, and none is lost or renamed on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from phasewise._options import OptionError, option, parse_bytes
from phasewise.cli.option_sets import spread


@dataclass(frozen=True)
class Tank:
    PANEL = "The tank"

    size_bytes: int = option(4 << 20, "how large", "--size", parser=parse_bytes, written="4M")
    open_lid: bool = option(False, "without a lid", "--open-lid")
    names: Sequence[str] | None = option(None, "what it is called [repeatable]", "--name")
    price: float = 0.5
    """No option."""


def _run_command(command: Callable[..., None], arguments: Sequence[str]) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(spread(command))
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def _run(*arguments: str) -> tuple[int, str]:
    def command(what: str, tank: Tank, loud: bool = False) -> None:
        print(what, tank, loud)

    return _run_command(command, arguments)


def test_without_options_the_command_gets_the_dataclass_s_own_defaults() -> None:
    assert _run("it") == (0, f"it {Tank()} False\n")


def test_each_option_reaches_its_field() -> None:
    code, output = _run("it", "--size", "1k", "--open-lid", "--name", "a", "--name", "b", "--loud")
    assert (code, output) == (0, f"it {Tank(1024, True, ['a', 'b'])} True\n")


@dataclass(frozen=True)
class Filled:
    VARIABLES = True

    tank: Tank = Tank()
    taps: bool = option(True, "with taps", "--taps/--no-taps")
    hose: list[str] | None = option(None, "command of a hose [repeatable]", envvar=None)


def test_each_option_within_a_class_with_variables_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(filled: Filled) -> None:
        print(filled)

    for name, text in {"SIZE": "1k", "OPEN_LID": "1", "NAME": "a b", "TAPS": "0", "HOSE": "a b"}.items():
        monkeypatch.setenv(f"PHASEWISE_{name}", text)
    assert _run_command(command, []) == (0, f"{Filled(Tank(1024, True, ['a', 'b']), False)}\n")
    assert _run_command(command, ["--taps", "--size", "2"])[1] == f"{Filled(Tank(2, True, ['a', 'b']))}\n"


@dataclass(frozen=True)
class Lid:
    own: Literal["round", "square"] = option("round", "own")
    text: str = option("round", "text", kind=Literal["round", "square"])


def test_a_choice_reaches_its_field_and_nothing_else_is_one() -> None:
    """Choices where the dataclass names them, and where the dataclass has a string."""
    reached: list[Any] = []

    def command(lid: Lid) -> None:
        reached.append(lid)

    for arguments in ([], ["--own", "square", "--text", "square"]):
        assert _run_command(command, arguments)[0] == 0

    assert reached == [Lid(), Lid("square", "square")]
    assert _run_command(command, ["--text", "oval"])[0] == 2


def test_a_value_that_cannot_be_read_names_its_option_and_says_why() -> None:
    code, output = _run("it", "--size", "big")
    assert code == 2
    assert "--size" in output
    assert "is not a size" in output


def test_help_shows_the_default_as_a_user_writes_it() -> None:
    assert "[default: 4M]" in _run("--help")[1]


@dataclass(frozen=True)
class WrongTank:
    size_bytes: int = option(4 << 20, "how large", parser=parse_bytes, written="8M")


def test_a_written_default_must_be_the_field_s() -> None:
    def command(tank: WrongTank) -> None: ...

    with pytest.raises(ValueError, match="8M"):
        spread(command)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1000", 1000),
        ("4k", 4096),
        ("512M", 1 << 29),
        ("1.5GiB", 3 << 29),
        ("2 GB", 2 << 30),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "-1", "1X", "one", "1e9", "G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError):
        parse_bytes(text)
